"""A barrier that names the ranks that do not come: Group.monitored_barrier().

Flow: rank 0 tells the others that it is here -> each answers that it is here, too -> rank 0 waits for the answers until
the time-out, and tells all the outcome.  These are messages: a rank that does not come leaves the group's other
calls in step.  A rank that comes too late is told so, because each barrier's messages have a number of their own.

SPDX-License-Identifier: Apache-2.0
"""

import errno
import time

import torch

from ..._errors import Error

# Bytes of the message that says how the barrier ended: a text and zeros.
_VERDICT_BYTES = 1024

# Seconds beyond the time-out that ranks wait for rank 0's word, which it gives at its own time-out.
_GRACE_S = 10.0


def _byte():
    return torch.ones(1, dtype=torch.uint8, device="cpu")


def _take_back(operation, reason):
    operation.cancel(reason)
    operation.ends()


def _sent(message):
    """Wait until a message has gone.  It is no error if the other rank has given up waiting for it."""
    try:
        message.wait()
    except Error as error:
        if error.errno != errno.ECANCELED:
            raise


def _comes(message, limit):
    """Whether rank 0's message comes within `limit` seconds; if not, this rank no longer waits for it."""
    if message.ends(limit):
        message.wait()
        return True
    _take_back(message, "this rank has waited %g s for rank 0 in monitoredBarrier" % limit)
    return False


def _late(missing, limit):
    return "monitored_barrier: Timed out after %g s: Rank%s %s failed to pass monitoredBarrier in %d ms" % (
        limit, "s" if len(missing) > 1 else "", ", ".join(map(str, missing)), round(limit * 1000))


def _watch(ranks, number, limit, wait_all):
    """Rank 0's part.  Returns the error's text, or an empty text."""
    end, others, missing = time.monotonic() + limit, range(1, ranks.size), []
    arrivals = [ranks.receive_note(_byte(), rank, number) for rank in others]
    here = [ranks.send_note(_byte(), rank, number) for rank in others]
    for rank, arrival in zip(others, arrivals):
        if arrival.ends(max(0.0, end - time.monotonic())):
            arrival.wait()
        else:
            missing.append(rank)
    verdict = _late(missing if wait_all else missing[:1], limit) if missing else ""
    for rank in missing:
        _take_back(arrivals[rank - 1], verdict)
    answers = []
    for rank in others:
        text = verdict
        if verdict and rank not in missing:
            text = "Rank %d successfully reached monitoredBarrier, but: %s" % (rank, verdict)
        text = text.encode()[:_VERDICT_BYTES].ljust(_VERDICT_BYTES, b"\0")
        answers.append(ranks.send_note(torch.frombuffer(bytearray(text), dtype=torch.uint8), rank, number))
    for message in here + answers:
        _sent(message)
    return verdict


def _report(ranks, number, limit):
    """Another rank's part.  Returns the error's text, or an empty text."""
    text = torch.empty(_VERDICT_BYTES, dtype=torch.uint8, device="cpu")
    if not _comes(ranks.receive_note(text[:1], 0, number), limit):
        return _late([0], limit)
    hello = ranks.send_note(_byte(), 0, number)
    if not _comes(ranks.receive_note(text, 0, number), limit + _GRACE_S):
        return _late([0], limit + _GRACE_S)
    _sent(hello)
    return bytes(text.tolist()).rstrip(b"\0").decode()


def barrier(ranks, number, limit, wait_all):
    """Wait until all ranks are here.

    number: count of earlier barriers, on each rank.  limit: seconds.  wait_all: name all late ranks, not the first
        only.  Raises tally.Error on every rank that is here if one is not in time.
    """
    if ranks.size == 1:
        return
    wrong = _watch(ranks, number, limit, wait_all) if ranks.rank == 0 else _report(ranks, number, limit)
    if wrong:
        raise Error(wrong, errno.ETIMEDOUT)

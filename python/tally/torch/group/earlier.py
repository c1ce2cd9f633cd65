"""Calls of a group that later calls wait for.

A barrier, and a call that its caller waits for (async_op=False), end no sooner than the group's earlier calls.  Programs
rely on it: they drop the works of asynchronous calls, and read the tensors behind a barrier.  Messages are left out.  A
barrier that waited for a receive would keep this rank from the barrier behind which the other rank sends.

Flow: an asynchronous call is put into the group's InFlight -> a later call takes an Earlier for each one that is still
there, as one of its own operations.  A barrier that its caller waits for first waits for them, so at its end the earlier
calls have ended on all ranks.  A call that fails before its caller has been told leaves its failure here, for the next
barrier, which raises the first by the order of calls: it is the same on all ranks, whichever thread saw the end when.

SPDX-License-Identifier: Apache-2.0
"""

import errno
import time

from ... import _where
from ..._errors import Error, again

_LOOK_S = 0.5  # between looks whether the group has failed
_MOST_UNHEARD = 64  # failures kept for the next barrier, of which it raises the first


class InFlight:
    """Asynchronous calls of a group that have not ended, or whose end nobody has seen.  It keeps them, because a program
    may have dropped them.  Of those that have failed it keeps the failure, until somebody hears it."""

    def __init__(self):
        self._calls = {}  # as a set, in the order of calls
        self._unheard = {}  # number of a call that has ended -> its failure, which its caller has not been told

    def __bool__(self):
        return bool(self._calls)

    def add(self, call):
        """Note a call, and let go of the oldest ones that have ended: they hold their tensors."""
        calls = self._calls
        while calls:
            try:
                oldest = next(iter(calls))
            except (StopIteration, RuntimeError) as error:  # another thread has seen the end of one
                if _where.is_handlers(error):
                    raise
                break
            if not oldest.ended_unseen():
                break
            oldest.finish()
            calls.pop(oldest, None)
        calls[call] = None

    def discard(self, call):
        """Let go of a call that its caller hears of, or has heard of."""
        self._calls.pop(call, None)
        self._unheard.pop(call.number, None)

    def ended(self, call, failure):
        """Let go of a call that has ended.  failure: what its caller has yet to be told; None: nothing."""
        if failure is not None and call in self._calls:
            self._unheard[call.number] = again(failure)
            if len(self._unheard) > _MOST_UNHEARD:  # in a program that calls no barrier
                self._unheard.pop(max(list(self._unheard)), None)
        self._calls.pop(call, None)

    def hear(self, number):
        """Raise the first failure of the calls before this number that nobody has heard, and forget the others."""
        numbers = sorted([one for one in list(self._unheard) if one < number])
        failures = [self._unheard.pop(one, None) for one in numbers]
        for failure in failures:
            if failure is not None:
                raise failure

    def all(self):
        """A list of them, in the order of calls."""
        return list(self._calls)


def wait(group, calls, end):
    """Wait for the end of calls, until the time `end` on the monotonic clock or the group's failure.  Raises no failure."""
    for call in calls:
        while not call.has_ended and group.failure is None and time.monotonic() < end:
            call.ends(max(0.0, min(end - time.monotonic(), _LOOK_S)))


class Earlier:
    """An earlier call as an operation of a later one."""

    def __init__(self, call):
        self._call = call
        self._reason = None  # why the later call no longer waits for it

    def done(self):
        return self._reason is not None or self._call.ended()

    def ends(self, timeout=None):
        return self._reason is not None or self._call.ends(timeout)

    def wait(self):
        self.ends()
        if self._reason is not None:
            raise Error(self._reason, errno.ECANCELED)

    def cancel(self, reason):
        """End this operation.  The earlier call goes on."""
        self._reason = reason

    def watch(self, then):
        self._call.future().then(then)

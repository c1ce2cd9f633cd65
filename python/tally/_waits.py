"""Waits that let signals through: for an event, and for a C function that may take long.

SPDX-License-Identifier: Apache-2.0
"""

import math
import threading
import time

from . import _lib

# A wait is cut into slices so that signals (KeyboardInterrupt) get through.  Each slice costs about 100 us of a processor, so
# the slices of a long wait are longer: after 3 s it has only the longest.
SLICE_MS, LONGER_MS, LONGEST_SLICE_MS = 50, 10, 250


def longer(slice_ms):
    """The slice behind one of so many milliseconds."""
    return min(slice_ms + LONGER_MS, LONGEST_SLICE_MS)


def await_event(event, timeout=math.inf):
    """Wait for a threading.Event, at most `timeout` seconds; whether it was set.  Signals get through."""
    end = time.monotonic() + timeout
    limit = SLICE_MS
    while not event.wait(max(0, min(limit / 1000, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
        limit = longer(limit)
    return True


def call_aside(function, *arguments, abandoned=None):
    """Call a C function that may wait for long in a thread of its own.

    Returns (status, sentence).  If the wait is interrupted, the call continues, and `abandoned(status)` runs at its end.
    """
    outcome = []
    lock = threading.Lock()  # so that one thread knows that the other is through
    ended = threading.Event()
    left = threading.Event()

    def run():
        status = function(*arguments)
        with lock:
            outcome.append((status, _lib.error() if status < 0 else ""))
            ended.set()
            late = left.is_set()
        if late and abandoned is not None:
            abandoned(status)

    threading.Thread(target=run, name="tally-call", daemon=True).start()
    try:
        await_event(ended)
    except BaseException:
        with lock:
            left.set()
            late = ended.is_set()
        if late and abandoned is not None:
            abandoned(outcome[0][0])
        raise
    return outcome[0]

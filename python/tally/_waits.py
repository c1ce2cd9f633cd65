"""Waits that let signals through: for an event, and for a C function that may take long.

SPDX-License-Identifier: Apache-2.0
"""

import math
import threading
import time

from . import _lib

# A wait is cut into slices so that signals (KeyboardInterrupt) get through.  Each slice costs about 75 us of a processor, so
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


class Aside:
    """A call of a C function that may wait for long, in a thread of its own, which begins with the first wait()."""

    def __init__(self, function, *arguments):
        self._function, self._arguments = function, arguments
        self._begun = threading.Lock()  # never released by the thread that makes the call
        self._lock = threading.Lock()  # so that one thread knows that the other is through
        self._ended = threading.Event()
        self._outcome = self._abandoned = None

    def _run(self):
        if not self._begun.acquire(blocking=False):  # a signal handler has broken off an earlier start()
            return
        status = self._function(*self._arguments)
        with self._lock:
            self._outcome = status, _lib.error() if status < 0 else ""
            self._ended.set()
            then = self._abandoned
        if then is not None:
            then(status)

    def wait(self):
        """Returns (status, sentence).  If the wait is interrupted, the call continues, and the next wait goes on."""
        if not self._begun.locked():
            threading.Thread(target=self._run, name="tally-call", daemon=True).start()
        await_event(self._ended)
        return self._outcome

    def abandon(self, then):
        """Nobody waits any more: call then(status) at the end."""
        with self._lock:
            self._abandoned = then
            ended = self._ended.is_set()
        if ended:
            then(self._outcome[0])


def call_aside(function, *arguments, abandoned):
    """Call a C function that may wait for long in a thread of its own.

    Returns (status, sentence).  If the wait is interrupted, the call continues, and `abandoned(status)` runs at its end.
    """
    aside = Aside(function, *arguments)
    try:
        return aside.wait()
    except BaseException:
        aside.abandon(abandoned)
        raise

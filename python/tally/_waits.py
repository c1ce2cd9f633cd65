"""Waits that let signals through: for an event, and for a C function that may take long.

SPDX-License-Identifier: Apache-2.0
"""

import math
import threading
import time

from . import _lib

# A wait is cut into slices of this length so that signals (KeyboardInterrupt) get through.
SLICE_MS = 50


def await_event(event, timeout=math.inf):
    """Wait for a threading.Event, at most `timeout` seconds.  Signals get through."""
    end = time.monotonic() + timeout
    while not event.wait(SLICE_MS / 1000) and time.monotonic() < end:
        pass


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

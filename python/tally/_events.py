"""The completion queue: threads that run a call at the end of each operation, and pass log lines to `logging`.

Flow: tally_comm_next() -> a log line goes to the logger "tally"; the end of an operation runs its call.  It begins with
one thread.  A call may itself wait for another operation's call (a future's callback does).  So before a call runs,
another thread must be on the queue, and one is started if none is.

A thread takes one end at a time.  Taking all that are there while it has the GIL saves turns at the GIL, but keeps a
second thread awake, which must be on the queue while a call runs.  On a busy machine of 2 cores a DDP hook's bucket of
16 bytes then took 66 to 96 µs of CPU in a job of one rank, instead of 26 to 28 (commit b5ecd78, when each sum's end was
announced; bench/train/overhead.py).

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import logging
import sys
import threading
import time
import traceback

from . import _lib
from ._lib import blocking, lib

logger = logging.getLogger("tally")

# How long stop() waits for calls that run.
PATIENCE_S = 10.0

_LEVELS = {_lib.LOG_ERROR: logging.ERROR, _lib.LOG_WARNING: logging.WARNING, _lib.LOG_INFO: logging.INFO,
           _lib.LOG_DEBUG: logging.DEBUG}


def log(level, line, error=None):
    """Pass a line, with the exception that it is about, to the logger "tally".  If the program has set up no logging, write it to standard error as the C library
    does.  Python alone would drop what is no warning then, and the prefix of the rest."""
    if logger.hasHandlers():
        logger.log(level, "%s", line, exc_info=error)
    else:
        print("tally %s %s" % (logging.getLevelName(level).lower(), line), file=sys.stderr, flush=True)
        if error is not None:
            traceback.print_exception(type(error), error, error.__traceback__)


class Events:
    """The completion queue of one communicator, from its opening to its closing."""

    def __init__(self, comm, explain):
        """comm: its address.  explain: log line -> what is logged."""
        self._comm, self._explain, self._rank = comm, explain, lib.tally_comm_rank(comm)
        self._lock = threading.Lock()  # guards the rest
        self._changed = threading.Condition(self._lock)
        self._calls = {}     # address of a queued operation -> (call, operation)
        self._early = set()  # addresses of queued operations that ended before their call was known
        self._threads = []
        self._waiting = 0    # threads in tally_comm_next(), or on their way there
        self._living = 0
        self._running = 0    # calls
        self._closed = self._finished = False
        lib.tally_comm_watch_log(comm, 1)
        with self._lock:
            self._start()

    def _start(self):
        thread = threading.Thread(target=self._listen, name="tally-event", daemon=True)
        self._threads.append(thread)
        self._waiting += 1
        self._living += 1
        thread.start()

    def expect(self, address, call, operation):
        """Run call(operation) when the queued operation at `address` has ended: in a thread of this queue, or at once if it
        has ended.  Needed once for every queued operation.  A second call replaces the first one's, unless that has been taken.
        A call must not raise."""
        with self._lock:
            if address not in self._early and not self._finished:
                if not operation.told:
                    self._calls[address] = (call, operation)
                return
            operation.told = True  # first: a signal handler's exception may come in between
            self._early.discard(address)
        call(operation)

    def _listen(self):
        event = _lib.Event()
        place = ctypes.byref(event)
        while True:
            status = blocking.tally_comm_next(self._comm, -1, place)
            entry = None
            with self._lock:
                self._waiting -= 1
                if status != 0 or self._closed or event.kind not in (_lib.EVENT_LOG, _lib.EVENT_OP):
                    self._living -= 1
                    last = self._living == 0
                    break
                if event.kind == _lib.EVENT_OP:
                    entry = self._calls.pop(event.op, None)
                    if entry is None:
                        self._early.add(event.op)
                    else:
                        entry[1].told = True
                        self._running += 1
                        if self._waiting == 0:
                            self._start()
            if entry is not None:
                try:
                    entry[0](entry[1])
                except Exception as error:
                    log(logging.ERROR, "rank %d python: a callback at the end of an operation has failed: %s: %s"
                        % (self._rank, type(error).__name__, error), error)
            elif event.kind == _lib.EVENT_LOG:
                log(_LEVELS.get(event.status, logging.INFO), self._explain(event.text.decode(errors="replace")))
            with self._lock:
                if entry is not None:
                    entry = None  # and with it what the call holds
                    self._running -= 1
                    self._changed.notify_all()
                if self._closed:
                    return
                self._waiting += 1
        if status == 0 and event.kind == _lib.EVENT_LOG_END and not last:
            # Each end of watching wakes one thread: pass it on.
            lib.tally_comm_watch_log(self._comm, 1)
            lib.tally_comm_watch_log(self._comm, 0)

    def is_mine(self, thread):
        """Whether `thread` belongs to this queue."""
        return thread in self._threads

    def stop(self):
        """Stop all threads, after the calls of ended operations have run.  Then the communicator can be closed, which waits
        for operations in flight by itself."""
        with self._lock:
            self._changed.wait_for(lambda: not self._running, PATIENCE_S)
        lib.tally_comm_watch_log(self._comm, 0)  # what is said from here on goes where it went before
        for thread in list(self._threads):
            thread.join(PATIENCE_S)
        with self._lock:
            self._closed = True  # for threads that still run a call

    def finish(self):
        """Run the remaining calls after the communicator was closed, when all operations have ended.  Each runs in a thread
        of its own, because they may wait for each other."""
        with self._lock:
            entries, self._calls, self._finished = list(self._calls.values()), {}, True
        threads = [threading.Thread(target=call, args=(operation,), name="tally-event", daemon=True)
                   for call, operation in entries]
        for thread in threads:
            thread.start()
        end = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

"""Tell the other ranks when an exception ends this process: "rank 1 left: ValueError: bad data (step 3)".

Exceptions are seen in four places, because a program may have hooks of its own:
- sys.excepthook, for one that nobody has caught in the main thread; an earlier hook runs after ours;
- the end of the main thread, which comes before Python waits for other threads: sys.last_value has that exception, also
  where the program has set another hook;
- threading.excepthook, for a thread that has called Tally; other threads' exceptions end nothing that ranks wait for;
- sys.exit("reason").  Its SystemExit is one of ours, and is deleted where no Python function runs if nobody has caught it.
  sys.exit() and an exit status are an orderly end.
A process of multiprocessing, or of torch.multiprocessing.spawn(), catches its exceptions itself, and runs its finalizers
while it handles one.  TALLY_ABORT=0 turns all this off.

SPDX-License-Identifier: Apache-2.0
"""

import multiprocessing.process
import multiprocessing.util
import sys
import threading

MOST_TEXT = 300  # characters of an exception's text

steps = lambda: None  # how many steps this process has made; None: nobody counts  # noqa: E731
calling = threading.local()  # here: this thread has called Tally
_before = _before_in_threads = None  # the hooks that ours call; None: ours are not there
_abort = None
_watching = threading.Lock()  # guards the hooks' installation


def reason(kind, value):
    """One line for an exception."""
    try:
        text = " ".join(str(value).split())
    except Exception:
        text = "its text cannot be had"
    if len(text) > MOST_TEXT:
        text = text[:MOST_TEXT] + "..."
    text = "%s: %s" % (kind.__name__, text) if text else kind.__name__
    count = steps()
    return text if count is None else "%s (step %d)" % (text, count)


def _tell(kind, value):
    if _abort is None:  # this process has never joined
        return
    if hasattr(sys, "ps1") or sys.flags.interactive:  # at a prompt the process goes on
        return
    try:
        _abort(reason(kind, value))
    except Exception:  # the traceback matters more
        pass


def _hook(kind, value, trace):
    _tell(kind, value)
    _before(kind, value, trace)


def _hook_in_threads(args):
    if hasattr(calling, "here") and not issubclass(args.exc_type, SystemExit):
        _tell(args.exc_type, args.exc_value)
    _before_in_threads(args)


def _main_ends():
    value = getattr(sys, "last_value", None)
    trace = getattr(value, "__traceback__", None)
    if trace is not None and trace.tb_frame.f_back is None:  # it has left the program, and no test runner has noted it
        _tell(type(value), value)


class _Exit(SystemExit):
    """sys.exit() with a reason."""

    def __del__(self):
        if sys._getframe().f_back is None:
            _tell(SystemExit, self)


def _exit(status=None, /):
    raise SystemExit(status) if status is None or isinstance(status, int) else _Exit(status)


def _finalize():
    value = sys.exc_info()[1]
    if isinstance(value, SystemExit):  # spawn() ends the process so while it handles the exception
        if value.__context__ is None and not isinstance(value.code, (int, type(None))):
            _tell(SystemExit, value)
        value = value.__context__ if value.code else None
    if isinstance(value, Exception):
        _tell(type(value), value)


threading._register_atexit(_main_ends)  # atexit's are called when all threads have ended; refused once the main one has


def watch(abort):
    """Call abort(reason) when an exception ends the process, or a thread that calls Tally."""
    global _before, _before_in_threads, _abort
    _abort = abort
    with _watching:
        if _before is not None:
            return
        if multiprocessing.process.parent_process() is not None:
            multiprocessing.util.Finalize(None, _finalize, exitpriority=100)
        _before, sys.excepthook = sys.excepthook, _hook
        _before_in_threads, threading.excepthook = threading.excepthook, _hook_in_threads
        sys.exit = _exit

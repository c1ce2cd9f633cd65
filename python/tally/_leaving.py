"""Tell the other ranks when an exception ends this process: "rank 1 left: ValueError: bad data (step 3)".

Exceptions are seen in four places, from which no hook of the program keeps them:
- sys.excepthook, for one that nobody has caught in the main thread; an earlier hook runs after ours;
- the end of the main thread, which comes before Python waits for other threads: sys.last_value has that exception, also
  where the program has set another hook;
- the call of threading.excepthook in a thread that has called Tally; other threads' exceptions end nothing that ranks
  wait for;
- SystemExit.code, which Python reads when a SystemExit ends the process, whoever raised it (docs/why/python.md).  None and
  an exit status are an orderly end.
A process of multiprocessing, or of torch.multiprocessing.spawn(), catches its exceptions itself, and runs its finalizers
while it handles one.  TALLY_ABORT=0 turns all this off.

SPDX-License-Identifier: Apache-2.0
"""

import atexit
import ctypes
import functools
import gc
import multiprocessing.process
import multiprocessing.util
import sys
import threading
import types

MOST_TEXT = 300  # characters of an exception's text

steps = lambda: None  # how many steps this process has made; None: nobody counts  # noqa: E731
_before = None  # the hook that ours calls; None: ours is not there
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


class _Calling(threading.local):
    """`here` is set in each thread that calls Tally.  The first time, this looks at how the thread ends."""

    def __init__(self):
        thread = threading.current_thread()
        hook = getattr(thread, "_invoke_excepthook", None)  # calls threading.excepthook, whichever it is by then
        if hook is not None:
            thread._invoke_excepthook = functools.partial(_thread_ends, hook)


def _thread_ends(hook, thread):
    kind, value = sys.exc_info()[:2]
    if value is not None and hasattr(calling, "here") and not issubclass(kind, SystemExit):
        _tell(kind, value)
    hook(thread)


calling = _Calling()


def _main_ends():
    value = getattr(sys, "last_value", None)
    trace = getattr(value, "__traceback__", None)
    if trace is not None and trace.tb_frame.f_back is None:  # it has left the program, and no test runner has noted it
        _tell(type(value), value)


def _watch_exits():
    own = SystemExit.__dict__["code"]

    def code(exit):
        value = own.__get__(exit)
        if sys._getframe().f_back is None and not isinstance(value, (int, type(None))):  # the program has ended
            _tell(type(exit), value)
        return value

    def put(descriptor):
        namespace["code"] = descriptor
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # forget what attributes it had

    namespace, = gc.get_referents(SystemExit.__dict__)  # the type's own, which cannot be written by its name
    put(property(code, own.__set__, own.__delete__, own.__doc__))
    atexit.register(put, own)
    if sys.version_info < (3, 12):
        _have_exits_make_exceptions()


def _have_exits_make_exceptions():
    """Before Python 3.12 sys.exit() makes a SystemExit only where one is caught.  Replace it, also where a module has imported
    it, by one that catches it."""
    own = sys.exit

    @functools.wraps(own)
    def exit(*status):
        try:
            own(*status)
        except SystemExit:
            raise

    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            names = vars(module)
            for name in [name for name, value in list(names.items()) if value is own]:
                names[name] = exit


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
        _watch_exits()

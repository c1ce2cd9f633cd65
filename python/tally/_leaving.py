"""Tell the other ranks when an exception ends this process: "rank 1 left: ValueError: bad data (step 3)".

Exceptions are seen in four places, from which no hook of the program keeps them:
- sys.excepthook, for one that nobody has caught in the main thread; an earlier hook runs after ours;
- the end of the main thread, which comes before Python waits for other threads: sys.last_value has that exception, also
  where the program has set another hook;
- the call of threading.excepthook in a thread that has called Tally; other threads' exceptions end nothing that ranks
  wait for;
- sys.exit(), exit() and quit(), which raise a subclass of SystemExit if they are given a reason (docs/why/python.md).
  None and an exit status are an orderly end.
A process of multiprocessing, or of torch.multiprocessing.spawn(), catches its exceptions itself, and runs its finalizers
while it handles one.  TALLY_ABORT=0 turns all this off.

SPDX-License-Identifier: Apache-2.0
"""

import _sitebuiltins
import functools
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


def _is_reason(status):
    return not isinstance(status, (int, type(None)))


class _Exit(SystemExit):
    """What sys.exit("reason") raises.  To end the process for it Python reads `code`, outside of all frames."""

    __module__, __qualname__ = "builtins", "SystemExit"  # in tracebacks, and in logs (below)

    def _code(self):
        status = super().code
        if sys._getframe().f_back is None and _is_reason(status):
            _tell(SystemExit, self)
        return status

    code = property(_code, SystemExit.code.__set__, SystemExit.code.__delete__)

    def __reduce__(self):
        return (SystemExit, *super().__reduce__()[1:])


_Exit.__name__ = "SystemExit"


def _raising_ours(exit):
    @functools.wraps(exit)
    def raises(*arguments, **named):
        try:
            exit(*arguments, **named)
        except SystemExit as error:
            # In another thread it ends no process, and threading.excepthook is silent only for SystemExit itself.
            if (type(error) is not SystemExit or not _is_reason(error.code)
                    or threading.current_thread() is not threading.main_thread()):
                raise
            reasons = error.args
        raise _Exit(*reasons)
    return raises


def _watch_exits():
    """Replace sys.exit(), also where a module has imported it, and what exit() and quit() call."""
    own = sys.exit
    ours = _raising_ours(own)
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            names = vars(module)
            for name in [name for name, value in list(names.items()) if value is own]:
                names[name] = ours
    _sitebuiltins.Quitter.__call__ = _raising_ours(_sitebuiltins.Quitter.__call__)


def _finalize():
    value = sys.exc_info()[1]
    if isinstance(value, SystemExit):  # spawn() ends the process so while it handles the exception
        if value.__context__ is None and _is_reason(value.code):
            _tell(SystemExit, value)
        value = value.__context__ if value.code else None
    if isinstance(value, Exception):
        _tell(type(value), value)


threading._register_atexit(_main_ends)  # atexit's are called when all threads have ended; refused once the main one has


def watch(abort):
    """Call abort(reason) when an exception ends the process, or a thread that calls Tally."""
    global _before, _abort
    _abort = abort
    with _watching:
        if _before is not None:
            return
        if multiprocessing.process.parent_process() is not None:
            multiprocessing.util.Finalize(None, _finalize, exitpriority=100)
        _before, sys.excepthook = sys.excepthook, _hook
        _watch_exits()

"""Tell the other ranks when an exception ends this process: "rank 1 left: ValueError: bad data (step 3)".

sys.excepthook runs in the main thread for an uncaught exception, and then the interpreter ends.  This module installs a
hook there; an earlier hook runs after it.  An exception that ends another thread does not end the process, so
threading.excepthook stays as it is.  A process of multiprocessing, or of torch.multiprocessing.spawn(), catches its
exceptions itself, and runs its finalizers while it handles one.

SPDX-License-Identifier: Apache-2.0
"""

import multiprocessing.process
import multiprocessing.util
import sys

MOST_TEXT = 300  # characters of an exception's text

steps = lambda: None  # how many steps this process has made; None: nobody counts  # noqa: E731
_before = None        # the hook that ours calls; None: ours is not there
_abort = None


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
    try:
        _abort(reason(kind, value))
    except Exception:  # the traceback matters more
        pass


def _hook(kind, value, trace):
    # At a prompt the process goes on after an exception.
    if not hasattr(sys, "ps1") and not sys.flags.interactive:
        _tell(kind, value)
    _before(kind, value, trace)


def _finalize():
    value = sys.exc_info()[1]
    if isinstance(value, SystemExit):  # spawn() ends the process so while it handles the exception
        value = value.__context__ if value.code else None
    if isinstance(value, Exception):
        _tell(type(value), value)


def watch(abort):
    """Call abort(reason) when an exception ends the process."""
    global _before, _abort
    _abort = abort
    if _before is None:
        if multiprocessing.process.parent_process() is not None:
            multiprocessing.util.Finalize(None, _finalize, exitpriority=100)
        _before = sys.excepthook
        sys.excepthook = _hook

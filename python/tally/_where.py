"""Where the script is that called: " (train.py:31)", for errors; and whether an error comes from a signal handler.

The walk over the frames costs 0.4 µs a frame, and a call of Horovod's API or torch.distributed has five to eight of ours and
torch's.  So it is made when an error is, not at each call: the line is the one that waits, which is that of the call unless
the call was asynchronous.

SPDX-License-Identifier: Apache-2.0
"""

import os
import re
import sys
import sysconfig

_OWN = os.path.dirname(__file__) + os.sep
_AUTOLOAD = os.path.join(os.path.dirname(_OWN[:-1]), "tally_autoload.py")
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def of_caller():
    """" (train.py:31)", the innermost line on this thread's stack outside of Tally, Python's library and all installed
    packages.  A training program may be installed, too: without such a line, the innermost one outside of Tally, Python's
    library, torch and typing_extensions, which wraps some of torch's functions.  "" if there is none, as in threads of
    Tally's and of torch's own."""
    try:
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        folder = os.path.dirname(torch) if torch else _OWN[:-1]
        beside = os.path.dirname(folder) + os.sep if torch else _OWN  # also packages, as after `pip install --target`
        inside = (_OWN, _AUTOLOAD, folder + os.sep, "<frozen ", "<eval_with_key>")  # the last is what torch.fx has made
        frame, script, program = sys._getframe(1), None, None
        while frame is not None and script is None:
            path = frame.f_code.co_filename
            if path.startswith(inside) or path.endswith(os.sep + "typing_extensions.py"):
                pass
            elif path.startswith(beside) or _INSTALLED.search(path):
                program = program or frame
            elif not path.startswith(_STANDARD):
                script = frame
            frame = frame.f_back
        frame = script or program
        if frame is None:
            return ""
        path, here = frame.f_code.co_filename, os.getcwd() + os.sep
        return " (%s:%d)" % (path[len(here):] if path.startswith(here) else path, frame.f_lineno)
    except OSError:  # no current directory
        return ""


def is_handlers(error):
    """Whether a signal handler has raised an exception that was just caught.  Python calls a handler in the main thread
    between any two lines, with the frame that it interrupts: no other function gets the frame of its caller."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        back = frame.f_back
        # Not of Tally's own: a frame keeps what it has once told of its variables, such as the exception itself.
        if (back is not None and not frame.f_code.co_filename.startswith(_OWN)
                and any(value is back or (type(value) is tuple and any(one is back for one in value))
                        for value in frame.f_locals.values())):
            return True
        trace = trace.tb_next
    return False

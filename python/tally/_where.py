"""Where the script is that called: " (train.py:31)", for errors.

The walk over the frames costs 0.4 µs a frame, and a call of Horovod's API or torch.distributed has five to eight of ours and
torch's.  So it is made when an error is, not at each call: the line is the one that waits, which is that of the call unless
the call was asynchronous.

SPDX-License-Identifier: Apache-2.0
"""

import os
import sys
import sysconfig

_OWN = os.path.dirname(__file__) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = os.path.join(sysconfig.get_path("stdlib"), "site-packages") + os.sep


def _is_inside(path, inside):
    """Whether a frame's file is Tally's, torch's or of Python's library."""
    return path.startswith(inside) or (path.startswith(_STANDARD) and not path.startswith(_PACKAGES))


def of_caller():
    """" (train.py:31)", the innermost line outside of Tally, torch and Python's library on this thread's stack.  "" if there
    is none, as in threads of Tally's and of torch's own."""
    try:
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        inside = (_OWN, os.path.dirname(torch) + os.sep) if torch else (_OWN,)
        inside += ("<frozen ", "<eval_with_key>")  # Python's own, and what torch.fx has made
        frame = sys._getframe(1)
        while frame is not None and _is_inside(frame.f_code.co_filename, inside):
            frame = frame.f_back
        if frame is None:
            return ""
        path, here = frame.f_code.co_filename, os.getcwd() + os.sep
        return " (%s:%d)" % (path[len(here):] if path.startswith(here) else path, frame.f_lineno)
    except Exception:  # such as no current directory; the error itself matters more
        return ""

"""The outcome of a future's callback, returned or raised, without our frames in the message that C++ makes of an exception.

C++ turns an exception that leaves a callback into text, with a list of the frames that it has passed ("At: ...").  Where no
frame has, there is no list.  So the callback of a Begun future is of C: it calls the future's attribute `outcome`, which is
of C, too.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import functools
import operator

from ... import _where
from ..patches import Future

_raise = ctypes.pythonapi["PyErr_SetObject"]  # ctypes raises what is set when it returns
_raise.argtypes = [ctypes.py_object, ctypes.py_object]
_raise.restype = None

_take = operator.methodcaller("outcome")


class Begun(Future):
    """A future on the CPU.  then_outcome() makes the one that others wait for."""

    def __init__(self):
        super().__init__([])

    def then_outcome(self):
        return self.then(_take)

    def end(self, call):
        """Complete the future of then_outcome() with what call() returns or raises."""
        try:
            self.outcome = [call()].pop
        except BaseException as error:  # an interrupt, too, must leave no future open
            if not isinstance(error, Exception) or _where.is_handlers(error):
                self.outcome = call
                self.set_result(None)
                raise
            self.outcome = functools.partial(_raise, type(error), error.with_traceback(None))
        self.set_result(None)

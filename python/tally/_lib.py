"""The C library for ctypes: found, loaded and described.  Everything else in the package calls it through this module.

There are two views of one library.  `lib` (PyDLL) keeps the GIL, for short calls that never block.  `blocking` (CDLL)
releases it, for calls that wait or work for long.  Argument types are set once, here, so that a call costs only the conversion of its
arguments.

SPDX-License-Identifier: Apache-2.0
"""

import os
from ctypes import (CDLL, POINTER, PyDLL, Structure, c_char, c_char_p, c_double, c_int, c_int32, c_int64,
                    c_size_t, c_uint32, c_uint64, c_void_p)

# The numbers of include/tally/tally.h.
DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool",
               "complex64", "complex128", "uint16", "uint32", "uint64")
DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
PUSH_PULL, BROADCAST, ALLGATHER, BARRIER = 1, 2, 3, 4
REDUCE, REDUCE_SCATTER, ALLTOALL, GATHER, SCATTER = 5, 6, 7, 8, 9
PUSH_PULLV, SHARED_CREATE = 13, 14
EVENT_OP, EVENT_LOG, EVENT_CLOSE, EVENT_LOG_END = 1, 2, 3, 4
LOG_ERROR, LOG_WARNING, LOG_INFO, LOG_DEBUG = 1, 2, 3, 4


class Options(Structure):
    """struct tally_options."""

    _fields_ = [
        ("size", c_size_t),
        ("priority", c_int32),
        ("ndim", c_uint32),
        ("shape", POINTER(c_int64)),
        ("prescale", c_double),
        ("postscale", c_double),
        ("queued", c_uint32),
        ("space", c_uint32),
        ("tag", c_void_p),
        ("group", c_void_p),
        ("note", c_char_p),
        ("partial", c_uint32),
        ("unused", c_uint32),
        ("place", c_uint64),
        ("stream", c_void_p),
    ]


class Range(Structure):
    """struct tally_range."""

    _fields_ = [
        ("begin", c_uint64),
        ("count", c_uint64),
    ]


class Event(Structure):
    """struct tally_event."""

    _fields_ = [
        ("kind", c_int),
        ("status", c_int),
        ("op", c_void_p),
        ("tag", c_void_p),
        ("text", c_char * 1024),
    ]


def _candidates():
    """Places of the library, the most specific first."""
    chosen = os.environ.get("TALLY_LIBRARY")
    if chosen:
        return [chosen]  # who names one does not want another
    # Links are not followed: build/python/tally is a link into the sources, and build/lib lies beside the link.
    package = os.path.dirname(os.path.abspath(__file__))
    return [
        os.path.join(package, "libtally.so"),
        os.path.join(os.path.dirname(os.path.dirname(package)), "lib", "libtally.so"),
        "libtally.so.0",  # wherever the system's loader looks
    ]


def _load():
    tried = []
    for path in _candidates():
        try:
            return CDLL(path)
        except OSError as error:
            missing = os.sep in path and not os.path.exists(path)
            tried.append("  %s: %s" % (path, "no such file" if missing else error))
    raise ImportError("libtally.so could not be loaded; looked at\n%s\nBuild it with `make`, or set TALLY_LIBRARY "
                      "to its path." % "\n".join(tried))


blocking = _load()
lib = PyDLL(blocking._name, handle=blocking._handle)

_shared = {
    "tally_version": (c_char_p,),
    "tally_error": (c_char_p,),
    "tally_comm_rank": (c_int, c_void_p),
    "tally_comm_size": (c_int, c_void_p),
    "tally_comm_local_rank": (c_int, c_void_p),
    "tally_comm_local_size": (c_int, c_void_p),
    "tally_comm_machine": (c_int, c_void_p),
    "tally_comm_machine_count": (c_int, c_void_p),
    "tally_comm_service_count": (c_int, c_void_p),
    "tally_comm_has_pool": (c_int, c_void_p),
    "tally_comm_status": (c_int, c_void_p, POINTER(c_char_p)),
    "tally_comm_watch_log": (c_int, c_void_p, c_int),
    "tally_name_calls": (None, c_uint32, POINTER(c_char_p)),
    "tally_group_create": (c_int, c_void_p, c_char_p, POINTER(c_int), c_size_t, POINTER(c_void_p)),
    "tally_push_pull": (c_int, c_void_p, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "tally_push_pullv": (c_int, c_void_p, c_char_p, c_void_p, c_void_p, POINTER(Range), c_size_t, c_int, c_int, c_void_p,
                         c_void_p),
    "tally_shared_create": (c_int, c_void_p, c_char_p, c_void_p, c_size_t, c_int, c_uint32, c_void_p, c_void_p),
    "tally_shared_add": (c_int, c_void_p, c_char_p, c_void_p, c_void_p, c_void_p),
    "tally_shared_read": (c_int, c_void_p, c_char_p, c_void_p, c_void_p),
    "tally_shared_values": (c_int, c_void_p, POINTER(c_void_p)),
    "tally_broadcast": (c_int, c_void_p, c_char_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "tally_allgather": (c_int, c_void_p, c_char_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "tally_allgather_into": (c_int, c_void_p, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "tally_reduce_scatter": (c_int, c_void_p, c_char_p, c_void_p, c_void_p, POINTER(c_size_t), c_int, c_int, c_void_p,
                             c_void_p),
    "tally_alltoall": (c_int, c_void_p, c_char_p, c_void_p, POINTER(c_size_t), c_void_p, POINTER(c_size_t), c_int,
                       c_void_p, c_void_p),
    "tally_reduce": (c_int, c_void_p, c_char_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p),
    "tally_gather": (c_int, c_void_p, c_char_p, c_void_p, c_size_t, c_void_p, POINTER(c_size_t), c_int, c_int, c_void_p,
                     c_void_p),
    "tally_scatter": (c_int, c_void_p, c_char_p, c_void_p, POINTER(c_size_t), c_void_p, c_size_t, c_int, c_int,
                      c_void_p, c_void_p),
    "tally_send": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_uint32, c_void_p, c_void_p),
    "tally_recv": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_uint32, c_void_p, c_void_p),
    "tally_probe": (c_int, c_void_p, c_uint32, c_void_p, c_void_p),
    "tally_join": (c_int, c_void_p, c_void_p, c_void_p),
    "tally_op_source": (c_int, c_void_p),
    "tally_op_watch": (c_int, c_void_p),
    "tally_barrier": (c_int, c_void_p, c_char_p, c_void_p, c_void_p),
    "tally_refuse": (c_int, c_void_p, c_char_p, c_uint32, c_void_p, c_char_p),
    "tally_alloc": (c_int, c_void_p, c_size_t, POINTER(c_void_p)),
    "tally_free": (c_int, c_void_p),
    "tally_op_poll": (c_int, c_void_p),
    "tally_op_cancel": (c_int, c_void_p, c_char_p),
    "tally_op_error": (c_char_p, c_void_p),
    "tally_op_gathered": (c_int, c_void_p, POINTER(c_void_p), POINTER(c_size_t), POINTER(POINTER(c_int64))),
    "tally_op_free": (None, c_void_p),
}
_waiting = {
    "tally_comm_listen": (c_int, POINTER(c_char_p), POINTER(c_int)),
    "tally_comm_open": (c_int, POINTER(c_char_p), POINTER(c_void_p)),
    "tally_comm_abort": (c_int, c_void_p, c_char_p),
    "tally_comm_close": (c_int, c_void_p),
    "tally_comm_next": (c_int, c_void_p, c_int, POINTER(Event)),
    "tally_comm_report": (c_int, c_void_p, c_int, POINTER(c_void_p)),
    "tally_plan": (c_int, c_void_p, c_uint32, c_size_t, POINTER(c_char_p), POINTER(c_uint64)),
    "tally_op_wait": (c_int, c_void_p, c_int),
    "tally_add_norms": (c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_void_p),
}
# The end of what has ended is taken without giving up the GIL, which another thread may keep for a while.
_shared["tally_op_wait"] = _waiting["tally_op_wait"]
for _view, _table in ((lib, _shared), (blocking, _waiting)):
    for _name, (_result, *_arguments) in _table.items():
        try:
            _function = getattr(_view, _name)
        except AttributeError:
            raise ImportError("%s has no %s: it is of another release than this package; set TALLY_LIBRARY to one of this release"
                              % (blocking._name, _name)) from None
        _function.restype = _result
        _function.argtypes = _arguments

free = CDLL(None).free
free.restype = None
free.argtypes = [c_void_p]


def error():
    """The reason for the calling thread's last failed call."""
    return lib.tally_error().decode(errors="replace")

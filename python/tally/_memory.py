"""Memory that the ranks of a machine share.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import os
import weakref

from . import _job, _lib
from ._lib import lib


def has_pool():
    """Whether alloc() returns memory that the ranks share."""
    comm = _job.own.comm
    return comm is not None and bool(lib.tally_comm_has_pool(comm))


def alloc(length):
    """Return `length` bytes of zeros as a ctypes array, which frees its memory with its last reference.  The memory is from
    the pool that the ranks of a machine share, or ordinary memory if they share none.  A forked child does not have it."""
    memory = ctypes.c_void_p()
    with _job.own.in_use() as comm:
        status = lib.tally_alloc(comm, length, ctypes.byref(memory))
    if status < 0:
        raise MemoryError(_lib.error() or os.strerror(-status))
    array = (ctypes.c_uint8 * max(length, 1)).from_address(memory.value)
    weakref.finalize(array, lib.tally_free, memory.value).atexit = False
    return array

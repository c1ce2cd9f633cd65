"""join(): ranks that have run out of input, and those that have not.

Flow: join() waits until each operation of two steps has submitted its second step, because the library takes nothing more
from a rank that has joined -> the library takes zeros for this rank in all reductions of the other ranks
(tally_join) -> once all have joined, the optimizers forget reductions of a backward without a step.

SPDX-License-Identifier: Apache-2.0
"""

import threading
import weakref

from ... import _operations
from .. import device as devices
from ..crossing import gates

_optimizers = []  # weak references, in order of creation
_halves = []  # weak references to operations of two steps, in order of creation; under _lock
_lock = threading.Lock()  # backward begins operations in a thread of its own


def register(optimizer):
    """Call optimizer.begin_anew(), while it lives, when all ranks have joined."""
    _optimizers[:] = [one for one in _optimizers if one() is not None] + [weakref.ref(optimizer)]


def begin_half(operation):
    """Make join() call operation.settle(), unless operation.submitted is set: its second step has been submitted, or will not be."""
    with _lock:
        live = [one for one in _halves if (half := one()) is not None and not half.submitted.is_set()]
        _halves[:] = live + [weakref.ref(operation)]


def _settle_halves():
    with _lock:
        halves = [half for one in _halves if (half := one()) is not None]
        _halves.clear()
    for half in halves:
        half.settle()


def join(device=-1):
    """Say that this rank has no more input, and wait until all living ranks have said so.

    Meanwhile zeros stand for this rank in every allreduce of the others, whatever its name, dtype, shape and op, and in
    their DistributedOptimizers.  Averages are still over all ranks.  Their barriers do not wait for it.  Their
    allgather, broadcast, alltoall and reducescatter raise Error, and so do their operations in a process set that
    contains this rank.
    Sparse sums and alltoalls that this rank has begun are completed with its input, so the other ranks must begin them
    before they wait for anything without this rank.
    device: as in Horovod; without effect.

    Returns the rank that joined last, whose model is the one to broadcast.  Collective.
    """
    gates.drain()     # updates of the last step(), whose sums this rank is in
    _settle_halves()
    devices.settle()  # what was begun on a device counts as submitted
    last = _operations.join()
    for one in _optimizers:
        optimizer = one()
        if optimizer is not None:
            optimizer._tally_begin_anew()
    return last

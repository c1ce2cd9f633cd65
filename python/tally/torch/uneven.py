"""join(): ranks that have run out of input, and those that have not.

Flow: a rank in join() tells the library, which takes zeros in its place in all that the other ranks reduce (tally_join);
once all have joined the optimizers forget what backward had begun without a step.

SPDX-License-Identifier: Apache-2.0
"""

import weakref

from .. import _core
from . import device as devices
from . import gates

_optimizers = []  # weak references, in order of creation


def register(optimizer):
    """Have optimizer.begin_anew() called, while it lives, when all ranks have joined."""
    _optimizers[:] = [one for one in _optimizers if one() is not None] + [weakref.ref(optimizer)]


def join(device=-1):
    """Say that this rank has no more input, and wait until all ranks have said so, for as long as they live.

    Meanwhile zeros stand for this rank in every allreduce of the others, whatever its name, dtype, shape and op, and in
    their DistributedOptimizers; averages are still over all ranks.  Their barriers do not wait for it; their allgather,
    broadcast, alltoall and reducescatter, and what they do in a process set that this rank is in, raise Error.
    device: as in Horovod; without effect.

    Returns the rank that joined last, whose model is the one to broadcast.  Collective.
    """
    gates.drain()     # updates of the last step(), whose sums this rank is in
    devices.settle()  # what was begun on a device counts as submitted
    last = _core.join()
    for one in _optimizers:
        optimizer = one()
        if optimizer is not None:
            optimizer.begin_anew()
    return last

"""join(): ranks that have run out of input, and those that have not.

Flow: at the first gradient of a step, or before a SyncBatchNorm's first forward in it, each DistributedOptimizer
submits a census, a word of each rank on whether it has joined -> a rank in join() takes part in the census and in every
gradient's reduction, with zeros, step after step -> the census in which all have joined ends it.

SPDX-License-Identifier: Apache-2.0
"""

import gc
import threading
import weakref

import torch

from .. import _core
from .._core import GRADIENT, USER
from .._lib import BARRIER
from . import ops

_optimizers = []  # weak references, in order of creation: the same on all ranks


def register(optimizer):
    """Take part, while it lives, in what optimizer.stand_in() submits."""
    _optimizers[:] = [one for one in _optimizers if one() is not None] + [weakref.ref(optimizer)]


def _registered(of_all):
    """The optimizers that live, over all ranks or over some."""
    living = [one() for one in _optimizers]
    return [one for one in living if one is not None and one.of_all == of_all]


def ask():
    """Say that this rank goes on, and hear who does not, before a call that waits for all ranks."""
    for optimizer in _registered(True)[:1]:
        note(optimizer.take_census().wait())


def count(name, joined, then=None):
    """Submit a census of ranks; the result has a 1 for each that has joined."""
    words = torch.zeros(_core.size(), dtype=torch.int32)
    words[_core.rank()] = joined
    return ops._reduce(words, words, name, ops.Sum, 1.0, 1.0, 0, GRADIENT, None, then)


def note(census):
    """Remember who has joined, for the calls that those ranks take no part in."""
    ops.joined_in = _core.generation()
    ops.joined[:] = census.nonzero().flatten().tolist()


def join(device=-1):
    """Say that this rank has no more input, and wait until all ranks have said so.

    Meanwhile zeros stand for its gradients in the other ranks' DistributedOptimizers; averages are still over all
    ranks.  Other operations of ranks that have not joined raise Error, from when they know: from their next gradient or
    SyncBatchNorm on.  device: as in Horovod; without effect.  NotImplementedError here, and Error on the other ranks, if
    a DistributedOptimizer of this rank is over some of the ranks.

    Returns the rank that joined last (of several in the same step the highest), whose model is the one to broadcast.
    Collective.
    """
    if _registered(False):
        gc.collect()  # one that nobody uses may still hang in a cycle
    optimizers, partial = _registered(True), _registered(False)
    if partial:
        reason = NotImplementedError("join() is for optimizers over all ranks, and a DistributedOptimizer here is over "
                                     "a process set of some")
        for optimizer in optimizers:
            optimizer.refuse_census(reason)
        if not optimizers:
            _core.refuse(BARRIER, None, USER, reason)
        raise reason
    last = _core.size() - 1
    if not optimizers or _core.size() == 1:
        _core.barrier()
        return last
    wake = threading.Event()
    before = list(ops.joined)
    rounds = {optimizer: optimizer.stand_in(lambda _: wake.set()) for optimizer in optimizers}
    while rounds:
        wake.wait(_core.SLICE_MS / 1000)  # signals get through
        wake.clear()
        for optimizer, handles in list(rounds.items()):
            census = handles.operations[0]
            if census.done():
                census.wait()  # raises where a rank refuses
            if not handles.done():
                continue
            census = handles.wait()[0]
            if census.all():
                del rounds[optimizer]
                continue
            if optimizer is optimizers[0]:
                before = census.nonzero().flatten().tolist()
            rounds[optimizer] = optimizer.stand_in(lambda _: wake.set())
    ops.joined.clear()
    return max(rank for rank in range(_core.size()) if rank not in before)

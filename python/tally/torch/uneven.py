"""join(): ranks that have run out of input, and those that have not.

Flow: at the first gradient of a step each DistributedOptimizer submits a census, a word of each rank on whether it has
joined; what SyncBatchNorm gathers is one, too, for who has joined gives nothing -> a rank in join() takes part in the
censuses and in every gradient's reduction, with zeros, step after step -> those in which all have joined end it.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import errno
import gc
import itertools
import threading
import weakref

import torch

from .. import _core
from .._core import GRADIENT
from .._lib import ALLGATHER
from . import ops

_optimizers = []  # weak references, in order of creation

_ROWS = "/rows"  # of gather(): one name, as who has joined cannot know what the others gather


def register(optimizer):
    """Take part, while it lives, in what optimizer.stand_in() submits."""
    _optimizers[:] = [one for one in _optimizers if one() is not None] + [weakref.ref(optimizer)]


def _registered(of_all):
    """The optimizers that live, over all ranks or over some."""
    living = [one() for one in _optimizers]
    return [one for one in living if one is not None and one.of_all == of_all]


def count(name, joined, mark=0, then=None):
    """Submit a census of ranks: the result says of each whether it has joined, and its mark, below 2**30."""
    words = torch.zeros(_core.size(), dtype=torch.int32, device="cpu")
    words[_core.rank()] = joined + 2 * mark
    return ops._reduce(words, words, name, ops.Sum, 1.0, 1.0, 0, GRADIENT, None, then)


class _Rows:
    """Handle of a gathering of numbers, to which only ranks that have joined give none; wait() returns a census."""

    def __init__(self, own, then=None):
        self._gather = ops._allgather(own, _ROWS, GRADIENT, then)
        self.done = self._gather.done

    def wait(self):
        self.numbers = self._gather.wait()
        self.lengths = self._gather.first_dims
        return torch.tensor([int(not length) for length in self.lengths], device="cpu")

    def firsts(self):
        """Each rank's first number, as it came to the host: no wait for a device, to which `numbers` may go."""
        address = self._gather.operation.gathered()[0]
        begins = itertools.accumulate([0, *self.lengths[:-1]])
        return [ctypes.c_double.from_address(address + 8 * begin).value for begin in begins]


def gather(own):
    """The ranks' numbers, one behind the other; how many each has given; the first of each.  Error where a rank has
    joined.

    own: a tensor of one dimension, of float64, not empty.  Ranks call it in the same order."""
    handle = _Rows(own)
    census = handle.wait()
    note(census)
    if census.any():
        raise _core.Error("SyncBatchNorm is over all ranks, and of them have joined: %s"
                          % ", ".join(map(str, sorted(_members(census)))), errno.EINVAL)
    return handle.numbers, handle.lengths, handle.firsts()


def refuse_gather(reason):
    """Have the other ranks' next gather() fail with this rank's reason."""
    _core.refuse(ALLGATHER, _ROWS, GRADIENT, reason)


def _rows_missing(then):
    """Take part in a gather() of the other ranks, for a rank that has joined."""
    return ops.Group([_Rows(torch.empty(0, dtype=torch.float64, device="cpu"), then)])


def marks(census):
    """Those of the ranks that have not joined."""
    return {word // 2 for word in census.tolist() if not word % 2}


def _members(census):
    return set((census % 2).nonzero().flatten().tolist())


def _heard():
    """Who has joined, as far as this rank knows."""
    return set(ops.joined) if ops.joined_in == _core.generation() else set()


def note(census):
    """Remember who has joined, for the calls that those ranks take no part in; a census may be older than the last."""
    ops.joined[:] = sorted(_heard() | _members(census))
    ops.joined_in = _core.generation()


def _stand_in(begins):
    """Take part in what the other ranks do until all have joined; returns who had before the last.

    begins: for each thing they do again and again, what submits this rank's part in the next: the census first."""
    wake = threading.Event()
    before = set()
    rounds = {begin: begin(lambda _: wake.set()) for begin in begins}
    while rounds:
        wake.wait(_core.SLICE_MS / 1000)  # signals get through
        wake.clear()
        for begin, handles in list(rounds.items()):
            census = handles.operations[0]
            if census.done():
                census.wait()  # raises where a rank refuses
            if not handles.done():
                continue
            census = handles.wait()[0]
            if len(_members(census)) == len(census):
                del rounds[begin]
                continue
            before |= _members(census)
            rounds[begin] = begin(lambda _: wake.set())
    return before


def join(device=-1):
    """Say that this rank has no more input, and wait until all ranks have said so, for as long as they live.

    Meanwhile zeros stand for its gradients in the other ranks' DistributedOptimizers; averages are still over all
    ranks.  Other operations of ranks that have not joined raise Error, from when they know: from the end of their next
    step or their next SyncBatchNorm on; those before wait.  device: as in Horovod; without effect.  NotImplementedError
    here, and Error on the other ranks, if a DistributedOptimizer of this rank is over some of the ranks.

    Returns the rank that joined last (of several in the same step the highest), whose model is the one to broadcast.
    Collective.
    """
    gc.collect()  # an optimizer that nobody uses may still hang in a cycle, here and not on another rank
    optimizers, partial = _registered(True), _registered(False)
    if partial:
        reason = NotImplementedError("join() is for optimizers over all ranks, and a DistributedOptimizer here is over "
                                     "a process set of some")
        for optimizer in optimizers:
            optimizer.refuse(reason)
        refuse_gather(reason)
        raise reason
    last = _core.size() - 1
    if last == 0:
        return last
    with _core.standing_by():  # the others may step one of several optimizers alone for long, or evaluate
        before = _heard() | _stand_in([*(optimizer.stand_in for optimizer in optimizers), _rows_missing])
    ops.joined.clear()
    return max((rank for rank in range(_core.size()) if rank not in before), default=last)

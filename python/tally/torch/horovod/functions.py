"""Copy parameters, optimizer state and Python objects of one rank to all ranks.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import hashlib
import itertools
import pickle

import torch

from ... import _calls, _errors, _job
from ..._calls import STATE, Call
from ..._lib import ALLGATHER, BROADCAST
from ..calls import Group, allgather, broadcast
from ..process_sets import global_process_set

try:
    # Also takes lambdas and what __main__ defines.  What it writes, pickle reads where the package is present.
    from cloudpickle import dumps as _dumps
except ImportError:
    from pickle import dumps as _dumps


def _call(name, process_set):
    return Call(name, group=process_set.group(), space=STATE)


def compare(what, own, process_set=global_process_set, name=None):
    """Raise Error with the same sentence on all ranks unless the ranks' lists of strings `own` are equal.  Collective: calls
    meet by name, or without one by their order."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(repr(own).encode()).digest()), dtype=torch.uint8)
    digests = allgather(_call(name, process_set), digest.unsqueeze(0)).wait()
    if digests.eq(digests[0]).all():
        return
    for entries in itertools.zip_longest(*allgather_object(own, process_set=process_set), fillvalue="nothing"):
        if len(set(entries)) > 1:
            raise _errors.disagreement(what, dict(zip(process_set.ranks, entries)))


def broadcast_parameters(params, root_rank, process_set=global_process_set):
    """Overwrite tensors in place with those of rank `root_rank`.

    params: a dict such as model.state_dict(), an iterable of (name, tensor) such as model.named_parameters(), or an
        iterable of tensors.  Names, shapes and dtypes must be the same on all ranks; for an iterable of tensors the order
        too.
    Raises TypeError for an entry that is not a tensor, and Error on all ranks if they disagree.
    """
    if isinstance(params, dict):
        params = sorted(params.items())
    elif isinstance(params, (str, torch.Tensor)):
        raise ValueError("params must be a dict, or an iterable of tensors or (name, tensor), not %s"
                         % type(params).__name__)
    try:
        params = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    except TypeError:
        raise ValueError("params must be a dict, or an iterable of tensors or (name, tensor), not %s"
                         % type(params).__name__) from None
    for name, tensor in params:
        if not isinstance(tensor, torch.Tensor):
            reason = TypeError("parameter %s is no tensor but of type %s; use broadcast_object for it"
                               % (name, type(tensor).__name__))
            _calls.refuse(ALLGATHER, _call(None, process_set), reason)  # of compare()
            raise reason
    compare("the parameters to broadcast", sorted("%r" % (name,) for name, _ in params), process_set)
    Group([broadcast(_call(name, process_set), tensor, tensor, root_rank, process_set) for name, tensor in params]).wait()


def broadcast_object(obj, root_rank=0, name=None, process_set=global_process_set):
    """Return `obj` of rank `root_rank` on every rank: the object itself on the root, a pickled copy elsewhere.

    obj: anything that can be pickled (with lambdas and the like if cloudpickle is installed).  Ignored on other ranks.
    """
    first, second = [_call(name and name + end, process_set) for end in (".length", ".pickle")]
    root = _job.rank() == root_rank
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    if root:
        try:
            data = torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8)
        except Exception as reason:
            _calls.refuse(BROADCAST, first, "rank %d cannot pickle its object: %s" % (root_rank, reason))
            raise
        length[0] = data.numel()
    broadcast(first, length, length, root_rank, process_set).wait()
    if not root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast(second, data, data, root_rank, process_set).wait()
    return obj if root else pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))


def allgather_object(obj, name=None, process_set=global_process_set):
    """Return a list of all ranks' objects in order of ranks.  All are pickled copies, also this rank's.

    obj: anything that can be pickled (with lambdas and the like if cloudpickle is installed).
    """
    call = _call(name and name + ".pickles", process_set)
    try:
        data = torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8)
    except Exception as reason:
        _calls.refuse(ALLGATHER, call, "rank %d cannot pickle its object: %s" % (_job.rank(), reason))
        raise
    gather = allgather(call, data)
    return [pickle.loads(piece.numpy().tobytes()) for piece in gather.wait().split(gather.first_dims)]


class _Slot:
    """The placeholder of a tensor in a state that travels as an object."""

    def __init__(self, tensor):
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _replace(state, kind, function):
    """Copy nested dicts, lists and tuples, with function(x) instead of each x of type `kind`, in order."""
    if isinstance(state, kind):
        return function(state)
    if isinstance(state, dict):
        return {key: _replace(value, kind, function) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_replace(value, kind, function) for value in state)
    return state


def broadcast_optimizer_state(optimizer, root_rank, model=None, process_set=global_process_set):
    """Copy the optimizer state of rank `root_rank` to every rank: hyperparameters, and the state of each parameter.

    A fresh optimizer gets the root's state, whatever it consists of.  If the root's optimizer is fresh, all are.
    optimizer: any torch optimizer or DistributedOptimizer over the same parameters on all ranks, in the same order.  With sparse=
        each rank keeps the gradients that it has not sent; if the root has none, all ranks drop them.
        Behind a backward, that step's reductions end first, and are forgotten on all ranks, as by load_state_dict().  If an update
        fails then, the root's failure is raised on all ranks, and another rank's on that rank, with the state loaded.
    model: accepted as in Horovod; not needed, because no step is made to create the state.
    """
    root = _job.rank() == root_rank
    tensors = []

    def take(tensor):
        # Quantities that live elsewhere are loaded to where the parameters live, so that the CPU will do.
        tensors.append(tensor.detach().to("cpu").contiguous())
        return _Slot(tensor)

    def make(slot):
        tensors.append(torch.empty(slot.shape, dtype=slot.dtype, device="cpu"))
        return tensors[-1]

    # Ranks other than the root load a state.  The step of a backward that none has ended needs the root, too.
    failure, own = getattr(optimizer, "_tally_begin_over", lambda: None)(), None
    if root:
        try:
            if failure is not None:
                raise failure
            own = getattr(optimizer, "_tally_state_for_broadcast", optimizer.state_dict)()
        except Exception as reason:
            _calls.refuse(BROADCAST, _call(None, process_set), "rank %d has no optimizer state: %s" % (root_rank, reason))
            raise
    state = broadcast_object(_replace(own, torch.Tensor, take), root_rank, process_set=process_set)
    if not root:
        state = _replace(state, _Slot, make)
    Group([broadcast(_call(None, process_set), tensor, tensor, root_rank, process_set) for tensor in tensors]).wait()
    if not root:
        optimizer.load_state_dict(state)
        if failure is not None:
            raise failure  # a parameter lacks that update

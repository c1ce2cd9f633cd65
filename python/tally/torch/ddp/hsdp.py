"""FSDP2's hybrid sharding with Tally between the replicas: torch reduces and scatters gradients inside a replica, and
Tally averages the resulting shards over the replicas.

    model = fully_shard(model, mesh=mesh["shard"])
    tally.torch.hsdp(model, mesh["replicate"])

Flow: FSDP2 has reduced a module's gradients within a replica -> its all-reduce hook -> an average over the ranks that
hold the same shard, which are a job of their own.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import itertools
import weakref

import torch.distributed as dist

from ... import _job
from ..._calls import BUCKET, Call
from .. import patches
from ..calls import reduce
from ..meeting import join
from ..horovod.functions import compare
from ..horovod.ops import Average


_numbers = weakref.WeakKeyDictionary()  # process group of the replicas -> numbers of its models, in order of hsdp()


class _Replicas:
    """Averages gradients over the replicas, in place.  If one replica leaves a module out, the others wait for it by
    its name.  Without names, all later gradients would be averaged with the wrong ones."""

    def __init__(self, group, modules):
        self._group = group
        self._modules = sorted("module %r" % name for name in modules)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._joined = 0  # generation of the communicator in which the replicas are known to be alike

    def number(self):
        """The next model's number: modules of several models have the same names."""
        return next(_numbers.setdefault(self._group, itertools.count()))

    def average(self, number, call, gradient):
        if self._joined != _job.generation() or not _job.is_initialized():
            store = patches.store_of(self._group)
            join(dist.PrefixStore("tally", store), self.ranks, dist.get_rank(self._group), patches.time_out(self._group))
            compare("what is sharded in model %d of hsdp()" % number, self._modules, name="hsdp.%d" % number)
            self._joined = _job.generation()
        reduce(call, gradient, gradient).wait()


def _group_of(replicas):
    """The given process group, or that of the mesh."""
    if getattr(replicas, "ndim", 1) != 1:
        raise ValueError("hsdp: replicas is a mesh of the dimensions %s; give the one over which a shard is the same, as "
                         "mesh[\"replicate\"]" % (replicas.mesh_dim_names or replicas.ndim,))
    group = replicas.get_group() if hasattr(replicas, "get_group") else replicas
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("hsdp: replicas must be a process group that this rank is in, or a DeviceMesh, not %r"
                         % (replicas,))
    return group


def _shard(group, name, replicas):
    """The shard that this rank holds, in words; the ranks compare it in each average.

    Raises ValueError if some replicas are ranks that hold other shards.
    """
    ranks = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
    if set(ranks) & set(replicas.ranks) != {dist.get_rank()}:
        raise ValueError("hsdp: %s is sharded over ranks %s, and replicas has ranks %s: they must have this rank, %d, in "
                         "common and no other" % ("module '%s'" % name if name else "the model", ranks,
                                                  list(replicas.ranks), dist.get_rank()))
    return "shard %d of %d" % (group.mesh_info.shard_mesh_rank, len(ranks))


def hsdp(model, replicas):
    """Average the gradients of an FSDP2 model over its replicas.

    model: a module to which fully_shard() has been applied with a mesh of one dimension, the ranks of one replica; all
        such modules in it are taken.
    replicas: the process group, or the DeviceMesh of one dimension, of the ranks that hold the same shard as this one.
        They form Tally's job, of which a process can have one.  All call hsdp() for their models in the same order.

    Raises ValueError for a model that is not sharded, for a mesh of two dimensions, over which torch has already
    reduced, and for replicas that hold other shards.  Raises NotImplementedError if this PyTorch has no FSDP2, or one
    without an all-reduce hook.
    """
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "_get_fsdp_state")}
    if not modules:
        from torch.distributed import fsdp  # dear, and here already where a model is sharded

        if not hasattr(fsdp, "fully_shard"):
            raise NotImplementedError("hsdp: this PyTorch has no FSDP2 (torch.distributed.fsdp.fully_shard)")
        raise ValueError("no module of the model is sharded; call fully_shard() on it first")
    replicas, shards = _Replicas(_group_of(replicas), modules), {}
    for name, module in modules.items():
        if not hasattr(module, "set_all_reduce_hook"):
            raise NotImplementedError("hsdp: FSDP2 of this PyTorch has no set_all_reduce_hook()")
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        groups = [group for group in groups if group is not None]
        if any(group._is_hsdp for group in groups):
            raise ValueError("hsdp: the model is sharded on a mesh of two dimensions, over which torch reduces by "
                             "itself; shard it over the ranks of one replica, mesh[\"shard\"]")
        for group in groups:  # one, or torch takes no hook
            shards[name] = _shard(group, name, replicas)
    number = replicas.number()
    for name, module in modules.items():
        call = Call("hsdp.%d.%s" % (number, name), Average, space=BUCKET, note=shards.get(name))
        module.set_all_reduce_hook(functools.partial(replicas.average, number, call))

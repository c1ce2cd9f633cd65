"""Tally for PyTorch, with Horovod's API:

    import tally.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Ranks are given by torchrun, mpirun, Slurm or `tally run`.  Works with PyTorch 2.1 and later, on CPU tensors.

SPDX-License-Identifier: Apache-2.0
"""

import torch.distributed

from .. import _core
from .._core import (Error, NotInitializedError, barrier, is_initialized, local_rank, local_size, rank, report,
                     shutdown, size)
from .compression import Compression
from .functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .hooks import ddp_hook, ddp_hook_bf16, ddp_hook_fp16, state
from .ops import (Average, Max, Min, Product, Sum, allgather, allgather_async, allreduce, allreduce_,
                  allreduce_async, allreduce_async_, broadcast, broadcast_, broadcast_async, broadcast_async_,
                  grouped_allreduce, grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_, poll,
                  push_pull, push_pull_async, push_pull_async_inplace, push_pull_inplace, synchronize)
from .optimizer import DistributedOptimizer

if torch.distributed.is_available():
    from . import group  # registers the backend
    from . import parallel
    from .hsdp import hsdp


def init(comm=None, process_sets=None, *, settings=None):
    """Join the job and wait until all ranks have; does nothing if this process has.

    comm, process_sets: there for Horovod's signature; only None (all ranks) is supported.
    settings: as in tally.init().
    """
    if comm is not None or process_sets is not None:
        raise NotImplementedError("init() joins all ranks of the job; comm and process_sets must be None")
    _core.init(settings)


def cross_size():
    """Number of machines with ranks."""
    return _core.machine_count()


def cross_rank():
    """This machine's number, from 0."""
    return _core.machine()


__all__ = ["Average", "Compression", "DistributedOptimizer", "Error", "Max", "Min", "NotInitializedError", "Product",
           "Sum", "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
           "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
           "broadcast_optimizer_state", "broadcast_parameters", "cross_rank", "cross_size", "ddp_hook", "ddp_hook_bf16",
           "ddp_hook_fp16", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
           "grouped_allreduce_async_", "init", "is_initialized", "local_rank", "local_size", "poll", "push_pull",
           "push_pull_async", "push_pull_async_inplace", "push_pull_inplace", "rank", "report", "shutdown", "size",
           "state", "synchronize"]

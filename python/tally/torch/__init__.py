"""Tally for PyTorch, with Horovod's API:

    import tally.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

torchrun, mpirun, Slurm or `tally run` start the ranks.  Works with PyTorch 2.1 and later, on CPU and CUDA tensors.

SPDX-License-Identifier: Apache-2.0
"""

import sys

import torch.distributed

from .. import _calls, _job
from .._errors import Error, NotInitializedError
from .._job import is_initialized, local_rank, local_size, rank, report, shutdown, size
from . import elastic, steps
from .async_optimizer import AsyncOptimizer
from .calls import Adasum
from .meeting import join_launched
from .pool import alloc
from .process_sets import (ProcessSet, add_process_set, global_process_set, process_set_by_id, process_sets,
                           remove_process_set)
from .crossing.deferred import find_stale_reads
from .ddp.hooks import ddp_hook, ddp_hook_bf16, ddp_hook_fp16, state
from .horovod import compression, functions, optimizer, sync_batch_norm
from .horovod.compression import Compression
from .horovod.exchange import (alltoall, alltoall_async, grouped_reducescatter, grouped_reducescatter_async, reducescatter,
                               reducescatter_async)
from .horovod.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .horovod.ops import (Average, Max, Min, Product, Sum, allgather, allgather_async, allreduce, allreduce_,
                          allreduce_async, allreduce_async_, barrier, broadcast, broadcast_, broadcast_async,
                          broadcast_async_, grouped_allgather, grouped_allgather_async, grouped_allreduce,
                          grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_, poll, push_pull,
                          push_pull_async, push_pull_async_inplace, push_pull_inplace, synchronize)
from .horovod.optimizer import DistributedOptimizer
from .horovod.sparse import sparse_allreduce_async
from .horovod.sparse_chunks import SparseChunks
from .horovod.sync_batch_norm import SyncBatchNorm
from .horovod.uneven import join

# Horovod has these modules by these names: from tally.torch.functions import broadcast_object
sys.modules.update({"%s.%s" % (__name__, one.__name__.rpartition(".")[2]): one
                    for one in (compression, functions, optimizer, sync_batch_norm)})

# Horovod's functions.
_calls.name_calls((_calls.HOROVOD, _calls.GRADIENT, _calls.STATE, _calls.BUCKET),
                 "allreduce", "broadcast", "allgather", "barrier", "reduce", "reducescatter", "alltoall", "gather", "scatter")

if torch.distributed.is_available():
    from . import parallel
    from .ddp.cross_barrier import cross_barrier
    from .ddp.hsdp import hsdp
    from .group.making import create as _create  # registers the backend


def init(comm=None, process_sets=None, *, settings=None):
    """Join the job, and wait until all ranks have joined.  Does nothing if this process has joined.

    comm: part of Horovod's signature; only None (all ranks) is supported.
    process_sets: a list of ProcessSet or of lists of ranks to add; "dynamic" and None: none.
    settings: as in tally.init().
    """
    if comm is not None:
        raise NotImplementedError("init() joins all ranks of the job; comm must be None, and process_sets takes lists of "
                                  "ranks")
    join_launched(settings)
    for one in process_sets if process_sets is not None and process_sets != "dynamic" else ():
        add_process_set(one)


def cross_size():
    """Number of machines with ranks."""
    return _job.machine_count()


def cross_rank():
    """This machine's number, from 0."""
    return _job.machine()


HorovodInternalError = Error


def start_timeline(file_path, mark_cycles=False):
    """Horovod's timeline of a running job; not implemented.  Tally's timeline is in docs/trace.md."""
    raise NotImplementedError("a timeline is that of a whole job: start it with TALLY_TRACE=NAME, and `tally trace "
                              "merge` puts its files together (docs/trace.md)")


def stop_timeline():
    """As start_timeline()."""
    start_timeline(None)


def _not_built():
    """False: Horovod's question whether it was built with a library."""
    return False


mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = nccl_built = _not_built
ddl_built = ccl_built = cuda_built = rocm_built = _not_built

__all__ = ["Adasum", "AsyncOptimizer", "Average", "Compression", "DistributedOptimizer", "Error", "HorovodInternalError", "Max", "Min",
           "NotInitializedError", "ProcessSet", "Product", "SparseChunks", "Sum", "SyncBatchNorm", "add_process_set", "alloc",
           "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
           "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async",
           "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "ccl_built",
           "cross_rank", "cross_size", "cuda_built", "ddl_built", "ddp_hook", "ddp_hook_bf16", "ddp_hook_fp16",
           "elastic", "find_stale_reads", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
           "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
           "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_initialized",
           "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
           "poll", "process_set_by_id", "process_sets", "push_pull", "push_pull_async", "push_pull_async_inplace",
           "push_pull_inplace", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "report",
           "rocm_built", "shutdown", "size", "sparse_allreduce_async", "start_timeline", "state", "stop_timeline",
           "synchronize"]

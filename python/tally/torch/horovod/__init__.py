"""Horovod's API.

    ops.py             allreduce, broadcast, allgather, barrier
    exchange.py        alltoall, reducescatter
    functions.py       objects, parameters and states; comparisons of what the ranks mean
    optimizer.py       DistributedOptimizer
    order.py           its priorities
    lazy.py            its operations: ranges of small gradients
    sparse_chunks.py   chunks of gradients, of which those with large norms are sent
    sparse_optimizer.py  the DistributedOptimizer that sends them
    cross_barrier.py   its updates behind step()
    sparse.py          sparse gradients
    uneven.py          join()
    compression.py     types in which gradients are sent
    sync_batch_norm.py SyncBatchNorm
    sampler.py         ElasticSampler

Uses crossing.

SPDX-License-Identifier: Apache-2.0
"""

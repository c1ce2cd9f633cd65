"""Trainings by DistributedOptimizer(sparse=SparseChunks(...)) for the tests of it."""

import functools

import reference
from test_ops import hvd

OPTIONS = {"share": 0.2, "warm_up": 6, "chunk": 64}


@functools.lru_cache
def data():
    from test_optimizer import digits
    return digits()


def shard(step, rank, size, count=16):
    x, y = data()
    first = (step * size + rank) * count % 1700
    return x[first:first + count], y[first:first + count]


def make(seed=0, model=None, options=OPTIONS, momentum=0.9, decay=1e-2, **more):
    """(model, DistributedOptimizer)."""
    import torch
    from test_optimizer import make_model
    t = hvd()
    model = model or make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    return model, t.DistributedOptimizer(optimizer, model.named_parameters(), **{"sparse": t.SparseChunks(**options), **more})


def wrong(one, other):
    return sum(reference.same(p.detach().numpy(), q.detach().numpy()) for p, q in zip(one.parameters(), other.parameters()))


def train_some(model, optimizer, steps, first=0):
    from test_optimizer import backward
    t = hvd()
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, *shard(step, t.rank(), t.size()))
        optimizer.step()

"""DistributedOptimizer(sparse=SparseChunks(...)) where code gives gradients other memory, and at the limits of its lists."""

import jobs
from sparse_training import make, shard, train_some, wrong
from test_ops import fails, hvd


def moved_gradients():
    """Code may give gradients other memory.  Ranks go on as without that, and gradients of another type are refused."""
    from test_optimizer import backward
    t = hvd()

    def train(*ways):
        model, optimizer = make()
        train_some(model, optimizer, 12)
        for step, way in enumerate(ways, 12):
            for p in model.parameters():
                way(p)
            optimizer.zero_grad(set_to_none=False)
            backward(model, *shard(step, t.rank(), t.size()))
            optimizer.step()
            begins, gradients = optimizer.history.chunks.layout.begins, optimizer.history.gradients
            for name, p in model.named_parameters():
                assert p.grad.data_ptr() == gradients[begins[name]:].data_ptr(), (way, name)
        return model, optimizer

    def cloned(p):
        p.grad.data = p.grad.clone()

    def turned(p):
        p.grad.data = p.grad.t().contiguous().t()

    def shared(p):
        p.grad.share_memory_()

    model, optimizer = train(cloned, turned, shared, cloned)
    other, _ = train(*[lambda p: None] * 4)
    assert wrong(model, other) == 0
    model.double()
    optimizer.zero_grad(set_to_none=False)
    x, y = shard(99, t.rank(), t.size())
    fails(TypeError, lambda: backward(model, x.double(), y), "float64", "float32", "once more")
    fails(TypeError, optimizer.step, "float64")


def test_gradients_in_other_memory(four):
    four(moved_gradients)


def turned_parameter():
    """One rank's parameter is not contiguous any more: all ranks hear of it."""
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make()
    train_some(model, optimizer, 12)
    optimizer.zero_grad()
    if t.rank() == 2:
        model[2].weight.data = model[2].weight.t().contiguous().t()
        fails(TypeError, lambda: backward(model, *shard(99, t.rank(), t.size())), "2.weight", "contiguous")
    else:
        backward(model, *shard(99, t.rank(), t.size()))
    fails(TypeError if t.rank() == 2 else RuntimeError, optimizer.step, "2.weight", "contiguous")
    if t.rank() == 2:
        model[2].weight.data = model[2].weight.contiguous()
    t.broadcast_parameters(model.state_dict(), 0)
    train_some(model, optimizer, 3)


def test_parameter_that_is_not_contiguous_any_more(four):
    four(turned_parameter)


def fewest_chunks():
    """Behind the warm-up each list of a step has a chunk."""
    import torch
    from tally.torch.horovod import sparse_optimizer
    saved, sparse_optimizer.LIST_BYTES = sparse_optimizer.LIST_BYTES, 64
    try:
        layer = torch.nn.Linear(16, 15, bias=False)
        _, optimizer = make(model=layer, options={"share": 0.1, "warm_up": 5, "chunk": 16})
        for _ in range(12):
            optimizer.zero_grad()
            layer(torch.ones(1, 16)).square().sum().backward()
            optimizer.step()
        assert optimizer._tally_layout.ranges and optimizer.history.chunks.count == 15
        return int(optimizer.history.chunks.sent.sum())
    finally:
        sparse_optimizer.LIST_BYTES = saved


def test_fewest_chunks(two):
    assert two(fewest_chunks) == [2] * 2


def alone():
    """A rank that resumes alone sends to itself what it had not sent."""
    import torch
    model, optimizer = make(decay=0.0, momentum=0.0)
    state = optimizer.state_dict()
    state["sparse_chunks"]["history"] = torch.ones(optimizer.history.chunks.layout.length)
    optimizer.load_state_dict(state)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.step()
    for p, old in zip(model.parameters(), before):
        assert torch.equal(p, old - 0.1)


def test_one_rank_resumes():
    job = jobs.Ranks(1, 1)
    try:
        job(alone)
    finally:
        job.close()

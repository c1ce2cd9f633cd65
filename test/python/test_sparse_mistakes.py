"""DistributedOptimizer(sparse=SparseChunks(...)): options and gradients that it refuses, and odd ones that it takes."""

import copy

from sparse_training import make, shard, train_some, wrong
from test_ops import fails, hvd


def refused():
    import torch
    from test_optimizer import make_model
    t = hvd()
    sparse = t.SparseChunks(0.5, 0, 64)

    def wrap(optimizer, **more):
        return lambda: t.DistributedOptimizer(optimizer, sparse=sparse, **more)

    def sgd(model=None, **more):
        return torch.optim.SGD((model or make_model()).parameters(), lr=0.1, **more)

    fails(TypeError, wrap(torch.optim.Adam(make_model().parameters())), "torch.optim.SGD", "Adam")
    fails(ValueError, wrap(sgd(momentum=0.9, dampening=0.1)), "dampening=0.1")
    fails(ValueError, wrap(sgd(), cross_barrier=True), "cross_barrier=")
    fails(ValueError, wrap(sgd(), compression=t.Compression.bf16), "compression=")
    fails(ValueError, wrap(sgd(), groups=2), "groups=")
    fails(ValueError, wrap(sgd(), op=t.Max), "op=", "Average")
    fails(ValueError, wrap(sgd(), lazy=4096), "lazy=")
    fails(TypeError, lambda: t.DistributedOptimizer(sgd(), sparse=0.15), "SparseChunks", "0.15")
    fails(TypeError, wrap(sgd(make_model().double())), "float32", "float64")
    fails(TypeError, wrap(sgd(make_model().bfloat16())), "float32", "bfloat16")
    convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    fails(TypeError, wrap(sgd(convolution)), "contiguous")
    part = t.add_process_set([0, 1])
    fails(ValueError, wrap(sgd(), process_set=part), "process_set=")
    t.remove_process_set(part)
    # Unlike options: every rank names them.
    options = {"share": 0.5, "chunk": 64} if t.rank() != 2 else {"share": 0.25, "chunk": 64}
    fails(RuntimeError, lambda: make(options=options), "share=0.5", "share=0.25", "rank 2")
    model, optimizer = make()
    more = {"params": torch.nn.Linear(2, 2).parameters(), "dampening": 0.5}
    fails(ValueError, lambda: optimizer.add_param_group(more), "dampening=0.5")
    state = optimizer.state_dict()
    state["param_groups"][0]["dampening"] = 0.5
    fails(ValueError, lambda: optimizer.load_state_dict(state), "dampening=0.5")
    assert optimizer.param_groups[0]["dampening"] == 0
    x, y = shard(0, t.rank(), t.size())
    torch.nn.functional.cross_entropy(model(x), y).backward()
    fails(AssertionError, lambda: optimizer.add_param_group({"params": torch.nn.Linear(2, 2).parameters()}), "on their way")
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def test_refused(four):
    four(refused)


def behind_a_failure(optimizer, model, backward):
    """H behind a step with these gradients whose lists fail: with gradients where nothing is sent, elsewhere as before."""
    history, layout = optimizer.history, optimizer.history.chunks.layout
    kept = history.history.clone()
    model.zero_grad()
    backward(model)
    for name, p in model.named_parameters():
        kept[layout.begins[name]:][:p.numel()] += p.grad.view(-1)
    for begin, end, chosen in history.chunks.runs(history.chunks.chosen):
        if chosen:
            kept[begin:end] = history.history[begin:end]
    return kept


def bad_gradients():
    """One rank's parameter is frozen, or has another shape: all ranks are told, and the next step sends everything."""
    import torch
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make()
    train_some(model, optimizer, 12)
    assert optimizer._tally_layout.ranges

    def step():
        optimizer.zero_grad()
        backward(model, *shard(99, t.rank(), t.size()))
        optimizer.step()

    if t.rank() == 1:
        model[2].bias.requires_grad_(False)
    fails(RuntimeError, step, "2.bias" if t.rank() == 1 else "rank 1", "frozen")
    model[2].bias.requires_grad_(True)
    assert optimizer.history.chunks.chosen.all()
    t.broadcast_parameters(model.state_dict(), 0)
    train_some(model, optimizer, 3)
    assert not optimizer.history.chunks.chosen.all()

    # On all ranks: it keeps its gradient and its values, and the others train on.
    model[2].weight.requires_grad_(False)
    old = model[2].weight.grad.clone()
    backward(model, *shard(99, t.rank(), t.size()))
    optimizer.synchronize()
    assert torch.equal(model[2].weight.grad, old)
    model[2].weight.requires_grad_(False)
    optimizer.zero_grad()
    before = model[2].weight.clone()
    train_some(model, optimizer, 4)
    assert torch.equal(before, model[2].weight)
    model[2].weight.requires_grad_(True)
    train_some(model, optimizer, 4)
    assert not torch.equal(before, model[2].weight)

    # Written to while it is on its way.
    optimizer.zero_grad()
    backward(model, *shard(99, t.rank(), t.size()))
    model[0].weight.grad.mul_(2)
    fails(RuntimeError, optimizer.step, "0.weight", "changed")
    t.broadcast_parameters(model.state_dict(), 0)
    t.broadcast_optimizer_state(optimizer, 0)

    # Unlike choices, as of ranks that have loaded unlike states.
    train_some(model, optimizer, 3)
    if t.rank() == 2:
        optimizer.history.chunks.choose_all()
    kept = behind_a_failure(optimizer, copy.deepcopy(model), lambda one: backward(one, *shard(99, t.rank(), t.size())))
    fails(RuntimeError, step, "the chunks of gradients", "the ranks disagree", "rank 2")
    assert optimizer.history.kept and torch.equal(optimizer.history.history, kept)
    assert optimizer.history.chunks.sent.all() == (t.rank() == 2)
    t.broadcast_parameters(model.state_dict(), 0)
    train_some(model, optimizer, 3)

    # Parameters that are added go along once the ranks have laid out gradients anew.
    model.append(torch.nn.Linear(10, 10))
    optimizer.add_param_group({"params": model[-1].parameters()})
    t.broadcast_parameters(model.state_dict(), 0)
    assert not optimizer._tally_layout.ranges
    train_some(model, optimizer, 8)
    assert optimizer._tally_layout.ranges and not optimizer.history.chunks.chosen.all()
    assert {"group.1.0", "group.1.1"} < set(optimizer.history.chunks.layout.names)

    # Another shape.
    optimizer.zero_grad()
    if t.rank() == 2:
        model[4].bias.data = torch.zeros(1)
        fails(TypeError, lambda: backward(model, *shard(99, t.rank(), t.size())), "4.bias", "float32 [1]", "[10]", "once more")
        fails(TypeError, optimizer.step, "4.bias")
    else:
        fails(RuntimeError, step, "rank 2", "4.bias")


def test_bad_gradients(four):
    four(bad_gradients)


def half_passes():
    """A step may have fewer passes than backward_passes_per_step; code that changes a gradient meanwhile is found out."""
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make(backward_passes_per_step=2)
    train_some(model, optimizer, 12)
    assert optimizer._tally_layout.ranges and not optimizer.history.chunks.sent.all()
    backward(model, *shard(99, t.rank(), t.size()))
    model[0].weight.grad.mul_(2)
    fails(RuntimeError, optimizer.step, "0.weight", "changed")


def test_fewer_passes(two):
    two(half_passes)


def long_chunk():
    """A chunk longer than the model is the model."""
    model, optimizer = make(options={"share": 0.1, "warm_up": 0})
    train_some(model, optimizer, 8)
    assert optimizer._tally_layout.ranges and optimizer.history.chunks.count == 1 and optimizer.history.chunks.sent.all()
    other, dense = make(sparse=None)
    train_some(other, dense, 8)
    return wrong(model, other)


def test_chunk_longer_than_the_model(four):
    assert four(long_chunk) == [0] * 4


def embedding():
    import torch
    t = hvd()
    for as_dense in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 4))
        _, optimizer = make(model=model, sparse_as_dense=as_dense)

        def step():
            optimizer.zero_grad()
            model(torch.tensor([t.rank(), 7])).sum().backward()
            optimizer.step()

        if not as_dense:
            fails(TypeError, step, "0.weight", "sparse_as_dense=True")
            continue
        for _ in range(8):
            step()
        assert optimizer._tally_layout.ranges and model[0].weight.grad.layout is torch.strided


def test_sparse_embedding(four):
    four(embedding)

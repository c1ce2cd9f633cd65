"""Memory that the ranks of a machine share, and gradients in it."""

import weakref

import numpy as np
import pytest

import reference
from test_ops import hvd
from test_optimizer import backward, digits, make_model, train, values


def shared():
    """(begin, end) of this process's pool, or None."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        lines = [line.split() for line in maps if "memfd:tally" in line]
    return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]


def is_shared(tensor):
    at = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
    return any(begin <= at < end for begin, end in shared())


def alloc():
    import tally
    import torch
    t = hvd()
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = t.alloc(3, 5, dtype=dtype)
        results.append((is_shared(x), x.dtype == dtype, tuple(x.shape), bool((x == 0).all())))
        x += t.rank() + 1
        t.allreduce_(x, op=t.Sum, name="x")
        results.append(bool((x == t.size() * (t.size() + 1) // 2).all()))
    kept = t.alloc(1 << 20)[17:1000]  # a view keeps the memory
    kept[:] = t.rank()
    t.allreduce_(kept, op=t.Sum, name="kept")
    results.append(bool((kept == sum(range(t.size()))).all()))
    a = tally.alloc((4, 2), "float64")
    results.append((is_shared(a), a.dtype == np.float64, a.shape, not a.any()))
    a[:] = t.rank()
    tally.push_pull(a, name="a", op=tally.Sum)
    results.append(bool((a == sum(range(t.size()))).all()))
    results += [t.alloc(0).numel() == 0, t.alloc([2, 0, 3]).shape == (2, 0, 3), tally.alloc(0).shape == (0,),
                t.alloc().dim() == 0]
    with pytest.raises(MemoryError, match="memory"):
        t.alloc(1 << 60)
    return results


def test_alloc(machine, four):
    for results in machine(alloc):
        assert all(one is True or one[0] and one[1] and one[-1] for one in results), results
    for results in four(alloc):  # ranks of several machines: the same, in ordinary memory
        assert all(one is True or not one[0] and one[1] and one[-1] for one in results), results


def is_given_back():
    import os
    t = hvd()

    def used():
        with open("/proc/self/smaps", encoding="ascii") as maps:
            lines = maps.read().splitlines()
        at = [i for i, line in enumerate(lines) if "memfd:tally" in line]
        return sum(int(line.split()[1]) for i in at for line in lines[i:i + 12] if line.startswith("Rss:")) >> 10

    t.alloc(1)
    x = t.alloc(32 << 20, dtype=__import__("torch").uint8)
    x += 1
    view, before = x.view(-1, 1024)[5:], used()
    del x
    kept = used()
    assert int(view.sum()) == view.numel()
    pid = os.fork()
    if pid == 0:  # what a child lets go of is not the parent's
        try:
            del view
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert int(view.sum()) == view.numel()
    del view
    return before, kept, used()


def test_memory_is_given_back(machine):
    for before, kept, after in machine(is_given_back):
        assert before >= 32 and kept >= 32 and after <= before - 32


@pytest.mark.parametrize("kind, options", [("sgd", {}), ("adam", {}), ("sgd", {"passes": 3}), ("sgd", {"groups": 2}),
                                           ("sgd", {"compression": "fp16"}), ("sgd", {"op": "Sum"})])
def test_same_parameters_as_one_process(machine, kind, options):
    for ours, single, _ in machine(train, kind, options):
        assert all(reference.same(a, b) == 0 for a, b in zip(ours, single))


def steps(set_to_none):
    """Three steps; where the gradients were after each, whether they were equal to the averages, the parameters."""
    import torch
    t = hvd()
    model = make_model()
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    x, y = digits()
    places, kept, seen = [], None, []
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        begin = (step * t.size() + t.rank()) * 16
        backward(model, x[begin:begin + 16], y[begin:begin + 16])
        if kept is not None:
            seen.append(all(torch.equal(a, b) for a, b in kept))
        optimizer.step()
        places.append([(is_shared(p.grad), p.grad.data_ptr()) for p in model.parameters()])
        if set_to_none:  # a gradient that somebody keeps stays what it is
            kept = [(p.grad, p.grad.clone()) for p in list(model.parameters())[:2]]
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    return places, seen, values(model)


@pytest.mark.parametrize("set_to_none", (True, False))
def test_gradients_lie_in_the_pool(machine, four, set_to_none):
    results = machine(steps, set_to_none)
    for places, seen, model in results:
        assert all(in_pool for step in places for in_pool, _ in step)
        assert places[0][2:] == places[1][2:] == places[2][2:]
        assert (places[0][0] != places[1][0]) == set_to_none  # kept
        assert all(seen)
        assert all(reference.same(a, b) == 0 for a, b in zip(model, results[0][2]))
    # The same training over several machines, where there is no pool, has its own number of ranks: only the places.
    for places, seen, _ in four(steps, set_to_none):
        assert not any(in_pool for step in places for in_pool, _ in step) and all(seen)


def odd_gradients():
    """Gradients that cannot lie in the pool, beside one that can."""
    import torch
    t = hvd()
    table = torch.nn.Embedding(10, 4, sparse=True)
    image = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    plain = torch.nn.Linear(4, 4)
    parameters = [("table", table.weight), ("image", image.weight), ("plain", plain.weight)]
    optimizer = t.DistributedOptimizer(torch.optim.SGD([p for _, p in parameters], lr=1.0), parameters)
    for _, p in parameters:
        torch.nn.init.ones_(p)
    for _ in range(2):
        optimizer.zero_grad()
        (table(torch.tensor([t.rank()])).sum() * (t.rank() + 1) + plain(torch.ones(4)).sum() * (t.rank() + 1)
         + image(torch.ones(1, 3, 3, 3).contiguous(memory_format=torch.channels_last)).sum() * (t.rank() + 1)).backward()
        optimizer.step()
    mean = (t.size() + 1) / 2
    right = [torch.allclose(table.weight[r], torch.full((4,), 1 - 2 * (r + 1) / t.size())) for r in range(t.size())]
    right += [bool((p == 1 - 2 * mean).all()) for p in (image.weight, plain.weight)]
    return right, is_shared(plain.weight.grad), table.weight.grad.is_sparse, is_shared(image.weight.grad)


def test_gradients_that_cannot(machine):
    for right, plain, sparse, image in machine(odd_gradients):
        assert all(right) and plain and sparse and not image


def no_place(how):
    """Whether the gradients are right, and which are in the pool: where a parameter has become smaller, or where an earlier
    gradient is kept and there is no memory for another place."""
    import torch
    from tally import _memory
    t = hvd()
    plain = torch.nn.Linear(4, 4)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.0), plain.named_parameters())

    def step():
        rows = plain.weight.shape[0]
        ((plain.weight @ torch.ones(4)).sum() + plain.bias[:rows].sum()).mul(t.rank() + 1).backward()
        optimizer.step()

    step()
    kept = plain.weight.grad
    optimizer.zero_grad(set_to_none=True)
    if how == "memory":
        def refuse(_):
            raise MemoryError("no memory")
        with pytest.MonkeyPatch.context() as patch:
            if t.rank() == 0:
                patch.setattr(_memory, "alloc", refuse)
            step()
    else:
        del kept
        plain.weight.data = plain.weight.data[:how].clone()
        step()
    right = bool((plain.weight.grad == (t.size() + 1) / 2).all()) and plain.weight.grad.shape == plain.weight.shape
    return right, is_shared(plain.weight.grad), is_shared(plain.bias.grad)


@pytest.mark.parametrize("how", (1, 2, "memory"))
def test_no_place_for_a_gradient(machine, how):
    for rank, (right, weight, bias) in enumerate(machine(no_place, how)):
        assert right and bias
        assert weight == (how == "memory" and rank > 0)


def sizes():
    import torch
    t = hvd()
    shapes = [t.alloc(size).shape for size in (np.int64(5), torch.Size([2, 3]), (1, np.int64(2)))]
    with pytest.raises(RuntimeError, match="negative"):
        t.alloc(-1)
    return shapes


def test_sizes_as_torch_has_them(machine):
    for shapes in machine(sizes):
        assert shapes == [(5,), (2, 3), (1, 2)]


def in_use(options):
    """Bytes of gradients' places in use behind the first step and the last one, where ranks lay out gradients between."""
    import torch
    from tally import _memory
    t, real, arrays = hvd(), _memory.alloc, []

    def alloc(length):
        array = real(length)
        arrays.append((length, weakref.ref(array)))
        return array

    _memory.alloc = alloc
    try:
        torch.manual_seed(0)
        model, found = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), []
        options = {"sparse": t.SparseChunks(0.5, 0, 1024)} if options == "sparse" else options
        optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            found.append(sum(length for length, one in arrays if one() is not None))
        assert optimizer._tally_layout.ranges
        return found[0], found[-1]
    finally:
        _memory.alloc = real


@pytest.mark.parametrize("options, places", (("sparse", 0), ({"lazy": 1 << 20}, 1)), ids=str)
def test_places_that_no_gradient_has_any_more(machine, options, places):
    """Once all gradients lie in ranges, which have places of their own, the first ones are free."""
    gradients = 4 * 4 * (64 * 64 + 64)
    assert machine(in_use, options) == [(gradients, places * gradients)] * 3

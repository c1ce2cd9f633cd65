"""DistributedOptimizer and the state that goes with it."""

import copy
import warnings

import numpy as np
import pytest

import jobs
import reference
from test_ops import fails, hvd


def make_model(seed=0):
    import torch
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16), torch.nn.ReLU(),
                               torch.nn.Linear(16, 10))


def digits():
    """scikit-learn's handwritten digits: (1797, 64) in 0..1 and labels."""
    import torch
    from sklearn.datasets import load_digits
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def values(model):
    return [p.detach().numpy().copy() for p in model.parameters()]


def backward(model, x, y):
    import torch
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


MAKERS = {
    "sgd": lambda p: __import__("torch").optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: __import__("torch").optim.Adam(p, lr=0.01),
    "adamw": lambda p: __import__("torch").optim.AdamW(p, lr=0.01, amsgrad=True),
}


def train(kind, options):
    """Train on this rank's shard of each batch; compare with one process that averages the shards' gradients by
    the reference, to the last bit.  options: compression, passes, groups, predivide, op."""
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    passes = options.get("passes", 1)
    op = options.get("op", "Average")
    compression = getattr(t.Compression, options.get("compression", "none"))
    x, y = digits()

    model = make_model(seed=r)
    optimizer = MAKERS[kind](model.parameters())
    optimizer = t.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters() if options.get("named", True) else None,
        compression=compression, backward_passes_per_step=passes, op=getattr(t, op), groups=options.get("groups"))
    t.broadcast_parameters(model.state_dict(), root_rank=0)
    t.broadcast_optimizer_state(optimizer, root_rank=0)
    single = make_model(seed=0)
    plain = MAKERS[kind](single.parameters())

    per_rank = 16
    for step in range(12):
        def shard(rank, part):
            first = ((step * passes + part) * n + rank) * per_rank % 1700
            return x[first:first + per_rank], y[first:first + per_rank]

        optimizer.zero_grad()
        for part in range(passes):
            backward(model, *shard(r, part))
        optimizer.step()

        shards = []
        for rank in range(n):
            plain.zero_grad()
            for part in range(passes):
                backward(single, *shard(rank, part))
            shards.append([compression.compress(p.grad.clone())[0] for p in single.parameters()])
        for i, p in enumerate(single.parameters()):
            ours = [grads[i] for grads in shards]
            if ours[0].dtype == torch.bfloat16:
                ours = [g.view(torch.int16).numpy().view(np.uint16) for g in ours]
                mean = torch.from_numpy(reference.widen(reference.reduce("bfloat16", op, ours)))
            else:
                ours = [g.numpy() for g in ours]
                mean = torch.from_numpy(reference.reduce(str(ours[0].dtype), op, ours)).float()
            p.grad.copy_(mean)
        plain.step()
    return values(model), values(single), len(optimizer.state)


CASES = [
    ("sgd", {}),
    ("adam", {}),
    ("adamw", {"named": False}),
    ("sgd", {"passes": 3}),
    ("sgd", {"compression": "fp16"}),
    ("sgd", {"compression": "bf16"}),
    ("sgd", {"groups": 2}),
    ("sgd", {"op": "Sum"}),
]


@pytest.mark.parametrize("kind, options", CASES, ids=["-".join([kind, *map(str, sum(options.items(), ()))])
                                                      for kind, options in CASES])
def test_same_parameters_as_one_process(four, kind, options):
    results = four(train, kind, options)
    for own, single, states in results:
        assert states == 6
        for a, b, first in zip(own, single, results[0][0]):
            assert reference.same(a, first) == 0, "ranks differ"
            assert reference.same(a, b) == 0, "differs from the single process"


def test_tree_that_is_not_full(three):
    for own, single, _ in three(train, "sgd", {}):
        assert all(reference.same(a, b) == 0 for a, b in zip(own, single))


def overlap():
    """When backward reaches the input's layer, the output's gradients are on their way, with lower priority."""
    t = hvd()
    model = make_model()
    optimizer = t.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(
        [slot.name for slot, handle in optimizer._tally_handles.items() if handle is not None]))
    x, y = digits()
    backward(model, x[:8], y[:8])
    assert {"4.weight", "4.bias", "2.weight", "2.bias"} <= set(seen[0]), seen
    assert len(optimizer._tally_handles) == 6, "all are under way after backward"
    fails(AssertionError, optimizer.zero_grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    order = [slot.priority for slot in optimizer._tally_slots]
    assert order == sorted(order, reverse=True) and len(set(order)) == 6


def test_overlaps_backward(four):
    four(overlap)


def manners():
    import torch
    t = hvd()
    n = t.size()
    model = make_model()
    kind = torch.optim.SGD
    plain = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = t.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, kind) and type(optimizer).__name__ == "SGD"
    x, y = digits()
    x, y = x[t.rank() * 8:][:8], y[t.rank() * 8:][:8]

    backward(model, x, y)
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    assert t.allreduce(norm, op=t.Max) == t.allreduce(norm, op=t.Min), "the gradients were reduced before"

    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("optimizer.step() called without optimizer.skip_synchronize()" in str(w.message) for w in caught)

    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05, "a scheduler made before still rules"
    later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.step()
    later.step()
    assert abs(optimizer.param_groups[0]["lr"] - 0.005) < 1e-9

    # More passes than agreed.
    optimizer.zero_grad()
    backward(model, x, y)
    fails(AssertionError, lambda: backward(model, x, y), "backward_passes_per_step")
    fails(RuntimeError, optimizer.step, "changed")
    t.broadcast_parameters(model.state_dict(), 0)  # what was added to gradients on their way is anybody's guess
    t.broadcast_optimizer_state(optimizer, 0)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    backward(model, x, y)
    assert all(handle is None for handle in optimizer._tally_handles.values())
    backward(model, x, y)
    optimizer.step()
    # A step before the passes are complete reduces what is there.
    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad()
    return values(model), n


def test_manners_of_horovods(four):
    results = four(manners)
    assert all(reference.same(a, b) == 0 for own, _ in results for a, b in zip(own, results[0][0]))


def unused():
    """Ranks reach different parameters; a gradient that never came counts as zeros."""
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    model = torch.nn.ModuleList([torch.nn.Linear(4, 1, bias=False) for _ in range(n + 1)])
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    named = list(model.named_parameters()) + [("frozen", frozen)]
    optimizer = t.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named, op=t.Sum)
    t.broadcast_parameters(dict(named), 0)
    before = [layer.weight.detach().clone() for layer in model]
    model[r](torch.full((1, 4), float(r + 1))).sum().backward()
    optimizer.step()
    for i in range(n):
        assert torch.equal(model[i].weight, before[i] - (i + 1)), i
    assert torch.equal(model[n].weight, before[n]) and frozen.eq(1).all() and frozen.grad is None


def test_unused_and_frozen_parameters(four):
    four(unused)


def sparse(as_dense):
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = t.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), embedding.named_parameters(),
                                       sparse_as_dense=as_dense, op=t.Sum)
    embedding(torch.tensor([r, r, 9])).sum().backward()
    optimizer.step()
    want = before.clone()
    for i in range(n):
        want[i] -= 2
    want[9] -= n
    assert torch.equal(embedding.weight, want)


@pytest.mark.parametrize("as_dense", (False, True))
def test_sparse_gradients(four, as_dense):
    four(sparse, as_dense)


def wrong_arguments():
    import torch
    t = hvd()
    model = make_model()
    named = list(model.named_parameters())

    def make(*args, **kw):
        return t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), *args, **kw)

    fails(ValueError, lambda: make([p for _, p in named]), "named_parameters")
    fails(ValueError, lambda: make([("same", p) for _, p in named]), "same")
    fails(ValueError, lambda: make(named[1:]), "group.0.0")
    fails(ValueError, lambda: make(named, backward_passes_per_step=0))
    fails(ValueError, lambda: make(named, op=t.Sum, gradient_predivide_factor=2.0))
    fails(ValueError, lambda: make(named, groups=-1))
    fails(ValueError, lambda: make(named, op="mean"))
    optimizer = make(named)
    fails(ValueError, lambda: t.DistributedOptimizer(optimizer), "already")  # noqa: F821 - deleted below
    fails(ValueError, lambda: make(named), "0.weight")
    del optimizer
    make(named)


def test_wrong_arguments(four):
    four(wrong_arguments)


def models_differ(what):
    import torch
    t = hvd()
    odd = t.rank() == 1
    model = torch.nn.Sequential(torch.nn.Linear(8, 4 if what == "shape" and odd else 3), torch.nn.Linear(3, 1))
    named = [(name + "x" if what == "name" and odd else name, p) for name, p in model.named_parameters()]
    if what == "count" and odd:
        named = named[:2]
    sentence = fails(RuntimeError, lambda: t.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=0.1), named), "1")
    assert t.allreduce(torch.ones(2), op=t.Sum).eq(t.size()).all()
    return sentence


@pytest.mark.parametrize("what", ("shape", "name", "count"))
def test_models_that_differ(four, what):
    assert len(set(four(models_differ, what))) == 1


def options_differ(what, in_set):
    """Told when the optimizer is made, on the ranks that it is over; the others are left alone."""
    import torch
    t = hvd()
    odd = t.rank() == 1
    some = t.add_process_set([0, 1, 3]) if in_set else t.global_process_set
    if not some.included():
        return None
    model = torch.nn.Embedding(4, 2, sparse=True)
    options = {"op": {"op": t.Sum}, "compression": {"compression": t.Compression.fp16},
               "backward_passes_per_step": {"backward_passes_per_step": 2},
               "sparse_as_dense": {"sparse_as_dense": True}}.get(what, {})
    sentence = fails(t.Error, lambda: t.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), [("odd" if what == "odd" and odd else "w", model.weight)],
        process_set=some, **(options if odd else {})), what, "on rank 1", "on ranks 0, %s3" % ("" if in_set else "2-"))
    assert t.allreduce(torch.ones(2), op=t.Sum, process_set=some).eq(some.size()).all()
    return sentence


@pytest.mark.parametrize("what, in_set", (("op", False), ("compression", False), ("backward_passes_per_step", False),
                                          ("sparse_as_dense", False), ("sparse_as_dense", True), ("odd", True)))
def test_options_that_differ(four, what, in_set):
    assert len(set(four(options_differ, what, in_set)) - {None}) == 1


def names_differ():
    import torch
    t = hvd()
    model = make_model().state_dict()
    if t.rank() == 2:
        model["more"] = model.pop("0.bias")
    sentence = fails(t.Error, lambda: t.broadcast_parameters(model, 0), "'0.bias' on ranks 0-1, 3", "on rank 2")
    odd = t.rank() == 1
    fails(t.Error, lambda: t.broadcast_parameters([torch.ones(2)] * (2 if odd else 1), 0),
          "the parameters to broadcast: the ranks disagree: nothing on ranks 0, 2-3")
    fails(TypeError if odd else t.Error, lambda: t.broadcast_parameters({"a": 1 if odd else torch.ones(1)}, 0),
          "parameter a is no tensor")
    t.broadcast_parameters(make_model(t.rank()).state_dict(), 0)
    return sentence


def test_parameters_whose_names_differ(four):
    assert len(set(four(names_differ))) == 1


def bad_gradient():
    """One rank's gradient has another dtype than the others': step() says so on all ranks, and the next works."""
    import torch
    t = hvd()
    model = torch.nn.Linear(4, 2)
    t.broadcast_parameters(model.state_dict(), 0)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    if t.rank() == 2:
        model.weight.grad = None
        model.double()
    model(torch.ones(1, 4, dtype=model.weight.dtype)).sum().backward()
    fails(RuntimeError, optimizer.step, "float64")
    if t.rank() == 2:
        model.float()
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return values(model)


def test_a_gradient_that_differs(four):
    results = four(bad_gradient)
    assert all(reference.same(a, b) == 0 for own in results for a, b in zip(own, results[0]))


def two_optimizers():
    """Two models with the same names, both in flight at once."""
    import torch
    t = hvd()
    models = [torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(3, 1, bias=False)]
    optimizers = [t.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), m.named_parameters(), op=t.Sum)
                  for m in models]
    for m in models:
        t.broadcast_parameters(m.state_dict(), 0)
    before = [m.weight.detach().clone() for m in models]
    for i, m in enumerate(models):
        m(torch.full((1, 3), float(i + 1))).sum().backward()
    for optimizer in reversed(optimizers):
        optimizer.step()
    for i, m in enumerate(models):
        assert torch.equal(m.weight, before[i] - (i + 1) * t.size())


def half_sparse():
    """The first gradient of an embedding is there on rank 0 alone: the others are told, and it, when they have left."""
    import tally
    import torch
    t = hvd()
    model = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    if t.rank() == 0:
        model(torch.tensor([1])).sum().backward()
    fails(tally.Error, optimizer.step, *(["left"] if t.rank() == 0 else ["rank 0 refuses", "sparse_as_dense=True"]))
    t.shutdown()


def test_a_gradient_sparse_on_one_rank_only():
    job = jobs.Ranks(3, 1)
    try:
        job(half_sparse, timeout=100)
    finally:
        job.close()


def frozen_sparse():
    """An embedding that has had sparse gradients is frozen on one rank: all are told, it by its own name."""
    import tally
    import torch
    t = hvd()
    model = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(2):
        if step and t.rank() == 1:
            model.weight.requires_grad_(False)
        else:
            model(torch.tensor([t.rank()])).sum().backward()
        if step:
            fails(tally.Error, optimizer.step, "'weight': the ranks disagree: frozen (requires_grad is False) on rank 1")
        else:
            optimizer.step()
        optimizer.zero_grad()


def test_a_sparse_gradient_frozen_on_one_rank(three):
    three(frozen_sparse)


def closures():
    """The gradients that a closure computes are those that the step takes."""
    import torch
    t = hvd()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, bias=False)
    want = model.weight.detach().clone()
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    for step in range(3):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.full((1, 3), float(step + t.rank()))).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        want -= 0.5 * (step + (t.size() - 1) / 2)
        assert torch.allclose(model.weight, want)


def test_closures(four):
    four(closures)


def thawed():
    import torch
    t = hvd()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    fails(ValueError, optimizer.step, "0.weight, 0.bias", "once more")


def test_a_parameter_that_was_frozen(four):
    four(thawed)


def one_freezes():
    import torch
    t = hvd()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    t.broadcast_parameters(model.state_dict(), 0)

    def step():
        optimizer.zero_grad()
        model(torch.full((1, 2), t.rank() + 1.0)).sum().backward()
        optimizer.step()

    step()
    model[0].weight.requires_grad_(t.rank() != 1)
    fails(t.Error, step, "'0.weight': the ranks disagree: frozen (requires_grad is False) on rank 1")
    model[0].requires_grad_(False)
    step()
    model[0].requires_grad_(True)
    step()
    return [p.tolist() for p in model.parameters()]


def test_a_parameter_that_one_rank_freezes(four):
    """All are told at once, and go on once they freeze alike."""
    results = four(one_freezes)
    assert results == results[:1] * 4


def test_two_optimizers(four):
    four(two_optimizers)


def more_parameters():
    import torch
    t = hvd()
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    optimizer = t.DistributedOptimizer(torch.optim.SGD([a], lr=1.0), [("a", a)], op=t.Sum)
    optimizer.add_param_group({"params": [b], "lr": 2.0})
    (a.sum() + b.sum()).backward()
    optimizer.step()
    assert a.tolist() == [-t.size()] * 2 and b.tolist() == [-2 * t.size()] * 3


def test_add_param_group(four):
    four(more_parameters)


def optimizer_state(kind):
    """Rank 1 has trained and the others are fresh; afterwards all are as rank 1."""
    import torch
    t = hvd()
    make = {"lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=2),
            "plain": lambda p: torch.optim.SGD(p, lr=0.3)}.get(kind) or MAKERS[kind]
    model = make_model(seed=t.rank())
    optimizer = make(model.parameters())
    x, y = digits()
    if t.rank() == 1:
        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[:32]), y[:32])
            loss.backward()
            return loss
        optimizer.param_groups[0]["lr"] = 0.123
        for _ in range(3):
            optimizer.step(closure)
        optimizer.zero_grad()
    if kind == "sgd":
        optimizer = t.DistributedOptimizer(optimizer, model.named_parameters())
    before = values(model)
    t.broadcast_parameters(model.state_dict(), 1)
    t.broadcast_optimizer_state(optimizer, root_rank=1)
    if t.rank() == 1:
        assert all(reference.same(a, b) == 0 for a, b in zip(before, values(model))), "the root steps nowhere"
    assert optimizer.param_groups[0]["lr"] == 0.123
    if kind == "lbfgs":
        return repr(optimizer.state_dict()["state"][0]["n_iter"]), []
    flat = [(key, name, value.numpy() if torch.is_tensor(value) else value)
            for key, entry in optimizer.state_dict()["state"].items() for name, value in entry.items()]
    if kind != "plain":
        assert len(optimizer.state) == 6
    # And they go on alike.
    optimizer.zero_grad()
    backward(model, x[:16], y[:16])
    optimizer.step()
    # A quantity that is not there yet is None in an older PyTorch, or not there at all.
    return [(key, name, np.asarray(value)) for key, name, value in flat if value is not None], values(model)


@pytest.mark.parametrize("kind", ("sgd", "adam", "adamw", "plain", "lbfgs"))
def test_broadcast_optimizer_state(four, kind):
    results = four(optimizer_state, kind)
    for state, model in results:
        for a, b in zip(state, results[0][0]):
            assert a[:2] == b[:2] and (isinstance(a, str) or reference.same(a[2], b[2]) == 0)
        assert all(reference.same(a, b) == 0 for a, b in zip(model, results[0][1]))


def schedules(way):
    """A scheduler made before the DistributedOptimizer rules after its state has been loaded, too."""
    import torch
    t = hvd()
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = t.DistributedOptimizer(plain, model.named_parameters())
    x, y = digits()

    def step():
        optimizer.zero_grad()
        backward(model, x[:8], y[:8])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step()

    step()
    held, groups = optimizer.state, optimizer.param_groups
    if way == "load":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif way == "broadcast":
        optimizer.param_groups[0]["lr"] *= 1 + t.rank()
        t.broadcast_optimizer_state(optimizer, 0)
    else:
        state = t.elastic.TorchState(model, optimizer, scheduler=scheduler)
        step()
        state.restore()
    assert optimizer.state is held is plain.state and optimizer.param_groups is groups is plain.param_groups
    assert len(held) == 6 and all(entry["momentum_buffer"].any() for entry in held.values())
    step()
    return optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0]


@pytest.mark.parametrize("way", ("load", "broadcast", "restore"))
def test_a_scheduler_made_before(four, way):
    assert four(schedules, way) == [(0.25, 0.25)] * 4


def scaled(way, fused, enabled=True):
    """GradScaler's usual loop, and those that see unscaled gradients: the ranks' mean is what the step takes."""
    import torch
    t = hvd()
    p = torch.nn.Parameter(torch.zeros(200_000))
    optimizer = t.DistributedOptimizer(torch.optim.SGD([p], lr=1.0, fused=fused), [("p", p)])
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=enabled)
    mean = (t.size() + 1) / 2
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        infinite = enabled and step == 2  # on one rank: all skip the step
        scaler.scale((p * (float("inf") if infinite and t.rank() == 1 else t.rank() + 1.0)).sum()).backward()
        before, want = p.detach().clone(), 0.0 if infinite else mean
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if way == "horovod":
                optimizer.synchronize()
            if way != "plain":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_([p], 1.0)
                want = min(want, 1.0)
            if way == "horovod":
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        assert (before - p.detach()).eq(want).all(), step
    assert scaler.get_scale() == (32768.0 if enabled else 1.0)


@pytest.mark.parametrize("fused, enabled", ((False, True), (True, True), (False, False)))
@pytest.mark.parametrize("way", ("plain", "unscaled", "horovod"))
def test_grad_scaler(four, way, fused, enabled):
    if not hasattr(pytest.importorskip("torch").amp, "GradScaler"):
        pytest.skip("this PyTorch's GradScaler is for CUDA alone")
    four(scaled, way, fused, enabled)


def skipped(way):
    """After a step that the scaler, or the script, has skipped the optimizer steps without the scaler, too."""
    import torch
    t = hvd()
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = t.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        scaler.scale((p * float("inf")).sum()).backward()
        scaler.unscale_(optimizer)
        if way == "scaler":
            scaler.step(optimizer)
        scaler.update()
        p.grad = None
        (p * (t.rank() + 1.0)).sum().backward()
        optimizer.step()
        assert p.eq(-(step + 1) * (t.size() + 1) / 2).all()
        p.grad = None
    # A backward between unscale_() and the step is still refused.
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    p.sum().backward()
    fails(AssertionError, lambda: scaler.step(optimizer), "unscale_()")
    optimizer.synchronize()


@pytest.mark.parametrize("way", ("scaler", "script"))
def test_a_step_that_is_skipped(four, way):
    if not hasattr(pytest.importorskip("torch").amp, "GradScaler"):
        pytest.skip("this PyTorch's GradScaler is for CUDA alone")
    four(skipped, way)


def changed():
    """Gradients that change on their way, or come behind the reduction, are refused by name; then all goes on."""
    import torch
    t = hvd()
    model = make_model()
    optimizer = t.DistributedOptimizer(MAKERS["sgd"](model.parameters()), model.named_parameters())
    x, y = digits()
    x, y = x[t.rank() * 8:][:8], y[t.rank() * 8:][:8]
    for clip in (lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.5),
                 lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
                 model.zero_grad):
        backward(model, x, y)
        clip()
        fails(t.Error, optimizer.step, "the gradient of 4.", "optimizer.synchronize()", "skip_synchronize")
        optimizer.zero_grad()
    backward(model, x, y)
    optimizer.synchronize()
    backward(model, x, y)
    with optimizer.skip_synchronize():
        fails(AssertionError, optimizer.step, "4.", "after optimizer.synchronize()")
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    return values(model)


def test_gradients_that_change_on_their_way(four):
    results = four(changed)
    assert all(reference.same(a, b) == 0 for own in results for a, b in zip(own, results[0]))


def changed_while_waiting(options, passes):
    """The same for gradients that are not on their way yet: others of their group are missing, or a pass."""
    import torch
    t = hvd()
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(4)) for name in ("used", "unused")})
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options)
    mean = (t.size() + 1) / 2

    def backward(name="used"):
        for _ in range(passes):
            (model[name] * (t.rank() + 1.0)).sum().backward()

    for clip in (lambda: torch.nn.utils.clip_grad_value_([model["used"]], 0.5), lambda: model["used"].grad.zero_(),
                 model.zero_grad):
        for later in (False, True):  # the rest of the group comes behind it
            backward()
            clip()
            if later and passes == 1:
                backward("unused")
            fails(t.Error, optimizer.step, "the gradient of used", "skip_synchronize")
            optimizer.zero_grad()
    # What is right goes on.
    before = model["used"].detach().clone()
    backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_value_([model["used"]], 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert (before - model["used"].detach()).eq(0.5).all()
    optimizer.zero_grad(set_to_none=False)
    backward()
    optimizer.step()
    assert (before - model["used"].detach()).eq(0.5 + passes * mean).all() and model["unused"].eq(0).all()


def parts_of_one():
    """Gradients that lie in one tensor of the user's, and so count their changes together."""
    import torch
    t = hvd()
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(2)) for name in "abc"})
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), groups=1)
    whole = torch.zeros(6)
    for number, p in enumerate(model.values()):
        p.grad = whole[2 * number:2 * number + 2]
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        sum((p * (t.rank() + 1.0)).sum() for p in model.values()).backward()
        optimizer.step()
    assert all(p.eq(-(t.size() + 1)).all() for p in model.values())


def whole_of_one():
    """A gradient that is another view of all of a tensor: who writes to it is found out."""
    import tally
    import torch
    t = hvd()
    p = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = t.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], backward_passes_per_step=2)
    p.grad = torch.zeros(6).view(2, 3)
    p.sum().backward()
    p.grad.mul_(2)
    with pytest.raises(tally.Error, match="gradient of p was changed"):
        optimizer.step()


def test_a_gradient_that_is_a_view(four):
    four(whole_of_one)


def test_gradients_that_are_parts_of_one(four):
    four(parts_of_one)


@pytest.mark.parametrize("options, passes", (({"groups": 1}, 1), ({"backward_passes_per_step": 2}, 1),
                                             ({"backward_passes_per_step": 3, "groups": 1}, 2)))
def test_gradients_that_change_before_they_go(four, options, passes):
    four(changed_while_waiting, options, passes)


class Unfit(Exception):
    """Cannot be made from what its message is."""

    def __init__(self, what, where):
        super().__init__("%s at %s" % (what, where))


def raising():
    import torch
    import tally.torch as t

    class Raising(t.Compression.fp16):
        @staticmethod
        def decompress(tensor, ctx):
            raise Unfit("nonsense", "the end")

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = t.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], compression=Raising)
    p.sum().backward()
    with pytest.raises(Exception, match="^nonsense at the end$"):
        optimizer.step()


def test_a_compression_that_raises(four):
    four(raising)


def refused():
    import torch
    t = hvd()
    model = torch.nn.Linear(2, 2)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    fails(TypeError, lambda: copy.deepcopy((model, optimizer)), "make another one")
    phases = torch.nn.Linear(2, 2, dtype=torch.complex64)
    fails(TypeError, lambda: t.DistributedOptimizer(torch.optim.SGD(phases.parameters(), lr=0.1),
                                                    phases.named_parameters()), "weight is of complex")


def test_refused_by_name(three):
    three(refused)


def dropped():
    """Whether an optimizer with groups, and its parameters, are gone as soon as nobody has them, without gc."""
    import gc
    import weakref
    import torch
    model = torch.nn.Linear(2, 2)
    optimizer = hvd().DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), groups=1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    seen = [weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
    gc.disable()
    try:
        del optimizer, model
        return [one() is None for one in seen]
    finally:
        gc.enable()


def test_nothing_keeps_what_is_dropped(two):
    assert two(dropped) == [[True] * 3] * 2

"""DistributedDataParallel over Tally: the same parameters as one process that sees all the data, in every mode."""

import contextlib
import importlib
import textwrap

import numpy as np
import pytest

import jobs

STEPS, BATCH = 4, 6

# Gloo's groups of a rank: destroyed they are, but never freed.  A thread of Gloo may be about to take the GIL to drop
# its last work, and the group's destructor, which holds the GIL, would wait for that thread for ever.
_kept = []


def needs(module, name):
    """Skip the test where this PyTorch lacks something."""
    try:
        found = hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        found = False
    if not found:
        pytest.skip("this PyTorch has no %s.%s" % (module, name))


def needs_averages_of_shards():
    """Skip the test where FSDP2 over Gloo sums instead, and fails on CPUs over two dimensions: before it had this method."""
    needs("torch.distributed.fsdp", "fully_shard")
    import torch.distributed.fsdp
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_force_sum_reduction_for_comms"):
        pytest.skip("FSDP2 of this PyTorch does not average on CPUs")


# --- on the ranks ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def group(backend, path):
    """torch's process group over this job's ranks."""
    import tally.torch
    import torch.distributed as dist
    dist.init_process_group(backend, store=dist.FileStore(path, tally.size()), rank=tally.rank(),
                            world_size=tally.size())
    try:
        yield
    finally:
        _kept.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()


def way(name):
    """(backend of the process group, hook or None) of one way to sum gradients."""
    import tally.torch as t
    return {"hook": ("gloo", t.ddp_hook), "fp16": ("gloo", t.ddp_hook_fp16), "bf16": ("gloo", t.ddp_hook_bf16),
            "backend": ("tally", None), "gloo": ("gloo", None)}[name]


def network(mode="plain", seed=1):
    """Some layers; those of a mode that needs particular ones."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(5, 40)
            self.second = torch.nn.Linear(40, 40)
            self.other = torch.nn.Linear(40, 40)
            self.table = torch.nn.Embedding(9, 40, sparse=mode == "sparse")
            self.last = torch.nn.Linear(40, 2)

        def forward(self, x, branch):
            y = self.first(x).relu()
            y = (self.other if mode == "unused" and branch else self.second)(y).relu()
            if mode != "unused":
                y = self.other(y).tanh() + self.table((x[:, 0] * 4).abs().long().clamp(max=8))
            return self.last(y)

    torch.manual_seed(seed)
    return Net()


def batch(step, rank):
    import torch
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 5, generator=generator), torch.randn(BATCH, 2, generator=generator)


def loss(model, step, rank):
    x, y = batch(step, rank)
    return (model(x, rank % 2) - y).square().mean()


def parameters(model):
    return [p.detach().numpy().copy() for p in model.parameters()]


def optimizer(model, mode):
    import torch
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0 if mode == "sparse" else 0.9)


OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "accumulated": {},
    "small buckets": {"bucket_cap_mb": 0.004},
    "sparse": {},
    "double": {},
}


def wrap(model, name, **options):
    from torch.nn.parallel import DistributedDataParallel
    import tally.torch as t
    model = DistributedDataParallel(model, **options)
    _, hook = way(name)
    if hook is not None:
        model.register_comm_hook(t.state(), hook)
    return model


def train(name, mode, path):
    """Parameters after some steps on all ranks."""
    import tally
    rank = tally.rank()
    with group(way(name)[0], path):
        model = network(mode)
        model = wrap(model.double() if mode == "double" else model, name, **OPTIONS[mode])
        steps = optimizer(model, mode)
        for step in range(STEPS):
            steps.zero_grad()
            if mode == "accumulated":
                with model.no_sync():
                    loss(model, step + 100, rank).backward()
            if mode == "double":
                x, y = batch(step, rank)
                (model(x.double(), 0) - y).square().mean().backward()
            else:
                loss(model, step, rank).backward()
            steps.step()
        return parameters(model)


def train_uneven(name, path, initial=True):
    """Rank r has r more batches than rank 0.

    initial: whether gradients are divided by the number of ranks at the start, or of those that still have input."""
    import tally
    rank = tally.rank()
    with group(way(name)[0], path):
        model = wrap(network(), name)
        steps = optimizer(model, "plain")
        with model.join(divide_by_initial_world_size=initial):
            for step in range(2 + rank):
                steps.zero_grad()
                loss(model, step, rank).backward()
                steps.step()
        return parameters(model)


def train_two(name, path):
    """Two models, one the other's input, in one backward."""
    import tally
    rank = tally.rank()
    with group(way(name)[0], path):
        models = [wrap(network(seed=seed), name) for seed in (1, 2)]
        steps = [optimizer(model, "plain") for model in models]
        for step in range(STEPS):
            x, y = batch(step, rank)
            out = models[0](x, 0)
            out = models[1](out.repeat(1, 3)[:, :5], 0)
            for one in steps:
                one.zero_grad()
            (out - y).square().mean().backward()
            for one in steps:
                one.step()
        return [p for model in models for p in parameters(model)]


# --- in one process --------------------------------------------------------------------------------------------


def reference(mode, size):
    """What one process makes of all ranks' batches."""
    model = network(mode)
    if mode == "double":
        model = model.double()
    steps = optimizer(model, mode)
    for step in range(STEPS):
        steps.zero_grad()
        for rank in range(size):
            if mode == "double":
                x, y = batch(step, rank)
                part = (model(x.double(), 0) - y).square().mean()
            else:
                part = loss(model, step, rank)
            if mode == "accumulated":
                part = part + loss(model, step + 100, rank)
            (part / size).backward()
        steps.step()
    return parameters(model)


def reference_two(size):
    models = [network(seed=seed) for seed in (1, 2)]
    steps = [optimizer(model, "plain") for model in models]
    for step in range(STEPS):
        for one in steps:
            one.zero_grad()
        for rank in range(size):
            x, y = batch(step, rank)
            out = models[1](models[0](x, 0).repeat(1, 3)[:, :5], 0)
            ((out - y).square().mean() / size).backward()
        for one in steps:
            one.step()
    return [p for model in models for p in parameters(model)]


def same_on_all(results):
    return all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def close(result, expected, tolerance=2e-6):
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("name", ["hook", "backend"])
def test_same_as_one_process(three, store, name, mode):
    results = three(train, name, mode, store)
    assert same_on_all(results)
    # Without a hook torch 2.13 divides dense buckets twice where there is a sparse one, whatever the backend.
    as_gloo = (name, mode) == ("backend", "sparse")
    close(results[0], three(train, "gloo", mode, store + "-gloo")[0] if as_gloo else reference(mode, 3))


@pytest.mark.parametrize("name, tolerance", [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_precision(three, store, name, tolerance):
    results = three(train, name, "plain", store)
    assert same_on_all(results)
    expected = reference("plain", 3)
    close(results[0], expected, tolerance)
    assert any(np.abs(a - b).max() > 1e-5 for a, b in zip(results[0], expected))


@pytest.mark.parametrize("name", ["hook", "backend"])
def test_uneven_inputs(three, store, name):
    """As with Gloo, in DDP's own join()."""
    results = three(train_uneven, name, store)
    assert same_on_all(results)
    close(results[0], three(train_uneven, "gloo", store + "-gloo")[0])


def test_uneven_inputs_of_fewer_and_fewer_ranks(three, store):
    """The reducer waits for the count of ranks that still have input: a call that Python began, and has let go of."""
    results = three(train_uneven, "backend", store, False)
    assert same_on_all(results)
    close(results[0], three(train_uneven, "gloo", store + "-gloo", False)[0])
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(results[0], three(train_uneven, "gloo", store + "-all")[0]))


@pytest.mark.parametrize("name", ["hook", "backend"])
def test_two_models(three, store, name):
    results = three(train_two, name, store)
    assert same_on_all(results)
    close(results[0], reference_two(3))


def train_groups(way, mode, path):
    """Models whose process groups have two ranks each, a different number of them on the ranks, and one of all."""
    import tally
    import torch.distributed as dist
    from tally.torch.parallel import DistributedDataParallel
    rank = tally.rank()
    with group("gloo", path):
        halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        models = []
        for mine in [halves[rank // 2]] * (1 + rank // 2) + [None]:
            if way == "parallel":
                models.append(DistributedDataParallel(network(mode), process_group=mine))
            else:
                models.append(wrap(network(mode), way, process_group=mine))
        for model in models:
            loss(model, 0, rank).backward()
        return [[p.grad.to_dense().numpy() for p in model.parameters()] for model in models]


@pytest.mark.parametrize("way, mode", [("hook", "plain"), ("hook", "sparse"), ("parallel", "plain")])
def test_process_groups(four, store, way, mode):
    """Each average is over the model's own process group."""
    results = four(train_groups, way, mode, store)
    expected = four(train_groups, "gloo", "plain", store + "-gloo")
    for result, gradients in zip(results, expected, strict=True):
        for one, other in zip(result, gradients, strict=True):
            close(one, other)


def train_wrapped(path):
    """Our hook called by one of the user's own, which holds the state."""
    import tally
    import tally.torch as t
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    rank = tally.rank()
    with group("gloo", path):
        halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        model = DistributedDataParallel(network(), process_group=halves[rank // 2])
        model.register_comm_hook({"state": t.state()}, lambda state, bucket: t.ddp_hook(state["state"], bucket))
        loss(model, 0, rank).backward()
        return [p.grad.numpy() for p in model.parameters()]


def test_a_hook_that_calls_ours(four, store):
    """Its averages are over the model's process group, too."""
    for own, wanted in zip(four(train_wrapped, store), four(train_groups, "gloo", "plain", store + "-gloo"), strict=True):
        for one, other in zip(own, wanted[0], strict=True):
            close(one, other)


def train_again(given, path):
    """Half of the steps each in two DistributedDataParallels of one module, with one state."""
    import tally
    import tally.torch as t
    from torch.nn.parallel import DistributedDataParallel
    with group("gloo", path):
        module, state = network(), t.state()
        steps = optimizer(module, "plain")
        for half in range(2):
            model = DistributedDataParallel(module)
            if given:
                model.register_comm_hook(state, t.ddp_hook)
            else:
                model.register_comm_hook(None, lambda _, bucket: t.ddp_hook(state, bucket))
            for step in range(half * STEPS // 2, (half + 1) * STEPS // 2):
                steps.zero_grad()
                loss(model, step, tally.rank()).backward()
                steps.step()
        return parameters(module)


@pytest.mark.parametrize("given", [True, False])
def test_a_module_wrapped_again(three, store, given):
    """Its state is its own still, as where a strategy's object serves two fits."""
    results = three(train_again, given, store)
    assert same_on_all(results)
    close(results[0], reference("plain", 3))


def registered_in_another_order(path):
    """Two models of one shape; what is no state; what is no bucket."""
    import tally
    import tally.torch as t
    import torch
    from torch.nn.parallel import DistributedDataParallel
    rank = tally.rank()
    with group("gloo", path):
        models = [DistributedDataParallel(torch.nn.Linear(2, 1, bias=False)) for _ in range(2)]
        for wrong in (None, t.state):
            with pytest.raises(TypeError, match="tally.torch.state()"):
                models[0].register_comm_hook(wrong, t.ddp_hook)
        for wrong in (torch.ones(1), torch.ones(1)), torch.ones(1):
            with pytest.raises(NotImplementedError, match="DistributedDataParallel's buckets, not [tT]"):
                t.ddp_hook(t.state(), wrong)
        for model in models if rank else reversed(models):
            model.register_comm_hook(t.state(), t.ddp_hook)
        x = torch.full((1, 2), rank + 1.0)
        (models[0](x) + 10 * models[1](x)).sum().backward()
        return [model.module.weight.grad.tolist() for model in models]


def test_models_of_one_shape(three, store):
    """They are told apart by the order in which they were made."""
    assert three(registered_in_another_order, store) == [[[[2, 2]], [[20, 20]]]] * 3


def train_part(name, path):
    """A model, and a part of it wrapped by itself over other ranks."""
    import tally
    import torch
    import torch.distributed as dist
    rank = tally.rank()
    with group("gloo", path):
        module = network()
        pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        whole, part = wrap(module, name), wrap(module.last, name, process_group=pair)
        gradients = []
        for step in range(3):  # torch rebuilds the buckets behind the first
            for output in (lambda: loss(whole, step, rank), lambda: part(torch.full((2, 40), rank + 1.0)).sum()):
                module.zero_grad()
                output().backward()
                gradients += [p.grad.numpy().copy() for p in module.parameters() if p.grad is not None]
        return gradients


def part_with_own_hooks(later, path):
    """A model over all ranks, of which a part is wrapped over pairs as well, both with hooks of the user's own, which call
    ours at once or in a callback: whether the whole's gradients are averages over all."""
    import copy
    import tally
    import tally.torch as t
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    rank = tally.rank()

    def hook(states, bucket):
        return t.ddp_hook(states[0], bucket)

    def call_later(state, bucket):
        begun = dist.all_reduce(torch.zeros(1), async_op=True).get_future()
        return begun.then(lambda _: t.ddp_hook(state, bucket).wait())

    with group("gloo", path):
        pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        torch.manual_seed(0)
        module = torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(2)))
        alone = copy.deepcopy(module)
        whole = DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=0.004)
        part = DistributedDataParallel(module[1], process_group=pair)
        for one in (whole, part):
            one.register_comm_hook(*((t.state(), call_later) if later else ([t.state()], hook)))
        for one in (whole, alone):
            one(torch.full((1, 40), float(rank))).sum().backward()
        for p in alone.parameters():
            dist.all_reduce(p.grad)
        return all(torch.allclose(p.grad, q.grad / 4) for p, q in zip(module.parameters(), alone.parameters()))


@pytest.mark.parametrize("later", [False, True])
def test_a_part_wrapped_with_own_hooks(four, store, later):
    assert four(part_with_own_hooks, later, store) == [True] * 4


def copied(path):
    """Gradients of a model, of a copy, and of one that was pickled, which is registered anew."""
    import copy
    import pickle
    import tally
    import tally.torch as t
    import torch
    with group("gloo", path):
        model = wrap(torch.nn.Linear(2, 1, bias=False), "hook")
        pickled = pickle.loads(pickle.dumps(model))
        pickled.register_comm_hook(t.state(), t.ddp_hook)
        results = []
        for one in (model, copy.deepcopy(model), pickled):
            one(torch.full((1, 2), tally.rank() + 1.0)).sum().backward()
            results.append(one.module.weight.grad.tolist())
        return results


def test_copies(three, store):
    assert three(copied, store) == [[[[2, 2]]] * 3] * 3


def test_a_part_wrapped_by_itself(four, store):
    for own, wanted in zip(four(train_part, "hook", store), four(train_part, "gloo", store + "-gloo"), strict=True):
        close(own, wanted)


def hook_of_others(before, path):
    """A hook that is not ours, on a process group that torch.distributed does not know, or no longer."""
    import tally
    import torch.distributed as dist
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

    def hook(_, bucket):
        future = Future()
        future.set_result(bucket.buffer().zero_())
        return future

    with group("gloo", path):
        unknown = dist.new_group()
        _kept.append(unknown)
        if before:
            dist.destroy_process_group(unknown)
        model = DistributedDataParallel(network(), process_group=unknown)
        if not before:
            dist.destroy_process_group(unknown)
        model.register_comm_hook(None, hook)
        loss(model, 0, tally.rank()).backward()
        return not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_others(three, store, before):
    """They are left alone, also where the process group is none that torch has made."""
    assert three(hook_of_others, before, store) == [True] * 3


def profiled_hook(mode, path):
    """The ranges of a backward with the hook: (name, shapes)."""
    import torch
    import tally
    with group("gloo", path):
        model = wrap(network(mode), "hook", gradient_as_bucket_view=True)
        for step in range(2):  # the second has the buckets that stay
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as made:
                loss(model, step, tally.rank()).backward()
        ranges = [(event.name, event.input_shapes) for event in made.events() if event.name.startswith("tally:")]
        return ranges, sum(p.numel() for p in model.parameters()), [9, 40]


def test_ranges_of_the_hook(three, store):
    for ranges, numbers, _ in three(profiled_hook, "plain", store):
        assert ranges == [("tally:all_reduce", [[numbers]])]
    for ranges, numbers, table in three(profiled_hook, "sparse", store + "-sparse"):
        assert sorted(ranges) == [("tally:all_reduce", [table]),
                                  ("tally:all_reduce", [[numbers - table[0] * table[1]]])]


def no_hooks(path):
    """{case and backend: what register_comm_hook() says to what is no hook}, and the same without Tally's part in it."""
    import torch
    import tally.torch
    from torch.nn.parallel import DistributedDataParallel

    def annotated(state, bucket: int):
        pass

    def returns(state, bucket) -> int:
        pass

    wrong = {"number": 1, "nothing": None, "tensor": torch.ones(2), "array": np.ones(2), "future": torch.futures.Future(),
             "bucket": annotated, "result": returns}
    told = {}
    for backend in ("gloo", "tally"):
        with group(backend, path + backend):
            model = DistributedDataParallel(network())
            for name, hook in wrong.items():
                for way, register in ((backend, model.register_comm_hook),
                                      ("torch", DistributedDataParallel.register_comm_hook.__wrapped__.__get__(model))):
                    try:
                        register(None, hook)
                    except Exception as error:
                        told[name, way] = type(error).__name__, str(error)
            loss(model, 0, tally.rank()).backward()  # it is as it was
    return told


def test_what_is_no_hook(three, store):
    for told in three(no_hooks, store):
        assert told["number", "torch"] == ("TypeError", "Communication hook must be callable.")
        for (name, way), error in told.items():
            assert error == told[name, "torch"], (name, way)
        assert len(told) == 3 * 7


def both(mode, path):
    return train("hook", mode, path), train("backend", mode, path + "-backend")


@pytest.mark.parametrize("mode", [mode for mode in OPTIONS if mode != "sparse"])
def test_hook_and_backend_sum_the_same(four, store, mode):
    """To the bit, where the number of ranks is a power of two: torch divides before the sum, the hook after."""
    for hook, backend in four(both, mode, store):
        assert all(np.array_equal(a, b) for a, b in zip(hook, backend, strict=True))


# --- other ways to the same ------------------------------------------------------------------------------------


def test_a_script_of_byteps():
    """tally.torch.parallel needs no process group, and makes one beside which there may be others."""
    status, output = jobs.run(2, 1, ["-c", textwrap.dedent("""
        import datetime
        import tally.torch as bps, torch, test_ddp
        import torch.distributed as dist
        from tally.torch.parallel import DistributedDataParallel
        bps.init()
        for compression, tolerance in ((bps.Compression.none, 2e-6), (bps.Compression.fp16, 2e-3)):
            model = DistributedDataParallel(test_ddp.network(), device_ids=None, compression=compression)
            assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
            steps = test_ddp.optimizer(model, "plain")
            for step in range(test_ddp.STEPS):
                steps.zero_grad()
                test_ddp.loss(model, step, bps.rank()).backward()
                steps.step()
            test_ddp.close(test_ddp.parameters(model), test_ddp.reference("plain", 2), tolerance)
        for backend in ("gloo", "tally"):
            x = torch.ones(2)
            dist.all_reduce(x, group=dist.new_group(backend=backend, timeout=datetime.timedelta(seconds=10)))
            assert x.tolist() == [2, 2]
        dist.destroy_process_group()
        print("good")
    """)])
    assert status == 0 and output.count("good") == 2, output

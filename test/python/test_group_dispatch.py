"""The backend "tally" where calls are watched or traced, or tensors have no memory: as Gloo's, which calls c10d's operators."""

import time

import pytest

from test_ddp import group, needs


@pytest.fixture(autouse=True)
def redispatch():
    import torch
    if not hasattr(torch._ops.OpOverload, "redispatch"):
        pytest.skip("this PyTorch has no OpOverload.redispatch")


def each_call(like):
    """Make each call of torch.distributed on tensors made by `like`; returns the tensors with results."""
    import torch.distributed as dist
    rank, size = dist.get_rank(), dist.get_world_size()
    made = []

    def x(count=4):
        made.append(like(count))
        return made[-1]

    def xs(count=4):
        return [x(count) for _ in range(size)]

    dist.all_reduce(x())
    dist.all_reduce(x(), dist.ReduceOp.MAX)
    dist.all_reduce(x(), async_op=True).wait()
    dist.broadcast(x(), 1)
    dist.reduce(x() if rank == 1 else like(4), 1, dist.ReduceOp.PRODUCT)  # Gloo leaves others a part of it
    dist.all_gather(xs(), x())
    dist.all_gather_into_tensor(x(4 * size), x())
    dist.reduce_scatter(x(), xs())
    dist.reduce_scatter_tensor(x(), x(4 * size))
    dist.gather(x(), xs() if rank == 1 else None, 1)
    dist.scatter(x(), xs() if rank == 1 else None, 1)
    dist.all_to_all(xs(), xs())
    dist.all_to_all_single(x(4 * size), x(4 * size))
    dist.barrier()
    if rank == 0:
        dist.send(x(), 1, tag=3)
        dist.recv(x(), 1, tag=4)
    elif rank == 1:
        dist.recv(x(), 0, tag=3)
        dist.send(x(), 0, tag=4)
    return made


def modes():
    """{what was asked: what the group makes of it}, the same on any backend."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode
    rank, seen, results = dist.get_rank(), [], {}

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, operator, kinds, arguments=(), named=None):
            if str(operator).startswith("c10d"):
                seen.append((str(operator), [type(one).__name__ for one in arguments]))
            return operator(*arguments, **(named or {}))

    def numbers(count):
        return torch.arange(float(count)) + rank

    results["unwatched"] = [one.tolist() for one in each_call(numbers)]
    with Log():
        results["watched"] = [one.tolist() for one in each_call(numbers)]
    results["operators"] = seen
    assert results["watched"] == results["unwatched"]

    def counts(call):
        with CommDebugMode() as mode:
            call()
        return {str(one): count for one, count in mode.get_comm_counts().items()}

    results["counts"] = counts(lambda: each_call(numbers))
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    results["DDP"] = counts(lambda: replica(torch.ones(2, 4)).sum().backward())
    assert results["DDP"] == {"c10d.allreduce_": 1}

    def step(x):
        y = x * 2
        dist.all_reduce(y, dist.ReduceOp.MAX)
        return y

    for kind in ("real", "fake"):
        traced = make_fx(step, tracing_mode=kind)(torch.ones(4))
        assert "c10d.allreduce_.default" in traced.code, traced.code
        results["traced", kind] = traced.code
        y, deadline = traced(torch.full((4,), 3. * rank)), time.monotonic() + 20
        while y.tolist() != [6] * 4 and time.monotonic() < deadline:  # the graph waits for nothing
            time.sleep(0.01)
        assert y.tolist() == [6] * 4, y

    with FakeTensorMode():
        results["fake"] = [str(one) for one in each_call(torch.ones)]
    with FakeTensorMode():
        alone = torch.ones(4)
    dist.all_reduce(alone)  # it has the mode
    results["meta"] = [str(one) for one in each_call(lambda count: torch.ones(count, device="meta"))]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, CommDebugMode():
        dist.all_reduce(numbers(4))
    results["profile"] = sorted(one.name.replace("gloo:", "tally:") for one in profile.events()
                                if one.name.startswith(("c10d::", "gloo:", "tally:")))
    assert "c10d::allreduce_" in results["profile"], results["profile"]

    x = numbers(4)
    dist.all_reduce(x)
    return {**results, "at last": x.tolist()}


def beside_gloo(path):
    import tally
    import tally.torch
    import torch
    import torch.distributed as dist
    results = []
    for backend in ("gloo", "tally"):
        with group(backend, path + backend):
            results.append(modes())
            other = dist.new_group(backend="gloo")  # its calls pass ours' kernels
            x = torch.ones(3)
            dist.all_reduce(x, group=other)
            assert x.tolist() == [tally.size()] * 3
    return results


def test_modes_see_operators(two, store):
    needs("torch.distributed.tensor.debug", "CommDebugMode")
    for with_gloo, ours in two(beside_gloo, store):
        for what, wanted in with_gloo.items():
            assert ours[what] == wanted, what


def shards(path):
    """What CommDebugMode and MemTracker find in a step of FSDP2."""
    import tally.torch
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    results = []

    def model(mesh):
        return fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)), mesh=mesh)

    def step(mesh):
        """The most memory that a step would take."""
        with FakeTensorMode():
            sharded, tracker = model(mesh), MemTracker()
            optimizer = torch.optim.Adam(sharded.parameters())
            tracker.track_external(sharded, optimizer)
            with tracker:
                sharded(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        return {str(place): {str(kind): size for kind, size in sizes.items()}
                for place, sizes in tracker.get_tracker_snapshot("peak").items()}

    for backend in ("gloo", "tally"):
        with group(backend, path + backend):
            mesh = init_device_mesh("cpu", (tally.size(),))
            sharded = model(mesh)
            with CommDebugMode() as mode:
                sharded(torch.ones(2, 8)).sum().backward()
            counts = {str(one): count for one, count in mode.get_comm_counts().items()}
            assert sum(counts.values()) == 2, counts
            for _ in range(2):  # the first one fills torch's caches, which count
                memory = step(mesh)
            results.append((counts, memory))
    return results


def test_tools_of_sharded_models(two, store):
    needs("torch.distributed.tensor.debug", "CommDebugMode")
    needs("torch.distributed.fsdp", "fully_shard")
    needs("torch.distributed._tools.mem_tracker", "MemTracker")
    for with_gloo, ours in two(shards, store):
        assert with_gloo == ours and ours[1]


def unknown_reductions(path):
    import tally.torch
    import torch
    import torch.distributed as dist
    with group("tally", path):
        world, x = dist.group.WORLD.boxed(), torch.ones(3) * tally.rank()
        dist.all_reduce(torch.ones(1, device="meta"))
        dist.Work.unbox(torch.ops.c10d.broadcast_([x], world, 1, 0)[1]).wait()
        with pytest.raises(RuntimeError, match="c10d.allreduce_.* trace the graph again"):
            torch.ops.c10d.allreduce_([x], world, torch.classes.c10d.ReduceOp(), None)
    return x.tolist()


def test_operators_called_by_themselves(two, store):
    assert two(unknown_reductions, store) == [[1, 1, 1]] * 2

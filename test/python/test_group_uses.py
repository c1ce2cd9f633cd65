"""What stands on a group of the backend "tally": object collectives, torch's own hooks, sharded models, meshes."""

import datetime
import gc
import time
import warnings

from test_ddp import group, needs, needs_averages_of_shards


def stand_on_it(path):
    """Parts of torch that use a process group."""
    import tally.torch
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    import test_ddp
    rank = tally.rank()
    with group("tally", path):
        objects = [None] * 3
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": one} for one in range(3)]
        objects = [rank, "x" * rank]
        dist.broadcast_object_list(objects, 2)
        assert objects == [2, "xx"]
        objects = [None]
        dist.scatter_object_list(objects, ["a", "b", "c"] if rank == 0 else None, 0)
        assert objects == ["abc"[rank]]
        objects = [None] * 3 if rank == 1 else None
        dist.gather_object(rank, objects, 1)
        assert rank != 1 or objects == [0, 1, 2]

        world = dist.group.WORLD
        x = torch.arange(6.0) + rank

        def listed(result):
            return (result + 0).tolist()  # an older PyTorch's has no tolist() while it is on its way

        assert listed(functional.all_reduce(x, "sum", world)) == (3 * torch.arange(6.0) + 3).tolist()
        assert functional.all_gather_tensor(x, 0, world).numel() == 18
        assert listed(functional.reduce_scatter_tensor(x, "avg", 0, world)) == [2 * rank + 1, 2 * rank + 2]
        if hasattr(functional, "broadcast"):
            assert listed(functional.broadcast(x, 1, world)) == (torch.arange(6.0) + 1).tolist()
        if hasattr(functional, "all_to_all_single"):
            assert listed(functional.all_to_all_single(x, None, None, world)) == [
                2.0 * rank + one + other for other in range(3) for one in range(2)]
        many = [functional.all_reduce(torch.full((3,), float(one)), "sum", world) for one in range(40)]
        gc.collect()  # an older PyTorch keeps but half of these calls
        assert [listed(one)[0] for one in many] == [3 * one for one in range(40)]
        both = functional.all_reduce_coalesced([x, x + 1], "max", world)
        assert [listed(one)[0] for one in both] == [2, 3]
        with dist._coalescing_manager(group=world):
            y, z = torch.ones(3), torch.ones(4)
            dist.all_reduce(y)
            dist.all_reduce(z)
        assert y.tolist() + z.tolist() == [3] * 7
        with dist._coalescing_manager(device=y.device, async_ops=True) as calls:
            dist.isend(x[:4].clone(), (rank + 1) % 3)
            dist.irecv(z, (rank + 2) % 3)
        calls.wait()
        assert z[0] == (rank + 2) % 3

        # It asks for each type of device that the name stands for: on a machine without CUDA it must be none.
        assert dist.BackendConfig(dist.Backend("tally")).get_device_backend_map() == {"cpu": "tally"}

        # What torch does to all groups for NCCL's sake; its compiler when it finds its work in a cache.
        for what in ("_add_ephemeral_timeout_for_all_pgs", "_set_pg_timeout"):
            with warnings.catch_warnings(action="ignore"):
                getattr(dist.distributed_c10d, what, lambda limit: None)(datetime.timedelta(seconds=99))
        assert not world._get_backend(torch.device("cuda")).supports_splitting

        results = []
        for hook in (default_hooks.allreduce_hook, powerSGD_hook.powerSGD_hook):
            model = DistributedDataParallel(test_ddp.network())
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
                                     if hook is powerSGD_hook.powerSGD_hook else None, hook)
            steps = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            for step in range(4):
                steps.zero_grad()
                test_ddp.loss(model, step, rank).backward()
                steps.step()
            results.append(test_ddp.parameters(model))
    return results


def test_what_stands_on_a_group(three, store):
    """Object and functional collectives, ZeroRedundancyOptimizer, torch's own hooks."""
    from test_ddp import same_on_all
    results = three(stand_on_it, store)
    assert same_on_all([[p for one in rank for p in one] for rank in results])


def handed_to_cpp(path):
    """Calls that Python hands to C++ and lets go of: (their results, how many of them are left)."""
    import tally.torch
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch._C import _distributed_c10d
    from torch.nn.parallel import DistributedDataParallel
    from tally.torch.group.work import GroupWork
    import test_ddp
    rank, results = tally.rank(), {}

    def live():
        gc.collect()
        return sum(isinstance(one, GroupWork) for one in gc.get_objects())

    def ones(count=3):
        return torch.full((count,), rank + 1.0)

    with group("tally", path):
        world, before = dist.group.WORLD, live()
        model = DistributedDataParallel(test_ddp.network())
        for initial in (False, True):  # whether the divisor is the number of ranks, or what the call gives
            count = torch.ones(1)
            model.reducer._set_forward_pass_work_handle(dist.all_reduce(count, async_op=True), initial)
            gc.collect()
            test_ddp.loss(model, 0, rank).backward()
            results["count %s" % initial] = count.item()
        model.reducer._set_forward_pass_work_handle(world.allreduce([ones(3 + (rank == 1))]), False)
        try:
            test_ddp.loss(model, 0, rank).backward()
        except RuntimeError as error:
            results["differ"] = "disagree" in str(error)
        del model

        if hasattr(_distributed_c10d, "_register_work"):
            x, y, z = ones(), ones(), ones()
            _distributed_c10d._register_work(x, dist.all_reduce(x, async_op=True))
            _distributed_c10d._register_work(tensor=y, work=dist.all_reduce(y, async_op=True))
            with dist._coalescing_manager(device=z.device, async_ops=True) as calls:
                dist.all_reduce(z)
                dist.isend(ones(), (rank + 1) % 3)
                dist.irecv(into := torch.zeros(3), (rank + 2) % 3)
            _distributed_c10d._register_work(z, calls.works[0])
            del calls
            gc.collect()
            results["registered"] = [functional.wait_tensor(one).tolist() for one in (x, y, z)]
            results["received"] = into.tolist()
        if hasattr(dist.Work, "boxed"):
            boxed = dist.all_reduce(x := ones(), async_op=True).boxed()
            gc.collect()
            dist.Work.unbox(boxed).wait()
            results["boxed"] = x.tolist()

        # What C++ itself begins, by each of the group's methods that it calls.
        outputs = {"all_reduce": functional.all_reduce(ones(), "sum", world),
                   "all_gather": functional.all_gather_tensor(ones(1), 0, world),
                   "reduce_scatter": functional.reduce_scatter_tensor(ones(), "sum", 0, world)}
        if hasattr(functional, "broadcast"):
            outputs["broadcast"] = functional.broadcast(ones(), 1, world)
        if hasattr(functional, "all_to_all_single"):
            outputs["all_to_all"] = functional.all_to_all_single(ones(), None, None, world)
        outputs["several sums"] = functional.all_reduce_coalesced([ones()], "sum", world)[0]
        outputs["several gathered"] = functional.all_gather_into_tensor_coalesced([ones(1)], world)[0]
        outputs["several scattered"] = functional.reduce_scatter_tensor_coalesced([ones()], "sum", [0], world)[0]
        gc.collect()
        results.update({name: (one + 0).tolist() for name, one in outputs.items()})
        del outputs
        end = time.monotonic() + 30  # Tally's thread that ended the last calls may still hold them
        while (left := live() - before) and time.monotonic() < end:
            time.sleep(0.01)
    return results, left


def test_calls_that_only_cpp_keeps(three, store):
    for rank, (results, left) in enumerate(three(handed_to_cpp, store)):
        assert results.pop("count False") == results.pop("count True") == 3 and results.pop("differ")
        expected = {"registered": [[6] * 3] * 3, "received": [(rank + 2) % 3 + 1] * 3, "boxed": [6] * 3, "all_reduce": [6] * 3, "all_gather": [1, 2, 3],
                    "reduce_scatter": [6], "broadcast": [2] * 3, "all_to_all": [1, 2, 3], "several sums": [6] * 3,
                    "several gathered": [1, 2, 3], "several scattered": [6]}
        assert results == {name: value for name, value in expected.items() if name in results}, rank
        assert left == 0


def ranges_of(profiled, calls):
    """{call: the ranges that a profile has of it: (name, shapes, whether it is asynchronous)}; calls are marked by ranges of their own."""
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    found = {}
    for mark in events:
        if mark.name in calls:
            found[mark.name] = [(one.name, one.input_shapes, one.is_async) for one in events
                                if one.name.startswith(("c10d::", "gloo:", "tally:"))
                                and mark.time_range.start <= one.time_range.start <= mark.time_range.end]
    return found


def profiled_calls(path):
    """{backend: ranges of each call}, and what was made of a call that fails and while no profiler is on."""
    import tally.torch
    import torch
    import torch.distributed as dist
    from tally.torch.group import profile
    from torch.nn.parallel import DistributedDataParallel
    rank, ranges = tally.rank(), {}
    x, longer, whole = torch.ones(2, 2), torch.ones(4, 3), torch.ones(6, 2)
    pieces = [torch.zeros(2, 2) for _ in range(3)]

    def sparse():
        return torch.sparse_coo_tensor([[0]], [1.0], (4,), check_invariants=True)

    def passed(one):
        works = [one.send([x], (rank + 1) % 3, 0), one.recv([pieces[0]], (rank + 2) % 3, 0)]
        for work in works:
            work.wait()

    calls = {
        "sum": lambda one: dist.all_reduce(longer, group=one),
        "sum later": lambda one: dist.all_reduce(longer, group=one, async_op=True).wait(),
        "sum in a future": lambda one: dist.all_reduce(longer, group=one, async_op=True).get_future().wait(),
        "sum of some": lambda one: one.allreduce_coalesced([x, longer]).wait(),
        "broadcast": lambda one: dist.broadcast(x, 1, group=one),
        "reduce": lambda one: dist.reduce(x, 1, group=one),
        "all_gather": lambda one: dist.all_gather(pieces, x, group=one),
        "all_gather of some": lambda one: one.allgather_coalesced([[torch.zeros(2, 2)] for _ in range(3)], [x]).wait(),
        "gather": lambda one: dist.gather(x, pieces if rank == 1 else None, 1, group=one),
        "scatter": lambda one: dist.scatter(x, pieces if rank == 1 else None, 1, group=one),
        "reduce_scatter": lambda one: dist.reduce_scatter(x, pieces, group=one),
        "all_to_all": lambda one: dist.all_to_all_single(torch.zeros(6, 2), whole, group=one),
        "all_to_all of a list": lambda one: one.alltoall([torch.zeros(2, 2) for _ in range(3)], pieces).wait(),
        "messages": passed,
        "barrier": lambda one: one.barrier().wait()}
    with group("gloo", path):
        ours = dist.new_group(backend="tally")
        for backend, one in (("gloo", dist.group.WORLD), ("tally", ours)):
            # In backward DDP's reducer makes its calls from another thread.
            model = DistributedDataParallel(torch.nn.Linear(3, 4), process_group=one)
            for call in calls.values():
                call(one)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as made:
                for name, call in calls.items():
                    dist.barrier(ours)
                    with torch.profiler.record_function(name):
                        call(one)
                with torch.profiler.record_function("backward"):
                    model(longer).sum().backward()
            ranges[backend] = ranges_of(made, [*calls, "backward"])
            del model

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as made:
            with torch.profiler.record_function("fails"):
                try:
                    ours.allreduce([x, longer])
                except RuntimeError:
                    pass
            with torch.profiler.record_function("sparse"):
                dist.all_reduce(sparse(), group=ours)
            ours.monitored_barrier()
            left = dist.all_reduce(x, group=ours, async_op=True)
        left.wait()  # the profiler is no more
        ended = [event.name for event in made.events() if event.name.startswith("tally:")]

        entered = []
        enter = profile.enter_range
        profile.enter_range = lambda *arguments: entered.append(arguments)
        try:
            kind = type(ours.barrier()).__name__
            for call in calls.values():
                call(ours)
        finally:
            profile.enter_range = enter
    return ranges, ended, entered, kind


def test_ranges_of_a_profile(three, store):
    """As Gloo's; but a reduce_scatter is none of all_reduces here."""
    for ranges, ended, entered, kind in three(profiled_calls, store):
        assert entered == [] and kind == "GroupWork"
        assert ended == ["tally:all_reduce", "tally:all_reduce", "tally:monitored_barrier", "tally:all_reduce"]
        assert len(ranges["gloo"]) == len(ranges["tally"]) == 16
        for call, with_gloo in ranges["gloo"].items():
            ours = ranges["tally"][call]
            operators = {name for name, *_ in with_gloo if name.startswith("c10d::")}
            assert {name for name, *_ in ours if name.startswith("c10d::")} == operators, (call, ours)
            assert all(is_async for name, _, is_async in ours if name.startswith("tally:")), (call, ours)
            for name, *rest in ours:
                if name.startswith("tally:") and name != "tally:reduce_scatter":
                    assert ("gloo" + name[5:], *rest) in with_gloo, (call, ours, with_gloo)
            whole = [shapes for name, shapes, _ in ours if name.startswith("tally:")]
            assert whole == [shapes for name, shapes, _ in ours if name.startswith("c10d::")], call
            assert whole and (all(whole) or call in ("barrier", "scatter")), call
        assert ranges["tally"]["backward"][-1][1] == [[16]]
        assert ("tally:reduce_scatter", [[2, 2]] * 3, True) in ranges["tally"]["reduce_scatter"]


def shards(path):
    """FSDP2 and a checkpoint over the group; parameters as a whole, and whether they come back."""
    import tally.torch
    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import test_ddp
    with group("tally", path):
        mesh = init_device_mesh("cpu", (tally.size(),))
        model = test_ddp.network()
        fully_shard(model.other, mesh=mesh)
        fully_shard(model, mesh=mesh)
        steps = test_ddp.optimizer(model, "plain")
        for step in range(test_ddp.STEPS):
            steps.zero_grad()
            test_ddp.loss(model, step, tally.rank()).backward()
            steps.step()
        state = model.state_dict()
        checkpoint.save({"model": state}, checkpoint_id=path + "-checkpoint")
        loaded = {name: torch.zeros_like(value) for name, value in state.items()}
        checkpoint.load({"model": loaded}, checkpoint_id=path + "-checkpoint")
        same = all(torch.equal(loaded[name].to_local(), value.to_local()) for name, value in state.items())
        return [p.full_tensor().detach().numpy() for p in model.parameters()], same


def test_sharded_models_and_checkpoints(three, store):
    needs("torch.distributed.fsdp", "fully_shard")
    from test_ddp import close, reference
    for whole, same in three(shards, store):
        close(whole, reference("plain", 3))
        assert same


def divided(path):
    """[gradients of a model whose divide factor is set, what they must be], on a mesh of one dimension and of two."""
    import tally.torch
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    found = []
    with group("tally", path):
        for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))):
            gradients = []
            for factor in (None, 8.0, 3.0):
                torch.manual_seed(1)
                model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
                fully_shard(model, mesh=mesh)
                if factor is not None:
                    model.set_gradient_divide_factor(factor)
                model(torch.full((2, 8), 1.0 + tally.rank())).sum().backward()
                gradients.append([p.grad.full_tensor() * (factor or 4.0) for p in model.parameters()])
            mean, *others = gradients
            found += [torch.allclose(ours, right) for one in others for ours, right in zip(one, mean)]
    return found


def test_divide_factors_of_sharded_models(four, store):
    needs_averages_of_shards()  # its PyTorch has divide factors, too
    assert four(divided, store) == [[True] * 16] * 4


def meshes(path):
    """The groups of a mesh of two dimensions: sums along each."""
    import tally.torch
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    with group("tally", path):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        sums = []
        for name in ("a", "b"):
            x = torch.tensor(float(tally.rank()))
            dist.all_reduce(x, group=mesh[name].get_group())
            sums.append(x.item())
        return sums


def test_meshes(four, store):
    needs("torch.distributed.device_mesh", "init_device_mesh")
    assert four(meshes, store) == [[2, 1], [4, 1], [2, 5], [4, 5]]


def more_on_it(path):
    """What needs groups of some ranks: post-local SGD; and uneven inputs."""
    import tally.torch
    import torch
    import torch.distributed as dist
    import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local
    from torch.distributed.algorithms.join import Join
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    import test_ddp
    rank = tally.rank()
    results = {}
    for backend in ("gloo", "tally"):
        with group(backend, path + backend):
            pairs = [dist.new_group([one, one + 1]) for one in (0, 2)]
            model = DistributedDataParallel(test_ddp.network())
            model.register_comm_hook(post_local.PostLocalSGDState(None, pairs[rank // 2], start_localSGD_iter=2),
                                     post_local.post_localSGD_hook)
            steps = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                          PeriodicModelAverager(period=3, warmup_steps=2))
            for step in range(4):
                steps.zero_grad()
                test_ddp.loss(model, step, rank).backward()
                steps.step()
            local = test_ddp.parameters(model)

            model = DistributedDataParallel(test_ddp.network())
            steps = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            with Join([model, steps]):
                for step in range(2 + rank % 2):
                    steps.zero_grad()
                    test_ddp.loss(model, step, rank).backward()
                    steps.step()
            results[backend] = local, test_ddp.parameters(model)
    return results


def two_dimensions(path):
    """FSDP2 over two dimensions."""
    import tally.torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import test_ddp
    with group("tally", path):
        model = test_ddp.network()
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        steps = test_ddp.optimizer(model, "plain")
        for step in range(test_ddp.STEPS):
            steps.zero_grad()
            test_ddp.loss(model, step, tally.rank()).backward()
            steps.step()
        return [p.full_tensor().detach().numpy() for p in model.parameters()]


def test_what_stands_on_subgroups(four, store):
    """As with Gloo: the post-local SGD hook, ZeroRedundancyOptimizer in Join."""
    from test_ddp import close
    for result in four(more_on_it, store):
        for ours, with_gloo in zip(result["tally"], result["gloo"]):
            close(ours, with_gloo)


def test_sharding_in_two_dimensions(four, store):
    """As one process does."""
    from test_ddp import close, needs_averages_of_shards, reference
    needs_averages_of_shards()
    for ours in four(two_dimensions, store):
        close(ours, reference("plain", 4))


def only_for_cuda(path):
    """Of "cpu:gloo,cuda:tally" tensors on the CPU are Gloo's."""
    import tally.torch
    import torch
    import torch.distributed as dist
    import test_ddp
    rank = tally.rank()
    with group("cpu:gloo,cuda:tally", path):
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x)
        objects = [None] * 3
        dist.all_gather_object(objects, rank)
        if rank < 2:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2), 1 - rank),
                                                dist.P2POp(dist.irecv, torch.empty(2), 1 - rank)]):
                work.wait()
        model = test_ddp.wrap(test_ddp.network(), "backend")
        test_ddp.loss(model, 0, rank).backward()
        assert dist.group.WORLD.begun == 0
        dist.barrier()
        return x.tolist(), objects


def test_a_group_only_for_cuda(three, store):
    assert three(only_for_cuda, store) == [([6] * 3, [0, 1, 2])] * 3


def made_late(path):
    """A group whose rank 1 comes last: the others do not go on before it has come.  (Whether it has come, for each of two.)"""
    import os
    import tally
    come = []
    for turn in ("first", "again"):
        if tally.rank() == 1:
            time.sleep(0.3)
            open(path + turn, "w").close()
        with group("tally", path + " of " + turn):
            come.append(os.path.exists(path + turn))
    return come


def test_a_group_is_there_on_all_ranks_at_once(three, store):
    """torch drops what it has made for another device, which a slower rank may not have connected to yet."""
    assert three(made_late, store) == [[True, True]] * 3


def uneven_groups(path):
    """Of "cpu:gloo,cuda:tally", where the ranks are in different numbers of groups and two threads call at once."""
    import threading
    import torch
    import torch.distributed as dist
    with group("cpu:gloo,cuda:tally", path):
        pair, results = dist.new_group([0, 1]), []

        def reduce():
            dist.all_reduce(x := torch.ones(3))
            results.append(x.tolist())

        threads = [threading.Thread(target=reduce) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        if dist.get_rank() < 2:
            dist.all_reduce(x := torch.ones(2), group=pair)
            results.append(x.tolist())
        assert dist.get_process_group_ranks(dist.group.WORLD.other(torch.device("cpu"))) == [0, 1, 2]
        dist.barrier()
    return results


def test_ranks_in_different_numbers_of_groups(three, store):
    both = [[3.0] * 3] * 2
    assert three(uneven_groups, store) == [[*both, [2.0] * 2]] * 2 + [both]

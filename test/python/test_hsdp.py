"""tally.torch.hsdp: FSDP2 within replicas, Tally between them."""

import textwrap

import pytest

import jobs
from test_ddp import needs, needs_averages_of_shards

HYBRID = """
    import os, sys, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import tally.torch, test_ddp

    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 4), rank=int(os.environ["RANK"]), world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rank = dist.get_rank()
"""


def test_hybrid_sharding(store):
    """FSDP2 within replicas of two ranks, Tally between the replicas."""
    needs_averages_of_shards()
    status, output = jobs.run(4, 0, ["-c", textwrap.dedent(HYBRID + """
    model = test_ddp.network()
    fully_shard(model.other, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    tally.torch.hsdp(model, mesh["replicate"])
    steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(test_ddp.STEPS):
        steps.zero_grad()
        test_ddp.loss(model, step, rank).backward()
        steps.step()
    assert (tally.rank(), tally.size()) == (rank // 2, 2)
    whole = [p.full_tensor().detach().numpy() for p in model.parameters()]
    test_ddp.close(whole, test_ddp.reference("plain", 4))
    tally.shutdown()
    print("good", flush=True)
    dist.barrier()
    os._exit(0)
    """), store])
    assert status == 0 and output.count("good") == 4, output


def test_hybrid_sharding_where_a_replica_leaves_a_module_out(store):
    """It is waited for, and named, where the modules behind it would have been averaged with others."""
    needs("torch.distributed.fsdp", "fully_shard")
    status, output = jobs.run(4, 0, ["-c", textwrap.dedent(HYBRID + """
    os.environ["TALLY_TIMEOUT"] = "3"

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, short):
            x = self.first(x)
            return x if short else self.second(x)

    model = Net()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh["shard"])
    tally.torch.hsdp(model, mesh["replicate"])
    try:
        model(torch.ones(2, 4), rank // 2 == 1).sum().backward()
        raise SystemExit("averaged with the wrong module")
    except RuntimeError as error:
        assert "'hsdp." in str(error) and "TALLY_TIMEOUT" in str(error), error
    print("good", flush=True)
    dist.barrier()
    os._exit(0)
    """), store])
    assert status == 0 and output.count("good") == 4, output


def test_hybrid_sharding_of_other_modules(store):
    """Replicas that have sharded other modules are told so, each of them."""
    needs("torch.distributed.fsdp", "fully_shard")
    status, output = jobs.run(4, 0, ["-c", textwrap.dedent(HYBRID + """
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for module in [model[0], model[1]][:1 + rank // 2] + [model]:
        fully_shard(module, mesh=mesh["shard"])
    tally.torch.hsdp(model, mesh["replicate"])
    try:
        model(torch.ones(1, 4)).sum().backward()
        raise SystemExit("averaged all the same")
    except RuntimeError as error:
        assert "what is sharded in model 0 of hsdp()" in str(error) and "module '1'" in str(error), error
    print("good", flush=True)
    dist.barrier()
    os._exit(0)
    """), store])
    assert status == 0 and output.count("good") == 4, output


def test_hybrid_sharding_of_two_models(store):
    """Of one shape: where replicas take turns with them in another order, they are not averaged with each other."""
    needs("torch.distributed.fsdp", "fully_shard")
    status, output = jobs.run(4, 0, ["-c", textwrap.dedent(HYBRID + """
    models = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
    for model in models:
        fully_shard(model, mesh=mesh["shard"])
        tally.torch.hsdp(model, mesh["replicate"])
    os.environ["TALLY_TIMEOUT"] = "3"
    try:
        models[rank // 2](torch.ones(1, 4)).sum().backward()
        raise SystemExit("averaged with the wrong model")
    except RuntimeError as error:
        assert "'hsdp." in str(error) and "TALLY_TIMEOUT" in str(error), error
    print("good", flush=True)
    dist.barrier()
    os._exit(0)
    """), store])
    assert status == 0 and output.count("good") == 4, output


def test_hybrid_sharding_without_fsdp2():
    """Said by whoever has a PyTorch without it."""
    import torch
    import tally.torch
    from torch.distributed import fsdp
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(fsdp, "fully_shard", raising=False)
        with pytest.raises(NotImplementedError, match="FSDP2"):
            tally.torch.hsdp(torch.nn.Linear(1, 1), None)


def test_hybrid_sharding_refused(store):
    """What torch has reduced already, what is not sharded, a PyTorch without the hook; DTensors are not for the optimizer."""
    needs("torch.distributed.fsdp", "fully_shard")
    status, output = jobs.run(4, 0, ["-c", textwrap.dedent(HYBRID + """
    model = fully_shard(test_ddp.network(), mesh=mesh)
    for what, word in ((model, "two dimensions"), (test_ddp.network(), "fully_shard()")):
        try:
            tally.torch.hsdp(what, mesh["replicate"])
            raise SystemExit("not refused")
        except ValueError as error:
            assert word in str(error), error
    one = fully_shard(test_ddp.network(), mesh=mesh["shard"])
    for replicas, word in ((mesh["shard"], "is sharded over"), (dist.group.WORLD, "is sharded over"), (None, "not None"),
                           (mesh, "('replicate', 'shard')")):
        try:
            tally.torch.hsdp(one, replicas)
            raise SystemExit("not refused")
        except ValueError as error:
            assert word in str(error), error
    hook = torch.distributed.fsdp.FSDPModule.set_all_reduce_hook
    del torch.distributed.fsdp.FSDPModule.set_all_reduce_hook
    try:
        tally.torch.hsdp(one, mesh["replicate"])
        raise SystemExit("not refused")
    except NotImplementedError as error:
        assert "set_all_reduce_hook" in str(error), error
    torch.distributed.fsdp.FSDPModule.set_all_reduce_hook = hook
    tally.torch.init()
    try:
        tally.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        raise SystemExit("not refused")
    except TypeError as error:
        assert "hsdp" in str(error), error
    print("good", flush=True)
    dist.barrier()
    os._exit(0)
    """), store])
    assert status == 0 and output.count("good") == 4, output


def test_hybrid_sharding_over_other_replicas(store):
    """A process has one job: a second model's other replicas are refused, also where this one's rank is as in the first's."""
    needs("torch.distributed.fsdp", "fully_shard")
    status, output = jobs.run(4, 0, ["-c", textwrap.dedent(HYBRID + """
    from torch.distributed.device_mesh import DeviceMesh

    def sharded(mesh):
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["shard"])
        tally.torch.hsdp(model, mesh["replicate"])
        return model

    meshes = [DeviceMesh("cpu", rows, mesh_dim_names=("replicate", "shard")) for rows in ([[0, 1], [2, 3]],
                                                                                        [[0, 1], [3, 2]])]
    first, second = map(sharded, meshes)
    first(torch.ones(1, 4)).sum().backward()
    try:
        second(torch.ones(1, 4)).sum().backward()
        raise SystemExit("averaged over the wrong ranks")
    except (RuntimeError, ValueError) as error:
        assert "can have no second one, of ranks " + str(dist.get_process_group_ranks(meshes[1]["replicate"].get_group())) \\
            in str(error), error
    print("good", flush=True)
    dist.barrier()
    os._exit(0)
    """), store])
    assert status == 0 and output.count("good") == 4, output


def test_hybrid_sharding_of_shards_that_differ(store):
    """Replicas whose ranks hold different shards are told, where no rank can see it alone."""
    needs("torch.distributed.fsdp", "fully_shard")
    status, output = jobs.run(4, 0, ["-c", textwrap.dedent(HYBRID + """
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["shard"])
    pairs = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    tally.torch.hsdp(model, pairs[rank in (1, 2)])
    try:
        model(torch.ones(1, 4)).sum().backward()
        raise SystemExit("averaged different shards")
    except RuntimeError as error:
        assert "shard 0 of 2" in str(error) and "shard 1 of 2" in str(error), error
    print("good", flush=True)
    dist.barrier()
    os._exit(0)
    """), store])
    assert status == 0 and output.count("good") == 4, output

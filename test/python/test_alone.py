"""The warning about a model that each rank trains alone: a framework has left it bare, and exchanges metrics at most."""

import contextlib
import logging

import pytest

import jobs
from test_ddp import group, needs

STEPS = 3
QUESTION = " since the first: is the model in DistributedDataParallel? A framework may leave it bare on a backend that it does not know"
NOTHING = "3 optimizer steps, and nothing was reduced" + QUESTION
LITTLE = "%d optimizer steps of 20 gradient elements each, and at most %d elements were reduced" + QUESTION


@contextlib.contextmanager
def warnings_of(logger):
    """The list of what is logged within it."""
    lines, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def train(way):
    """Train a model of 20 parameters for some steps.  The optimizer is gone afterwards."""
    import tally
    import tally.torch as hvd
    import torch
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    rank, size = tally.rank(), tally.size()
    model = torch.nn.Linear(4, 4)
    dist.broadcast(model.weight.detach(), 0)
    optimizers = []
    if way in ("ddp", "hook", "cross_barrier", "zero", "accumulate", "helper"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=way == "cross_barrier")
    elif way == "gloo":
        model = DistributedDataParallel(model, process_group=dist.new_group(backend="gloo"))
    elif way == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif way == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if way == "zero":
        optimizers.append(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    else:
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    if way == "hook":
        model.register_comm_hook(hvd.state(), hvd.ddp_hook)
    elif way == "cross_barrier":
        hvd.cross_barrier(model, optimizers[0])
    elif way == "horovod":
        optimizers[0] = hvd.DistributedOptimizer(optimizers[0], named_parameters=model.named_parameters())
    elif way == "horovod, no barrier":
        optimizers[0] = hvd.DistributedOptimizer(optimizers[0], named_parameters=model.named_parameters(), cross_barrier=True)
    elif way == "helper":  # trained on each rank alone, as is meant
        helper = torch.nn.Linear(1, 1)
        optimizers.append(torch.optim.SGD(helper.parameters(), lr=0.1))
    elif way == "early":
        optimizers[0].step()
    trains = way not in ("inference", "barriers") and (way != "learner" or rank == 0)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.ones(2, 4)
        if way == "stages":
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        elif way == "experts":
            dist.all_to_all_single(torch.empty(2), torch.ones(2))
        elif way == "buffers":
            dist.broadcast(torch.ones(3), 0)
        if way == "accumulate":
            with model.no_sync():
                model(x).sum().backward()
        y = model(x).sum() + (helper(torch.ones(1)).sum() if way == "helper" else 0)
        if trains:
            y.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if way == "gathered":
            for one in gradients:
                pieces = [torch.empty_like(one) for _ in range(size)] if rank == 0 else None
                dist.gather(one, pieces)
                one.copy_(sum(pieces) if pieces else one)
                dist.broadcast(one, 0)
        elif way == "scattered":
            flat = torch.cat([one.view(-1) for one in gradients])
            dist.reduce_scatter_tensor(torch.empty(len(flat) // size), flat)
        for optimizer in optimizers if trains else ():
            optimizer.step()
        if way in ("metric", "early"):
            dist.all_reduce(y.detach())
        elif way == "seldom":
            dist.all_reduce(torch.ones(10))
        elif way == "watched":
            dist.group.WORLD.monitored_barrier()
        elif way == "local" and step == 1 or way == "learner":
            for p in model.parameters():
                dist.all_reduce(p.detach()) if way == "local" else dist.broadcast(p.detach(), 0)
    dist.barrier()


def trained(path, ways):
    """{way: the warnings of a group's end}"""
    import tally.torch
    steps, told = tally.torch.steps, {}
    for way in ways:
        before, steps._SELDOM = steps._SELDOM, 1 if way == "seldom" else steps._SELDOM
        with warnings_of(logging.getLogger("tally")) as lines:
            with group("tally", path + way):
                train(way)
        steps._SELDOM = before
        told[way] = [line.partition(" torch: ")[2].partition(" (docs")[0] for line in lines if "optimizer steps" in line]
    return told


@pytest.fixture(scope="module")
def job():
    job = jobs.Ranks(2, 0)
    yield job
    job.close()


def test_a_bare_model(job, store):
    told = job(trained, store, ["bare", "watched", "metric", "early", "buffers", "seldom"])
    expected = {"bare": [NOTHING], "watched": [NOTHING], "metric": [LITTLE % (3, 3)], "early": [LITTLE % (4, 3)],
                "seldom": [LITTLE % (3, 30)]}
    assert told == [expected | {"buffers": [LITTLE % (3, 6)]}, expected | {"buffers": [NOTHING]}]


@pytest.mark.parametrize("ways", [
    ["inference", "barriers", "learner"], ["ddp", "accumulate", "helper", "zero", "local"], ["gathered", "scattered"],
    ["stages", "experts"], ["gloo", "hook", "cross_barrier", "horovod", "horovod, no barrier"], ["fsdp"], ["fsdp1"]],
    ids="-".join)
def test_nobody_is_alone(job, store, ways):
    if "fsdp" in ways:
        needs("torch.distributed.fsdp", "fully_shard")
    assert job(trained, store, ways) == [{way: [] for way in ways}] * 2


SCRIPT = """
import tally.torch, torch, torch.distributed as dist
dist.init_process_group("tally")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_single_rank_is_not_alone(ranks):
    status, output = jobs.run(ranks, 0, ["-c", SCRIPT])
    assert status == 0, output
    assert ("tally warning rank 0 torch: " + NOTHING in output) == (ranks > 1), output

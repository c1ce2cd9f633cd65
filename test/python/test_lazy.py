"""Lazy all-reduce: small gradients share ranges, and a range is one operation with the same bits."""

import hashlib
import random

import pytest

import jobs
from test_ops import hvd


# --- the layout -------------------------------------------------------------------------------------------------


def lists(seed):
    """A list of gradients, as lay_out() takes it."""
    draw = random.Random(seed)
    count = draw.choice([0, 1, 2, 20, 300])
    rooms = [64 * draw.choice([1, 2, 3, 40, 1000]) for _ in range(count)]
    kinds = [draw.choice(["float32", "float32", "bfloat16", None]) for _ in range(count)]
    return rooms, kinds, draw.choice([1, 64, 100, 5000, 10**9])


def block_of(rooms, i):
    """As tly_tensor_plan() in src/comm/op/tensor.c has it."""
    return int(sum(rooms[:i]) / sum(rooms) * 16)


@pytest.mark.parametrize("seed", range(40))
def test_layout(seed):
    from tally.torch.horovod.lazy import lay_out
    rooms, kinds, theta = lists(seed)
    units = lay_out(rooms, kinds, theta)
    assert sorted(i for unit in units for i in unit) == list(range(len(rooms))), "each gradient once"
    assert all(unit == sorted(unit) for unit in units) and units == sorted(units, key=lambda unit: unit[-1])
    alone = [i for i, (room, kind) in enumerate(zip(rooms, kinds)) if kind is None or room >= theta]
    assert all([i] in units for i in alone), "what is large or fits in no range"
    for unit in units:
        if unit[0] in alone:
            continue
        assert len({kinds[i] for i in unit}) == 1, "one type"
        assert len({block_of(rooms, i) for i in unit}) == 1, "one block"
        assert sum(rooms[i] for i in unit[:-1]) < theta, "the range ends once it has θ bytes"
        if sum(rooms[i] for i in unit) < theta:
            later = [i for i in range(unit[-1] + 1, len(rooms)) if i not in alone and kinds[i] == kinds[unit[0]]]
            assert not later or block_of(rooms, later[0]) > block_of(rooms, unit[0]), "and not before, but at a block's end"


def test_places_lie_side_by_side():
    from tally.torch.pool import offsets
    assert offsets([]) == ([], 0)
    assert offsets([4, 64, 65, 1]) == ([0, 64, 128, 256], 320)


# --- the same bits ----------------------------------------------------------------------------------------------


def make_model(dtype):
    """Small layers of two types, a large one, a sparse embedding, one in another memory format, one that is not always used,
    and one that is frozen."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(10, 8, sparse=True)
            self.small = torch.nn.ModuleList(torch.nn.Linear(8, 8, dtype=torch.float32 if i % 3 else dtype) for i in range(24))
            self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
            self.image = torch.nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
            self.branch = torch.nn.Linear(8, 8)
            self.wide = torch.nn.Linear(8, 600)

        def forward(self, rows, branch):
            x = self.frozen(self.table(rows))
            for layer in self.small:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
            x = self.image(x.float().view(-1, 8, 1, 1).contiguous(memory_format=torch.channels_last)).flatten(1)
            return self.wide(self.branch(x) if branch else x)

    torch.manual_seed(0)
    return Model()


def train(lazy, dtype="float32", cross=False, steps=9, kill=0, **options):
    """(the parameters' digest; how many gradients each range has)."""
    import os
    import signal

    import torch
    t = hvd()
    model = make_model(getattr(torch, dtype))
    passes = options.get("backward_passes_per_step", 1)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), cross_barrier=cross,
                                       lazy=lazy, **options)
    draw = torch.Generator().manual_seed(t.rank())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        for _ in range(passes):
            model(torch.randint(10, (4,), generator=draw), (step + t.rank()) % 2 or step < 2).square().sum().backward()
        optimizer.step()
        if step == steps // 2 and kill and t.rank() == 0:
            os.kill(kill, signal.SIGKILL)
    optimizer.synchronize() if cross else None
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().float().numpy().tobytes())
    return digest.hexdigest(), [len(one.slots) for one in optimizer._layout.ranges]


@pytest.fixture(scope="module")
def teams():
    job = jobs.Ranks(4, 1, machines=2)
    yield job
    job.close()


@pytest.mark.parametrize("cluster", ("two", "three", "four", "teams", "machine"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_same_bits(request, cluster, dtype):
    job = request.getfixturevalue(cluster)
    plain = job(train, 0, dtype)
    assert [ranges for _, ranges in plain] == [[]] * job.size and len({digest for digest, _ in plain}) == 1
    for cross in (False, True):
        results = job(train, 2048, dtype, cross)
        assert [digest for digest, _ in results] == [plain[0][0]] * job.size, cross
        assert len({tuple(ranges) for _, ranges in results}) == 1
        assert sum(results[0][1]) > 40 and max(results[0][1]) > 3, "small gradients share ranges"

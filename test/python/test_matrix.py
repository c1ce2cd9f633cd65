"""What scripts do between backward and step, in each of the three ways to Tally: the same parameters as one process
that sees all the data, or a refusal; and where the ways sum the same, the same bits.

Hook and backend are two ways of DistributedDataParallel; the optimizer is Horovod's.
"""

import contextlib

import numpy as np
import pytest

import reference
from test_ddp import group, needs

WAYS = ("hook", "backend", "optimizer")
STEPS, BATCH = 3, 6


def make(case):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
            self.last = torch.nn.Linear(8, 8, bias=False)
            if case == "shared":
                self.last.weight = self.blocks[0].weight
            if case == "frozen":
                self.blocks[1].requires_grad_(False)

        def forward(self, x):
            for block in self.blocks:
                if case == "checkpointing":
                    x = torch.utils.checkpoint.checkpoint(lambda x, block=block: block(x).tanh(), x,
                                                          use_reentrant=False)
                else:
                    x = block(x).tanh()
            return self.last(x)

    torch.manual_seed(3)
    return Net()


def shard(step, rank):
    import torch
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 8, generator=generator)


def loss(model, step, rank):
    x, y = shard(step, rank)
    return (model(x) - y).square().mean()


def split(case, model):
    """Lists of parameters, one for each optimizer."""
    own = [p for p in model.parameters() if p.requires_grad]
    return [own[:2], own[2:]] if case == "two optimizers" else [own]


def optimizers(case, model):
    import torch
    return [torch.optim.SGD(own, lr=0.2, momentum=0.9) if i == 0 else torch.optim.Adam(own, lr=0.01)
            for i, own in enumerate(split(case, model))]


def train(way, case, path):
    """This rank's parameters after some steps."""
    import torch
    import tally
    import tally.torch as t
    from torch.nn.parallel import DistributedDataParallel
    rank = tally.rank()
    passes = 2 if case == "accumulation" else 1
    with contextlib.ExitStack() as stack:
        model = plain = make(case)
        if case == "compile per block":
            for block in plain.blocks:
                block.compile(backend="aot_eager")
        if way == "optimizer":
            named = list(plain.named_parameters())
            steps = [t.DistributedOptimizer(one, [(name, p) for name, p in named if any(p is q for q in own)],
                                            backward_passes_per_step=passes)
                     for one, own in zip(optimizers(case, plain), split(case, plain))]
        else:
            stack.enter_context(group("gloo" if way == "hook" else "tally", path))
            model = DistributedDataParallel(plain)
            if way == "hook":
                model.register_comm_hook(t.state(), t.ddp_hook)
            steps = optimizers(case, plain)
        if case.startswith("compile whole"):
            model = torch.compile(model, backend=case.split()[-1])
        scaler = (torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=not case.endswith("disabled"))
                  if "GradScaler" in case else None)
        for step in range(STEPS):
            for one in steps:
                one.zero_grad()
            for part in range(passes):
                last = part == passes - 1
                quiet = contextlib.nullcontext() if way == "optimizer" or last else model.no_sync()
                with quiet:
                    value = loss(model, passes * step + part, rank)
                    (value if scaler is None else scaler.scale(value)).backward()
            skip = contextlib.nullcontext()
            if way == "optimizer" and case in ("GradScaler", "clip by norm", "clip by value"):
                steps[0].synchronize()
                skip = steps[0].skip_synchronize()
            if scaler is not None:
                scaler.unscale_(steps[0])
            if case.startswith("clip by norm"):
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            if case == "clip by value":
                torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
            with skip:
                for one in steps:
                    one.step() if scaler is None else scaler.step(one)
            if scaler is not None:
                scaler.update()
            if case == "state_dict" and step == 1:
                # As from a file: the state goes out and comes back into fresh objects of the same kind.
                saved = [copy_of(one.state_dict()) for one in steps]
                weights = copy_of(plain.state_dict())
                with torch.no_grad():
                    for p in plain.parameters():
                        p.zero_()
                plain.load_state_dict(weights)
                for one, state in zip(steps, saved):
                    one.load_state_dict(state)
        return [p.detach().numpy().copy() for p in plain.parameters()]


def copy_of(state):
    import io
    import torch
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def single(case, size):
    """The same in one process."""
    import torch
    passes = 2 if case == "accumulation" else 1
    model = make(case)
    steps = optimizers(case, model)
    for step in range(STEPS):
        for one in steps:
            one.zero_grad()
        for rank in range(size):
            for part in range(passes):
                (loss(model, passes * step + part, rank) / size).backward()
        if case.startswith("clip by norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if case == "clip by value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for one in steps:
            one.step()
    return [p.detach().numpy() for p in model.parameters()]


# Compilations by TorchInductor are slow: one is enough, and its sums have an order of their own.
CASES = ("plain", "GradScaler", "clip by norm", "clip by norm, GradScaler", "clip by norm, GradScaler disabled",
         "clip by value", "accumulation", "checkpointing", "shared", "frozen",
         "two optimizers", "state_dict", "compile per block",
         pytest.param("compile whole aot_eager", marks=pytest.mark.long(turn=4)),
         pytest.param("compile whole inductor", marks=pytest.mark.long))


@pytest.mark.parametrize("case", CASES)
def test_the_same_in_all_ways(four, tmp_path, case):
    if "GradScaler" in case:
        needs("torch.amp", "GradScaler")  # one for the CPU
    wanted = single(case, 4)
    results = {}
    ways = WAYS if "inductor" not in case else WAYS[:1]
    for way in ways:
        ranks = four(train, way, case, str(tmp_path / way), timeout=500)
        for own in ranks:
            assert all(reference.same(a, b) == 0 for a, b in zip(own, ranks[0])), "%s: the ranks differ" % way
        results[way] = ranks[0]
        for ours, theirs in zip(ranks[0], wanted):
            assert np.allclose(ours, theirs, rtol=1e-5, atol=2e-6), (way, np.abs(ours - theirs).max())
        assert any(reference.same(a, b.detach().numpy()) for a, b in zip(ranks[0], make(case).parameters()))
    # Four ranks: dividing before the sum, as DDP does for a backend, or after it makes no difference.  What clipping by
    # norm adds up, and what compilers do, follows the order of parameters, which is one.
    for way in ways[1:]:
        for a, b in zip(results[way], results["hook"]):
            assert reference.same(a, b) == 0, "%s and hook differ" % way

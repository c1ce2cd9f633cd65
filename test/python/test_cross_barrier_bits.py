"""Without the optimizer's barrier parameters have the same bits as with it: all optimizers that may be put off."""

import pytest

from test_cross_barrier import WIDTH, distributed, due, late, loss_of, make_model, same, values
from test_ddp import group
from test_ops import hvd

SIZES = {"two": 2, "three": 3, "four": 4}
# Three ranks have a tree of two levels that is not full; the others are more of that.
JOBS = ("three", *(pytest.param(job, marks=pytest.mark.long) for job in SIZES if job != "three"))
# Past some steps nothing new happens but rounding.
STEPS = (8, pytest.param(60, marks=pytest.mark.long))


# --- on the ranks ----------------------------------------------------------------------------------------------


def optimizers():
    """{name: parameters -> optimizer} of the allow-list, but those that want particular gradients; some with other options."""
    import torch
    from tally.torch.crossing.deferred import ALLOWED
    special = {"SparseAdam", "Muon"}
    found = {kind.__name__: kind for kind in ALLOWED if kind.__name__ not in special}
    made = {name: (lambda p, kind=kind: kind(p, lr=0.01)) for name, kind in found.items()}
    made["SGD"] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)
    made["Adam foreach"] = lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True)
    made["SGD foreach"] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)
    made["AdamW fused"] = lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)
    made["Adam, learning rate in a tensor"] = lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01))
    return made


def run(cross, optimizer, steps, model=None, loss=None):
    """Parameters after some steps, with a scheduler."""
    import torch
    model = model or make_model()
    optimizer = distributed(model, cross, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        (loss or loss_of)(model, step).backward()
        optimizer.step()
        scheduler.step()
    return values(model)


def run_ddp(cross, optimizer, steps):
    """The same with a DistributedDataParallel, whose buckets hold a parameter or two."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    t = hvd()
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
    optimizer = optimizer(model.parameters())
    if cross:
        t.cross_barrier(model, optimizer)
    else:
        model.register_comm_hook(t.state(), t.ddp_hook)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
        assert not cross or step < 1 or due() > 0
    return values(model)


def bits_ddp(steps, path):
    """Names of optimizers whose parameters differ, of DistributedDataParallel."""
    wrong = []
    with group("gloo", path):
        for name, optimizer in optimizers().items():
            with late():
                mine = run_ddp(True, optimizer, steps)
            wrong += [] if same(mine, run_ddp(False, optimizer, steps)) else [name]
    return wrong


def bits(steps):
    """Names of optimizers whose parameters differ from those with the barrier."""
    wrong = []
    for name, optimizer in optimizers().items():
        with_barrier = run(False, optimizer, steps)
        without = run(True, optimizer, steps)
        with late():
            at_the_gates = run(True, optimizer, steps // 4)
        if not same(with_barrier, without) or not same(run(False, optimizer, steps // 4), at_the_gates):
            wrong.append(name)
    return wrong


def bits_of_particular(steps):
    """SparseAdam, whose gradients are sparse, and Muon, whose parameters are matrices."""
    import torch
    import tally

    def table():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(20, WIDTH, sparse=True))

    def look_up(model, step):
        return model(torch.tensor([step % 20, (step * 7 + tally.rank()) % 20])).square().sum()

    def matrices():
        torch.manual_seed(0)
        return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    cases = [(table, look_up, lambda p: torch.optim.SparseAdam(p, lr=0.01))]
    if hasattr(torch.optim, "Muon"):
        cases.append((matrices, loss_of, lambda p: torch.optim.Muon(p, lr=0.01)))
    for model, loss, optimizer in cases:
        with_barrier = run(False, optimizer, steps, model(), loss)
        with late():
            assert same(with_barrier, run(True, optimizer, steps, model(), loss)), optimizer


# --- the tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("size", JOBS)
def test_same_bits(request, size, steps):
    assert request.getfixturevalue(size)(bits, steps, timeout=500) == [[]] * SIZES[size]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("size", JOBS)
def test_same_bits_of_ddp(request, size, steps, store):
    assert request.getfixturevalue(size)(bits_ddp, steps, store, timeout=500) == [[]] * SIZES[size]


@pytest.mark.parametrize("steps", STEPS)
def test_same_bits_of_sparse_gradients_and_matrices(two, steps):
    two(bits_of_particular, steps)

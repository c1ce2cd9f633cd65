"""Tally's sums of CUDA tensors on a real GPU: the tests of test_cuda_device.py, and training; all ranks share one GPU."""

import os

import pytest
import torch

import test_cuda_device
from test_ddp import group
from test_group import documented

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

PATIENCE = 300


def on_gpu(function, *arguments):
    """A function of test_cuda_device.py, on this machine's GPU."""
    import real_device
    with real_device.instead():
        return getattr(test_cuda_device, function)(*arguments)


def test_sums_in_chunks(three):
    assert [wrong for wrong, *_ in three(on_gpu, "reductions", 0, timeout=PATIENCE)] == [[]] * 3


def test_no_deadlock_where_orders_differ(three):
    assert three(on_gpu, "crossed", timeout=PATIENCE) == [True] * 3


def test_operations(three, store):
    """The backend's table in docs/pytorch.md holds for CUDA tensors too."""
    surveys = three(on_gpu, "survey", store, timeout=PATIENCE)
    assert [wrong for _, wrong in surveys] == [[]] * 3
    assert surveys[0][0] == documented()


def test_hook(three):
    assert three(on_gpu, "hooked", 0, timeout=PATIENCE) == [[]] * 3


@pytest.mark.parametrize("compress", [False, True])
def test_optimizer(three, compress):
    assert three(on_gpu, "trained", 0, compress, timeout=PATIENCE) == [True] * 3


def test_join(three):
    assert three(on_gpu, "joined", timeout=PATIENCE) == [[([6], 6), ([60], 6)]] * 3


def test_api(three):
    """As on the host, bit for bit, but for what SyncBatchNorm computes on the GPU itself."""
    for wrong in three(on_gpu, "api", 0, timeout=PATIENCE):
        for _, (host, gpu) in wrong:
            torch.testing.assert_close(torch.tensor(gpu), torch.tensor(host))
        assert len(wrong) <= 1


# --- training ----------------------------------------------------------------------------------------------------


STEPS = 6


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(64, 256, generator=generator).cuda(), torch.randn(64, 8, generator=generator).cuda()


def network():
    """Twelve layers of 256 x 256 and a narrow one, always with the same numbers."""
    torch.manual_seed(5)
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 8)).cuda()


def loss_of(model, rank, step):
    x, y = batch(rank, step)
    return torch.nn.functional.mse_loss(model(x), y)


def parameters_of(model):
    return [p.detach().cpu() for p in model.parameters()]


def alone():
    """The parameters after STEPS steps with the mean gradients of two ranks, computed in one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        each = [torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())) for rank in range(2)]
        for p, *gradients in zip(model.parameters(), *each):
            p.grad = (gradients[0] + gradients[1]) / 2
        optimizer.step()
    return parameters_of(model)


def train(way, path):
    """Whether STEPS steps by this way give the same bits as one process."""
    import tally
    import tally.torch as t
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums whatever ran before
    rank = tally.rank()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if way in ("optimizer", "cross barrier"):
        optimizer = t.DistributedOptimizer(optimizer, model.named_parameters(), cross_barrier=way == "cross barrier")
        t.broadcast_parameters(model.state_dict(), 0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if way == "cross barrier":
            optimizer.synchronize()
        found = parameters_of(model)
    else:
        with group("tally" if way == "backend" else "gloo", path):
            ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
            if way == "hook":
                ddp.register_comm_hook(t.state(), t.ddp_hook)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(ddp, rank, step).backward()
                optimizer.step()
            found = parameters_of(model)
            del ddp
    return all(torch.equal(one, other) for one, other in zip(found, alone()))


@pytest.mark.parametrize("way", ["backend", "hook", "optimizer", "cross barrier"])
def test_training_on_a_gpu(two, store, way):
    assert two(train, way, store, timeout=PATIENCE) == [True] * 2

"""One rank of the benchmark fsdp.py: trains a network whose parameters or whose optimizer's state are sharded, and prints one
JSON object.

    rank.py '{"way": "fsdp2", "backend": "tally", …}'      # a Task, below

SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import json
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "goodput"))

from gloo import machine  # noqa: E402

LEARNING_RATE = 0.01


@dataclasses.dataclass
class Task:
    way: str  # fsdp2; zero: ZeroRedundancyOptimizer with DistributedDataParallel; reference: all ranks' batches in one process
    backend: str  # gloo, tally
    width: int
    layers: int
    batch: int  # rows of one rank in one step
    ranks: int
    warm_up: int
    steps: int


class Block(torch.nn.Module):
    """A transformer's feed-forward block, whose weights are most of it."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model(task):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(task.width) for _ in range(task.layers)))


def batch(task, step, rank):
    """(inputs, what they are to become)."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(task.batch, task.width, generator=generator)
    return x, x.roll(1, 1)


def adam(parameters, **options):
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, **options)


def prepare(task):
    """(what to call, optimizer)."""
    model = make_model(task)
    if task.way == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (task.ranks,))
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), adam(model.parameters())
    if task.way == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        call = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=LEARNING_RATE, parameters_as_bucket_view=True
        )
        return call, optimizer
    return model, adam(model.parameters())


def reference(task):
    """The mean of all ranks' losses at each step."""
    model, optimizer = prepare(task)
    losses = []
    for step in range(task.warm_up + task.steps):
        optimizer.zero_grad()
        loss = sum(F.mse_loss(model(x), y) for x, y in (batch(task, step, rank) for rank in range(task.ranks))) / task.ranks
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


def train(task):
    if task.backend == "tally":
        import tally.torch  # noqa: F401
    dist.init_process_group(task.backend)
    rank = dist.get_rank()
    call, optimizer = prepare(task)
    seconds, losses, cpu, busy, ticks = [], [], 0, 0, 0
    for step in range(task.warm_up + task.steps):
        x, y = batch(task, step, rank)
        dist.barrier()
        before, begin, cpu_begin = machine(), time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = F.mse_loss(call(x), y)
        loss.backward()
        optimizer.step()
        if step >= task.warm_up:
            seconds.append(time.perf_counter() - begin)
            cpu += time.process_time() - cpu_begin
            after = machine()
            busy, ticks = busy + after[0] - before[0], ticks + after[1] - before[1]
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / task.ranks)
    dist.barrier()
    dist.destroy_process_group()
    return {"rank": rank, "seconds": seconds, "losses": losses, "cpu_s": cpu, "busy": busy, "ticks": ticks}


def main():
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    told = reference(task) if task.way == "reference" else train(task)
    told["bytes"] = 4 * sum(p.numel() for p in make_model(task).parameters())
    told["torch"] = torch.__version__
    print(json.dumps(told))


if __name__ == "__main__":
    main()

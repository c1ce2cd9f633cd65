"""One rank of the benchmark train.py: trains a model in one of the ways that it compares, and prints one JSON object.

    rank.py '{"way": "hook", "model": "mlp", …}'      # a Task, below

The data, the convolutional network and the tree of sums are examples/demo.py's.  SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import tally.torch as hvd

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / "goodput"), str(ROOT / "examples")]

import demo  # noqa: E402
from gloo import machine  # noqa: E402

TRIAL_WARM_UP, TRIAL_STEPS = 3, 3  # DistributedDataParallel makes its buckets anew after the first step
LEARNING_RATE = 0.1


@dataclasses.dataclass
class Task:
    way: str  # gloo, hook, backend, optimizer; or reference: all ranks' batches in one process
    model: str
    width: int  # of mlp
    batch: int  # images of one rank in one step
    ranks: int
    warm_up: int
    blocks: int  # the steps of one are timed together, ranks begin one together
    steps: int
    buckets: list  # MB; DistributedDataParallel's, of which the fastest is kept
    data: str
    compile: str  # "": nothing; model: the whole; layers: each one that has parameters


def make_model(task):
    torch.manual_seed(0)
    if task.model == "convnet":
        return demo.make_model()
    sizes = [784, task.width, task.width, task.width]
    layers = [torch.nn.Flatten()]
    for before, after in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(task.width, 10))


def batches(task):
    """A function (step, rank) -> (images, labels); steps begin again where the images end."""
    images, labels = demo.load(pathlib.Path(task.data), "train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    steps = len(images) // (task.batch * task.ranks)
    if not steps:
        sys.exit(f"rank: {len(images)} images are too few for one step")

    def take(step, rank):
        index = order[(step % steps * task.ranks + rank) * task.batch :][: task.batch]
        return images[index], labels[index]

    return take


def digest(model):
    hashed = hashlib.sha256()
    for tensor in model.state_dict().values():
        hashed.update(tensor.numpy().tobytes())
    return hashed.hexdigest()


# --- the ways ---------------------------------------------------------------------------------------


def join(way):
    """What there is before a model is made.  Returns what makes the ranks wait for each other."""
    if way == "optimizer":
        hvd.init()
        return hvd.barrier
    dist.init_process_group("tally" if way == "backend" else "gloo")
    return dist.barrier


def prepare(task, way, bucket=None):
    """(model, what to call for it, optimizer).  way: also none, by which each rank trains for itself"""
    model = make_model(task)
    if task.compile == "layers":
        for layer in filter(lambda layer: list(layer.parameters()), model):
            layer.compile()
    whole = torch.compile if task.compile == "model" else lambda call: call
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if way == "none":
        return model, whole(model), optimizer
    if way == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, whole(model), optimizer
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket, gradient_as_bucket_view=True)
    if way == "hook":
        parallel.register_comm_hook(hvd.state(), hvd.ddp_hook)
    return model, whole(parallel), optimizer


def leave(way):
    if way != "optimizer":
        dist.destroy_process_group()
    if way in ("hook", "optimizer"):
        hvd.shutdown()


def step(call, optimizer, images, labels):
    """Its loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(call(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def best_bucket(task, rank, take, barrier):
    """Of the sizes to try the one with the fastest steps, the same on all ranks."""
    if len(task.buckets) == 1:
        return task.buckets[0]
    seconds = torch.zeros(len(task.buckets))
    for i, bucket in enumerate(task.buckets):
        _, call, optimizer = prepare(task, task.way, bucket)
        for number in range(TRIAL_WARM_UP + TRIAL_STEPS):
            if number == TRIAL_WARM_UP:
                barrier()
                begin = time.perf_counter()
            step(call, optimizer, *take(number, rank))
        seconds[i] = time.perf_counter() - begin
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return task.buckets[int(seconds.argmin())]


def alone(task, model, bucket, barrier):
    """Seconds that the sums of a step take with nothing beside them, in several tries: of the optimizer's way a tensor for
    each parameter, of the others one for each bucket, all submitted at once."""
    sizes = [p.numel() for p in reversed(list(model.parameters()))]
    if task.way != "optimizer":
        most, all_of_them = int(bucket * 2**20 / 4), sum(sizes)
        sizes = [min(most, all_of_them - at) for at in range(0, all_of_them, most)]
    tensors = [torch.zeros(size) for size in sizes]
    seconds = []
    for _ in range(1 + task.blocks):
        barrier()
        begin = time.perf_counter()
        if task.way in ("hook", "optimizer"):
            handles = [hvd.allreduce_async_(t, name=f"alone.{i}", priority=-i) for i, t in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)
        else:
            for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
                work.wait()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def train(task, rank, take):
    """Blocks of steps without communication and blocks with it in turns, in the same processes: what else the machine does,
    and where memory lies, meets both."""
    barrier = join(task.way)
    bucket = best_bucket(task, rank, take, barrier) if task.way != "optimizer" else None
    _, plain, plain_optimizer = prepare(task, "none")
    model, call, optimizer = prepare(task, task.way, bucket)
    losses = []
    for number in range(task.warm_up):
        step(plain, plain_optimizer, *take(number, rank))
        losses.append(step(call, optimizer, *take(number, rank)))
    none, seconds, cpu, busy, ticks = [], [], 0.0, 0, 0
    for block in range(task.blocks):
        mine = [take(task.warm_up + block * task.steps + i, rank) for i in range(task.steps)]
        barrier()
        stamps = [time.perf_counter()]
        for one in mine:
            step(plain, plain_optimizer, *one)
            stamps.append(time.perf_counter())
        none.append([after - before for before, after in zip(stamps, stamps[1:])])
        barrier()
        before = machine()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        losses += [step(call, optimizer, *one) for one in mine]
        seconds.append((time.perf_counter() - begin) / task.steps)
        cpu += time.process_time() - cpu_begin
        after = machine()
        busy, ticks = busy + after[0] - before[0], ticks + after[1] - before[1]
    barrier()
    del call, optimizer
    sums = alone(task, model, bucket, barrier)
    barrier()
    leave(task.way)
    return {
        "bucket_mb": bucket,
        "none": none,
        "seconds": seconds,
        "alone": sums,
        "cpu_s": cpu / (task.blocks * task.steps),
        "busy": busy,
        "ticks": ticks,
        "losses": [[loss.item() for loss in losses]],
        "digest": digest(model),
        "bytes": 4 * sum(p.numel() for p in model.parameters()),
    }


def reference(task, take):
    """The same training in one process: each rank's gradients in turn, averaged along the tree of the ranks."""
    model, call, optimizer = prepare(task, "none")
    losses = [[] for _ in range(task.ranks)]
    for number in range(task.warm_up + task.blocks * task.steps):
        gradients = []
        for rank in range(task.ranks):
            images, labels = take(number, rank)
            optimizer.zero_grad()
            loss = F.cross_entropy(call(images), labels)
            loss.backward()
            losses[rank].append(loss.item())
            gradients.append([p.grad for p in model.parameters()])
        for p, *inputs in zip(model.parameters(), *gradients):
            p.grad = demo.tree(inputs) / task.ranks
        optimizer.step()
    return {"losses": losses, "digest": digest(model)}


def main():
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    take = batches(task)
    if task.way == "reference":
        print(json.dumps({"rank": 0, **reference(task, take)}))
        return
    rank = int(os.environ["RANK"])
    print(json.dumps({"rank": rank, "version": torch.__version__, **train(task, rank, take)}))


if __name__ == "__main__":
    main()

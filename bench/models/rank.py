"""One rank of the benchmark schedule.py: trains models whose layers sleep, by each system in turn, and prints one JSON object.

    rank.py TASK.json      # a Task, below

A model is a chain of real modules with real parameters; gradients are small integers, so that all sums are exact and every
system must come to the same parameters.  A layer's forward and backward sleep for the profile's times (Clock).
SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import inspect
import json
import pathlib
import sys
import time
import zlib

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "goodput"))

from gloo import machine  # noqa: E402

LEARNING_RATE = 1 / 64  # a power of two: exact
TRIAL_STEPS = 3  # of each size of DistributedDataParallel's buckets; it makes them anew after the first step
WAITED_S = 0.0003  # longer away from the processor than this was waiting


@dataclasses.dataclass
class Task:
    systems: list
    cells: list  # {"name", "layers": [[name, [[tensor, shape]], forward_s, backward_s]], "systems", "share": of the chunks, for csc}
    rounds: int  # in each all systems take turns
    warm_up: int  # steps of each turn
    steps: int  # that are timed
    buckets: list  # MB
    timeline: bool = False  # tell when each layer computed and each tensor was summed in the first timed step


# --- the model ----------------------------------------------------------------------------------------------


class Clock:
    """What a GPU's queue is to a training loop: layers follow each other without gaps, whatever the host does meanwhile,
    unless the host has waited for something.  Work that the rank's own thread does between two layers (making gradients,
    updates, submission) is part of the layers' times, as it is in a published step time."""

    def __init__(self):
        self.marks = None  # (begin, end, layer, phase) where somebody wants to know
        self.reset()

    def reset(self):
        self.free = self.wall = time.perf_counter()
        self.cpu = time.thread_time()

    def run(self, seconds, name, phase):
        away = (time.perf_counter() - self.wall) - (time.thread_time() - self.cpu)
        if away > WAITED_S:
            self.free = max(self.free, self.wall + away)
        begin, self.free = self.free, self.free + seconds
        left = self.free - time.perf_counter()
        if left > 0:
            time.sleep(left)
        if self.marks is not None:
            self.marks.append((begin, self.free, name, phase))
        self.wall, self.cpu = time.perf_counter(), time.thread_time()


class Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, *parameters):
        ctx.layer = layer
        layer.clock.run(layer.forward_s, layer.name, "forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        layer = ctx.layer
        value = float(layer.value())
        gradients = [torch.full_like(p, value) for p in layer.parameters()]
        layer.clock.run(layer.backward_s, layer.name, "backward")
        return (None, gradient, *gradients)


class Layer(torch.nn.Module):
    def __init__(self, index, spec, clock, rank, ranks):
        super().__init__()
        self.name, tensors, self.forward_s, self.backward_s = spec
        self.index, self.clock, self.rank, self.ranks = index, clock, rank, ranks
        self.step, self.summed = 0, [0.0]  # after each step
        for i, (_, shape) in enumerate(tensors):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.zeros(shape)))
        self.names = [name for name, _ in tensors]

    def value(self):
        """Of every element of this rank's gradients in this step; adds up what the average over the ranks is."""
        self.step += 1
        factor, more = 1 + self.index % 3, self.step % 4
        self.summed.append(self.summed[-1] + (self.ranks + 1) / 2 * factor + more)
        return (self.rank + 1) * factor + more

    def wrong(self, late):
        """Elements that are not what training must have made of zeros; `late`: or had made at the end of an earlier step."""
        exact = self.ranks & (self.ranks - 1) == 0
        wrong = 0
        for p in self.parameters():
            right = torch.zeros(p.shape, dtype=torch.bool)
            for summed in self.summed if late else self.summed[-1:]:
                due = -LEARNING_RATE * summed
                right |= (p - due).abs() <= (0.0 if exact else 1e-4 * abs(due))
            wrong += p.numel() - int(right.sum())
        return wrong

    def forward(self, x):
        return Compute.apply(self, x, *self.parameters())


def buckets_of(layers, most_bytes):
    """Lists of parameters in the order of backward, each full as soon as it has its bytes."""
    full = [[]]
    for layer in reversed(layers):
        for p in reversed(list(layer.parameters())):
            if 4 * sum(q.numel() for q in full[-1]) >= most_bytes:
                full.append([])
            full[-1].append(p)
    return [bucket for bucket in full if bucket]


# --- the systems --------------------------------------------------------------------------------------------


class System:
    """Trains one model.  Subclasses: what to do with a gradient, at the end of backward, and before a layer's forward."""

    late = False  # some gradients wait for a later step

    def __init__(self, cell, rank, ranks, option=None):
        self.clock, self.option = Clock(), option
        self.layers = [Layer(i, spec, self.clock, rank, ranks) for i, spec in enumerate(cell["layers"])]
        self.model = self.call = torch.nn.Sequential(*self.layers)
        self.prefix = cell["name"] + "/"
        self.submitted, self.ended = {}, {}  # name -> when, for a timeline
        self.begin()

    def begin(self):
        pass

    def done(self):
        """After backward: what optimizer.step() is."""
        raise NotImplementedError

    def drain(self):
        pass

    def steps(self, count):
        """When backward began, of each step; all parameters are right at the end."""
        begun = []
        self.clock.reset()
        for _ in range(count):
            x = torch.ones(1, requires_grad=True)
            loss = self.call(x).sum()
            begun.append(time.perf_counter())
            loss.backward()
            self.done()
        self.drain()
        return begun

    def wrong(self):
        return sum(layer.wrong(self.late) for layer in self.layers)

    def digest(self):
        """Of all parameters' bits."""
        found = 0
        for p in self.model.parameters():
            found = zlib.crc32(p.detach().numpy(), found)
        return found


class Own(System):
    """An operation for each gradient, and a gate before each layer: the scheduler's parts one by one."""

    barrier, urgent = True, True

    def begin(self):
        self.pending = {}
        self.names, self.priorities, listed = {}, {}, []
        for layer in self.layers:
            layer.register_forward_pre_hook(self.gate)
            for p, name in zip(layer.parameters(), layer.names):
                self.names[p], self.priorities[p] = self.prefix + name, -layer.index if self.urgent else 0
                listed.append((self.names[p], 4 * p.numel()))
                p.register_post_accumulate_grad_hook(self.ready)
        _job.plan([name for name, _ in reversed(listed)], [size for _, size in reversed(listed)], _calls.USER)

    def ready(self, p):
        name = self.names[p]
        if self.clock.marks is None:
            self.pending[p] = hvd.allreduce_async_(p.grad, name=name, priority=self.priorities[p])
        else:
            self.submitted.setdefault(name, time.perf_counter())  # of the first step; ended is, too
            call = _calls.Call(name, hvd.Average, priority=self.priorities[p],
                              then=lambda _: self.ended.setdefault(name, time.perf_counter()))
            self.pending[p] = reduce(call, p.grad, p.grad)

    def finish(self, p):
        handle = self.pending.pop(p, None)
        if handle is not None:
            hvd.synchronize(handle)
            p.data.add_(p.grad, alpha=-LEARNING_RATE)
            p.grad = None

    def gate(self, layer, _):
        for p in layer.parameters():
            self.finish(p)

    def drain(self):
        for p in self.names:
            self.finish(p)

    def done(self):
        if self.barrier:
            self.drain()


class Fifo(Own):
    urgent = False


class Priority(Own):
    pass


class Cross(Own):
    barrier = False


class Dear(System):
    """Zhang et al., ICDCS 2023: reduce-scatters in backward, in its order; the next forward's gates wait for all-gathers,
    in its order.  Tensors are put together as there."""

    def begin(self):
        ranks = hvd.size()
        self.buckets, self.place = [], {}
        for number, parameters in enumerate(buckets_of(self.layers, self.option * 2**20)):
            room = sum(p.numel() for p in parameters)
            share = -(-room // ranks)
            self.buckets.append({"flat": torch.zeros(share * ranks), "shard": torch.zeros(share), "left": len(parameters),
                                 "count": len(parameters), "name": f"{self.prefix}dear.{number}", "pending": None})
            at = 0
            for p in parameters:
                self.place[p] = self.buckets[-1], at
                at += p.numel()
                p.register_post_accumulate_grad_hook(self.ready)
        for layer in self.layers:
            layer.register_forward_pre_hook(self.gate)
        self.due = set()

    def ready(self, p):
        bucket, at = self.place[p]
        bucket["flat"][at : at + p.numel()] = p.grad
        p.grad = None
        bucket["left"] -= 1
        if not bucket["left"]:
            bucket["left"] = bucket["count"]
            flat, shard = bucket["flat"], bucket["shard"]
            bucket["pending"] = _operations.reduce_scatter(_calls.Call(bucket["name"], hvd.Average), flat.data_ptr(), shard.data_ptr(),
                                                     [shard.numel()] * hvd.size(), 0, (flat, shard))

    def done(self):
        for bucket in self.buckets:
            bucket["pending"].wait()
        for bucket in reversed(self.buckets):
            flat, shard = bucket["flat"], bucket["shard"]
            bucket["pending"] = _operations.allgather_into(_calls.Call(bucket["name"] + ".all"), shard.data_ptr(), flat.data_ptr(),
                                                     shard.numel(), 0, (shard.numel(),), (flat, shard))
        self.due = set(self.place)

    def gate(self, layer, _):
        for p in layer.parameters():
            if p in self.due:
                self.due.discard(p)
                bucket, at = self.place[p]
                bucket["pending"].wait()
                p.data.add_(bucket["flat"][at : at + p.numel()], alpha=-LEARNING_RATE)

    def drain(self):
        for layer in self.layers:
            self.gate(layer, None)


class Optimizer(System):
    """tally.torch.DistributedOptimizer, as users have it."""

    def begin(self):
        own = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.optimizer = hvd.DistributedOptimizer(own, named_parameters=self.model.named_parameters(), **self.more())

    def more(self):
        return {}

    def done(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class CrossBarrier(Optimizer):
    def more(self):
        return {"cross_barrier": True}

    def drain(self):
        self.optimizer.synchronize()


class PerTensor(Optimizer):
    def more(self):
        return {"lazy": 0}


class Bfloat16(Optimizer):
    def more(self):
        return {"lazy": 0, "compression": hvd.Compression.bf16}


class Csc(Optimizer):
    """Coarse-grained sparse communication, with its last share from the start."""

    late = True

    def more(self):
        return {"sparse": hvd.SparseChunks(share=self.option, warm_up=0)}


class Ddp(System):
    """DistributedDataParallel on Gloo; option: MB of its buckets."""

    def begin(self):
        self.call = DistributedDataParallel(self.model, bucket_cap_mb=self.option, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def done(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


SYSTEMS = {"ddp": Ddp, "fifo": Fifo, "whole": Fifo, "p3": Cross, "dear": Dear, "priority": Priority, "cross": Cross,
           "optimizer": Optimizer, "cross_barrier": CrossBarrier, "tensor": PerTensor, "bfloat16": Bfloat16, "lazy": Optimizer,
           "csc": Csc}
WITH_BUCKETS = ("ddp", "dear")
NEEDS = {"cross_barrier": "cross_barrier", "tensor": "lazy", "bfloat16": "lazy", "lazy": "lazy", "csc": "sparse"}


def known(system):
    """Whether this release's DistributedOptimizer has the option of the system."""
    return system not in NEEDS or NEEDS[system] in inspect.signature(hvd.DistributedOptimizer).parameters


# --- turns --------------------------------------------------------------------------------------------------


def slowest(seconds, gloo):
    """Of each of a list of times the longest of all ranks."""
    times = torch.tensor(seconds, dtype=torch.float64)
    if gloo:
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.tolist()
    return hvd.allreduce(times, name="slowest", op=hvd.Max).tolist()


def best_bucket(task, cell, system, rank, ranks, barrier):
    """The size with the fastest steps, the same on all ranks."""
    if len(task.buckets) == 1:
        return task.buckets[0]
    seconds = []
    for size in task.buckets:
        one = SYSTEMS[system](cell, rank, ranks, size)
        barrier()
        begun = one.steps(TRIAL_STEPS)
        seconds.append(begun[-1] - begun[1])
        barrier()
    seconds = slowest(seconds, system == "ddp")
    return task.buckets[seconds.index(min(seconds))]


def turn(task, cell, system, rank, ranks, option, barrier):
    """One system's steps on one model."""
    one = SYSTEMS[system](cell, rank, ranks, option)
    barrier()
    before, cpu = machine(), time.process_time()
    if task.timeline:
        one.steps(task.warm_up)
        one.clock.marks = []
        barrier()
    begun = one.steps(task.steps + (1 if task.timeline else 1 + task.warm_up))
    cpu, after = time.process_time() - cpu, machine()
    barrier()
    told = {
        "cell": cell["name"],
        "system": system,
        "option": option,
        "seconds": [b - a for a, b in zip(begun, begun[1:])][0 if task.timeline else task.warm_up :],
        "cpu_s": cpu / len(begun),
        "busy": after[0] - before[0],
        "ticks": after[1] - before[1],
        "wrong": one.wrong(),
        "digest": one.digest(),
    }
    if task.timeline:
        told |= {"marks": one.clock.marks, "begun": begun, "submitted": one.submitted, "ended": one.ended}
    return told


def main():
    global hvd, _calls, _job, _operations, reduce, dist, DistributedDataParallel
    with open(sys.argv[1], encoding="utf-8") as file:
        task = Task(**json.load(file))
    torch.set_num_threads(1)
    if task.systems == ["ddp"]:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        rank, ranks, barrier = dist.get_rank(), dist.get_world_size(), dist.barrier
    else:
        import tally.torch as hvd

        from tally import _calls, _job, _operations
        from tally.torch.calls import reduce

        hvd.init()
        rank, ranks, barrier = hvd.rank(), hvd.size(), hvd.barrier
        task.systems = [system for system in task.systems if known(system)]
    turns = []
    for cell in task.cells:
        taken = [system for system in task.systems if system in cell["systems"]]
        options = {system: best_bucket(task, cell, system, rank, ranks, barrier) if system in WITH_BUCKETS else
                   cell["share"] if system == "csc" else None for system in taken}
        for _ in range(task.rounds):
            turns += [turn(task, cell, system, rank, ranks, options[system], barrier) for system in taken]
    barrier()
    print(json.dumps({"rank": rank, "version": torch.__version__, "turns": turns}))
    if task.systems == ["ddp"]:
        dist.destroy_process_group()
    else:
        hvd.shutdown()


if __name__ == "__main__":
    main()

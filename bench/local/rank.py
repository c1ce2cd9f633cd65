"""One rank of the benchmark local.py in Python: all-reduces among the ranks of one machine by Tally and by Gloo
(torch.distributed), in the same processes.

    rank.py FROM TO SECONDS ROUNDS STEP

Sizes, modes and samples as in local.c.  Ways:
    gloo   torch.distributed.all_reduce, ordinary memory
    heap   tally.torch.allreduce_, the same memory
    pool   tally.torch.allreduce_, memory from tally.torch.alloc()
STEP, if it is not 0: also a step as DistributedDataParallel's, over ResNet-50's gradients in the order of a backward,
all written before: Gloo sums them in DDP's buckets (1 MB, then 25 MB each; the gradients are views of them), Tally each
by its name.  Rank 0 prints a JSON object for each row.

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

import tally.torch as hvd

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "goodput"))
import models  # noqa: E402

WAYS = ("gloo", "heap", "pool")
BATCH_S, MOST_BATCH, MOST_SAMPLES, LEAST_SAMPLES = 500e-6, 100, 4000, 3
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
STEP_SAMPLES = 4  # a round


def meet(way):
    """A barrier by the way's own means."""
    dist.barrier() if way == "gloo" else hvd.barrier()


def agree(number):
    """The largest of all ranks' numbers."""
    return int(hvd.allreduce(torch.tensor([int(number)]), op=hvd.Max, name="agree"))


def slowest(samples):
    return hvd.allreduce(torch.tensor(samples, dtype=torch.float64), op=hvd.Max, name="slowest").tolist()


def call(way, tensor):
    if way == "gloo":
        dist.all_reduce(tensor)
    else:
        hvd.allreduce_(tensor, op=hvd.Sum, name=way)


class Series:
    """What has been measured of one way."""

    def __init__(self):
        self.samples, self.wrong = [], 0

    def row(self, way, mode, size, what):
        ordered = sorted(self.samples)
        return {"bench": "local", "language": "Python", "ranks": hvd.size(), "bytes": size, "mode": mode, "way": way,
                "median_us": round(ordered[len(ordered) // 2] * 1e6, 3), "least_us": round(ordered[0] * 1e6, 3),
                "samples": len(ordered), "wrong": self.wrong, "what": what}


def pattern(count):
    """Small integers, so that any order of adding gives the same."""
    return (torch.arange(count) % 7).float()


def expected(base):
    return base * hvd.size() + hvd.size() * (hvd.size() + 1) // 2


def measure(way, hot, tensor, base, seconds, series):
    def fill():
        torch.add(base, hvd.rank() + 1, out=tensor)

    def test():
        fill()
        call(way, tensor)
        series.wrong += int((tensor != expected(base)).sum())

    test()
    tensor.zero_()
    meet(way)
    begin = time.perf_counter()
    for _ in range(LEAST_SAMPLES):
        call(way, tensor)
    each = (time.perf_counter() - begin) / LEAST_SAMPLES
    batch = max(1, min(MOST_BATCH, agree(BATCH_S / each))) if hot else 1
    samples = max(LEAST_SAMPLES, min(MOST_SAMPLES, agree(seconds / (each * batch * (1 if hot else 2) + 5e-6))))
    mine = []
    for i in range(samples):
        if not hot:
            fill()
        if not hot or i == 0:
            meet(way)
        begin = time.perf_counter()
        for _ in range(batch):
            call(way, tensor)
        mine.append((time.perf_counter() - begin) / batch)
        if not hot:
            meet(way)  # or who shares a core refills while the other is still in the call
    series.samples += slowest(mine)
    test()


def compare(size, hot, memory, seconds, rounds):
    base = pattern(size // 4)
    series = {way: Series() for way in WAYS}
    for turn in range(rounds):
        for i in range(len(WAYS)):
            way = WAYS[(i + turn) % len(WAYS)]
            measure(way, hot, memory[way][:size // 4], base, seconds / rounds, series[way])
    for way in WAYS:
        yield series[way].row(way, "hot" if hot else "refilled", size, "tensor")


def step(way, buckets, gradients):
    if way == "gloo":
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
    else:
        for handle in [hvd.allreduce_async_(gradient, op=hvd.Sum, name="%s.%s" % (way, name), priority=i)
                       for i, (name, gradient) in enumerate(gradients)]:
            hvd.synchronize(handle)


def steps(memory, rounds):
    """The rows of a step over a model's gradients."""
    tensors = list(reversed(models.tensors("resnet50")))
    total = sum(count for _, count in tensors)
    base = pattern(total)
    cuts, at, bucket, limit = [0], 0, 0, FIRST_BUCKET
    for _, count in tensors:
        at, bucket = at + count, bucket + 4 * count
        if bucket >= limit:
            cuts.append(at)
            bucket, limit = 0, BUCKET
    cuts += [total] if cuts[-1] < total else []
    series = {way: Series() for way in WAYS}
    for turn in range(rounds):
        for i in range(len(WAYS)):
            way = WAYS[(i + turn) % len(WAYS)]
            flat = memory[way][:total]
            views = list(zip([name for name, _ in tensors], flat.split([count for _, count in tensors])))
            buckets = [flat[a:b] for a, b in zip(cuts, cuts[1:])]
            mine = []
            for _ in range(STEP_SAMPLES):
                torch.add(base, hvd.rank() + 1, out=flat)
                meet(way)
                begin = time.perf_counter()
                step(way, buckets, views)
                mine.append(time.perf_counter() - begin)
            series[way].wrong += int((flat != expected(base)).sum())
            series[way].samples += slowest(mine[turn == 0:])  # the first one opens connections and makes names
    for way in WAYS:
        yield series[way].row(way, "refilled", 4 * total, "step of %d tensors" % len(tensors))


def main():
    first, last, rounds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    seconds, with_step = float(sys.argv[3]), int(sys.argv[5])
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    total = sum(count for _, count in models.tensors("resnet50")) if with_step else 0
    room = max(last // 4, total)
    memory = {"heap": torch.zeros(room), "pool": hvd.alloc(room)}
    memory["gloo"] = memory["heap"]

    def show(rows):
        for row in rows:
            row["wrong"] = int(hvd.allreduce(torch.tensor([row["wrong"]]), op=hvd.Sum, name="wrong"))
            if hvd.rank() == 0:
                print(json.dumps(row), flush=True)

    size = first
    while size <= last:
        for hot in (True, False):
            show(compare(size, hot, memory, seconds, rounds))
        size *= 4
    if with_step:
        show(steps(memory, rounds + 1))
    dist.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()

"""One rank of the benchmark goodput.py with Gloo's ring, by torch.distributed: goodput.c's arguments and output.

    gloo.py ITERATIONS WARM_UP LIST GROUPS

Everything is submitted at once and then waited for, as DistributedDataParallel does with its buckets; goodput.py
has already put small tensors together.  With more than one group each tensor is cut evenly over them: rings in
parallel, where one alone does not fill the network.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from ticks import machine


def main():
    iterations, warm_up, groups = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    with open(sys.argv[3], encoding="utf-8") as lines:
        counts = [int(line.split()[0]) for line in lines]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rings = [dist.group.WORLD, *(dist.new_group() for _ in range(groups - 1))]
    tensors = [torch.empty(count) for count in counts]
    pieces = [(ring, piece) for t in tensors for ring, piece in zip(rings, t.tensor_split(groups)) if piece.numel()]
    # Small integers, so that the sum is exact; others in each tensor and iteration.
    pattern = (torch.arange(max(counts) + 10) % 11).float()
    seconds, cpu, busy, ticks, wrong = [], [], 0, 0, 0
    for it in range(-warm_up, iterations):
        step = (it + warm_up) % 5
        for i, t in enumerate(tensors):
            torch.add(pattern[i % 11 :][: len(t)], rank + 1 + step, out=t)
        dist.barrier()
        before = machine()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for work in [dist.all_reduce(piece, group=ring, async_op=True) for ring, piece in pieces]:
            work.wait()
        if it >= 0:
            seconds.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - cpu_begin)
            after = machine()
            busy, ticks = busy + after[0] - before[0], ticks + after[1] - before[1]
        dist.barrier()
        for i, t in enumerate(tensors):
            expected = pattern[i % 11 :][: len(t)] * size + (size * (size + 1) // 2 + size * step)
            wrong += int((t != expected).sum())
    dist.barrier()
    dist.destroy_process_group()
    print(
        json.dumps(
            {
                "rank": rank,
                "wrong": wrong,
                "busy": busy,
                "ticks": ticks,
                "report": {"version": "PyTorch " + torch.__version__},
                "seconds": seconds,
                "cpu_seconds": cpu,
            }
        )
    )
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()

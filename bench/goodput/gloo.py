"""One rank of the benchmark goodput.py with Gloo's ring, by torch.distributed: goodput.c's arguments and output."""

import json
import sys
import time

import torch
import torch.distributed as dist


def main():
    iterations, warm_up, *counts = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.empty(count) for count in counts]
    seconds, cpu, wrong = [], [], 0
    for it in range(-warm_up, iterations):
        for t in tensors:
            t.fill_(rank + 1)
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()
        if it >= 0:
            seconds.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - cpu_begin)
        wrong += sum(int((t != size * (size + 1) / 2).sum()) for t in tensors)
    dist.barrier()
    dist.destroy_process_group()
    report = {"version": torch.__version__}
    print(json.dumps({"rank": rank, "wrong": wrong, "report": report, "seconds": seconds, "cpu_seconds": cpu}))


if __name__ == "__main__":
    main()

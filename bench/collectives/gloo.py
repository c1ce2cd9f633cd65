"""One rank of the benchmark collectives.py with Gloo, by torch.distributed: collectives.c's arguments and output.

    gloo.py ITERATIONS WARM_UP LIST GROUPS

With two groups an all-reduce, a broadcast and a reduce are halved over them; the others go through one.
SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "goodput"))

from ticks import be_observed, machine  # noqa: E402

OFTEN_BYTES, MOST_OFTEN = 32 << 20, 8  # as in each.c


def pattern(count, start=0):
    """rank_input() of rank 0 in the first iteration, from an element on."""
    return (torch.arange(start, start + count) % 11).float() + 1


class Each:
    """One operation of `count` float32 in all."""

    def __init__(self, name, count, groups):
        self.name, self.count, self.groups = name, count, groups
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.piece = count // self.size
        self.input = torch.empty(self.piece if name == "all-gather" else count)
        room = {"reduce-scatter": self.piece, "all-gather": count, "all-to-all": count}.get(name)
        self.output = self.input if room is None else torch.empty(room)

    def fill(self, step):
        torch.add(pattern(len(self.input)), self.rank + step, out=self.input)

    def halves(self):
        return zip(self.groups, self.input.tensor_split(len(self.groups)))

    def perform(self):
        if self.name == "all-reduce":
            works = [dist.all_reduce(half, group=group, async_op=True) for group, half in self.halves()]
        elif self.name == "broadcast":
            works = [dist.broadcast(half, 0, group=group, async_op=True) for group, half in self.halves()]
        elif self.name == "reduce":
            works = [dist.reduce(half, 0, group=group, async_op=True) for group, half in self.halves()]
        elif self.name == "reduce-scatter":
            works = [dist.reduce_scatter_tensor(self.output, self.input, async_op=True)]
        elif self.name == "all-gather":
            works = [dist.all_gather_into_tensor(self.output, self.input, async_op=True)]
        else:
            works = [dist.all_to_all_single(self.output, self.input, async_op=True)]
        for work in works:
            work.wait()

    def count_wrong(self, step):
        ranks, n, piece = self.size * (self.size - 1) / 2, self.size, self.piece
        if self.name == "reduce-scatter":
            right = (pattern(piece, self.rank * piece) + step) * n + ranks
        elif self.name == "broadcast":
            right = pattern(self.count) + step
        elif self.name in ("all-gather", "all-to-all"):
            start = 0 if self.name == "all-gather" else self.rank * piece
            right = torch.cat([pattern(piece, start) + step + rank for rank in range(n)])
        elif self.name == "reduce" and self.rank:
            return 0
        else:
            right = (pattern(self.count) + step) * n + ranks
        return int((self.output != right).sum())


def cards():
    """(bytes sent, bytes received) by this machine's cards, as in rank.c."""
    lines = pathlib.Path("/proc/net/dev").read_text(encoding="ascii").splitlines()[2:]
    numbers = [line.partition(":")[2].split() for line in lines if line.partition(":")[0].strip() != "lo"]
    return sum(int(of[8]) for of in numbers), sum(int(of[0]) for of in numbers)


def run(each, iterations, warm_up):
    seconds, cpu, busy, ticks, wrong = [], [], 0, 0, 0
    sent = received = 0
    for it in range(-warm_up, iterations):
        step = (it + warm_up) % 5
        each.fill(step)
        moved = cards()
        dist.barrier()
        if it >= 0:
            be_observed(each.rank, dist.barrier)
        before = machine()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        each.perform()
        if it >= 0:
            seconds.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - cpu_begin)
            after = machine()
            busy, ticks = busy + after[0] - before[0], ticks + after[1] - before[1]
        dist.barrier()
        if it >= 0:
            be_observed(each.rank, dist.barrier)
            now = cards()
            sent, received = sent + now[0] - moved[0], received + now[1] - moved[1]
        wrong += each.count_wrong(step)
    version = {"version": "PyTorch " + torch.__version__}
    print(json.dumps({"rank": each.rank, "wrong": wrong, "busy": busy, "ticks": ticks, "sent": sent, "received": received, "report": version,
                      "seconds": seconds, "cpu_seconds": cpu}), flush=True)
    return wrong


def main():
    iterations, warm_up, groups = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    with open(sys.argv[3], encoding="utf-8") as lines:
        entries = [line.split() for line in lines]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rings = [dist.group.WORLD, *(dist.new_group() for _ in range(groups - 1))]
    wrong = 0
    for count, name in entries:
        often = max(1, min(MOST_OFTEN, OFTEN_BYTES // (4 * int(count))))
        wrong += run(Each(name, int(count), rings), iterations * often, warm_up)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()

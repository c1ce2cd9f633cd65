#!/usr/bin/env python3
"""What a bucket of DistributedDataParallel costs beyond its bytes: steps of a model of many buckets of 16 bytes.

    bench/train/overhead.py [--quick] [--json FILE] [--build DIR]

Starts one rank, two ranks that share a machine, and two with a tallyd.  In each rank steps take turns with a hook that
does nothing, with Gloo, with Tally's hook and on its backend; what a way costs is its step less that of the hook that
does nothing, for each bucket.  README.md beside this file says what the columns mean.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAYOUTS = ((1, 0), (2, 0), (2, 1))  # ranks, tallyd
BUCKETS, ELEMENTS = 100, 4
BASE = "nothing"


def measure(arguments):
    """Body of a rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tally
    import tally.torch as hvd

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ParameterList(torch.ones(ELEMENTS) for _ in range(BUCKETS))

        def forward(self, x):
            total = 0
            for part in self.parts:
                total = total + (part * x).sum()
            return total

    def nothing(_, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"backend": dist.new_group(backend="tally")}
    ways = {}
    for way in (BASE, "gloo", "hook", "backend"):
        one = DistributedDataParallel(Model(), process_group=groups.get(way), bucket_cap_mb=ELEMENTS * 4 / 2**20,
                                      gradient_as_bucket_view=True)
        if way == BASE:
            one.register_comm_hook(None, nothing)
        elif way == "hook":
            one.register_comm_hook(hvd.state(), hvd.ddp_hook)
        ways[way] = one

    x = torch.ones(ELEMENTS)
    order = list(ways)
    found = {way: [] for way in ways}  # (seconds, CPU seconds of backward's thread, of the process), of a step
    rounds, steps = (10, 5) if arguments.quick else (30, 10)
    for turn in range(-2, rounds):  # buckets are made anew after the first step
        for i in range(len(order)):
            way = order[(i + turn) % len(order)]
            dist.barrier()
            begin = time.perf_counter(), time.thread_time(), time.process_time()
            for _ in range(steps):
                ways[way](x).backward()
            end = time.perf_counter(), time.thread_time(), time.process_time()
            if turn >= 0:
                found[way].append([(b - a) / steps for a, b in zip(begin, end)])
    for way, one in ways.items():
        for part in one.module.parts:
            if part.grad.tolist() != [(rounds + 2) * steps] * ELEMENTS:
                raise SystemExit("%s: a gradient is wrong: %s" % (way, part.grad))
    if dist.get_rank() == 0:
        report(arguments, found, tally.__version__, torch.__version__)
    dist.barrier()
    ways.clear()
    dist.destroy_process_group()
    hvd.shutdown()


def report(arguments, found, tally_version, torch_version):
    """One line and one JSON object for each way, of rank 0."""
    def of_bucket(way, which, pick):
        return pick(sorted(one[which] for one in found[way])) / BUCKETS * 1e6

    rows = []
    for way in found:
        row = {"bench": "overhead", "ranks": arguments.ranks, "tallyd": arguments.servers, "way": way,
               "buckets": BUCKETS, "bytes": 4 * ELEMENTS, "steps": len(found[way]),
               "tally": tally_version, "torch": torch_version}
        for name, which in (("time", 0), ("thread", 1), ("cpu", 2)):
            for kind, pick in (("us", statistics.median), ("least_us", lambda sorted_times: sorted_times[0])):
                value = of_bucket(way, which, pick)
                base = value if way == BASE else value - of_bucket(BASE, which, pick)
                row["%s_%s" % (name, kind)] = round(base, 2)
        rows.append(row)
        print("%5d %6d  %-8s %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f" % (
            row["ranks"], row["tallyd"], way, row["time_us"], row["time_least_us"], row["thread_us"],
            row["thread_least_us"], row["cpu_us"], row["cpu_least_us"]), flush=True)
    if arguments.json:
        with open(arguments.json, "a") as out:
            for row in rows:
                out.write(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser(description="what a bucket of DistributedDataParallel costs")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--build", metavar="DIR", default=os.path.join(ROOT, "build", "meson"), help="Meson's folder")
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)  # set in the ranks
    parser.add_argument("--servers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks:
        return measure(arguments)

    print("# %d buckets of %d bytes; us for each, of '%s' in all, of others what is more; %d CPUs, load %.1f" % (
        BUCKETS, 4 * ELEMENTS, BASE, os.cpu_count(), os.getloadavg()[0]))
    print("%5s %6s  %-8s %9s %9s %9s %9s %9s %9s" % (
        "ranks", "tallyd", "way", "time", "least", "thread", "least", "cpu", "least"), flush=True)
    if arguments.json:
        open(arguments.json, "w").close()
    environment = dict(os.environ, TALLY_LOG="warning", OMP_NUM_THREADS="1")
    for ranks, servers in LAYOUTS:
        command = [os.path.join(arguments.build, "src", "cli", "tally"), "run", "--no-prefix", "-n", str(ranks),
                   "-k", str(servers), "--tallyd", os.path.join(arguments.build, "src", "tallyd", "tallyd"), "--",
                   sys.executable, os.path.abspath(__file__), "--ranks", str(ranks), "--servers", str(servers)]
        command += ["--quick"] * arguments.quick
        command += ["--json", os.path.abspath(arguments.json)] if arguments.json else []
        subprocess.run(command, check=True, env=environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What a bucket of DistributedDataParallel costs beyond its bytes: steps of a model of many buckets of 16 bytes.

    bench/train/overhead.py [--quick] [--json FILE] [--build DIR]
    bench/train/overhead.py --buckets 10 --bytes 1048576        # with its bytes

Starts one rank, two ranks that share a machine, and two with a tallyd.  In each rank steps take turns with a hook that
does nothing, with Gloo, with Tally's hook and on its backend; what a way costs is its step less that of the hook that
does nothing, for each bucket.  Then other programs keep all cores busy, and the same steps show what the whole job needs of
the cores.  README.md beside this file says what the columns mean.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LAYOUTS = ((1, 0), (2, 0), (2, 1))  # ranks, tallyd
BASE = "nothing"
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(100000):\n        pass\n"


def of_job():
    """Seconds of a processor that all processes have used that were started by the one that started this rank."""
    seconds = 0.0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open("/proc/%s/stat" % pid, encoding="utf-8", errors="replace") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
            if parent == os.getppid():
                for tid in os.listdir("/proc/%s/task" % pid):
                    with open("/proc/%s/task/%s/schedstat" % (pid, tid), encoding="ascii") as stat:
                        seconds += int(stat.read().split()[0]) / 1e9
    return seconds


@contextlib.contextmanager
def busy_cores(here):
    """Programs that compute on all cores meanwhile; `here`: in one rank."""
    cores = range(os.cpu_count() if here else 0)
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in cores]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def measure(arguments):
    """Body of a rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tally
    import tally.torch as hvd

    buckets, elements = arguments.buckets, arguments.bytes // 4

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ParameterList(torch.ones(elements) for _ in range(buckets))

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
        one = DistributedDataParallel(Model(), process_group=groups.get(way), bucket_cap_mb=elements * 4 / 2**20,
                                      gradient_as_bucket_view=True)
        if way == BASE:
            one.register_comm_hook(None, nothing)
        elif way == "hook":
            one.register_comm_hook(hvd.state(), hvd.ddp_hook)
        ways[way] = one

    x = torch.ones(elements)
    order, first = list(ways), dist.get_rank() == 0
    rounds, steps = (10, 5) if arguments.quick else (30, 10)
    taken = 0

    def take_turns(warm_up, clocks):
        """{way: [what a step has added to each clock]}.  clocks(begins): what they say before the steps, or behind them."""
        nonlocal taken
        found = {way: [] for way in ways}
        for turn in range(-warm_up, rounds):
            for i in range(len(order)):
                way = order[(i + turn) % len(order)]
                dist.barrier()
                begin = clocks(True)
                for _ in range(steps):
                    ways[way](x).backward()
                end = clocks(False)
                if turn >= 0:
                    found[way].append([(b - a) / steps for a, b in zip(begin, end)])
            taken += steps
        return found

    def whole(begins):
        """The clock is read next to the steps: to read the job's processor time takes a while."""
        dist.barrier()  # all ranks' steps, and no others
        if not begins:
            clock = time.perf_counter()
        job = of_job() if first else 0.0
        if begins:
            dist.barrier()
            clock = time.perf_counter()
        return clock, job

    # Buckets are made anew after the first step.
    found = take_turns(2, lambda _: (time.perf_counter(), time.thread_time(), time.process_time()))
    with busy_cores(first):
        crowded = take_turns(1, whole)
    for way, one in ways.items():
        for part in one.module.parts:
            if not torch.equal(part.grad, torch.full_like(part.grad, taken)):
                raise SystemExit("%s: a gradient is wrong: %s" % (way, part.grad))
    if first:
        report(arguments, found, crowded, tally.__version__, torch.__version__)
    dist.barrier()
    ways.clear()
    dist.destroy_process_group()
    hvd.shutdown()


def report(arguments, found, crowded, tally_version, torch_version):
    """One line and one JSON object for each way, of rank 0."""
    def of_bucket(way, which, pick, blocks=found):
        return pick(sorted(one[which] for one in blocks[way])) / arguments.buckets * 1e6

    rows = []
    for way in found:
        row = {"bench": "overhead", "ranks": arguments.ranks, "tallyd": arguments.servers, "way": way,
               "buckets": arguments.buckets, "bytes": arguments.bytes, "steps": len(found[way]),
               "tally": tally_version, "torch": torch_version}
        for name, which in (("time", 0), ("thread", 1), ("cpu", 2)):
            for kind, pick in (("us", statistics.median), ("least_us", lambda sorted_times: sorted_times[0])):
                value = of_bucket(way, which, pick)
                base = value if way == BASE else value - of_bucket(BASE, which, pick)
                row["%s_%s" % (name, kind)] = round(base, 2)
        job = {one: of_bucket(one, 1, statistics.median, crowded) for one in (way, "gloo")}
        row |= {"busy_time_us": round(of_bucket(way, 0, statistics.median, crowded), 2), "busy_job_cpu_us": round(job[way], 2),
                "busy_job_cpu_of_gloo": round(job[way] / job["gloo"], 3)}
        rows.append(row)
        print("%5d %6d  %-8s %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %9.1f %7.2f" % (
            row["ranks"], row["tallyd"], way, row["time_us"], row["time_least_us"], row["thread_us"],
            row["thread_least_us"], row["cpu_us"], row["cpu_least_us"], row["busy_time_us"], row["busy_job_cpu_us"],
            row["busy_job_cpu_of_gloo"]), flush=True)
    if arguments.json:
        with open(arguments.json, "a") as out:
            for row in rows:
                out.write(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser(description="what a bucket of DistributedDataParallel costs")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    parser.add_argument("--buckets", type=int, default=100, help="of a step (100)")
    parser.add_argument("--bytes", type=int, default=16, help="of a bucket (16)")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--build", metavar="DIR", default=os.path.join(ROOT, "build", "meson"), help="Meson's folder")
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)  # set in the ranks
    parser.add_argument("--servers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.buckets < 1 or arguments.bytes < 4 or arguments.bytes % 4:
        parser.error("a bucket of 4 bytes is the least, and all are whole numbers of these")
    if arguments.ranks:
        return measure(arguments)

    print("# %d buckets of %d bytes; us for each, of '%s' in all, of others what is more; with all cores busy all of each; "
          "%d CPUs, load %.1f" % (arguments.buckets, arguments.bytes, BASE, os.cpu_count(), os.getloadavg()[0]))
    print("%5s %6s  %-8s %9s %9s %9s %9s %9s %9s %9s %9s %7s" % (
        "ranks", "tallyd", "way", "time", "least", "thread", "least", "cpu", "least", "busy time", "job cpu", "of gloo"), flush=True)
    if arguments.json:
        open(arguments.json, "w").close()
    environment = dict(os.environ, TALLY_LOG="warning", OMP_NUM_THREADS="1")
    for ranks, servers in LAYOUTS:
        command = [os.path.join(arguments.build, "src", "cli", "tally"), "run", "--no-prefix", "-n", str(ranks),
                   "-k", str(servers), "--tallyd", os.path.join(arguments.build, "src", "tallyd", "tallyd"), "--",
                   sys.executable, os.path.abspath(__file__), "--ranks", str(ranks), "--servers", str(servers)]
        command += ["--buckets", str(arguments.buckets), "--bytes", str(arguments.bytes)] + ["--quick"] * arguments.quick
        command += ["--json", os.path.abspath(arguments.json)] if arguments.json else []
        subprocess.run(command, check=True, env=environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())

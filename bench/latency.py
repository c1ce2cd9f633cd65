#!/usr/bin/env python3
"""Latency of a 4-byte push_pull between two workers beside that of Gloo's all-reduce in the same processes.

    bench/latency.py [--quick] [--json FILE] [--build DIR]

Starts two ranks with `tally run` and without or with `tallyd`; in each, blocks of calls through Tally's C API,
through its Python package and through torch.distributed with Gloo take turns, so that a disturbance meets all
alike.  A call's time is that of the slower rank.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LAYOUTS = ((1, 0), (2, 1), (2, 2))  # machines, tallyd


def measure(arguments):
    """Body of a rank."""
    import torch
    import torch.distributed as dist

    import tally
    import tally.torch as hvd
    from tally import _job

    hvd.init()
    dist.init_process_group("gloo")
    library = ctypes.CDLL(os.path.join(arguments.build, "bench", "libbench_latency.so"))
    library.bench_latency.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_double)]

    def through_c(count):
        times = (ctypes.c_double * count)()
        status = library.bench_latency(_job.own.comm, count, times)
        if status:
            raise SystemExit("bench_latency: %s" % os.strerror(-status))
        return list(times)

    def timed(call):
        def run(count):
            times = []
            for _ in range(count):
                tensor = torch.ones(1)
                begin = time.perf_counter()
                call(tensor)
                times.append(time.perf_counter() - begin)
                if tensor.item() != 2:
                    raise SystemExit("a sum is wrong: %g" % tensor.item())
            return times
        return run

    ways = (
        ("tally, C", through_c),
        ("tally.torch.allreduce_", timed(lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name="latency"))),
        ("gloo, torch.distributed", timed(dist.all_reduce)),
    )
    rounds, length, warm = (5, 150, 20) if arguments.quick else (30, 400, 50)
    times = {name: [] for name, _ in ways}
    for turn in range(rounds):
        for i in range(len(ways)):
            name, run = ways[(i + turn) % len(ways)]
            dist.barrier()
            times[name] += run(length + warm)[warm:]
    gathered = [None, None] if dist.get_rank() == 0 else None
    dist.gather_object(times, gathered)
    if gathered:
        report(arguments, [name for name, _ in ways], gathered, tally.__version__, torch.__version__)
    dist.destroy_process_group()
    hvd.shutdown()


def report(arguments, names, gathered, tally_version, torch_version):
    """One line and one JSON object for each way."""
    rows = []
    for name in names:
        slower = sorted(max(pair) * 1e6 for pair in zip(*(times[name] for times in gathered)))
        rows.append({
            "bench": "latency", "ranks": 2, "machines": arguments.machines, "tallyd": arguments.servers, "call": name,
            "bytes": 4, "median_us": round(statistics.median(slower), 2), "least_us": round(slower[0], 2),
            "p99_us": round(slower[int(len(slower) * 0.99)], 2), "calls": len(slower), "tally": tally_version,
            "torch": torch_version})
    for row in rows:
        row["gloo_ratio"] = round(row["median_us"] / rows[-1]["median_us"], 4)
        print("%8d %7d  %-26s %10.1f %10.1f %10.1f %8.2f %8d" % (
            row["machines"], row["tallyd"], row["call"], row["median_us"], row["p99_us"], row["least_us"],
            row["gloo_ratio"], row["calls"]), flush=True)
    if arguments.json:
        with open(arguments.json, "a") as out:
            for row in rows:
                out.write(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser(description="latency of 4 bytes between two workers, beside Gloo's")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--build", metavar="DIR", default=os.path.join(ROOT, "build", "meson"), help="Meson's folder")
    parser.add_argument("--machines", type=int, help=argparse.SUPPRESS)  # set in the ranks
    parser.add_argument("--servers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.machines:
        return measure(arguments)

    import torch
    print("# 4 bytes, 2 ranks on this machine; Tally, Gloo of PyTorch %s; Linux %s, %d CPUs, load %.1f" % (
        torch.__version__, os.uname().release, os.cpu_count(), os.getloadavg()[0]))
    print("%8s %7s  %-26s %10s %10s %10s %8s %8s" % (
        "machines", "tallyd", "call", "median us", "p99 us", "least us", "of Gloo", "calls"), flush=True)
    if arguments.json:
        open(arguments.json, "w").close()
    environment = dict(os.environ, TALLY_LOG="warning", OMP_NUM_THREADS="1")
    for machines, servers in LAYOUTS:
        command = [os.path.join(arguments.build, "src", "cli", "tally"), "run", "--no-prefix", "-n", "2",
                   "-k", str(servers), "--tallyd", os.path.join(arguments.build, "src", "tallyd", "tallyd"), "--",
                   sys.executable, os.path.abspath(__file__), "--build", os.path.abspath(arguments.build),
                   "--machines", str(machines), "--servers", str(servers)]
        command += ["--quick"] * arguments.quick
        command += ["--json", os.path.abspath(arguments.json)] if arguments.json else []
        subprocess.run(command, check=True, env=environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())

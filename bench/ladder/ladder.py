#!/usr/bin/env python3
"""What each way to hand gradients to the service on the same machine brings: goodput rung by rung, in one run.

    bench/ladder/ladder.py [--quick] [--json FILE] [--ranks 2] [--bytes 64M] [--tensors 16] [--rounds 5] [--build DIR]

The ranks share this machine, and the service in the first of them sums for all.  Each rung is the one before and one
thing more:

    tcp       headers and payloads over loopback (TALLY_SHM=0), tensors off a page's beginning
    + shm     payloads read where they lie, or in shared memory
    + pages   tensors page aligned and in huge pages
    + pool    tensors from tally_alloc(): the ranks of a machine sum them among themselves, without the service

README.md beside this says more.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What is compared below the pool is the way to the service: ranks that sum among themselves have none.
RUNGS = [("tcp", "heap", {"TALLY_SHM": "0", "TALLY_LOCAL": "off"}), ("+ shm", "heap", {"TALLY_LOCAL": "off"}),
         ("+ pages", "pages", {"TALLY_LOCAL": "off"}), ("+ pool", "pool", {})]
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text):
    """Bytes from "64M"."""
    return int(float(text[:-1]) * UNITS[text[-1].upper()]) if text[-1].upper() in UNITS else int(text)


def known_settings(build):
    """What `tally params` lists."""
    return subprocess.run([os.path.join(build, "src", "cli", "tally"), "params"], capture_output=True, text=True,
                          check=True).stdout


def climb(arguments, memory, settings):
    """One job on one rung: its row, or None where this Tally has no such rung."""
    known = known_settings(arguments.build)
    environment = dict(os.environ, **{name: value for name, value in settings.items() if name in known})
    environment.setdefault("TALLY_LOG", "warning")
    done = subprocess.run([os.path.join(arguments.build, "src", "cli", "tally"), "run", "--no-prefix", "-n",
                           str(arguments.ranks), "--", os.path.join(arguments.build, "bench", "ladder", "ladder"), memory,
                           str(arguments.bytes), str(arguments.tensors), str(arguments.seconds)],
                          env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode and "no tally_alloc" in done.stderr:
        return None
    if done.returncode or not rows:
        sys.exit("a job ended with status %d:\n%s%s" % (done.returncode, done.stdout, done.stderr))
    return json.loads(rows[0])


def main():
    parser = argparse.ArgumentParser(description="goodput to the service on the same machine, rung by rung")
    parser.add_argument("--quick", action="store_true", help="once, 16 MB, for a second a rung")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (%(default)s)")
    parser.add_argument("--bytes", type=size, default=size("64M"), help="gradients of a rank in a step (64M)")
    parser.add_argument("--tensors", type=int, default=16, help="of how many tensors they are (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2, help="for one job (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="jobs on each rung, in turn (%(default)s)")
    parser.add_argument("--build", metavar="DIR", default=os.path.join(ROOT, "build", "meson"), help="Meson's folder")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.bytes, arguments.seconds, arguments.rounds = size("16M"), 1, 1

    rungs = list(RUNGS)
    rows = {name: [] for name, _, _ in rungs}
    print("# %d ranks on this machine, %.0f MB of gradients in %d tensors, %d rounds; %d CPUs, load %.1f" % (
        arguments.ranks, arguments.bytes / 2**20, arguments.tensors, arguments.rounds, os.cpu_count(),
        os.getloadavg()[0]), flush=True)
    for _ in range(arguments.rounds):
        for rung in list(rungs):
            name, memory, settings = rung
            row = climb(arguments, memory, settings)
            if row is None:
                print("# %s: left out, this library has no tally_alloc()" % name, flush=True)
                rungs.remove(rung)
            else:
                rows[name].append(row)

    print("%-10s %12s %12s %14s %10s %7s" % ("rung", "step ms", "least ms", "goodput Gbit/s", "of tcp", "wrong"))
    first, lines = None, ""
    for name, _, settings in rungs:
        jobs = rows[name]
        seconds = statistics.median(job["time_s"] for job in jobs)
        goodput = jobs[0]["bytes"] * 8 / seconds / 1e9
        first = first or goodput
        row = dict(jobs[0], bench="ladder", rung=name, settings=settings, time_s=seconds,
                   least_s=min(job["least_s"] for job in jobs), jobs_s=[job["time_s"] for job in jobs],
                   goodput_gbit_s=round(goodput, 3), of_tcp=round(goodput / first, 3),
                   wrong=sum(job["wrong"] for job in jobs))
        print("%-10s %12.2f %12.2f %14.2f %10.2f %7d" % (name, seconds * 1e3, row["least_s"] * 1e3, goodput,
                                                        row["of_tcp"], row["wrong"]))
        lines += json.dumps(row) + "\n"
    if arguments.json:
        with open(arguments.json, "w") as out:
            out.write(lines)
    return any(json.loads(line)["wrong"] for line in lines.splitlines())


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""JAX's collectives and a training step over Tally, beside Gloo: the same script in the same layout, in turn.

    bench/jax/collectives.py [--json FILE]                    # one machine with 2 and 4 processes; 4 + 0 and 4 + 4
    bench/jax/collectives.py --quick                          # small, for a few seconds
    bench/jax/collectives.py --layouts 4+4 --rate 500mbit --sizes 1M 16M

README.md beside this file says what the columns mean.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "goodput"))

import optimum  # noqa: E402
from systems import BUILD, Host, Lab, LabError, built, why_not  # noqa: E402

OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "train_step"]
PATIENCE_S = 900
# What a TCP segment of Ethernet carries of what is on the wire, headers and preamble counted.
PAYLOAD = 1448 / 1538


def parse_size(text):
    found = re.fullmatch(r"(\d+)([KM]?)", text)
    if not found:
        raise argparse.ArgumentTypeError("%r is no size such as 4K or 16M" % text)
    return int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]]


def parse_layout(text):
    found = re.fullmatch(r"(local|\d+\+)(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError("%r is no layout such as local4 or 4+4" % text)
    return text


def command(way, work):
    return [sys.executable, str(HERE / "rank.py"), way, json.dumps(work)]


def environment(way):
    """Computing has one thread a process."""
    more = {"PYTHONPATH": str(BUILD / "python"), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    return {**more, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}


def find_rows(output):
    found = re.search(r"ROWS (\[.*\])", output)
    if not found:
        raise LabError("no result:\n" + output[-4000:])
    return json.loads(found[1])


def run_local(way, ranks, work):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TALLY_", "JAX_"))}
    done = subprocess.run([built("bin/tally"), "run", "-n", str(ranks), "--no-prefix", "--", *command(way, work)],
                          env={**env, **environment(way)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise LabError("%s ends with status %d:\n%s" % (way, done.returncode, done.stdout[-4000:]))
    return find_rows(done.stdout)


def run_cluster(lab, way, workers, services, work):
    job = lab.job(command(way, work), workers, services if way == "tally" else [], built("bin/tallyd"),
                  env=environment(way), timeout_s=PATIENCE_S)
    if not job.ok:
        raise LabError(str(job)[-6000:])
    return find_rows("\n".join(one.output for one in job.ranks))


def least_us(operation, size, n, k, rate):
    """What the cards take at least, by the rate of their payload; None on one machine."""
    if rate is None:
        return None
    bandwidth = rate / 8 * PAYLOAD
    if operation in ("reduce_scatter", "all_gather"):
        return 1e6 * size * (n - 1) / n / bandwidth
    return 1e6 * optimum.optimum([bandwidth] * n, [bandwidth] * k, size) if operation == "all_reduce" else None


def show(row):
    us = row["time_us"]
    optimal = "%6.1f%%" % (100 * row["optimum_us"] / us) if row.get("optimum_us") else "      -"
    faster = "%6.2f" % row["speedup"] if row.get("speedup") else "     -"
    print("%-8s %-6s %-15s %9d KB %10.0f us %10.0f us %s %s%s" % (
        row["layout"], row["way"], row["operation"], row["bytes"] >> 10, us, row["least_us"], optimal, faster,
        "  WRONG" if row["wrong"] else ""), flush=True)


def measure(layout, arguments, work, out):
    """Both ways, in turn; rows of the better of `--turns` runs of each operation."""
    local = layout.startswith("local")
    n, k = (int(layout[5:]), 0) if local else map(int, layout.split("+"))
    workers, services = ["w%d" % i for i in range(n)], ["c%d" % i for i in range(k)]
    best = {}
    lab = None if local else Lab([Host(host) for host in workers + services], rate=arguments.rate)
    with lab or open(os.devnull):
        rate = None if local else lab.rate("w0")
        for _ in range(arguments.turns):
            for way in arguments.ways:
                rows = run_local(way, n, work) if local else run_cluster(lab, way, workers, services, work)
                for row in rows:
                    key = row["operation"], row["bytes"], way
                    if key not in best or row["time_us"] < best[key]["time_us"] or row["wrong"]:
                        best[key] = row
    bad = 0
    for (operation, size, way), row in best.items():
        gloo = best.get((operation, size, "gloo"))
        row |= {"bench": "jax", "layout": layout, "ranks": n, "tallyd": k if way == "tally" else 0, "way": way,
                "rate": None if local else arguments.rate, "optimum_us": least_us(operation, size, n, k, rate),
                "speedup": gloo["time_us"] / row["time_us"] if way == "tally" and gloo else None}
        bad += row["wrong"] != 0
        show(row)
        out.write(json.dumps(row) + "\n")
    return bad


def main():
    parser = argparse.ArgumentParser(description="JAX's collectives over Tally, beside Gloo")
    parser.add_argument("--quick", action="store_true", help="one machine and 2 + 1, small, for a few seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--layouts", nargs="+", type=parse_layout, metavar="LAYOUT",
                        help="localN: N processes on this machine; N+K: N workers and K CPU machines on the emulated cluster")
    parser.add_argument("--sizes", nargs="+", type=parse_size, help="bytes of the array that is reduced or results")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--ways", nargs="+", choices=("tally", "gloo"), default=["gloo", "tally"])
    parser.add_argument("--rate", default="1gbit", help="of each card on the emulated cluster")
    parser.add_argument("--seconds", type=float, help="for each operation and size")
    parser.add_argument("--turns", type=int, help="runs of each way; the better counts")
    arguments = parser.parse_args()
    quick = arguments.quick
    reason = why_not()
    layouts = arguments.layouts or (["local2", "2+1"] if quick else ["local2", "local4", "4+0", "4+4"])
    if reason and not arguments.layouts:
        print("no emulated cluster: %s" % reason)
        layouts = [one for one in layouts if one.startswith("local")]
    work = {"operations": arguments.operations, "seconds": arguments.seconds or (0.5 if quick else 4),
            "sizes": arguments.sizes or ([1 << 20] if quick else [1 << 20, 4 << 20, 16 << 20, 64 << 20]),
            "least": 4 if quick else 10, "width": 256 if quick else 1024, "batch": 16}
    arguments.turns = arguments.turns or (1 if quick else 3)
    print("%-8s %-6s %-15s %12s %13s %13s %7s %s" % ("layout", "way", "operation", "bytes", "median", "least", "optimum",
                                                    "x Gloo"))
    bad = 0
    with open(arguments.json or os.devnull, "w") as out:
        for layout in layouts:
            try:
                bad += measure(layout, arguments, work, out)
            except LabError as error:
                sys.exit("%s: %s" % (layout, error))
    if bad:
        sys.exit("%d rows are wrong" % bad)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""All-gather, broadcast, reduce-scatter and reduce among the ranks of one machine, beside a loop that moves the same bytes
between the same processes, and beside Gloo.

    bench/local/moves.py [--quick] [--json FILE] [--ranks 2,4] [--from 1M] [--to 64M] [--seconds 1] [--rounds 3]

README.md beside this says what the ways and columns are.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from sweep import HERE, add_arguments, close, ranks_of, rows_of, say_where, shorten, tail

OPERATIONS = ("all-gather", "broadcast", "reduce-scatter", "reduce")
LOOPS = {"heap": "kernel", "pool": "copy"}  # the loop in the same kind of memory
MASTER_PORT = 29531


def moved(arguments, ranks):
    """The rows of moves.c."""
    program = os.path.join(arguments.build, "bench", "local", "moves")
    return rows_of(ranks_of(arguments.build, ranks, program, *tail(arguments)), dict(os.environ, TALLY_LOG="warning"))


def by_gloo(arguments, ranks):
    """The same of Gloo: each time is the slowest rank's, from behind a barrier."""
    sizes = [arguments.first << 2 * i for i in range(16) if arguments.first << 2 * i <= arguments.last]
    cases = [(operation, size) for operation in OPERATIONS for size in sizes]
    program = os.path.join(HERE, os.pardir, "collectives", "gloo.py")
    with tempfile.NamedTemporaryFile("w", prefix="moves-", suffix=".list") as listing:
        # Gloo wants equal pieces.
        listing.writelines("%d %s\n" % (size // 4 // ranks * ranks, operation) for operation, size in cases)
        listing.flush()
        running = [subprocess.Popen(
            [sys.executable, program, str(arguments.gloo_iterations), "1", listing.name, "1"],
            env=dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=str(MASTER_PORT), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE, text=True) for rank in range(ranks)]
        told = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        sys.exit("Gloo has failed")
    lines = [[json.loads(line) for line in each.splitlines() if line.startswith("{")] for each in told]
    for (operation, size), of in zip(cases, zip(*lines)):
        seconds = [max(times) for times in zip(*(rank["seconds"] for rank in of))]
        yield {"bench": "moves", "ranks": ranks, "operation": operation, "bytes": size, "way": "gloo",
               "median_us": statistics.median(seconds) * 1e6, "least_us": min(seconds) * 1e6, "samples": len(seconds),
               "wrong": sum(rank["wrong"] for rank in of)}


def compare(rows):
    """Write into Tally's rows how they stand to the loop and to Gloo."""
    found = {(row["operation"], row["bytes"], row["way"]): row for row in rows}
    for (operation, size, way), row in found.items():
        if way in LOOPS:
            loop, gloo = found[operation, size, LOOPS[way]], found.get((operation, size, "gloo"))
            for which in ("median", "least"):
                row["of_loop" if which == "median" else "least_of_loop"] = row[which + "_us"] / loop[which + "_us"]
            row["over_gloo"] = gloo["median_us"] / row["median_us"] if gloo else float("nan")
    return found


def show(ranks, found):
    print("\n# %d ranks" % ranks)
    print("%-15s %9s | %10s | %10s %10s %6s %6s %7s | %10s %10s %6s %6s %7s | %7s | %5s" % (
        "operation", "bytes", "gloo us", "kernel us", "heap us", "/ loop", "least", "x gloo", "copy us", "pool us", "/ loop",
        "least", "x gloo", "ping ns", "wrong"))
    for operation, size in dict.fromkeys(key[:2] for key in found):
        gloo, line = found.get((operation, size, "gloo")), ""
        for way, loop in LOOPS.items():
            row = found[operation, size, way]
            line += " | %10.1f %10.1f %6.2f %6.2f %7.2f" % (
                found[operation, size, loop]["median_us"], row["median_us"], row["of_loop"], row["least_of_loop"],
                row["over_gloo"])
        wrong = sum(row["wrong"] for (what, count, _), row in found.items() if (what, count) == (operation, size))
        ping = max(row.get("ping_ns", 0) for (what, count, _), row in found.items() if (what, count) == (operation, size))
        print("%-15s %9d | %10.1f%s | %7.0f | %5d" % (
            operation, size, gloo["median_us"] if gloo else float("nan"), line, ping, wrong), flush=True)


def main():
    parser = argparse.ArgumentParser(description="collectives on one machine, beside a loop and Gloo")
    add_arguments(parser, first="1M", last="64M", seconds=1, rounds=3, quick="to 4 MB, shortly")
    parser.add_argument("--gloo-iterations", type=int, default=4, help="of 32 MB and more; smaller ones up to eight times as "
                        "often; 0: without Gloo (%(default)s)")
    arguments = parser.parse_args()
    shorten(arguments, seconds=0.2, rounds=1)

    say_where("float32")
    everything = []
    for ranks in map(int, arguments.ranks.split(",")):
        rows = [*moved(arguments, ranks), *(by_gloo(arguments, ranks) if arguments.gloo_iterations else ())]
        show(ranks, compare(rows))
        everything += rows
    return close(everything, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

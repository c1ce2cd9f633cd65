#!/usr/bin/env python3
"""All-reduce among the ranks of one machine, beside OpenMPI (in C) and Gloo (in Python), in one run.

    bench/local/local.py [--quick] [--json FILE] [--ranks 2,4] [--from 4] [--to 256M] [--only c,python]
                         [--seconds 1] [--rounds 5] [--no-step] [--build DIR]

Both libraries are called in the same processes, in turns: C against C (local.c), Python against Python (rank.py).
README.md beside this says what the modes, ways and columns are.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import os
import shutil
import statistics
import sys

from sweep import HERE, add_arguments, close, ranks_of, rows_of, say_where, shorten, tail

# OpenMPI's own choice, and algorithms that its tuned component has: the fastest counts, size by size.
ALGORITHMS = {"its choice": None, "ring": 4, "rabenseifner": 6}
PEERS = {"C": "openmpi", "Python": "gloo"}


def mpirun(ranks, algorithm):
    # Each rank on a core, for both: else those that sleep and are woken share one, while others keep the other busy.
    command = ["mpirun", "--oversubscribe", "--map-by", "core", "--bind-to", "core:overload-allowed", "-n", str(ranks)]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if algorithm is not None:
        command += ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm",
                    str(algorithm)]
    return command


def in_c(arguments, ranks, environment):
    """The rows of local.c, and in how many jobs they were measured."""
    program = os.path.join(arguments.build, "bench", "local", "local")
    command = [program, *tail(arguments)]
    if not shutil.which("mpirun"):
        print("# OpenMPI is left out: there is no mpirun (openmpi-bin, libopenmpi-dev)", flush=True)
        return rows_of(ranks_of(arguments.build, ranks, *command), environment)
    rows = []
    for name, algorithm in list(ALGORITHMS.items())[:1 if arguments.quick else None]:
        for row in rows_of([*mpirun(ranks, algorithm), *command], environment):
            if row["way"] == "mpi":
                row.update(way="openmpi", variant=name)
            rows.append(row)
    return rows


def in_python(arguments, ranks, environment):
    command = [sys.executable, os.path.join(HERE, "rank.py"), *tail(arguments), str(int(not arguments.no_step))]
    return rows_of(ranks_of(arguments.build, ranks, *command), environment)


def together(rows):
    """Of rows of the same case from several jobs one: a peer's fastest variant, Tally's median over jobs."""
    cases = {}
    for row in rows:
        key = (row.get("what", "tensor"), row["bytes"], row["mode"], row["way"])
        cases.setdefault(key, []).append(row)
    merged = {}
    for key, same in cases.items():
        best = min(same, key=lambda row: row["median_us"])
        row = dict(best, least_us=min(row["least_us"] for row in same), wrong=sum(row["wrong"] for row in same),
                   samples=sum(row["samples"] for row in same), what=key[0])
        if key[3] in ("heap", "pool"):
            row["median_us"] = statistics.median(row["median_us"] for row in same)
        merged[key] = row
    for (what, count, mode, way), row in merged.items():
        peer = merged.get((what, count, mode, PEERS[row["language"]]))
        if peer and way in ("heap", "pool"):
            row["times"] = round(peer["median_us"] / row["median_us"], 3)
            row["least_times"] = round(peer["least_us"] / row["least_us"], 3)
    return list(merged.values())


def show(language, ranks, rows):
    print("\n# %s, %d ranks" % (language, ranks))
    print("%-20s %-8s | %12s %12s | %12s %8s %8s | %12s %8s %8s | %5s" % (
        "bytes", "mode", PEERS[language], "least us", "heap us", "x", "x least", "pool us", "x", "x least", "wrong"))
    cases = {}
    for row in rows:
        cases.setdefault((row["what"], row["bytes"], row["mode"]), {})[row["way"]] = row
    for (what, count, mode), ways in cases.items():
        peer, line = ways.get(PEERS[language], {}), ""
        for way in ("heap", "pool"):
            row = ways[way]
            line += " | %12.2f %8.2f %8.2f" % (row["median_us"], row.get("times", float("nan")),
                                               row.get("least_times", float("nan")))
        print("%-20s %-8s | %12.2f %12.2f%s | %5d" % (
            count if what == "tensor" else what, mode, peer.get("median_us", float("nan")),
            peer.get("least_us", float("nan")), line, sum(row["wrong"] for row in ways.values())), flush=True)


def main():
    parser = argparse.ArgumentParser(description="all-reduce on one machine, beside OpenMPI and Gloo")
    add_arguments(parser, first="4", last="256M", seconds=1, rounds=5, quick="to 4 MB, shortly, OpenMPI's own choice alone")
    parser.add_argument("--only", default="c,python", help="languages (%(default)s)")
    parser.add_argument("--no-step", action="store_true", help="without the step over a model's gradients")
    arguments = parser.parse_args()
    shorten(arguments, seconds=0.1, rounds=2)

    environment = dict(os.environ, TALLY_LOG="warning", OMP_NUM_THREADS="1")
    say_where("float32, in place")
    everything = []
    for ranks in map(int, arguments.ranks.split(",")):
        for language, measure in (("C", in_c), ("Python", in_python)):
            if language.lower() in arguments.only.lower().split(","):
                rows = together(measure(arguments, ranks, environment))
                show(language, ranks, rows)
                everything += rows
    return close(everything, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

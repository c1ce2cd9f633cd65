#!/usr/bin/env python3
"""All-reduce among the ranks of one machine, beside OpenMPI (in C) and Gloo (in Python), in one run.

    bench/local/local.py [--quick] [--json FILE] [--ranks 2,4] [--from 4] [--to 256M] [--only c,python]
                         [--seconds 1] [--rounds 5] [--no-step] [--build DIR]

Both libraries are called in the same processes, in turns: C against C (local.c), Python against Python (rank.py).
README.md beside this says what the modes, ways and columns are.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# OpenMPI's own choice, and algorithms that its tuned component has: the fastest counts, size by size.
ALGORITHMS = {"its choice": None, "ring": 4, "rabenseifner": 6}
PEERS = {"C": "openmpi", "Python": "gloo"}


def size(text):
    """Bytes from "64M"."""
    return int(float(text[:-1]) * UNITS[text[-1].upper()]) if text[-1].upper() in UNITS else int(text)


def mpirun(ranks, algorithm):
    # Each rank on a core, for both: else those that sleep and are woken share one, while others keep the other busy.
    command = ["mpirun", "--oversubscribe", "--map-by", "core", "--bind-to", "core:overload-allowed", "-n", str(ranks)]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if algorithm is not None:
        command += ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm",
                    str(algorithm)]
    return command


def rows_of(command, environment):
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        sys.exit("%s\nended with status %d:\n%s%s" % (" ".join(command), done.returncode, done.stdout, done.stderr))
    return rows


def in_c(arguments, ranks, environment):
    """The rows of local.c, and in how many jobs they were measured."""
    program = os.path.join(arguments.build, "bench", "local", "local")
    tail = [program, *map(str, (arguments.first, arguments.last, arguments.seconds, arguments.rounds))]
    if not shutil.which("mpirun"):
        print("# OpenMPI is left out: there is no mpirun (openmpi-bin, libopenmpi-dev)", flush=True)
        tally = os.path.join(arguments.build, "src", "cli", "tally")
        return rows_of([tally, "run", "--no-prefix", "-n", str(ranks), "--", *tail], environment)
    rows = []
    for name, algorithm in list(ALGORITHMS.items())[:1 if arguments.quick else None]:
        for row in rows_of([*mpirun(ranks, algorithm), *tail], environment):
            if row["way"] == "mpi":
                row.update(way="openmpi", variant=name)
            rows.append(row)
    return rows


def in_python(arguments, ranks, environment):
    tally = os.path.join(arguments.build, "src", "cli", "tally")
    return rows_of([tally, "run", "--no-prefix", "-n", str(ranks), "--", sys.executable, os.path.join(HERE, "rank.py"),
                    *map(str, (arguments.first, arguments.last, arguments.seconds, arguments.rounds,
                               int(not arguments.no_step)))], environment)


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
    parser.add_argument("--quick", action="store_true", help="to 4 MB, shortly, OpenMPI's own choice alone")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--from", dest="first", type=size, default=4, help="bytes of the first size (%(default)s)")
    parser.add_argument("--to", dest="last", type=size, default=size("256M"), help="of the last (256M); each is 4 times "
                        "the one before")
    parser.add_argument("--only", default="c,python", help="languages (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1, help="for one way, size and mode in a job (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="in how many turns (%(default)s)")
    parser.add_argument("--no-step", action="store_true", help="without the step over a model's gradients")
    parser.add_argument("--build", metavar="DIR", default=os.path.join(ROOT, "build", "meson"), help="Meson's folder")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.last, arguments.seconds, arguments.rounds = min(arguments.last, size("4M")), 0.1, 2

    environment = dict(os.environ, TALLY_LOG="warning", OMP_NUM_THREADS="1")
    print("# float32, in place; Linux %s, %d CPUs, load %.1f" % (os.uname().release, os.cpu_count(), os.getloadavg()[0]))
    everything = []
    for ranks in map(int, arguments.ranks.split(",")):
        for language, measure in (("C", in_c), ("Python", in_python)):
            if language.lower() in arguments.only.lower().split(","):
                rows = together(measure(arguments, ranks, environment))
                show(language, ranks, rows)
                everything += rows
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            for row in everything:
                out.write(json.dumps(row) + "\n")
    return any(row["wrong"] for row in everything)


if __name__ == "__main__":
    sys.exit(main())

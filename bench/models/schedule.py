#!/usr/bin/env python3
"""Training steps of seven models over emulated network cards, by each way to order their gradients, beside the ideal.

    bench/models/schedule.py [--json FILE] [--plot FILE]        # 3 models, 10 and 25 Gbit/s, 4 + 0 and 4 + 4, 64 MB
    bench/models/schedule.py --quick                            # the same with 8 MB and fewer steps: minutes
    bench/models/schedule.py --full                             # 7 models, 1 to 100 Gbit/s: hours
    bench/models/schedule.py --models vgg16 --equivalents 10 -k 4 --systems cross ddp --bytes 128M
    bench/models/schedule.py --models vgg16 --equivalents 10 -k 4 --timeline FIGURE.png

README.md beside this file says what is compared and what the columns mean.  Needs root (test/lab/lab.py says what else) and
an interpreter with PyTorch.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(1, str(HERE.parent / "goodput"))

import goodput  # noqa: E402
import ideal  # noqa: E402
import optimum  # noqa: E402
import pictures  # noqa: E402
import profiles  # noqa: E402
import stream  # noqa: E402
import systems  # noqa: E402
from systems import Lab, LabError, why_not  # noqa: E402

P3_BYTES, WHOLE_BYTES = 160 << 10, 64 << 20
# {system: Tally's settings, None for another system}.  Those with the same settings take turns within one job.
SYSTEMS = {
    "ddp": None,
    "fifo": {},
    "whole": {"TALLY_PART_BYTES": str(WHOLE_BYTES)},
    "p3": {"TALLY_PART_BYTES": str(P3_BYTES), "TALLY_CREDIT_BYTES": str(P3_BYTES)},
    "dear": {},
    "priority": {},
    "cross": {},
    "optimizer": {},
    "cross_barrier": {},
    "tensor": {},
    "bfloat16": {},
    "lazy": {},
    "csc": {},
}
GRADIENTFLOW = ["tensor", "bfloat16", "lazy", "csc"]  # those of bench/gradientflow alone
ORDERS = [name for name in SYSTEMS if name not in GRADIENTFLOW]
QUICK_MODELS = ["vgg16", "gpt2", "transformer"]
EQUIVALENTS, ALL_EQUIVALENTS = [10, 25], [1, 10, 25, 40, 100]


def cells_of(arguments):
    """[{name, profile, equivalent, seconds}]: each model as if over cards of each rate.  seconds: an emulated second takes
    so many of the real cluster's, as sums of the scaled tensors over the emulated cards do."""
    cells = []
    for model in arguments.models:
        whole = profiles.profile(model)
        for gbit in arguments.equivalents:
            small = whole.scaled(arguments.bytes, 1.0)
            seconds = (small.bytes / arguments.rate_bits) / (whole.bytes / (1e9 * gbit))
            cells.append({"name": f"{model}@{gbit}", "profile": whole.scaled(arguments.bytes, seconds),
                          "equivalent": gbit, "seconds": seconds})
    return cells


def groups_of(chosen):
    """Lists of systems that run in one job: those with the same settings."""
    found = []
    for name in chosen:
        one = next((g for g in found if SYSTEMS[g[0]] == SYSTEMS[name]), None)
        if one:
            one.append(name)
        else:
            found.append([name])
    return found


def environment(lab, host, settings, given):
    paths = [str(systems.BUILD / "python"), os.environ.get("PYTHONPATH")]
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),  # gradients of each step lie where the last one's did
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "TALLY_LOG": "warning",
    }
    if settings is None:
        return ours | {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return ours | {"TALLY_BANDWIDTH": f"{lab.rate(host) / 1e6:g}M"} | settings | given


def run(lab, hosts, group, cells, arguments, timeline=False):
    """What each rank says, by rank, and what they complained about.  hosts: (workers, CPU machines)."""
    settings = SYSTEMS[group[0]]
    task = {
        "systems": group,
        "cells": [
            {
                "name": cell["name"],
                "layers": [[la.name, [[name, [1, count] if profiles.multiplies(name) else [count]] for name, count in la.tensors],
                            la.forward_s, la.backward_s] for la in cell["profile"].layers],
                "systems": cell.get("systems", group),
                "share": cell.get("share"),
            }
            for cell in cells
        ],
        "rounds": arguments.rounds,
        "warm_up": arguments.warm_up,
        "steps": arguments.steps,
        "buckets": arguments.buckets,
        "timeline": timeline,
    }
    with tempfile.NamedTemporaryFile("w", prefix="schedule-", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        job = lab.job(
            [arguments.python, str(HERE / "rank.py"), file.name],
            *hosts,
            systems.built("bin/tallyd", "src/tallyd/tallyd"),
            env=lambda host: environment(lab, host, settings, arguments.settings),
            timeout_s=systems.PATIENCE_S,
            apart=True,
        )
    outputs, warnings = systems.outputs_of(job)
    said = sorted((json.loads(output.splitlines()[-1]) for output in outputs), key=lambda one: one["rank"])
    return said, warnings


# --- the table ----------------------------------------------------------------------------------------------


HEADER = (
    f"{'model':12} {'Gbit/s':>6} {'k':>2} {'system':13} {'step s':>8} {'ideal s':>8} {'of ideal':>8} {'least':>6} {'x ddp':>6} "
    f"{'bound':>6} {'speed':>8} {'busy':>5}"
)


def show(row):
    wrong = f"  {row['wrong']} elements WRONG" if row["wrong"] else ""
    bucket = f"  {row['option']:g} MB" if row["option"] is not None else ""
    print(
        f"{row['model']:12} {row['equivalent_gbit']:6g} {row['k']:2} {row['system']:13} {row['step_s']:8.4f} "
        f"{row['ideal_s']:8.4f} {row['fraction']:8.4f} {row['ideal_s'] / row['least_s']:6.3f} "
        f"{goodput.figure(row['over_ddp'], 6, 3)} {row['bound']:6.3f} {row['speed']:8.1f} {goodput.figure(row['busy'], 5, 2)}"
        f"{bucket}{wrong}",
        flush=True,
    )


def measured(cell, system, said):
    """What all ranks say of a system's turns, as fields of a row; None if it had none.  Medians over all timed steps, of the
    slowest rank in each."""
    turns = [[t for t in one["turns"] if (t["cell"], t["system"]) == (cell["name"], system)] for one in said]
    if not turns[0]:
        return None
    seconds = [max(step) for turn in zip(*turns) for step in zip(*(t["seconds"] for t in turn))]
    ticks = sum(t["ticks"] for t in turns[0])
    return {
        "option": turns[0][0]["option"],
        "step_s": statistics.median(seconds),
        "least_s": min(seconds),
        "steps_s": seconds,
        "cpu_s": statistics.median(sum(t["cpu_s"] for t in turn) for turn in zip(*turns)),
        "busy": sum(t["busy"] for t in turns[0]) / ticks if ticks else None,
        "wrong": sum(t["wrong"] for one in turns for t in one),
        "agree": all(len({t["digest"] for t in turn}) == 1 for turn in zip(*turns)),
    }


def row_of(cell, system, k, said, b, arguments):
    profile, n = cell["profile"], arguments.n
    told = measured(cell, system, said)
    if told is None:
        return None
    communication = optimum.optimum([b] * n, [b] * k, profile.bytes)
    least = ideal.of_profile(profile, communication)
    step = told["step_s"]
    return {
        "bench": "models",
        "model": profile.name,
        "equivalent_gbit": cell["equivalent"],
        "n": n,
        "k": k,
        "system": system,
        **told,
        "bytes": profile.bytes,
        "batch": profile.batch,
        "unit": profile.unit,
        "seconds_per_second": cell["seconds"],
        "forward_s": profile.forward_s,
        "backward_s": profile.backward_s,
        "communication_s": communication,
        "ideal_s": least,
        "fraction": least / step,
        "bound": ideal.bound(profile.forward_s, profile.backward_s, communication),
        "speed": profile.batch / step * cell["seconds"],
        "ideal_speed": profile.batch / least * cell["seconds"],
        "alone_speed": profile.batch / (profile.forward_s + profile.backward_s) * cell["seconds"],
        "over_ddp": None,
        "rate": arguments.rate,
        "b_bytes_per_s": b,
        "torch": said[0]["version"],
        "settings": {**SYSTEMS[system], **arguments.settings} if SYSTEMS[system] is not None else {},
        "warnings": "",
    }


class Bench:
    def __init__(self, arguments):
        self.arguments, self.rows, self.failed = arguments, systems.Rows(arguments.json), False

    def job(self, lab, k, group, cells, b):
        a = self.arguments
        workers = [f"w{i}" for i in range(a.n)]
        try:
            said, warnings = run(lab, (workers, [f"c{i}" for i in range(k)]), group, cells, a)
        except LabError as problem:
            print(f"k = {k}, {', '.join(group)} failed:\n{problem}", file=sys.stderr)
            self.failed = True
            return
        if warnings and group != ["ddp"]:
            print(warnings, file=sys.stderr)
        for cell in cells:
            for system in group:
                row = row_of(cell, system, k, said, b, a)
                if row is None:
                    continue
                row["warnings"] = warnings
                ddp = next((r for r in self.rows if r["system"] == "ddp" and (r["model"], r["equivalent_gbit"]) ==
                            (row["model"], row["equivalent_gbit"])), row if system == "ddp" else None)
                row["over_ddp"] = ddp["step_s"] / row["step_s"] if ddp else None
                self.failed |= row["wrong"] > 0 or not row["agree"]
                self.rows.add(row)
                show(row)

    def all(self):
        a = self.arguments
        cells = cells_of(a)
        hosts = [f"w{i}" for i in range(a.n)] + [f"c{i}" for i in range(max(a.k))]
        with Lab(hosts, a.rate, congestion="cubic", burst_bytes=a.burst) as lab:
            b = stream.bandwidths(lab, hosts, 1 if a.quick else 3)["w0"]
            print(f"{a.n} workers, {a.rate}; B = {b / 1e6:.3f} MB/s from host to host; {a.settings or 'default settings'}")
            if a.timeline:
                told = {}
                for group in groups_of(["priority", "cross"]):
                    workers, services = hosts[: a.n], hosts[a.n :][: a.k[0]]
                    told |= {t["system"]: t for t in run(lab, (workers, services), group, cells[:1], a, True)[0][0]["turns"]}
                pictures.draw_timeline(cells[0], told, a.timeline)
                return
            print(HEADER, flush=True)
            for group in groups_of(a.systems):
                for k in a.k if SYSTEMS[group[0]] is not None else [0]:
                    self.job(lab, k, group, cells, b)


# --- command line -------------------------------------------------------------------------------------------


def parse():
    parser = argparse.ArgumentParser(description="training steps on an emulated cluster, by each order of gradients")
    parser.add_argument("-n", type=int, default=4, help="worker machines (4)")
    parser.add_argument("-k", type=int, nargs="+", help="CPU machines (0 n)")
    parser.add_argument("--models", nargs="+", choices=list(profiles.MODELS), help=f"({' '.join(QUICK_MODELS)})")
    parser.add_argument("--equivalents", type=float, nargs="+", metavar="GBIT", help="rates of the cards that are meant (10 25)")
    parser.add_argument("--systems", nargs="+", choices=ORDERS, default=ORDERS, help="(all)")
    parser.add_argument("--rate", default="500mbit", help="of every emulated card (500mbit)")
    parser.add_argument("--burst", type=goodput.size, default=96 << 10, help="of the cards' token buckets (96K)")
    parser.add_argument("--bytes", type=goodput.size, help="of a model's gradients, at most (64M)")
    parser.add_argument("--rounds", type=int, help="in each all systems of a job take turns (3)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of each turn (1)")
    parser.add_argument("--steps", type=int, help="of each turn that are timed (3)")
    parser.add_argument("--buckets", type=float, nargs="+", metavar="MB", help="of DDP and DeAR, to choose from")
    systems.add_arguments(parser, "8 MB, one round: minutes")
    parser.add_argument("--full", action="store_true", help="seven models, 1 to 100 Gbit/s, 128 MB: hours")
    parser.add_argument("--plot", metavar="FILE", help="draw speeds over bandwidths (needs matplotlib)")
    parser.add_argument("--timeline", metavar="FILE", help="draw a step of the first model with and without barrier instead")
    a = parser.parse_args()
    usual = {"k": [0, a.n], "models": list(profiles.MODELS) if a.full else QUICK_MODELS,
             "equivalents": ALL_EQUIVALENTS if a.full else EQUIVALENTS,
             "bytes": 8 << 20 if a.quick else 128 << 20 if a.full else 64 << 20, "rounds": 1 if a.quick else 3,
             "steps": 3, "buckets": [1, 4] if a.quick else [0.25, 1, 5, 25, 100]}
    for name, value in usual.items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    if a.n < 2 or min(a.k) < 0:
        parser.error("two workers are the least")
    if min(a.rounds, a.steps) < 1 or a.warm_up < 0 or min(a.buckets + a.equivalents) <= 0:
        parser.error("one step and a rate are the least")
    a.settings = dict(word.split("=", 1) for word in a.set)
    a.rate_bits = systems.Lab(["w0"], a.rate).rate("w0")
    a.systems = [name for name in SYSTEMS if name in a.systems]  # DDP, by which others are measured, comes first
    return a


def main():
    arguments = parse()
    if why_not():
        sys.exit(f"schedule: {why_not()}")
    if (arguments.plot or arguments.timeline) and not pictures.available():
        sys.exit("schedule: --plot and --timeline need matplotlib")
    if not systems.built("bin/tallyd", "src/tallyd/tallyd"):
        sys.exit(f"schedule: there is no bin/tallyd in {systems.BUILD}; run make first")
    bench = Bench(arguments)
    bench.all()
    if arguments.plot:
        pictures.draw_speeds(bench.rows, arguments.plot)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ValueError) as problem:
        sys.exit(f"schedule: {problem}")

#!/usr/bin/env python3
"""GradientFlow's ways to send gradients over emulated network cards: tensor by tensor, in 16 bits, lazily, and sparse (CSC).

    bench/gradientflow/gradientflow.py [--json FILE]        # AlexNet and ResNet-50, 4 + 0, 8 + 0 and 4 + 4 machines
    bench/gradientflow/gradientflow.py --quick              # small tensors: a minute
    bench/gradientflow/gradientflow.py --clusters 4+0 --models alexnet --lists small

Models train as in bench/models; lists are exchanged without any computing.  README.md beside this file says what is compared
and what the columns mean.  Needs root (test/lab/lab.py says what else) and an interpreter with PyTorch.
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "models"))

import schedule  # noqa: E402

import goodput  # noqa: E402
import ideal  # noqa: E402
import optimum  # noqa: E402
import profiles  # noqa: E402
import stream  # noqa: E402
import systems  # noqa: E402
from systems import Lab, LabError, why_not  # noqa: E402

MODELS = ["alexnet", "resnet50"]
CLUSTERS = ["4+0", "8+0", "4+4"]
# Lists that are exchanged without computing: the systems that take them.
LISTS = {
    "alexnet": ["tensor", "lazy", "csc"],
    "resnet50": ["tensor", "lazy"],
    "one": ["tensor"],  # tensor of ResNet-50's bytes
    "small": ["tensor", "lazy"],  # 1,000 tensors of 4 KB
}


def idle(name, layers):
    """A profile that does not compute.  layers: lists of (tensor, count)."""
    return profiles.Profile(name, [profiles.Layer(str(i), tensors, 0) for i, tensors in enumerate(layers)], 1, "lists", "")


def list_of(name, most):
    """The list as a profile, of at most so many bytes."""
    if name == "small":
        count = min(1000, most // 4096)
        return idle("small list", [[(f"{i}.{j}.weight", 1024) for j in range(10)] for i in range(count // 10)])
    if name == "one":
        whole = list_of("resnet50", most)
        return idle("one tensor", [[("0.weight", whole.bytes // 4)]])
    return idle(f"{name} list", [layer.tensors for layer in profiles.profile(name).scaled(most, 0).layers])


def cells_of(arguments):
    cells = schedule.cells_of(arguments)
    for cell in cells:
        cell["systems"] = arguments.systems
    for name in arguments.lists:
        most = arguments.bytes if arguments.quick or name == "alexnet" else 1 << 40
        profile = list_of(name, most)
        cells.append({"name": profile.name, "profile": profile, "equivalent": None,
                      "systems": [system for system in LISTS[name] if system in arguments.systems]})
    for cell in cells:
        cell["share"] = arguments.share
    return cells


def sent_of(system, profile, share):
    """The part of a model's bytes that the system sends."""
    if system == "csc":
        vectors = sum(count for layer in profile.layers for name, count in layer.tensors if not profiles.multiplies(name))
        return share + (1 - share) * 4 * vectors / profile.bytes
    return 0.5 if system == "bfloat16" else 1.0


def row_of(cell, system, n, k, said, b, arguments):
    told = schedule.measured(cell, system, said)
    if told is None:
        return None
    profile, sent = cell["profile"], sent_of(system, cell["profile"], arguments.share)
    communication = optimum.optimum([b] * n, [b] * k, profile.bytes * sent)
    least = ideal.of_profile(profile, communication)
    return {
        "bench": "gradientflow",
        "model": profile.name,
        "equivalent_gbit": cell["equivalent"],
        "n": n,
        "k": k,
        "system": system,
        **told,
        "bytes": profile.bytes,
        "sent": sent,
        "forward_s": profile.forward_s,
        "backward_s": profile.backward_s,
        "communication_s": communication,
        "ideal_s": least,
        "fraction": least / told["step_s"],
        "over_tensor": None,
        "cpu_s_per_gb": told["cpu_s"] / profile.bytes * 1e9,
        "rate": arguments.rate,
        "b_bytes_per_s": b,
        "torch": said[0]["version"],
        "settings": arguments.settings,
        "warnings": "",
    }


HEADER = (f"{'model':14} {'n + k':>6} {'system':9} {'step s':>8} {'ideal s':>8} {'of ideal':>8} {'x tensor':>8} {'busy':>5} "
          f"{'CPU s/GB':>8}")


def show(row):
    wrong = f"  {row['wrong']} elements WRONG" if row["wrong"] else ""
    unlike = "" if row["agree"] else "  ranks DIFFER"
    print(
        f"{row['model']:14} {row['n']:2} + {row['k']} {row['system']:9} {row['step_s']:8.4f} {row['ideal_s']:8.4f} "
        f"{row['fraction']:8.4f} {goodput.figure(row['over_tensor'], 8, 3)} {goodput.figure(row['busy'], 5, 2)} "
        f"{row['cpu_s_per_gb']:8.2f}{wrong}{unlike}",
        flush=True,
    )


class Bench:
    def __init__(self, arguments):
        self.arguments, self.rows, self.failed = arguments, systems.Rows(arguments.json), False

    def job(self, lab, n, k, cells, b):
        a = self.arguments
        try:
            said, warnings = schedule.run(lab, ([f"w{i}" for i in range(n)], [f"c{i}" for i in range(k)]), a.systems, cells, a)
        except LabError as problem:
            print(f"{n} + {k} failed:\n{problem}", file=sys.stderr)
            self.failed = True
            return
        if warnings:
            print(warnings, file=sys.stderr)
        for cell in cells:
            rows = {system: row_of(cell, system, n, k, said, b, a) for system in cell["systems"]}
            for row in filter(None, rows.values()):
                if rows.get("tensor"):
                    row["over_tensor"] = rows["tensor"]["step_s"] / row["step_s"]
                row["warnings"] = warnings
                self.failed |= row["wrong"] > 0 or not row["agree"]
                self.rows.add(row)
                show(row)

    def all(self):
        a = self.arguments
        cells = cells_of(a)
        hosts = [f"w{i}" for i in range(max(n for n, _ in a.clusters))] + [f"c{i}" for i in range(max(k for _, k in a.clusters))]
        with Lab(hosts, a.rate, congestion="cubic", burst_bytes=a.burst) as lab:
            b = stream.bandwidths(lab, hosts[:2], 1 if a.quick else 3)["w0"]
            print(f"{a.rate}; B = {b / 1e6:.3f} MB/s from host to host; {a.settings or 'default settings'}")
            print(HEADER, flush=True)
            for n, k in a.clusters:
                self.job(lab, n, k, cells, b)


# --- command line -------------------------------------------------------------------------------------------


def cluster(text):
    n, _, k = text.partition("+")
    if not (n.isdigit() and k.isdigit() and int(n) >= 2):
        raise argparse.ArgumentTypeError(f"{text!r}: give worker and CPU machines as 4+0, with two workers at least")
    return int(n), int(k)


def parse():
    parser = argparse.ArgumentParser(description="GradientFlow's ways to send gradients, on an emulated cluster")
    parser.add_argument("--clusters", type=cluster, nargs="+", default=[cluster(one) for one in CLUSTERS], metavar="N+K",
                        help=f"worker and CPU machines ({' '.join(CLUSTERS)})")
    parser.add_argument("--models", nargs="*", choices=list(profiles.MODELS), default=MODELS, help=f"({' '.join(MODELS)})")
    parser.add_argument("--lists", nargs="*", choices=list(LISTS), default=list(LISTS), help="exchanged without computing (all)")
    parser.add_argument("--equivalents", type=float, nargs="+", default=[10], metavar="GBIT", help="rate of the cards that are meant (10)")
    parser.add_argument("--systems", nargs="+", choices=schedule.GRADIENTFLOW, default=schedule.GRADIENTFLOW, help="(all)")
    parser.add_argument("--share", type=float, default=0.15, help="of the chunks, that csc sends (0.15)")
    parser.add_argument("--rate", default="250mbit", help="of every emulated card (250mbit)")
    parser.add_argument("--burst", type=goodput.size, default=96 << 10, help="of the cards' token buckets (96K)")
    parser.add_argument("--bytes", type=goodput.size, help="of a model's gradients, at most (64M)")
    parser.add_argument("--rounds", type=int, default=1, help="in each all systems take turns (1)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of each turn: the layout is made in the fourth (5)")
    parser.add_argument("--steps", type=int, default=3, help="of each turn that are timed (3)")
    systems.add_arguments(parser, "8 MB: a minute")
    a = parser.parse_args()
    a.bytes = a.bytes or (8 << 20 if a.quick else 64 << 20)
    if min(a.rounds, a.steps) < 1 or a.warm_up < 0 or min(a.equivalents) <= 0:
        parser.error("one step and a rate are the least")
    if not 0 < a.share <= 1:
        parser.error("--share must be above 0 and at most 1")
    a.settings = dict(word.split("=", 1) for word in a.set)
    a.rate_bits = Lab(["w0"], a.rate).rate("w0")
    a.systems = [name for name in schedule.GRADIENTFLOW if name in a.systems]
    a.buckets = []
    return a


def main():
    arguments = parse()
    if why_not():
        sys.exit(f"gradientflow: {why_not()}")
    if not systems.built("bin/tallyd", "src/tallyd/tallyd"):
        sys.exit(f"gradientflow: there is no bin/tallyd in {systems.BUILD}; run make first")
    bench = Bench(arguments)
    bench.all()
    return 1 if bench.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ValueError) as problem:
        sys.exit(f"gradientflow: {problem}")

#!/usr/bin/env python3
"""Every collective beside its own optimum, Gloo and OpenMPI, on the emulated cluster.

    bench/collectives/collectives.py [--json FILE] [--plot FILE]     # n = 2, 4, 8; k = 0, n/2, n; 1 to 128 MB
    bench/collectives/collectives.py --quick                         # n = 4, k = 0, 200 Mbit/s, 1 and 8 MB: two minutes
    bench/collectives/collectives.py -n 4 -k 0 4 --bytes 32M --systems tally gloo --operations all-gather broadcast
    bench/collectives/collectives.py -k 0 --layouts 2x4 4x2 4+2+2    # machines with several ranks

README.md beside this file says what is compared and what the columns mean.  Needs root (test/lab/lab.py says what
else).  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "goodput"))

import goodput  # noqa: E402
import optimum  # noqa: E402
import plot  # noqa: E402
import stream  # noqa: E402
import systems  # noqa: E402
from systems import LabError, why_not  # noqa: E402

OPERATIONS = ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "reduce"]
MEGA = 1 << 20


class Tally(systems.Tally):
    program = ("meson/bench/collectives/collectives", "bench/collectives/collectives")


class Gloo(systems.Gloo):
    """variants: so many groups, over which what can be halved is."""

    program = HERE / "gloo.py"
    variants = ("1 group", "2 groups")


class OpenMpi(systems.OpenMpi):
    """variants: its choice of algorithms, and those that are made for large tensors: rings, pipelines, pairs."""

    program = ("meson/bench/collectives/collectives_mpi", "bench/collectives/collectives_mpi")
    variants = ("its choice", "rings")
    algorithms = {
        "rings": {
            "allreduce_algorithm": 4,
            "reduce_scatter_algorithm": 3,
            "allgather_algorithm": 4,
            "bcast_algorithm": 3,
            "bcast_algorithm_segmentsize": 128 << 10,
            "alltoall_algorithm": 2,
            "reduce_algorithm": 3,
            "reduce_algorithm_segmentsize": 128 << 10,
        }
    }


SYSTEMS = {"gloo": Gloo, "openmpi": OpenMpi, "tally": Tally}


class Cells:
    """What was measured on one cluster: {(system, variant, k): {(operation, bytes): [a run's result]}}."""

    def __init__(self, layout):
        self.results = {}
        self.first_ranks = [sum(layout[:machine]) for machine in range(len(layout))]

    def add(self, way, entries, lines, warnings):
        """lines: for each rank what it has printed for each entry."""
        for place, entry in enumerate(entries):
            ranks = [told[place] for told in lines]
            seconds = [max(times) for times in zip(*(rank["seconds"] for rank in ranks))]
            self.results.setdefault(way, {}).setdefault(entry, []).append(
                {
                    "seconds": seconds,
                    "median_s": statistics.median(seconds),
                    "cpu_s": sum(sum(rank["cpu_seconds"]) for rank in ranks) / len(seconds),
                    "machine_cpu_s": systems.machine_cpu_s(ranks) / len(seconds),
                    "cards": [[ranks[first][way] / len(seconds) for way in ("sent", "received")]
                              for first in self.first_ranks],
                    "busy": ranks[0]["busy"] / ranks[0]["ticks"] if ranks[0]["ticks"] else None,
                    "wrong": sum(rank["wrong"] for rank in ranks),
                    "version": ranks[0]["report"]["version"],
                    "warnings": warnings,
                }
            )

    def best(self, system, k, entry):
        """(variant, runs) of the fastest variant; (None, None) if there is none."""
        ways = [(variant, found[entry]) for (name, variant, of), found in self.results.items()
                if name == system and of == k and entry in found]
        return min(ways, key=lambda way: median(way[1]), default=(None, None))


def median(runs):
    return statistics.median(run["median_s"] for run in runs)


def layout_of(word):
    """Ranks on each worker machine: of "4x2" [2, 2, 2, 2], of "4+2+2" [4, 2, 2]."""
    try:
        if "x" in word:
            machines, each = map(int, word.split("x"))
            found = machines * [each]
        else:
            found = [int(each) for each in word.split("+")]
    except ValueError:
        found = []
    if len(found) < 2 or min(found) < 1:
        raise argparse.ArgumentTypeError(f"'{word}' is no layout; one looks like 4x2, machines and ranks on each, or 4+2+2")
    return found


def layout_text(layout):
    return f"{len(layout)} × {layout[0]}" if len(set(layout)) == 1 else " + ".join(map(str, layout))


def measure(lab, cluster, layout, found, entries, arguments):
    """The runs of all systems in turns."""
    cells, workers = Cells(layout), cluster.hosts[: cluster.n]
    tensors = [(name, total // 4 // sum(layout) * sum(layout)) for name, total in entries]
    for system in found.values():
        system.ranks = dict(zip(workers, layout))
    for turn in range(arguments.runs):
        for name, system in found.items():
            for variant in system.variants if not arguments.quick else system.variants[:1]:
                for k in cluster.ks if system.services else [0]:
                    services = cluster.hosts[cluster.n :][:k]
                    numbers = (arguments.iterations, arguments.warm_up)
                    lines, warnings = system.launch(lab, workers, services, tensors, numbers, variant)
                    cells.add((name, variant, k), entries, lines, warnings)
                    print(f"run {turn + 1} of {arguments.runs}: {name} {variant} k = {k}", file=sys.stderr, flush=True)
    return cells


HEADER = (f"{'operation':14} {'bytes':>10} {'k':>3} {'system':8} {'median s':>9} {'optimum s':>9} {'fraction':>8} "
          f"{'least':>7} {'x gloo':>6} {'cards':>6} {'cpu':>6} {'machine':>7} {'busy':>5}  version")


def show(row):
    print(f"{row['operation']:14} {row['bytes']:10} {row['k']:3} {row['system']:8} {row['time_s']:9.4f} "
          f"{row['optimum_s']:9.4f} {row['fraction']:8.4f} {row['optimum_s'] / row['least_s']:7.4f} "
          f"{goodput.figure(row['over_gloo'], 6, 2)} {row['cards']:6.3f} {row['cpu_s_per_gb']:6.2f} "
          f"{row['machine_cpu_s_per_gb']:7.2f} {goodput.figure(row['busy'], 5, 2)}  {row['version']}{' ' + row['variant'] if row['variant'] else ''}", flush=True)


def rows_of(cells, cluster, layout, found, entries, bandwidth, settings):
    workers = [bandwidth[h] for h in cluster.hosts[: cluster.n]]
    for entry in entries:
        operation, total = entry
        gloo = cells.best("gloo", 0, entry)[1]
        for name in found:
            for k in cluster.ks:
                variant, runs = cells.best(name, k, entry)
                if runs is None:
                    continue
                services = [bandwidth[h] for h in cluster.hosts[cluster.n :][:k]]
                best = optimum.collective(operation, workers, services, total, layout)
                moved = [[statistics.median(of) for of in zip(*ways)] for ways in zip(*(run["cards"] for run in runs))]
                yield {
                    "bench": "collectives",
                    "operation": operation,
                    "n": cluster.n,
                    "k": k,
                    "layout": layout,
                    "bytes": total,
                    "system": name,
                    "variant": variant,
                    "version": runs[0]["version"],
                    "time_s": median(runs),
                    "least_s": min(min(run["seconds"]) for run in runs),
                    "runs_s": [run["median_s"] for run in runs],
                    "optimum_s": best,
                    "fraction": best / median(runs),
                    "over_gloo": median(gloo) / median(runs) if gloo else None,
                    "cpu_s_per_gb": statistics.median(run["cpu_s"] for run in runs) / total * 1e9,
                    "machine_cpu_s_per_gb": statistics.median(run["machine_cpu_s"] for run in runs) / total * 1e9,
                    "cards": optimum.seconds(workers, moved) / best,
                    "cards_bytes": moved,
                    "cards_least_bytes": optimum.cards(operation, workers, services, total, layout),
                    "busy": statistics.median(run["busy"] or 0 for run in runs),
                    "wrong": sum(run["wrong"] for run in runs),
                    "warnings": "".join(sorted({run["warnings"] for run in runs})) if name == "tally" else "",
                    "rate": cluster.rate,
                    "b_bytes_per_s": workers[0],
                    "settings": settings if name == "tally" else {},
                }


def show_step(rows, total):
    """What an FSDP2 step communicates: a reduce-scatter and two all-gathers of all parameters."""
    def seconds(system, k):
        parts = {row["operation"]: row["time_s"] for row in rows
                 if row["system"] == system and row["k"] == k and row["bytes"] == total}
        wanted = [parts.get("reduce-scatter"), parts.get("all-gather"), parts.get("all-gather")]
        return None if None in wanted else sum(wanted)

    gloo = seconds("gloo", 0)
    for k in sorted({row["k"] for row in rows}):
        tally = seconds("tally", k)
        if gloo and tally:
            print(f"an FSDP2 step's communication, {total // MEGA} MB, k = {k}: {tally:.4f} s, Gloo {gloo:.4f} s: "
                  f"{gloo / tally:.2f} x Gloo")


def draw(rows, file):
    """A panel for each operation and layout: goodput over bytes, a line for each system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layouts = sorted({tuple(row["layout"]) for row in rows})
    operations = [o for o in OPERATIONS if any(r["operation"] == o for r in rows)]
    size = (4 * len(operations), 3.2 * len(layouts))
    figure, axes = pyplot.subplots(len(layouts), len(operations), figsize=size, squeeze=False)
    for across, layout in zip(axes, layouts):
        for axis, operation in zip(across, operations):
            lines = {}
            for row in rows:
                if (tuple(row["layout"]), row["operation"]) == (layout, operation):
                    label = row["system"] + (f", k = {row['k']}" if row["system"] == "tally" else "")
                    lines.setdefault(label, []).append((row["bytes"] / MEGA, 100 * row["fraction"]))
            for label, points in lines.items():
                axis.plot(*zip(*sorted(points)), marker="o", label=label)
            sizes = sorted({x for points in lines.values() for x, _ in points})
            axis.set(title=f"{operation}, {layout_text(layout)}", xscale="log", ylim=(0, 110), xlabel="MB", ylabel="% of the optimum")
            axis.set_xticks(sizes, [f"{x:g}" for x in sizes])
            axis.set_xticks([], minor=True)
            axis.legend(fontsize="x-small")
            axis.title.set_fontsize("small")
    figure.tight_layout()
    figure.savefig(file)


def parser_for(description, operations, n, k, sizes, iterations):
    """For this program and bench/cost; the last four are the defaults as --help says them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-n", type=int, nargs="+", help=f"worker machines, with a rank each ({n})")
    parser.add_argument("--layouts", type=layout_of, nargs="+", default=[], metavar="LAYOUT",
                        help="worker machines and their ranks, in place of -n: 4x2, or 4+2+2")
    parser.add_argument("-k", type=int, nargs="+", help=f"CPU machines ({k})")
    parser.add_argument("--rate", help="of every card (500mbit)")
    parser.add_argument("--burst", type=goodput.size, default=96 << 10, help="of the cards' token buckets (96K)")
    parser.add_argument("--bytes", type=goodput.size, nargs="+", help=f"({sizes})")
    parser.add_argument("--operations", nargs="+", choices=operations, default=operations)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--iterations", type=int, help=f"of 32 MB and more; of less up to 8 times as many ({iterations})")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a setting of Tally's")
    parser.add_argument("--gloo", metavar="PYTHON", default=sys.executable, help="an interpreter with PyTorch (this)")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    return parser


def parsed(parser, n, sizes, iterations):
    """The arguments, with defaults and checks; the last three are defaults without and with --quick."""
    arguments = parser.parse_args()
    quick = arguments.quick
    if arguments.n and arguments.layouts:
        parser.error("-n and --layouts exclude each other")
    arguments.ranks_per_machine = 1  # of the systems, until each cluster sets its own
    arguments.layouts = arguments.layouts or [machines * [1] for machines in arguments.n or n[quick]]
    arguments.bytes = arguments.bytes or [size * MEGA for size in sizes[quick]]
    arguments.rate = arguments.rate or ("200mbit" if quick else "500mbit")
    arguments.iterations = iterations[quick] if arguments.iterations is None else arguments.iterations
    if min(map(len, arguments.layouts)) < 2 or min(arguments.k or [0]) < 0:
        parser.error("two workers are the least")
    if arguments.iterations < 1 or arguments.warm_up < 0:
        parser.error("an iteration is the least")
    if any("=" not in word for word in arguments.set):
        parser.error("--set takes NAME=VALUE")
    return arguments


def parse():
    parser = parser_for("collectives on an emulated cluster against their optimum", OPERATIONS,
                        "2 4 8", "0, n/2, n", "1M 8M 32M 128M", 1)
    parser.add_argument("--runs", type=int, help="of each system, in turns (5)")
    parser.add_argument("--quick", action="store_true", help="n = 4, k = 0, 200 Mbit/s, 1 and 8 MB, one run")
    parser.add_argument("--plot", metavar="FILE", help="draw fractions over sizes (needs matplotlib)")
    arguments = parsed(parser, ([2, 4, 8], [4]), ([1, 8, 32, 128], [1, 8]), (1, 1))
    arguments.runs = arguments.runs or (1 if arguments.quick else 5)
    return arguments


def main():
    arguments = parse()
    if why_not():
        sys.exit(f"collectives: {why_not()}")
    if arguments.plot and not plot.available():
        sys.exit("collectives: --plot needs matplotlib; without it write --json")
    settings = dict(word.split("=", 1) for word in arguments.set)
    found, rows = systems.available(arguments, settings, SYSTEMS), systems.Rows(arguments.json)
    entries = [(operation, size) for operation in arguments.operations for size in arguments.bytes]
    for layout in arguments.layouts:
        n = len(layout)
        ks = arguments.k or ([0] if arguments.quick else sorted({0, n // 2, n}))
        cluster = goodput.Cluster(n, ks, arguments.rate, [], burst=arguments.burst)
        with cluster.lab() as lab:
            bandwidth = stream.bandwidths(lab, cluster.hosts, 1 if arguments.quick else 3)
            print(f"\n{cluster}, ranks {layout_text(layout)}; {' '.join(arguments.set) or 'default settings'}\n"
                  f"B = {bandwidth[cluster.hosts[0]] / 1e6:.3f} MB/s from host to host")
            cells = measure(lab, cluster, layout, found, entries, arguments)
        print(HEADER, flush=True)
        of_layout = list(rows_of(cells, cluster, layout, found, entries, bandwidth, settings))
        for row in of_layout:
            show(row)
            if row["warnings"]:
                print(row["warnings"], file=sys.stderr)
            rows.add(row)
        for size in arguments.bytes:
            show_step(of_layout, size)
    if arguments.plot:
        draw(rows, arguments.plot)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ValueError) as problem:
        sys.exit(f"collectives: {problem}")

#!/usr/bin/env python3
"""Goodput over the number of CPU machines, on the emulated cluster, beside the optimum and other systems.

    bench/goodput/goodput.py [--series NAME...] [--json FILE] [--plot FILE]     # n = 8, k = 0 … 8: half an hour
    bench/goodput/goodput.py --quick                                            # n = 4, k = 0 2 4: a minute
    bench/goodput/goodput.py -n 4 -k 0 2 4 --rate 200mbit --bytes 16M --model gpt2 --set TALLY_PART_BYTES=48K
    bench/goodput/goodput.py -n 4 -k 0 2 4 --ranks-per-machine 2    # the optimum is that of the machines

README.md beside this file says what is compared and what the columns mean.  Needs root (test/lab/lab.py says what
else).  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import dataclasses
import re
import sys

import models
import optimum
import plot
import stream
import systems
from systems import Lab, LabError, why_not

SLOW_BURST_BYTES = 96 << 10  # of the series with slow cards: with less, packets are cut up on their way (README.md)
WHOLE_BYTES = 128 << 20  # models of more gradients are scaled down to so much, unless --scale says otherwise


@dataclasses.dataclass
class Work:
    """What an iteration sums: tensors [(name, count of float32)] in the order of submission."""

    name: str
    tensors: list
    scale: float = 1.0

    @property
    def bytes(self):
        return 4 * sum(count for _, count in self.tensors)


@dataclasses.dataclass
class Cluster:
    """n workers and as many CPU machines as the largest of `ks`; all cards of `rate` but those of {host: rate}."""

    n: int
    ks: list
    rate: str
    works: list
    rate_of: dict = dataclasses.field(default_factory=dict)
    burst: int = None  # bytes, of the cards' token buckets; None: the lab's

    @property
    def hosts(self):
        return [f"w{i}" for i in range(self.n)] + [f"c{i}" for i in range(max(self.ks))]

    def lab(self):
        hosts = [systems.Host(host, self.rate_of.get(host)) for host in self.hosts]
        return Lab(hosts, self.rate, congestion="cubic", burst_bytes=self.burst)

    def __str__(self):
        others = "".join(f", {host} {rate}" for host, rate in self.rate_of.items())
        burst = f", bursts of {self.burst} bytes" if self.burst else ""
        return f"{self.n} workers, up to {max(self.ks)} CPU machines, {self.rate}{others}{burst}"


def one_tensor(count_bytes):
    return Work("tensor", [("gradient", count_bytes // 4)])


def model(name, scale=None):
    if scale is None:
        scale = min(1.0, WHOLE_BYTES / (4 * sum(count for _, count in models.tensors(name))))
    return Work(name, models.backward(name, scale), scale)


def unequal(rate, workers, services, works):
    """A cluster whose cards differ, with all its CPU machines."""
    rates = {f"w{i}": r for i, r in enumerate(workers)} | {f"c{i}": r for i, r in enumerate(services)}
    rate_of = {h: f"{r}mbit" for h, r in rates.items()}
    return Cluster(len(workers), [len(services)], rate, works, rate_of, SLOW_BURST_BYTES)


def series(name, scale):
    """Its clusters.  In the unequal ones no worker's card is so slow that it alone decides."""
    large = one_tensor(128 << 20)
    return {
        "main": lambda: [Cluster(8, list(range(9)), "1gbit", [large, one_tensor(16 << 20), model("resnet50", scale)])],
        "models": lambda: [Cluster(8, [0, 4, 8], "1gbit", [model(name, scale) for name in models.MODELS])],
        "unequal": lambda: [
            unequal("1gbit", [500, 500, 500, 500], [1000, 250], [large]),
            unequal("1gbit", [1000, 800, 800, 600], [400, 200], [large]),
            unequal("1gbit", [600, 700, 800], [100, 200, 400], [large]),
        ],
        "small": lambda: [
            *(Cluster(n, list(range(n + 1)), "1gbit", [large]) for n in (2, 3, 5)),
            Cluster(16, [0, 8, 16], "500mbit", [large], burst=SLOW_BURST_BYTES),
            Cluster(32, [0, 16, 32], "200mbit", [one_tensor(64 << 20)], burst=SLOW_BURST_BYTES),
            *series("unequal", scale),
        ],
    }[name]()


# --- the table --------------------------------------------------------------------------------------

HEADER = (
    f"{'work':11} {'bytes':>10} {'k':>3} {'system':10} {'median s':>9} {'optimum s':>9} {'fraction':>8} {'least':>7} "
    f"{'worst':>6} {'x gloo':>6} {'plan':>6} {'traffic':>7} {'cpu':>6} {'machine':>7} {'busy':>5}  version"
)


def figure(value, width, digits):
    return f"{value:{width}.{digits}f}" if value is not None else " " * (width - 1) + "-"


def show(row):
    print(
        f"{row['work']:11} {row['bytes']:10} {row['k']:3} {row['system']:10} {row['time_s']:9.4f} "
        f"{row['optimum_s']:9.4f} {row['fraction']:8.4f} {row['optimum_s'] / row['least_s']:7.4f} {row['worst']:6.2f} "
        f"{figure(row['over_gloo'], 6, 2)} {row['plan']:6.3f} {row['traffic']:7.4f} {row['cpu_s_per_gb']:6.2f} "
        f"{row['machine_cpu_s_per_gb']:7.2f} {figure(row['busy'], 5, 2)}  {row['version']}{' ' + row['variant'] if row['variant'] else ''}",
        flush=True,
    )
    if row["warnings"] and row["system"] not in ("gloo", "openmpi"):  # theirs are in the JSON
        print(row["warnings"], file=sys.stderr)


class Table:
    """The rows, printed and written as they come."""

    def __init__(self, arguments, settings):
        self.rows, self.failed = systems.Rows(arguments.json), False
        self.arguments, self.settings = arguments, settings

    def cluster(self, cluster, found):
        """All works on one cluster.  `found`: {name: System}."""
        with cluster.lab() as lab:
            bandwidth = stream.bandwidths(lab, cluster.hosts, 1 if self.arguments.quick else 3)
            measured = {lab.rate(h): b for h, b in bandwidth.items()}
            print(f"\n{cluster}; {' '.join(self.arguments.set) or 'default settings'}")
            for rate, b in measured.items():
                print(f"B = {b / 1e6:.3f} MB/s from host to host by cards of {rate / 1e6:g} Mbit/s")
            print(HEADER, flush=True)
            for work in cluster.works:
                gloo_s = None
                for name, system in found.items():
                    for k in cluster.ks if system.services else [0]:
                        if k or not system.services_needed:
                            row = self.cell(lab, bandwidth, cluster, work, k, name, system, gloo_s)
                            gloo_s = row["time_s"] if row and name == "gloo" else gloo_s

    def cell(self, lab, bandwidth, cluster, work, k, name, system, gloo_s):
        workers, services = cluster.hosts[: cluster.n], cluster.hosts[cluster.n :][:k]
        try:
            measured, shares = system.measure(lab, workers, services, work, self.arguments)
        except LabError as problem:
            print(f"{work.name}, k = {k}, {name} failed:\n{problem}", file=sys.stderr)
            self.failed = True
            return None
        cards = [bandwidth[h] for h in workers + services]
        due = optimum.ring(cluster.n, work.bytes) if shares is None else optimum.traffic(cluster.n, shares, work.bytes)
        best = optimum.optimum(cards[: cluster.n], cards[cluster.n :], work.bytes)
        rounds = self.arguments.iterations + self.arguments.warm_up
        links = [
            moved / (rounds * expected)
            for host, expected in zip(workers + services, due)
            for moved in measured["moved"][host]
            if expected
        ]
        row = {
            "bench": "goodput",
            "system": name,
            "n": cluster.n,
            "ranks_per_machine": self.arguments.ranks_per_machine,
            "k": k,
            "work": work.name,
            "tensors": len(work.tensors),
            "scale": work.scale,
            "bytes": work.bytes,
            **measured,
            "optimum_s": best,
            "fraction": best / measured["time_s"],
            "over_gloo": measured["time_s"] and gloo_s and gloo_s / measured["time_s"],
            "plan": max(d / b for d, b in zip(due, cards)) / best,
            "traffic": max(links, key=lambda r: abs(r - 1)),
            "rate": cluster.rate,
            "rate_of": cluster.rate_of,
            "burst_bytes": cluster.burst,
            "b_bytes_per_s": bandwidth[workers[0]],
            "settings": self.settings if system.settings is not None else {},
        }
        del row["moved"]
        show(row)
        self.rows.add(row)
        return row


# --- command line -----------------------------------------------------------------------------------


def size(text):
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"'{text}' is no size; one looks like 16M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no scale; one is above 0 and at most 1")
    return value


def parse():
    parser = argparse.ArgumentParser(description="goodput on an emulated cluster against the optimum")
    parser.add_argument("--series", nargs="+", choices=["main", "models", "small", "unequal"], help="(main)")
    parser.add_argument("-n", type=int, help="worker machines, instead of a series")
    parser.add_argument("-k", type=int, nargs="+", help="CPU machines (0 to n)")
    parser.add_argument("--ranks-per-machine", type=int, default=1, metavar="R", help="on every worker machine (1)")
    parser.add_argument("--rate", help="of every card (1gbit)")
    parser.add_argument("--rate-of", metavar="HOST=RATE", nargs="+", default=[], help="another for w0, w1 … c0, c1 …")
    parser.add_argument("--burst", type=size, help="of the cards' token buckets (the series', else 96K at 1 Gbit/s, less below)")
    parser.add_argument("--bytes", type=size, nargs="+", default=[], help="of one tensor")
    parser.add_argument("--model", choices=list(models.MODELS), nargs="+", default=[], help="tensors like this model's")
    parser.add_argument("--scale", type=fraction, help="of the models' tensors (at most 128 MB in all)")
    parser.add_argument("--systems", nargs="+", choices=list(systems.SYSTEMS), default=systems.DEFAULT)
    parser.add_argument("--iterations", type=int, help="(10)")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a setting of Tally's")
    parser.add_argument("--gloo", metavar="PYTHON", default=sys.executable, help="an interpreter with PyTorch (this)")
    parser.add_argument("--quick", action="store_true", help="n = 4, k = 0 2 4, 200 Mbit/s, 16 MB: a minute")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    parser.add_argument("--plot", metavar="FILE", help="draw goodput over k (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.iterations is None:
        arguments.iterations = 3 if arguments.quick else 10
    if arguments.ranks_per_machine < 1:
        parser.error("one rank a machine is the least")
    if arguments.iterations < 1 or arguments.warm_up < 0:
        parser.error("an iteration is the least")
    if any("=" not in word for word in arguments.set + arguments.rate_of):
        parser.error("--set takes NAME=VALUE, --rate-of HOST=RATE")
    own = [arguments.n, arguments.k, arguments.rate, arguments.rate_of, arguments.bytes, arguments.model]
    if arguments.series and any(own):
        parser.error("a series has its own machines and tensors")
    if arguments.series or not (any(own) or arguments.quick):
        return arguments, [c for name in arguments.series or ["main"] for c in series(name, arguments.scale)]
    n = arguments.n or (4 if arguments.quick else 8)
    ks = arguments.k or ([0, 2, 4] if arguments.quick else list(range(n + 1)))
    if n < 2 or min(ks) < 0:
        parser.error("two workers are the least")
    rate = arguments.rate or ("200mbit" if arguments.quick else "1gbit")
    works = [one_tensor(b) for b in arguments.bytes] + [model(name, arguments.scale) for name in arguments.model]
    works = works or [one_tensor((16 if arguments.quick else 128) << 20)]
    cluster = Cluster(n, ks, rate, works, dict(word.split("=", 1) for word in arguments.rate_of))
    unknown = set(cluster.rate_of) - set(cluster.hosts)
    if unknown:
        parser.error(f"there is no host {', '.join(sorted(unknown))}")
    return arguments, [cluster]


def main():
    arguments, clusters = parse()
    if why_not():
        sys.exit(f"goodput: {why_not()}")
    if arguments.plot and not plot.available():
        sys.exit("goodput: --plot needs matplotlib; without it write --json, and draw with plot.py elsewhere")
    settings = dict(word.split("=", 1) for word in arguments.set)
    found = systems.available(arguments, settings)
    table = Table(arguments, settings)
    for cluster in clusters:
        table.cluster(dataclasses.replace(cluster, burst=arguments.burst or cluster.burst), found)
    if arguments.plot:
        plot.draw(table.rows, arguments.plot)
    return 1 if table.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ValueError) as problem:
        sys.exit(f"goodput: {problem}")

#!/usr/bin/env python3
"""Real training on the emulated cluster: with DDP on Gloo, and in each of Tally's ways; beside it without communication.

    bench/train/train.py [--series NAME...] [--json FILE] [--plot FILE]     # 4 and 2 workers, and one machine
    bench/train/train.py --quick                                            # n = 2, k = 0 1, a small model
    bench/train/train.py -n 4 -k 0 4 --rate 500mbit --models mlp --ways gloo hook

README.md beside this file says what is compared and what the columns mean.  Needs root (test/lab/lab.py says what
else) and an interpreter with PyTorch.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "goodput"))

import optimum  # noqa: E402
import plot  # noqa: E402
import stream  # noqa: E402
import systems  # noqa: E402
from systems import Lab, LabError, why_not  # noqa: E402

DDP = ["gloo", "hook", "backend"]
TALLY = ["hook", "backend", "optimizer"]
WAYS = ["gloo", *TALLY]
BATCH = {"mlp": 8, "convnet": 128}
DATA = "/usr/share/datasets/fashion-mnist"
# Sums in another order differ in their last bits, and a network in training makes more of that with each step.
TOLERANCE, LEAST_LOSS, FIRST_STEPS = 0.02, 0.1, 3


@dataclasses.dataclass
class Cluster:
    """n worker machines of so many ranks, and as many CPU machines as the largest of `ks`."""

    n: int
    ks: list
    rate: str
    ranks_per_host: int = 1

    @property
    def ranks(self):
        return self.n * self.ranks_per_host

    @property
    def hosts(self):
        return [f"w{i}" for i in range(self.n)] + [f"c{i}" for i in range(max(self.ks))]

    def __str__(self):
        if self.n == 1:
            return f"one machine, {self.ranks} ranks"
        return f"{self.n} workers, up to {max(self.ks)} CPU machines, {self.rate}"


def series(name, rate):
    return {
        "four": [Cluster(4, [0, 2, 4], rate)],
        "two": [Cluster(2, [0, 2], rate)],
        "local": [Cluster(1, [0], rate, 2), Cluster(1, [0], rate, 4)],
    }[name]


def eq_7(n, k):
    """How often as fast as all-reduce the best split is (BytePS, OSDI 2020, Eq. 7), for k up to n."""
    return (n * n + k * n - 2 * k) / (n * n)


# --- one cell of the table --------------------------------------------------------------------------


class Bench:
    """Starts ranks and compares what they say."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.rows, self.failed = systems.Rows(arguments.json), False

    def task(self, way, model, ranks):
        a = self.arguments
        return {
            "way": way,
            "model": model,
            "width": a.width,
            "batch": a.batch or BATCH[model],
            "ranks": ranks,
            "warm_up": a.warm_up,
            "blocks": a.blocks,
            "steps": a.steps,
            "buckets": a.buckets,
            "data": a.data,
            "compile": a.compile or "",
        }

    def argv(self, task):
        return [self.arguments.python, str(HERE / "rank.py"), json.dumps(task)]

    @staticmethod
    def environment():
        """PyTorch's threads are one a rank; the package is the build's."""
        paths = [str(systems.BUILD / "python"), os.environ.get("PYTHONPATH")]
        return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def reference(self, model, ranks):
        """What a process alone gets: {"losses": those of each rank, "digest": of its parameters}."""
        done = subprocess.run(
            self.argv(self.task("reference", model, ranks)),
            env={**os.environ, **self.environment()},
            capture_output=True,
            text=True,
            timeout=systems.PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise LabError(f"the reference of {model}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def ranks(self, lab, cluster, k, way, model):
        """What each rank says, by rank, and what they complained about."""

        def environment(host):
            card = {"TALLY_BANDWIDTH": f"{lab.rate(host) / 1e6:g}M"} if way in TALLY else {}
            gloo = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            return {**self.environment(), "TALLY_LOG": "warning", **gloo, **card, **self.arguments.settings}

        workers, services = cluster.hosts[: cluster.n], cluster.hosts[cluster.n :][:k]
        job = lab.job(
            self.argv(self.task(way, model, cluster.ranks)),
            workers,
            services,
            systems.built("bin/tallyd", "src/tallyd/tallyd"),
            cluster.ranks_per_host,
            env=environment,
            timeout_s=systems.PATIENCE_S,
            apart=True,
        )
        outputs, warnings = systems.outputs_of(job)
        said = sorted((json.loads(output.splitlines()[-1]) for output in outputs), key=lambda one: one["rank"])
        return said, warnings

    # --- the table

    def cluster(self, cluster):
        with Lab(cluster.hosts, cluster.rate, congestion="cubic") as lab:
            b = None
            compiled = f"; torch.compile of {self.arguments.compile}" if self.arguments.compile else ""
            print(f"\n{cluster}; {self.arguments.settings or 'default settings'}{compiled}")
            if cluster.n > 1:
                b = stream.bandwidths(lab, cluster.hosts, 1 if self.arguments.quick else 3)["w0"]
                print(f"B = {b / 1e6:.3f} MB/s from host to host by cards of {lab.rate('w0') / 1e6:g} Mbit/s")
            print(HEADER, flush=True)
            for model in self.arguments.models:
                self.model(lab, cluster, model, b)

    def model(self, lab, cluster, model, b):
        reference = self.reference(model, cluster.ranks)
        gloo = None  # its row
        for way in self.arguments.ways:
            for k in cluster.ks if way in TALLY else [0]:
                try:
                    said, warnings = self.ranks(lab, cluster, k, way, model)
                except LabError as problem:
                    print(f"{model}, k = {k}, {way} failed:\n{problem}", file=sys.stderr)
                    self.failed = True
                    continue
                row = self.row(cluster, k, way, model, b, said, reference, gloo)
                row["warnings"] = warnings
                self.failed |= not row["agrees"]
                gloo = row if way == "gloo" else gloo
                self.rows.add(row)
                show(row)

    def row(self, cluster, k, way, model, b, said, reference, gloo):
        def slowest(what):
            return [max(times) for times in zip(*(one[what] for one in said))]

        seconds = slowest("seconds")
        none = [statistics.fmean(map(max, zip(*block))) for block in zip(*(one["none"] for one in said))]
        time_s, alone_s = statistics.median(seconds), statistics.median(slowest("alone"))
        not_hidden_s = statistics.median(one - other for one, other in zip(seconds, none))
        losses = [one["losses"][0] for one in said]
        # DDP cuts a compiled model's graph at its buckets, and the compiler makes other loops of the pieces: what
        # differs by a last bit at first is another training soon.
        cut = self.arguments.compile == "model" and way in DDP
        steps = FIRST_STEPS if cut else None
        pairs = [pair for one, its in zip(losses, reference["losses"]) for pair in zip(one[:steps], its[:steps])]
        off = max(abs(one - its) / max(abs(its), LEAST_LOSS) for one, its in pairs)
        same = losses == reference["losses"] and {one["digest"] for one in said} == {reference["digest"]}
        # Division by a power of two is exact, so before or after the sum it makes no difference.
        exact = way in TALLY and cluster.ranks & (cluster.ranks - 1) == 0 and not cut
        alike = len({one["digest"] for one in said}) == 1
        over_gloo = gloo["time_s"] / time_s if gloo else None
        gain = eq_7(cluster.n, k) if cluster.n > 1 and k <= cluster.n else None
        batch = self.arguments.batch or BATCH[model]
        return {
            "bench": "train",
            "way": way,
            "model": model,
            "n": cluster.n,
            "k": k,
            "ranks": cluster.ranks,
            "rate": cluster.rate if cluster.n > 1 else None,
            "batch": batch,
            "bytes": said[0]["bytes"],
            "bucket_mb": said[0]["bucket_mb"],
            "time_s": time_s,
            "least_s": min(seconds),
            "blocks_s": seconds,
            "samples_per_s": batch * cluster.ranks / time_s,
            "none_s": statistics.median(none),
            "not_hidden_s": not_hidden_s,
            "alone_s": alone_s,
            "hidden": 1 - not_hidden_s / alone_s,
            "optimum_s": optimum.optimum([b] * cluster.n, [b] * k, said[0]["bytes"]) if b else None,
            "over_gloo": over_gloo,
            "eq_7": gain if way in TALLY else None,
            "of_eq_7": over_gloo / gain if over_gloo and gain and way in TALLY else None,
            "cpu_s": sum(one["cpu_s"] for one in said),
            "busy": said[0]["busy"] / said[0]["ticks"] if said[0]["ticks"] else None,
            "losses": [statistics.fmean(step) for step in zip(*losses)],
            "same_bits": same,
            "off": off,
            "agrees": same if exact else alike and off <= TOLERANCE,
            "b_bytes_per_s": b,
            "torch": said[0]["version"],
            "compile": self.arguments.compile,
            "settings": self.arguments.settings if way in TALLY else {},
        }


HEADER = (
    f"{'model':8} {'k':>2} {'way':10} {'bucket':>6} {'ms/step':>9} {'samples/s':>9} {'none':>8} "
    f"{'not hidden':>10} {'alone':>8} {'hidden':>6} "
    f"{'optimum':>8} {'x gloo':>6} {'eq. 7':>6} {'of it':>6} {'cpu ms':>8} {'busy':>5} {'loss':>7} reference"
)


def figure(value, width, digits, factor=1):
    return f"{value * factor:{width}.{digits}f}" if value is not None else " " * (width - 1) + "-"


def show(row):
    beside = "same bits" if row["same_bits"] else f"within {row['off']:.1e}"
    print(
        f"{row['model']:8} {row['k']:2} {row['way']:10} {figure(row['bucket_mb'], 6, 0)} "
        f"{figure(row['time_s'], 9, 2, 1e3)} {row['samples_per_s']:9.0f} {figure(row['none_s'], 8, 2, 1e3)} "
        f"{figure(row['not_hidden_s'], 10, 2, 1e3)} "
        f"{figure(row['alone_s'], 8, 1, 1e3)} {figure(row['hidden'], 6, 2)} "
        f"{figure(row['optimum_s'], 8, 1, 1e3)} {figure(row['over_gloo'], 6, 3)} {figure(row['eq_7'], 6, 3)} "
        f"{figure(row['of_eq_7'], 6, 3)} {figure(row['cpu_s'], 8, 1, 1e3)} {figure(row['busy'], 5, 2)} "
        f"{row['losses'][-1]:7.4f} {beside}{'' if row['agrees'] else ': WRONG'}",
        flush=True,
    )
    if row["warnings"] and row["way"] in TALLY:
        print(row["warnings"], file=sys.stderr)


# --- command line -----------------------------------------------------------------------------------


def parse():
    parser = argparse.ArgumentParser(description="training on an emulated cluster, by each way to sum gradients")
    parser.add_argument("--series", nargs="+", choices=["four", "two", "local"], help="(all)")
    parser.add_argument("-n", type=int, help="worker machines, instead of a series")
    parser.add_argument("-k", type=int, nargs="+", help="CPU machines (0)")
    parser.add_argument("--ranks", type=int, help="on each worker machine (1)")
    parser.add_argument("--rate", help="of every card (1gbit)")
    parser.add_argument("--models", nargs="+", choices=list(BATCH), default=list(BATCH))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--width", type=int, help="of mlp's three hidden layers (2048)")
    parser.add_argument("--batch", type=int, help="images of a rank in a step (8 of mlp, 128 of convnet)")
    parser.add_argument("--buckets", type=float, nargs="+", metavar="MB", help="of DDP, to choose from (0.25 1 5 25 100)")
    parser.add_argument("--warm-up", type=int, help="steps (3)")
    parser.add_argument("--blocks", type=int, help="that are timed (5)")
    parser.add_argument("--steps", type=int, help="in each (5)")
    parser.add_argument("--compile", choices=["model", "layers"], help="with torch.compile")
    parser.add_argument("--data", default=DATA, help=f"folder with Fashion-MNIST's files ({DATA})")
    systems.add_arguments(parser, "n = 2, k = 0 1, 200 Mbit/s, width 128, few steps")
    parser.add_argument("--plot", metavar="FILE", help="draw samples per second and losses (needs matplotlib)")
    a = parser.parse_args()
    usual = dict(n=4, k=[0], ranks=1, rate="1gbit", width=2048, warm_up=3, blocks=5, steps=5)
    usual["buckets"] = [0.25, 1, 5, 25, 100]
    if a.quick:
        usual |= dict(n=2, k=[0, 1], rate="200mbit", width=128, buckets=[1], warm_up=2, blocks=1, steps=4)
    own = a.quick or any(x is not None for x in (a.n, a.k, a.ranks))
    if a.series and own:
        parser.error("a series has its own machines")
    if a.n == 1:
        usual["k"] = [0]
    for name, value in usual.items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    if a.n < 1 or a.ranks < 1 or a.n * a.ranks < 2 or min(a.k) < 0 or (a.n == 1 and max(a.k)):
        parser.error("two ranks are the least, and one machine takes no CPU machines")
    if min(a.width, a.steps, a.blocks) < 1 or a.warm_up < 0 or min(a.buckets) <= 0 or (a.batch or 1) < 1:
        parser.error("a step of an image is the least")
    a.settings = dict(word.split("=", 1) for word in a.set)
    a.ways = [way for way in WAYS if way in a.ways]  # Gloo, by which others are measured, comes first
    if own:
        return a, [Cluster(a.n, a.k, a.rate, a.ranks)]
    return a, [c for name in a.series or ["four", "two", "local"] for c in series(name, a.rate)]


def main():
    arguments, clusters = parse()
    if why_not():
        sys.exit(f"train: {why_not()}")
    if not systems.built("bin/tallyd", "src/tallyd/tallyd"):
        sys.exit(f"train: there is no bin/tallyd in {systems.BUILD}; run make first")
    if not (pathlib.Path(arguments.data) / "train-images-idx3-ubyte.gz").exists():
        sys.exit(f"train: no images in {arguments.data}: apt-get install dataset-fashion-mnist, or --data FOLDER")
    if arguments.plot and not plot.available():
        sys.exit("train: --plot needs matplotlib; without it write --json, and draw with curves.py elsewhere")
    bench = Bench(arguments)
    for cluster in clusters:
        bench.cluster(cluster)
    if arguments.plot:
        import curves

        curves.draw(bench.rows, arguments.plot)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ValueError) as problem:
        sys.exit(f"train: {problem}")

#!/usr/bin/env python3
"""Steps of FSDP2 and of ZeroRedundancyOptimizer on the emulated cluster, with the backend tally beside Gloo.

    bench/fsdp/fsdp.py [--json FILE]        # n = 4, k = 0 4, 500 Mbit/s, 33 MB of parameters
    bench/fsdp/fsdp.py --quick              # n = 2, k = 0, 200 Mbit/s, a small network
    bench/fsdp/fsdp.py -n 8 -k 0 --width 768 --layers 4

README.md beside this file says what is trained and what the columns mean.  Needs root (test/lab/lab.py says what
else) and an interpreter with PyTorch.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "goodput"))

import goodput  # noqa: E402
import optimum  # noqa: E402
import stream  # noqa: E402
import systems  # noqa: E402
from systems import LabError, why_not  # noqa: E402

WAYS, BACKENDS = ["fsdp2", "zero"], ["gloo", "tally"]
TOLERANCE = 1e-3  # of losses: sums in another order differ in their last bits


def environment(lab, backend, settings):
    """PyTorch's threads are one a rank; the package is the build's."""
    paths = [str(systems.BUILD / "python"), os.environ.get("PYTHONPATH")]

    def of_host(host):
        card = {"TALLY_BANDWIDTH": f"{lab.rate(host) / 1e6:g}M"} if backend == "tally" else {}
        return {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TALLY_LOG": "warning",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **card,
            **settings,
        }

    return of_host


class Bench:
    def __init__(self, arguments, settings):
        self.arguments, self.settings = arguments, settings

    def argv(self, way, backend):
        a = self.arguments
        task = {"way": way, "backend": backend, "width": a.width, "layers": a.layers, "batch": a.batch,
                "ranks": a.n * a.ranks_per_machine, "warm_up": a.warm_up, "steps": a.steps}
        return [a.python, str(HERE / "rank.py"), json.dumps(task)]

    def reference(self):
        done = subprocess.run(self.argv("reference", "gloo"), capture_output=True, text=True, check=False,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise LabError(f"the reference: status {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def once(self, lab, cluster, way, backend, k):
        workers, services = cluster.hosts[: cluster.n], cluster.hosts[cluster.n :][:k]
        job = lab.job(self.argv(way, backend), workers, services, systems.built("bin/tallyd", "src/tallyd/tallyd"),
                      self.arguments.ranks_per_machine, env=environment(lab, backend, self.settings),
                      timeout_s=systems.PATIENCE_S, apart=True)
        outputs, warnings = systems.outputs_of(job)
        said = [json.loads(output.splitlines()[-1]) for output in outputs]
        return sorted(said, key=lambda one: one["rank"]), warnings

    def row(self, cluster, way, backend, k, runs, reference, b):
        seconds = [[max(times) for times in zip(*(one["seconds"] for one in said))] for said, _ in runs]
        off = max(abs(ours - its) / its for said, _ in runs for one in said
                  for ours, its in zip(one["losses"], reference["losses"]))
        first = runs[0][0][0]
        cards, total = [b] * cluster.n, first["bytes"]
        gather = optimum.collective("all-gather", cards, [], total)
        return {
            "bench": "fsdp",
            "way": way,
            "system": backend,
            "n": cluster.n,
            "k": k,
            "ranks_per_machine": self.arguments.ranks_per_machine,
            "bytes": total,
            "time_s": statistics.median(statistics.median(one) for one in seconds),
            "least_s": min(min(one) for one in seconds),
            "runs_s": [statistics.median(one) for one in seconds],
            # Parameters twice and gradients once; or gradients on all, and then each rank's parameters from it.
            "optimum_s": 3 * gather if way == "fsdp2" else
            optimum.optimum(cards, [b] * k if backend == "tally" else [], total) + gather,
            "cpu_s": statistics.median(sum(one["cpu_s"] for one in said) for said, _ in runs),
            "busy": statistics.median(said[0]["busy"] / max(said[0]["ticks"], 1) for said, _ in runs),
            "losses": [first["losses"][0], first["losses"][-1]],
            "off": off,
            "agrees": off <= TOLERANCE,
            "warnings": "".join(sorted({warnings for _, warnings in runs})),
            "rate": cluster.rate,
            "b_bytes_per_s": b,
            "torch": first["torch"],
            "settings": self.settings if backend == "tally" else {},
        }


HEADER = (f"{'way':6} {'k':>3} {'system':7} {'bytes':>10} {'s/step':>8} {'least':>8} {'network':>8} {'x gloo':>6} "
          f"{'cpu s':>7} {'busy':>5} {'loss':>15}  off the reference")


def show(row):
    print(f"{row['way']:6} {row['k']:3} {row['system']:7} {row['bytes']:10} {row['time_s']:8.4f} {row['least_s']:8.4f} "
          f"{row['optimum_s']:8.4f} {goodput.figure(row['over_gloo'], 6, 2)} {row['cpu_s']:7.2f} {row['busy']:5.2f} "
          f"{row['losses'][0]:7.4f} {row['losses'][1]:7.4f}  {row['off']:.1e}", flush=True)


def parse():
    parser = argparse.ArgumentParser(description="sharded training on an emulated cluster beside Gloo")
    parser.add_argument("-n", type=int, help="worker machines (4)")
    parser.add_argument("-k", type=int, nargs="+", help="CPU machines (0 4)")
    parser.add_argument("--ranks-per-machine", type=int, default=1, metavar="R", help="(1)")
    parser.add_argument("--rate", help="of every card (500mbit)")
    parser.add_argument("--burst", type=goodput.size, default=96 << 10, help="of the cards' token buckets (96K)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--width", type=int, help="of the network (512)")
    parser.add_argument("--layers", type=int, help="its blocks (4)")
    parser.add_argument("--batch", type=int, default=8, help="rows of each rank in a step (8)")
    parser.add_argument("--runs", type=int, help="of each, in turns (5)")
    parser.add_argument("--steps", type=int, default=3, help="of a run (3)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them (2)")
    systems.add_arguments(parser, "n = 2, k = 0, 200 Mbit/s, a small network, one run")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.n = arguments.n or (2 if quick else 4)
    arguments.k = arguments.k or ([0] if quick else [0, 4])
    arguments.rate = arguments.rate or ("200mbit" if quick else "500mbit")
    arguments.width = arguments.width or (128 if quick else 512)
    arguments.layers = arguments.layers or (2 if quick else 4)
    arguments.runs = arguments.runs or (1 if quick else 5)
    if arguments.n < 2 or arguments.steps < 1 or arguments.warm_up < 0 or arguments.ranks_per_machine < 1:
        parser.error("two workers and a step are the least")
    return arguments


def main():
    arguments = parse()
    if why_not():
        sys.exit(f"fsdp: {why_not()}")
    bench = Bench(arguments, dict(word.split("=", 1) for word in arguments.set))
    cluster = goodput.Cluster(arguments.n, arguments.k, arguments.rate, [], burst=arguments.burst)
    reference, runs, rows = bench.reference(), {}, systems.Rows(arguments.json)
    with cluster.lab() as lab:
        b = stream.bandwidths(lab, cluster.hosts, 1 if arguments.quick else 3)[cluster.hosts[0]]
        print(f"\n{cluster}; {' '.join(arguments.set) or 'default settings'}\nB = {b / 1e6:.3f} MB/s from host to host")
        for turn in range(arguments.runs):
            for way in arguments.ways:
                for backend in arguments.backends:
                    for k in cluster.ks if backend == "tally" else [0]:
                        runs.setdefault((way, backend, k), []).append(bench.once(lab, cluster, way, backend, k))
            print(f"run {turn + 1} of {arguments.runs}", file=sys.stderr, flush=True)
    print(HEADER)
    for (way, backend, k), some in runs.items():
        row = bench.row(cluster, way, backend, k, some, reference, b)
        gloo = next((r for r in rows if r["way"] == way and r["system"] == "gloo"), row if backend == "gloo" else None)
        row["over_gloo"] = gloo["time_s"] / row["time_s"] if gloo else None
        rows.add(row)
        show(row)
        if row["warnings"] and backend == "tally":
            print(row["warnings"], file=sys.stderr)
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ValueError) as problem:
        sys.exit(f"fsdp: {problem}")

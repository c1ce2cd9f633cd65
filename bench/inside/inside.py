#!/usr/bin/env python3
"""What is predicted of the inside of machines, in the shape of figures 13 and 14 of BytePS (OSDI 2020), and how every
machine of the tests would sum.

    bench/inside/inside.py [--tally PROGRAM] [--machines FOLDER] [--json FILE] [--plot FIGURE.png]
    bench/inside/inside.py --flow [--tally PROGRAM] [--machines FOLDER] [--json FILE]

Nothing is measured: `tally plan` and `tally topo` predict, and beside them stands the same from the paper's formulas,
worked out here anew.  Times are of the communication alone; a training step hides a part of it behind what it computes, so
the paper's bars, which are whole steps, differ less.  With --flow: how near pieces in virtual time come to the forecast.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BYTES = 10**9
WORKERS = 8
CARD, BUS, ACROSS = 100e9 / 8, 105e9 / 8, 80e9 / 8  # bytes/s: what BytePS has and measured


def traffic(k, n=WORKERS):
    """What a worker machine's card carries each way, for one byte of gradients: Eq. 6."""
    return 2 * n * (n - 1) / (n * n + k * n - 2 * k)


def formula_pcie(k):
    """CPU-assisted aggregation below two switches of l = 4: Eq. 8 and 9 with x = 0, beside the card."""
    return BYTES * max(traffic(k) / CARD, traffic(k) / BUS, 1 / BUS, 7 / 4 / BUS)


def formula_ring():
    """A ring over both switches, and an eighth of it from each GPU to the processor and back."""
    return BYTES * max(traffic(0) / CARD, 7 / 4 / ACROSS + 4 / 8 / BUS)


def formula_roots(k, beside, share):
    """Reduce over NVLink to roots; those beside the card own the share `beside`, of another switch's the most `share`."""
    return BYTES * max(traffic(k) / CARD, (traffic(k) + beside) / BUS, share / BUS)


FIGURE_14 = {
    "pcie": {"all GPUs in a ring": formula_ring(), "CPU-assisted": formula_pcie(0)},
    "nvlink": {
        "root = 2": formula_roots(0, 0, 1),
        "root = 2, 3": formula_roots(0, 0, 1),
        "root = all": formula_roots(0, 2 / 8, 2 / 8),
        "root = 0": formula_roots(0, 1, 0),
    },
}


class Tally:
    def __init__(self, program, machines):
        self.program, self.machines = program, machines

    def ask(self, command, *arguments):
        done = subprocess.run([self.program, command, "--json", *map(str, arguments)], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"inside: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def files(self, name, option):
        links = self.machines / f"{name}.links"
        return [option, self.machines / f"{name}.xml", *(["--links", links] if links.exists() else [])]

    def plan(self, name, k):
        return self.ask("plan", "-n", WORKERS, "-k", k, "-M", BYTES, *self.files(name, "--topo"))

    def topo(self, name):
        return self.ask("topo", "-n", WORKERS, "-M", BYTES, *self.files(name, "--xml"))


def figure_13(tally):
    rows = []
    for machine in ("pcie", "nvlink"):
        for k in range(WORKERS + 1):
            p = tally.plan(machine, k)
            formula = formula_pcie(k) if machine == "pcie" else formula_roots(k, 0, 1)
            rows.append(
                {
                    "bench": "inside",
                    "figure": 13,
                    "machine": machine,
                    "k": k,
                    "network_s": p["time_s"],
                    "time_s": p["end_to_end_time_s"],
                    "formula_s": formula,
                    "all_reduce_s": p["end_to_end_all_reduce_time_s"],
                    "bottleneck": p["inside"]["bottleneck"],
                }
            )
    return rows


def figure_14(tally):
    """What `tally topo` says of those that are among its ways; the rest by formula alone."""
    rows = []
    for machine, strategies in FIGURE_14.items():
        found = tally.topo(machine)
        options = {(o["groups"], o["shares"]): o["time_s"] for o in found["options"]}
        said = {
            "all GPUs in a ring": options.get(("all", "equal")),
            "CPU-assisted": options.get(("switch", "equal")),
            "root = 2, 3": options.get(("nvlink", "near")),
            "root = all": options.get(("nvlink", "equal")),
            "root = 0": tally.plan(machine, 0)["inside"]["all_reduce_time_s"] if machine == "nvlink" else None,
        }
        for name, formula in strategies.items():
            rows.append({"bench": "inside", "figure": 14, "machine": machine, "strategy": name, "time_s": said.get(name), "formula_s": formula})
    return rows


def every_machine(tally):
    rows = []
    for path in sorted(tally.machines.glob("*.xml")):
        found = tally.topo(path.stem)
        if not found["gpus"]:
            continue
        p = tally.plan(path.stem, 0)
        rows.append(
            {
                "bench": "inside",
                "figure": 0,
                "machine": path.stem,
                "gpus": len(found["gpus"]),
                "rule": found["rule"],
                "strategy": found["strategy"],
                "time_s": p["inside"]["time_s"],
                "all_reduce_s": p["inside"]["all_reduce_time_s"],
                "bottleneck": p["inside"]["bottleneck"],
            }
        )
    return rows


FLOWS = [(128, 2, 0), (256, 4, 0), (256, 4, 2), (512, 4, 2), (1024, 2, 2)]  # KB, steps of a kind, us before each


def flows(tally):
    """Direct copies in virtual time: 100 MB, 8 worker machines."""
    rows = []
    for path in sorted(tally.machines.glob("*.xml")):
        for size, steps, delay in FLOWS:
            found = tally.ask("topo", "-n", WORKERS, "-M", 10**8, "--flow", f"{size}K,{steps},{delay}", *tally.files(path.stem, "--xml"))
            if not found["gpus"]:
                break
            direct = found["direct"]
            rows.append(
                {
                    "bench": "inside_flow",
                    "machine": path.stem,
                    "piece": size << 10,
                    "steps": steps,
                    "delay_s": 1e-6 * delay,
                    "strategy": direct["strategy"],
                    "forecast_s": direct["time_s"],
                    "time_s": direct["flow"]["time_s"],
                }
            )
    return rows


# Rates of the network card of a machine with one GPU.  A rank alone has none: its rate is so high that it costs no time.
ALONE = {"one rank alone": "100000G", "two machines, 100 Gbit/s": "100G"}
PARTS = [(256, 4, 0), (512, 4, 0), (256, 4, 2), (512, 4, 2), (512, 4, 5), (8192, 4, 0)]


def flows_of_one(tally):
    """Operations of 8 MB on a machine's only GPU in virtual time; the last column has no parts within an operation."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        links = pathlib.Path(folder) / "one.links"
        for name, rate in ALONE.items():
            links.write_text(f"card eth0 {rate}\npcie eth0 {rate}\n" if name == "one rank alone" else f"card eth0 {rate}\n")
            for size, steps, delay in PARTS:
                files = ["--xml", tally.machines / "one.xml", "--links", links]
                direct = tally.ask("topo", "-n", 2, "-M", 25 << 20, "--flow", f"{size}K,{steps},{delay}", *files)["direct"]
                rows.append(
                    {
                        "bench": "inside_flow_one",
                        "machine": name,
                        "piece": size << 10,
                        "steps": steps,
                        "delay_s": 1e-6 * delay,
                        "forecast_s": direct["time_s"],
                        "time_s": direct["flow"]["time_s"],
                    }
                )
    return rows


def print_flow_tables(rows):
    print_flows([r for r in rows if r["bench"] == "inside_flow"])
    these = [r for r in rows if r["bench"] == "inside_flow_one"]
    print("\n25 MB on the only GPU of a machine\n")
    print(f"{'machine':24} {'forecast':>8}", *(f"{f'{size}K,{steps},{delay}':>9}" for size, steps, delay in PARTS))
    for first in range(0, len(these), len(PARTS)):
        row = these[first : first + len(PARTS)]
        print(f"{row[0]['machine']:24} {1e3 * row[0]['forecast_s']:5.2f} ms", *(f"{r['forecast_s'] / r['time_s']:>9.1%}" for r in row))


def print_flows(rows):
    print("100 MB of gradients on each GPU of 8 worker machines, in virtual time: share of the forecast's speed\n")
    print(f"{'machine':12} {'forecast':>8}", *(f"{f'{size}K,{steps},{delay}':>9}" for size, steps, delay in FLOWS))
    for first in range(0, len(rows), len(FLOWS)):
        these = rows[first : first + len(FLOWS)]
        print(f"{these[0]['machine']:12} {1e3 * these[0]['forecast_s']:5.2f} ms", *(f"{r['forecast_s'] / r['time_s']:>9.1%}" for r in these))


def ms(seconds):
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def print_tables(rows):
    print(f"{WORKERS} worker machines of 8 GPUs, {BYTES / 1e9:g} GB of gradients on each GPU, ms\n")
    print(f"{'machine':8} {'k':>2} {'network':>8} {'Tally':>8} {'formula':>8} {'all-reduce':>11} {'gain':>6}  bottleneck")
    for r in (r for r in rows if r["figure"] == 13):
        gain = f"{r['all_reduce_s'] / r['time_s']:.2f}"
        print(f"{r['machine']:8} {r['k']:2} {ms(r['network_s']):>8} {ms(r['time_s']):>8} {ms(r['formula_s']):>8} {ms(r['all_reduce_s']):>11} {gain:>6}  {r['bottleneck']}")
    print(f"\n{'machine':8} {'strategy':20} {'Tally':>8} {'formula':>8}")
    for r in (r for r in rows if r["figure"] == 14):
        print(f"{r['machine']:8} {r['strategy']:20} {ms(r['time_s']):>8} {ms(r['formula_s']):>8}")
    print(f"\n{'machine':12} {'GPUs':>4} {'rule':>4} {'Tally':>8} {'all-reduce':>11}  strategy; bottleneck")
    for r in (r for r in rows if r["figure"] == 0):
        print(f"{r['machine']:12} {r['gpus']:4} {r['rule'] or '-':>4} {ms(r['time_s']):>8} {ms(r['all_reduce_s']):>11}  {r['strategy']}; {r['bottleneck']}")


def draw(rows, file):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"pcie": "PCIe only: two switches of four GPUs", "nvlink": "NVLink: four switches of two GPUs"}
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7.5))
    for axis, machine in zip(axes[0], titles):
        these = [r for r in rows if r["figure"] == 13 and r["machine"] == machine]
        k = [r["k"] for r in these]
        axis.plot(k, [8e-9 * BYTES / r["network_s"] for r in these], "--", color="black", label="network alone (Eq. 6)")
        axis.plot(k, [8e-9 * BYTES / r["time_s"] for r in these], "o-", color="#c82828", label="Tally, from GPU to GPU")
        axis.plot(k, [8e-9 * BYTES / r["all_reduce_s"] for r in these], "s-", color="#4285c4", label="all-reduce")
        axis.set(title=titles[machine], xlabel="CPU machines", ylabel="predicted goodput, Gbit/s")
        axis.set_ylim(0, 110)
        axis.legend(loc="lower right", fontsize="small")
    for axis, machine in zip(axes[1], titles):
        these = [r for r in rows if r["figure"] == 14 and r["machine"] == machine]
        best = min(r["formula_s"] for r in these)
        colours = ["#c82828" if r["formula_s"] < best * 1.001 else "#94b2d6" for r in these]
        bars = axis.bar([r["strategy"] for r in these], [8e-9 * BYTES / r["formula_s"] for r in these], color=colours, width=0.6)
        axis.bar_label(bars, fmt="%.0f", fontsize="small")
        axis.set(title="Strategies, no CPU machine", ylabel="predicted goodput, Gbit/s")
        axis.set_ylim(0, 70)
    figure.suptitle(f"Predicted, {WORKERS} worker machines of 8 GPUs, network of 100 Gbit/s", fontsize="medium")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tally", default=ROOT / "build" / "bin" / "tally")
    parser.add_argument("--machines", type=pathlib.Path, default=ROOT / "test" / "topo" / "machines")
    parser.add_argument("--json", help="one object a line")
    parser.add_argument("--plot", help="needs matplotlib")
    parser.add_argument("--flow", action="store_true", help="in virtual time")
    arguments = parser.parse_args()
    tally = Tally(arguments.tally, arguments.machines)
    if arguments.flow:
        rows = flows(tally) + flows_of_one(tally)
        print_flow_tables(rows)
    else:
        rows = figure_13(tally) + figure_14(tally) + every_machine(tally)
        print_tables(rows)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    if arguments.plot and not arguments.flow:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()

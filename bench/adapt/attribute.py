#!/usr/bin/env python3
"""What a wrong start costs, and through what: the split, the part size or the cores.

    bench/adapt/attribute.py                                # 4 + 0, 4 + 2 at 500 Mbit/s, 8 + 8 at 250: a quarter of an hour
    bench/adapt/attribute.py --layouts 4+2 --seconds 30

Wrong figures change the split and the part size together.  Each is also injected alone, with the other as right figures
make it.  TALLY_REPLAN is 0, so nothing mends them.  README.md beside this file says what the columns mean.  Needs root
(test/lab/lab.py says what else).  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import tempfile

import adapt
import optimum
import ticks

RATES = {"8+8": "250mbit"}
WRONG = 0.64  # of the card's rate, as measured once on an undisturbed machine


def predicted(rates, said, workers, services, total):
    """Fraction of the optimum that the split for the rates `said` reaches over cards of `rates`."""
    n = len(workers)
    if n == 2 and not services:
        return 1.0
    least = optimum.optimum([said[w] for w in workers], [said[s] for s in services], total)
    shares = [max(0.0, (least * said[w] / total - 1) / (n - 2)) for w in workers]
    shares += [least * said[s] / (n * total) for s in services]
    shares = [x / sum(shares) for x in shares]
    time = max(sent / rates[h] for sent, h in zip(optimum.traffic(n, shares, total), workers + services))
    return optimum.optimum([rates[w] for w in workers], [rates[s] for s in services], total) / time


def measure(options, said, part_bytes=None):
    """{fraction, part_kb, busy} of a job that was told these factors."""
    with tempfile.TemporaryDirectory() as folder:
        options.log = str(pathlib.Path(folder, "log"))
        options.set = [f"TALLY_PART_BYTES={part_bytes}"] if part_bytes else []
        before = ticks.machine()
        found = adapt.run(options, adapt.Scenario(options.seconds, said=said))
        after = ticks.machine()
        line = pathlib.Path(options.log).read_text(encoding="utf-8")
    return {
        "fraction": statistics.median(s["fraction"] for s in found["steps"][2:]),
        "part_kb": int(re.search(r"parts of (\d+) KB", line)[1]),
        "busy": (after[0] - before[0]) / (after[1] - before[1]),
    }


def attribute(options, layout):
    """Rows of a layout: one for each way to be wrong."""
    options.workers, options.services = map(int, layout.split("+"))
    options.rate = RATES.get(layout, "500mbit")
    workers = [f"w{i}" for i in range(options.workers)]
    services = [f"c{i}" for i in range(options.services)]
    hosts, last = workers + services, (services or workers)[-1]
    rates = dict.fromkeys(hosts, 1.0)
    right = measure(options, {})
    for name, said in (
        ("one card too low", {last: WRONG}),
        ("all but one too low", {h: WRONG for h in hosts if h != last}),
    ):
        both = measure(options, said)
        yield {
            "layout": layout,
            "rate": options.rate,
            "wrong": name,
            "right": right,
            "both": both,
            "split": measure(options, said, right["part_kb"] << 10),
            "part": measure(options, {}, both["part_kb"] << 10),
            "predicted": predicted(rates, {h: said.get(h, 1) for h in hosts}, workers, services, 1.0),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layouts", nargs="+", default=["4+0", "4+2", "8+8"], help="workers + CPU machines")
    parser.add_argument("--seconds", type=float, default=20, help="of each of seven jobs a layout (20)")
    parser.add_argument("--bytes", type=int, default=32 << 20, help="of each step (32 MB)")
    parser.add_argument("--json", help="write the rows, one object a line")
    options = parser.parse_args()
    options.replan, options.burst = 0, adapt.BURST_BYTES
    if adapt.why_not():
        sys.exit(f"attribute: {adapt.why_not()}")
    print("layout wrong               right  both  split alone (predicted)  parts alone    KB right, wrong  busy")
    for layout in options.layouts:
        for row in attribute(options, layout):
            print(
                f"{layout:6} {row['wrong']:19} {row['right']['fraction']:5.3f} {row['both']['fraction']:5.3f}"
                f"  {row['split']['fraction']:11.3f} ({row['predicted']:9.3f})  {row['part']['fraction']:11.3f}"
                f"    {row['right']['part_kb']:8}, {row['both']['part_kb']:5}  {row['right']['busy']:4.2f}",
                flush=True,
            )
            if options.json:
                with open(options.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

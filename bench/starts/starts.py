#!/usr/bin/env python3
"""How well a job measures the network cards of an emulated cluster when it starts: cards that come out wrong, of many starts.

    bench/starts/starts.py                            # 50 starts of 8 + 8 hosts at 500 Mbit/s: three minutes
    bench/starts/starts.py -n 2 -k 0 --starts 200

Each start has a new cluster, in which nothing else sends.  A card is right if it comes out within 5% of what it carries, without
packets' headers.  The exit status is 1 if a card is wrong.  Needs root (test/lab/lab.py says what else).

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "goodput"))

import systems  # noqa: E402
from systems import Lab, LabError, why_not  # noqa: E402

PAYLOAD = 1448 / 1514  # of what a card carries
WITHIN = 0.05


def judge(output, hosts, carries):
    """What the coordinator's line says: the rates of all cards, the wrong ones (0: not there), and those measured once."""
    line = next((x for x in output.splitlines() if "network cards were measured: " in x), "")
    figures = re.findall(r"(\w+) ([0-9.e+-]+) Gbit/s( \(once\))?", line)
    found = {host: float(rate) * 1e9 for host, rate, _ in figures}
    wrong = {h: found.get(h, 0.0) for h in hosts if abs(found.get(h, 0.0) / carries - 1) > WITHIN}
    return {"found": found, "wrong": wrong, "once": [host for host, _, once in figures if once]}


def start(arguments):
    """What one start finds."""
    workers = [f"w{i}" for i in range(arguments.workers)]
    services = [f"c{i}" for i in range(arguments.services)]
    program = [systems.built("meson/examples/push_pull", "examples/push_pull")]
    with Lab(workers + services, arguments.rate, congestion="cubic") as lab:
        job = lab.job(
            program, workers, services, systems.built("bin/tallyd", "src/tallyd/tallyd"), timeout_s=systems.PATIENCE_S
        )
        carries = lab.rate("w0") * PAYLOAD
    if not job.ok:
        raise LabError(str(job))
    return judge(job.ranks[0].output, workers + services, carries)


def commit():
    asked = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-n", "--workers", type=int, default=8)
    parser.add_argument("-k", "--services", type=int, default=8)
    parser.add_argument("--rate", default="500mbit", help="of each card (500mbit)")
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="two starts of 2 + 1")
    parser.add_argument("--json", metavar="FILE", help="one object for each start")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.services, arguments.starts = 2, 1, 2
    reason = why_not()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    cards = wrong = once = 0
    for number in range(arguments.starts):
        try:
            row = start(arguments)
        except LabError as problem:
            print(f"start {number}: {problem}", file=sys.stderr)
            return 1
        cards += arguments.workers + arguments.services
        wrong += len(row["wrong"])
        once += len(row["once"])
        for host, rate in sorted(row["wrong"].items()):
            print(f"start {number}: {host} {rate * 1e-9:.3g} Gbit/s" + " (once)" * (host in row["once"]), flush=True)
        if arguments.json:
            layout = f"{arguments.workers}+{arguments.services}"
            setting = {"bench": "starts", "commit": commit(), "layout": layout, "rate": arguments.rate}
            with open(arguments.json, "a", encoding="utf-8") as file:
                file.write(json.dumps({**setting, **row}) + "\n")
    print(f"{arguments.workers}+{arguments.services} at {arguments.rate}: {arguments.starts} starts, {cards} cards, {wrong} wrong, {once} doubtful")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

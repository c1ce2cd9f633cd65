#!/usr/bin/env python3
"""How fast the plan follows the network: goodput step by step beside the optimum of the moment, while cards of the emulated
cluster change.

    bench/adapt/adapt.py                                    # all scenarios, 4 + 2 at 500 Mbit/s, 32 MB: ten minutes
    bench/adapt/adapt.py --scenario drop -n 8 -k 4 --json FILE
    bench/adapt/adapt.py --scenario wrong --replan 0        # what the wrong figures cost where nothing mends them

README.md beside this file says what the scenarios are and what the columns mean.  Needs root (test/lab/lab.py says what
else).  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import dataclasses
import json
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "goodput"))

import optimum  # noqa: E402
import systems  # noqa: E402
from systems import BUILD, Lab, LabError, why_not  # noqa: E402

PAYLOAD = 1448 / 1514  # of what a card carries
PATIENCE_S = 120
ENOUGH = 0.95  # of what the split reached before the change, relative to the optimum: it has followed
FEWEST_STEPS, LEAST_S = 20, 10  # within the later of these it should


@dataclasses.dataclass
class Scenario:
    """events: (seconds, host, factor of its card's rate).  said: {host: factor of what counts as measured at the start}.
    late: hosts whose tallyd comes after so many seconds."""

    seconds: float
    events: list = dataclasses.field(default_factory=list)
    said: dict = dataclasses.field(default_factory=dict)
    late: dict = dataclasses.field(default_factory=dict)


def wander(hosts, seconds, seed=1):
    """Each card by about 3% a second, between a half and the whole of its rate."""
    draw, events, now = random.Random(seed), [], dict.fromkeys(hosts, 1.0)
    for second in range(5, int(seconds)):
        for host in hosts:
            now[host] = min(1.0, max(0.5, now[host] * (1 + draw.gauss(0, 0.03))))
            events.append((second, host, now[host]))
    return events


def shake(hosts, seconds, seed=1):
    """Each card by 5% around its rate less that, ten times a second."""
    draw = random.Random(seed)
    return [
        (tenth / 10, host, min(1.0, max(0.8, draw.gauss(0.95, 0.05))))
        for tenth in range(50, int(10 * seconds), 10)
        for host in hosts
    ]


def scenarios(workers, services):
    hosts = workers + services
    last = services[-1] if services else workers[-1]
    found = {
        "drop": Scenario(60, [(15, last, 0.2), (40, last, 1)]),
        "worker": Scenario(60, [(15, workers[1], 0.5), (40, workers[1], 1)]),
        "wrong": Scenario(30, said={last: 0.64}),
        "wrong-high": Scenario(30, said={h: 0.64 for h in hosts if h != last}),
        "walk": Scenario(90, wander(hosts, 90)),
        "steady": Scenario(90, shake(hosts, 90)),
        "pattern": Scenario(130, [(10 + 30 * i, last, 1 if i % 2 else 0.2) for i in range(4)]),
    }
    if services:
        found["join"] = Scenario(50, [(0, last, 0.3)], late={last: 15})
    return found


# --- a run --------------------------------------------------------------------------------------------


class Network:
    """What each card carries, since when."""

    def __init__(self, lab, hosts):
        self.lab, self.base = lab, {h: lab.rate(h) for h in hosts}
        self.history = [(0.0, dict(self.base))]

    def change(self, host, factor):
        self.lab.set_rate(host, self.base[host] * factor)
        self.history.append((time.monotonic(), {h: self.lab.rate(h) for h in self.base}))

    def during(self, begin, end):
        """[(seconds, {host: bit/s})] of the time between these."""
        edges = [max(begin, at) for at, _ in self.history] + [end]
        return [(max(0.0, min(end, b) - a), rates) for (_, rates), a, b in zip(self.history, edges, edges[1:]) if b > a]


def fraction(network, workers, services_at, bytes_, begin, seconds):
    """The optimum's time over the step's, by what the cards carried while it went on."""
    end, moved = begin + seconds, 0.0
    for lasted, rates in network.during(begin, end):
        here = [s for s, since in services_at.items() if since <= begin]
        best = optimum.optimum([rates[w] / 8 * PAYLOAD for w in workers], [rates[s] / 8 * PAYLOAD for s in here], bytes_)
        moved += lasted / best
    return 1 / moved


def run(arguments, scenario):
    workers = [f"w{i}" for i in range(arguments.workers)]
    services = [f"c{i}" for i in range(arguments.services)]
    with Lab(workers + services, arguments.rate, congestion="cubic") as lab, tempfile.TemporaryDirectory() as folder:
        stop, network = pathlib.Path(folder, "stop"), Network(lab, workers + services)
        env = {"PYTHONPATH": str(BUILD / "python"), "TALLY_REPLAN": str(arguments.replan)}
        bandwidth = {h: network.base[h] * PAYLOAD * scenario.said.get(h, 1) for h in workers + services}
        env["TALLY_MEASURED"] = ",".join(f"{h}={rate:.0f}" for h, rate in bandwidth.items())
        ranks, daemons = lab.environment(workers, services, env=env)
        early = [s for s in services if s not in scenario.late]
        for one in ranks:
            one["TALLY_SERVERS"] = str(len(early))
        tallyd = systems.built("bin/tallyd", "src/tallyd/tallyd")
        argv = [sys.executable, str(HERE / "rank.py"), str(arguments.bytes), str(stop)]
        daemon = {h: lab.start(h, [tallyd, "--once"], daemons[h], inherit=False) for h in early}
        running = [lab.start(h, argv, ranks[i], inherit=False) for i, h in enumerate(workers)]
        start = time.monotonic()
        services_at = dict.fromkeys(early, 0.0)
        events = sorted(scenario.events + [(at, h, None) for h, at in scenario.late.items()], key=lambda e: e[0])
        for at, host, factor in events:
            time.sleep(max(0.0, start + at - time.monotonic()))
            if factor is None:
                daemon[host] = lab.start(host, [tallyd, "--once"], daemons[host], inherit=False)
                services_at[host] = time.monotonic()
            else:
                network.change(host, factor)
        time.sleep(max(0.0, start + scenario.seconds - time.monotonic()))
        stop.touch()
        results = [p.wait(PATIENCE_S) for p in running]
        for p in daemon.values():
            p.wait(PATIENCE_S)
    if any(r.status for r in results):
        raise LabError("\n".join(f"--- {r.host}: {r.status}\n{r.output[-2000:]}" for r in results))
    output = results[0].output
    steps = []
    for ended, seconds in json.loads(re.search("STEPS (.*)", output)[1]):
        f = fraction(network, workers, services_at, arguments.bytes, ended - seconds, seconds)
        steps.append({"at_s": ended - start, "seconds": seconds, "fraction": f})
    changes = [line for line in output.splitlines() if "its share is now" in line or "it sums nothing" in line]
    times = [at - start for at, _ in network.history[1:]]
    return {"steps": steps, "changes": changes, "events_s": times}


# --- what it says ---------------------------------------------------------------------------------------


def settled(steps, usual, since):
    """(steps, seconds) after `since` until three in a row reach ENOUGH of the usual; None: never."""
    after = [s for s in steps if s["at_s"] - s["seconds"] >= since]
    for i in range(len(after) - 2):
        if all(s["fraction"] >= ENOUGH * usual for s in after[i : i + 3]):
            return i, after[i]["at_s"] - after[i]["seconds"] - since
    return None


def show(name, arguments, scenario, found):
    steps = found["steps"][2:]
    mean = sum(s["fraction"] * s["seconds"] for s in steps) / sum(s["seconds"] for s in steps)
    first = scenario.events[0][0] if scenario.events else None
    before = [s["fraction"] for s in steps if first is None or s["at_s"] < first]
    usual = statistics.median(before) if len(before) > 4 and first else max(s["fraction"] for s in steps)
    row = f"{name:11} {arguments.workers}+{arguments.services} {len(steps):5} steps  mean {mean:.3f}  usual {usual:.3f}"
    row += f"  changes {len(found['changes']):3}"
    few = [at for at in found["events_s"] if at > 1] if len(scenario.events) <= 4 else []
    for at in few or ([0.0] if scenario.said else []):
        took = settled(steps, usual, at)
        row += f"  after {at:.0f} s: " + (f"{took[0]} steps, {took[1]:.1f} s" if took else "never")
    print(row, flush=True)
    for line in found["changes"] if arguments.verbose else []:
        print("    " + line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-n", "--workers", type=int, default=4)
    parser.add_argument("-k", "--services", type=int, default=2)
    parser.add_argument("--rate", default="500mbit", help="of each card (500mbit)")
    parser.add_argument("--bytes", type=int, default=32 << 20, help="of each step (32 MB)")
    parser.add_argument("--scenario", action="append", help="one of those in README.md; by default all")
    parser.add_argument("--replan", type=int, choices=(0, 1), default=1, help="TALLY_REPLAN (1)")
    parser.add_argument("--json", help="write each step and each change to this file")
    parser.add_argument("--verbose", action="store_true", help="print what was said of each change")
    arguments = parser.parse_args()
    if why_not():
        sys.exit(f"adapt: {why_not()}")
    hosts = [f"w{i}" for i in range(arguments.workers)], [f"c{i}" for i in range(arguments.services)]
    known, everything = scenarios(*hosts), {}
    names = arguments.scenario or list(known)
    if unknown := [n for n in names if n not in known]:
        sys.exit(f"adapt: there is no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        everything[name] = run(arguments, known[name])
        show(name, arguments, known[name], everything[name])
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(everything), encoding="utf-8")


if __name__ == "__main__":
    main()

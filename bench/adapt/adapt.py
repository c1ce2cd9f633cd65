#!/usr/bin/env python3
"""How fast the plan follows the network: goodput step by step beside the optimum of the moment, while cards of the emulated
cluster change.

    bench/adapt/adapt.py                                    # all scenarios, 4 + 2 at 500 Mbit/s, 32 MB: a quarter of an hour
    bench/adapt/adapt.py --scenario drop -n 8 -k 4 --json FILE
    bench/adapt/adapt.py --scenario wrong --replan 0        # what the wrong figures cost where nothing mends them

README.md beside this file says what the scenarios are and what the columns mean.  Needs root (test/lab/lab.py says what
else).  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "goodput"))

import goodput  # noqa: E402
import optimum  # noqa: E402
import systems  # noqa: E402
import draw  # noqa: E402
from systems import BUILD, Lab, LabError, why_not  # noqa: E402

PAYLOAD = 1448 / 1514  # of what a card carries
PATIENCE_S = 120
BURST_BYTES = 96 << 10  # of the cards' token buckets
ENOUGH = 0.95  # of the optimum of the moment: the split has followed
FEWEST_STEPS, LEAST_S = 20, 10  # within the later of these it should


@dataclasses.dataclass
class Scenario:
    """events: (seconds, what, host, value); what is to happen then:
        rate     the host's card carries `value` of its rate
        tallyd   the host's tallyd starts only now
        cores    the host's tallyd has so many cores; 0: as many as there are
        foreign  another host streams to this one, 1, or does so no more, 0
        job      another job's tallyd sums on this host, 1, or has ended, 0
    said: {host: factor of what counts as measured at the start}; None: the job measures."""

    seconds: float
    events: list = dataclasses.field(default_factory=list)
    said: dict = dataclasses.field(default_factory=dict)

    def late(self):
        return {host for _, what, host, _ in self.events if what == "tallyd"}


def wander(hosts, seconds, seed=1):
    """Each card by about 3% a second, between a half and the whole of its rate."""
    draw, events, now = random.Random(seed), [], dict.fromkeys(hosts, 1.0)
    for second in range(5, int(seconds)):
        for host in hosts:
            now[host] = min(1.0, max(0.5, now[host] * (1 + draw.gauss(0, 0.03))))
            events.append((second, "rate", host, now[host]))
    return events


def shake(hosts, seconds, seed=1):
    """Each card by 5% around its rate, once a second."""
    draw = random.Random(seed)
    return [
        (second, "rate", host, min(1.15, max(0.85, draw.gauss(1, 0.05))))
        for second in range(5, int(seconds))
        for host in hosts
    ]


def scenarios(workers, services, seconds=None):
    """seconds: of those in which nothing happens that is to be followed."""
    hosts = workers + services
    last = services[-1] if services else workers[-1]
    found = {
        "drop": Scenario(60, [(15, "rate", last, 0.2), (40, "rate", last, 1)]),
        "worker": Scenario(60, [(15, "rate", workers[1], 0.5), (40, "rate", workers[1], 1)]),
        "right": Scenario(seconds or 30),
        "wrong": Scenario(30, said={last: 0.64}),
        "wrong-high": Scenario(30, said={h: 0.64 for h in hosts if h != last}),
        "foreign": Scenario(50, [(0, "foreign", last, 1), (15, "foreign", last, 0)], said=None),
        "walk": Scenario(90, wander(hosts, 90)),
        "steady": Scenario(seconds or 90, shake(hosts, seconds or 90)),
        "pattern": Scenario(130, [(10 + 30 * i, "rate", last, 1 if i % 2 else 0.2) for i in range(4)]),
    }
    if services:
        found["join"] = Scenario(50, [(0, "rate", last, 0.3), (15, "tallyd", last, 1)])
        found["cpu"] = Scenario(60, [(15, "cores", last, 0.03), (40, "cores", last, 0)])
        found["job"] = Scenario(60, [(15, "job", last, 1), (40, "job", last, 0)])
    return found


# --- a run --------------------------------------------------------------------------------------------

OTHERS = ["x0", "x1"]  # the hosts of another job's ranks, and where foreign traffic comes from


class Network:
    """What each card carries for the job, and which services are there to sum, since when."""

    def __init__(self, lab, hosts, services):
        self.lab, self.base = lab, {h: lab.rate(h) for h in hosts}
        self.rates, self.services = dict(self.base), set(services)
        self.history = [(0.0, dict(self.base), frozenset(services))]

    def note(self, host, factor=None, sums=None):
        if factor is not None:
            self.rates[host] = self.base[host] * factor
        if sums is not None:
            (self.services.add if sums else self.services.discard)(host)
        self.history.append((time.monotonic(), dict(self.rates), frozenset(self.services)))

    def change(self, host, factor):
        self.lab.set_rate(host, self.base[host] * factor)
        self.note(host, factor)

    def during(self, begin, end):
        """[(seconds, {host: bit/s}, services)] of the time between these."""
        edges = [max(begin, at) for at, *_ in self.history] + [end]
        times = [max(0.0, min(end, b) - a) for a, b in zip(edges, edges[1:])]
        return [(t, rates, services) for t, (_, rates, services) in zip(times, self.history) if t > 0]


def fraction(network, workers, bytes_, begin, seconds):
    """The optimum's time over the step's, by what the cards carried while it went on."""
    moved = 0.0
    for lasted, rates, services in network.during(begin, begin + seconds):
        cards = [rates[w] / 8 * PAYLOAD for w in workers], [rates[s] / 8 * PAYLOAD for s in sorted(services)]
        moved += lasted / optimum.optimum(*cards, bytes_)
    return 1 / moved


class Cores:
    """A control group for one process, of whichever version this machine has."""

    V1 = pathlib.Path("/sys/fs/cgroup/cpu")
    PERIOD_US = 100000

    def __init__(self):
        self.group = (self.V1 if self.V1.is_dir() else pathlib.Path("/sys/fs/cgroup")) / f"tally-adapt-{os.getpid()}"

    @classmethod
    def why_not(cls):
        """Why no process can be limited here; None: it can."""
        if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
            return "a control group does not limit processes of real-time priority: run this scenario without chrt"
        v2 = pathlib.Path("/sys/fs/cgroup/cgroup.subtree_control")
        if cls.V1.is_dir():
            there = (cls.V1 / "cpu.cfs_quota_us").exists() and os.access(cls.V1, os.W_OK)
            return None if there else "/sys/fs/cgroup/cpu limits nothing here"
        if not v2.exists() or "cpu" not in v2.read_text().split() or not os.access(v2.parent, os.W_OK):
            return "there is no control group for processors in /sys/fs/cgroup"
        return None

    def limit(self, process, cores):
        self.group.mkdir(exist_ok=True)
        quota = int(cores * self.PERIOD_US)
        if self.V1.is_dir():
            (self.group / "cpu.cfs_period_us").write_text(str(self.PERIOD_US))
            (self.group / "cpu.cfs_quota_us").write_text(str(quota or -1))
        else:
            (self.group / "cpu.max").write_text(f"{quota or 'max'} {self.PERIOD_US}")
        (self.group / "cgroup.procs").write_text(str(process.pid))

    def remove(self):
        """Once the process has ended."""
        if self.group.is_dir():
            self.group.rmdir()


class Run:
    """A job on the emulated cluster, and what happens to it."""

    def __init__(self, lab, arguments, scenario, workers, services, stop):
        self.lab, self.stop, self.tallyd = lab, stop, systems.built("bin/tallyd", "src/tallyd/tallyd")
        self.argv = [sys.executable, str(HERE / "rank.py"), str(arguments.bytes)]
        settings = dict(word.split("=", 1) for word in arguments.set)
        self.env = {"PYTHONPATH": str(BUILD / "python"), "TALLY_REPLAN": str(arguments.replan)} | settings
        early = [s for s in services if s not in scenario.late()]
        self.network = Network(lab, workers + services, early)
        env = dict(self.env)
        if scenario.said is not None:
            rates = {h: r * PAYLOAD * scenario.said.get(h, 1) for h, r in self.network.base.items()}
            env["TALLY_MEASURED"] = ",".join(f"{h}={rate:.0f}" for h, rate in rates.items())
        ranks, self.daemon_env = lab.environment(workers, services, env=env)
        ranks[0]["TALLY_LOG"] = "debug" if arguments.log else "info"
        for one in ranks:
            one["TALLY_SERVERS"] = str(len(early))
        self.cores, self.other, self.foreign = Cores(), [], []
        self.happen([e for e in scenario.events if e[0] == 0])
        self.daemon = {h: lab.start(h, [self.tallyd, "--once"], self.daemon_env[h], inherit=False) for h in early}
        self.ranks = [lab.start(h, [*self.argv, str(stop)], ranks[i], inherit=False) for i, h in enumerate(workers)]

    def happen(self, events):
        for _, what, host, value in events:
            getattr(self, "do_" + what)(host, value)

    def do_rate(self, host, factor):
        self.network.change(host, factor)

    def do_tallyd(self, host, _):
        self.daemon[host] = self.lab.start(host, [self.tallyd, "--once"], self.daemon_env[host], inherit=False)
        self.network.note(host, sums=True)

    def do_cores(self, host, cores):
        """How fast a tallyd adds with so little is not known: the optimum is that of a job without it."""
        self.cores.limit(self.daemon[host], cores)
        self.network.note(host, sums=not cores)

    def do_foreign(self, host, on):
        """Two streams share a card in halves."""
        if on:
            self.foreign = [self.lab.start(host, [sys.executable, str(HERE / "foreign.py"), "in"])]
            while "listening" not in self.foreign[0].output():
                time.sleep(0.01)
            out = [sys.executable, str(HERE / "foreign.py"), "out", self.lab.address(host)]
            self.foreign.append(self.lab.start(OTHERS[0], out))
        else:
            for process in self.foreign:
                process.kill()
        self.network.note(host, 0.5 if on else 1)

    def do_job(self, host, on):
        """The other job's ranks are on hosts of their own; its tallyd shares the card in halves."""
        other_stop = self.stop.with_name("other")
        if on:
            ranks, daemons = self.lab.environment(OTHERS, [host], env=self.env)
            self.other = [self.lab.start(host, [self.tallyd, "--once"], daemons[host], inherit=False)]
            argv = [*self.argv, str(other_stop)]
            self.other += [self.lab.start(h, argv, ranks[i], inherit=False) for i, h in enumerate(OTHERS)]
        else:
            other_stop.touch()
            for process in self.other:
                process.wait(PATIENCE_S)
        self.network.note(host, 0.5 if on else 1)

    def finish(self):
        self.stop.touch()
        results = [p.wait(PATIENCE_S) for p in self.ranks]
        for process in self.daemon.values():
            process.wait(PATIENCE_S)
        self.cores.remove()
        if any(r.status for r in results):
            raise LabError("\n".join(f"--- {r.host}: {r.status}\n{r.output[-2000:]}" for r in results))
        return results[0].output


def commit():
    asked = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def run(arguments, scenario):
    workers = [f"w{i}" for i in range(arguments.workers)]
    services = [f"c{i}" for i in range(arguments.services)]
    hosts = workers + services + OTHERS
    with Lab(hosts, arguments.rate, congestion="cubic", burst_bytes=arguments.burst) as lab, tempfile.TemporaryDirectory() as folder:
        job = Run(lab, arguments, scenario, workers, services, pathlib.Path(folder, "stop"))
        start = time.monotonic()
        for event in sorted((e for e in scenario.events if e[0] > 0), key=lambda e: e[0]):
            time.sleep(max(0.0, start + event[0] - time.monotonic()))
            job.happen([event])
        time.sleep(max(0.0, start + scenario.seconds - time.monotonic()))
        output = job.finish()
    if arguments.log:
        pathlib.Path(arguments.log).write_text(output, encoding="utf-8")
    steps = []
    for ended, seconds in json.loads(re.search("STEPS (.*)", output)[1]):
        f = fraction(job.network, workers, arguments.bytes, ended - seconds, seconds)
        steps.append({"at_s": ended - start, "seconds": seconds, "fraction": f})
    changes = [line for line in output.splitlines() if "its share is now" in line or "it sums nothing" in line]
    times = [at - start for at, *_ in job.network.history[1:]]
    layout = f"{arguments.workers}+{arguments.services}"
    setting = {"commit": commit(), "layout": layout, "rate": arguments.rate, "burst": arguments.burst, "bytes": arguments.bytes}
    return {**setting, "steps": steps, "changes": changes, "events_s": times}


# --- what it says ---------------------------------------------------------------------------------------


def settled(steps, since, until):
    """(steps, seconds) after `since` until three in a row reach ENOUGH; None: not before `until`."""
    after = [s for s in steps if s["at_s"] - s["seconds"] >= since and s["at_s"] <= until]
    for i in range(len(after) - 2):
        if all(s["fraction"] >= ENOUGH for s in after[i : i + 3]):
            return i, after[i]["at_s"] - after[i]["seconds"] - since
    return None


def show(name, arguments, scenario, found):
    """True: the split has followed each change in time."""
    steps = found["steps"][2:]
    mean = sum(s["fraction"] * s["seconds"] for s in steps) / sum(s["seconds"] for s in steps)
    first = next((at for at, *_ in scenario.events if at > 0), None)
    before = [s["fraction"] for s in steps if first is None or s["at_s"] < first]
    usual = statistics.median(before) if len(before) > 4 and first else max(s["fraction"] for s in steps)
    row = f"{name:11} {arguments.workers}+{arguments.services} {len(steps):5} steps  mean {mean:.3f}  usual {usual:.3f}"
    row += f"  changes {len(found['changes']):3}"
    in_time = True
    few = [at for at in found["events_s"] if at > 1] if len(scenario.events) <= 4 else []
    few = few or ([0.0] if scenario.said else [])
    for at, until in zip(few, [*few[1:], float("inf")]):
        took = settled(steps, at, until)
        late = bool(took) and took[0] > FEWEST_STEPS and took[1] > LEAST_S
        row += f"  after {at:.0f} s: " + (f"{took[0]} steps, {took[1]:.1f} s" if took else "never") + " (late)" * late
        in_time &= bool(took) and not late
    print(row, flush=True)
    for line in found["changes"] if arguments.verbose else []:
        print("    " + line)
    return in_time


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-n", "--workers", type=int, default=4)
    parser.add_argument("-k", "--services", type=int, default=2)
    parser.add_argument("--rate", default="500mbit", help="of each card (500mbit)")
    parser.add_argument("--burst", type=goodput.size, default=BURST_BYTES, help="of the cards' token buckets (96K)")
    parser.add_argument("--bytes", type=int, default=32 << 20, help="of each step (32 MB)")
    parser.add_argument("--scenario", action="append", help="one of those in README.md; by default all")
    parser.add_argument("--seconds", type=float, help="of `right` (30) and `steady` (90)")
    parser.add_argument("--replan", type=int, choices=(0, 1), default=1, help="TALLY_REPLAN (1)")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a setting of Tally's")
    parser.add_argument("--json", help="write each step and each change to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw goodput over time (needs matplotlib)")
    parser.add_argument("--log", metavar="FILE", help="write what rank 0 logs, each sample of the traffic among it, of the last run")
    parser.add_argument("--check", action="store_true", help="exit with 1 if some change was followed late or never")
    parser.add_argument("--verbose", action="store_true", help="print what was said of each change")
    arguments = parser.parse_args()
    if why_not():
        sys.exit(f"adapt: {why_not()}")
    if arguments.plot and not draw.available():
        sys.exit("adapt: --plot needs matplotlib; without it write --json, and draw with draw.py elsewhere")
    hosts = [f"w{i}" for i in range(arguments.workers)], [f"c{i}" for i in range(arguments.services)]
    known, everything, in_time = scenarios(*hosts, arguments.seconds), {}, True
    names = arguments.scenario or list(known)
    if unknown := [n for n in names if n not in known]:
        sys.exit(f"adapt: there is no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    for name in names:
        if any(what == "cores" for _, what, _, _ in known[name].events) and Cores.why_not():
            print(f"{name:11} skipped: {Cores.why_not()}", flush=True)
            continue
        everything[name] = run(arguments, known[name])
        in_time &= show(name, arguments, known[name], everything[name])
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(everything), encoding="utf-8")
    if arguments.plot:
        draw.draw(everything, arguments.plot)
    if arguments.check and not in_time:
        sys.exit(1)


if __name__ == "__main__":
    main()

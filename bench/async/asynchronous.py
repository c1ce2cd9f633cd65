#!/usr/bin/env python3
"""Asynchronous training on the emulated cluster: what additions cost, what slow ranks cost the others, and what is learned.

    bench/async/asynchronous.py                              # all series, 500 Mbit/s: eight minutes
    bench/async/asynchronous.py --series adds -k 0 4 --json FILE
    bench/async/asynchronous.py --quick

README.md beside this file says what the series are and what the columns mean.  Needs root (test/lab/lab.py says what
else) and an interpreter with PyTorch.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import pathlib
import random
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "goodput"))

import goodput  # noqa: E402
import systems  # noqa: E402
from lab import parse_rate  # noqa: E402
from systems import Lab, LabError, why_not  # noqa: E402

PATIENCE_S = 240
BURST_BYTES = 96 << 10  # of the cards' token buckets
SLOW = 3  # a slow step computes so many times as long
PAYLOAD = 1448 / 1514  # of what a card carries
TALLYD = systems.built("bin/tallyd", "src/tallyd/tallyd")
TARGET_LOSS = 0.25  # of the test images


def recurrence(delays, staleness):
    """Seconds until all steps have ended, if communication took no time.

    delays: of each rank, what each step computes.  An addition is sent when its step has computed and the values of the one before
    are there.  Those of addition r are there once all ranks have sent addition r - staleness (0: no bound)."""
    n, steps = len(delays), len(delays[0])
    sent = [[0.0] for _ in range(n)]

    def answered(rank, step):
        if not staleness or step <= staleness:
            return sent[rank][step]
        return max(sent[rank][step], *(sent[other][step - staleness] for other in range(n)))

    for step in range(1, steps + 1):
        for rank in range(n):
            sent[rank].append(max(sent[rank][-1] + delays[rank][step - 1], answered(rank, step - 1)))
    return max(answered(rank, steps) for rank in range(n))


def drawn(ranks, steps, seconds, seed):
    """What each step computes: of each rank, a tenth of the steps takes longer."""
    draw = random.Random(seed)
    return [[seconds * (SLOW if draw.random() < 0.1 else 1) for _ in range(steps)] for _ in range(ranks)]


class Bench:
    """Runs tasks, and keeps the rows."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.rows, self.wrong = systems.Rows(arguments.json), False

    def command(self, task):
        return [self.arguments.python, str(HERE / "rank.py"), json.dumps(task)]

    def hosts(self, k):
        return [f"w{i}" for i in range(self.arguments.n)], [f"c{i}" for i in range(k)]

    def environment(self):
        settings = dict(word.split("=", 1) for word in self.arguments.set)
        return {"PYTHONPATH": str(systems.BUILD / "python"), "OMP_NUM_THREADS": "1", **settings}

    def lab(self, hosts):
        return Lab(hosts, self.arguments.rate, congestion="cubic", burst_bytes=BURST_BYTES)

    def told(self, ranks):
        """What the ranks have said."""
        if any(rank.status for rank in ranks):
            raise LabError("\n".join(f"--- {rank.host}: {rank.status}\n{rank.output[-2000:]}" for rank in ranks))
        told = [next(json.loads(line[7:]) for line in rank.output.splitlines() if line.startswith("RESULT ")) for rank in ranks]
        self.wrong = self.wrong or any(one["wrong"] for one in told)
        return told

    def run(self, task, k=0):
        """A job to its end."""
        workers, services = self.hosts(k)
        with self.lab(workers + services) as lab:
            job = lab.job(self.command(task), workers, services, TALLYD, env=self.environment(), timeout_s=PATIENCE_S)
        if not job.ok:
            raise LabError(str(job))
        return self.told(job.ranks)

    def run_with_death(self, task, k):
        """The same, and when a tallyd was killed."""
        workers, services = self.hosts(k)
        with self.lab(workers + services) as lab:
            of_ranks, of_services = lab.environment(workers, services, env=self.environment())
            daemons = [lab.start(host, [TALLYD, "--once"], of_services[host], inherit=False) for host in services]
            ranks = [lab.start(host, self.command(task), of_ranks[i], inherit=False) for i, host in enumerate(workers)]
            while "ADDING" not in ranks[0].output() and all(rank.poll() is None for rank in ranks):
                time.sleep(0.05)
            time.sleep(task["seconds"] / 2)
            killed = time.monotonic()
            daemons[-1].kill()
            told = self.told([rank.wait(PATIENCE_S) for rank in ranks])
        return told, killed

    def show(self, text, **row):
        print(text, flush=True)
        self.rows.add({"bench": "async", "n": self.arguments.n, "rate": self.arguments.rate, **row})

    def adds(self):
        """All ranks add at once, beside push_pull."""
        a = self.arguments
        for k in a.k:
            told = self.run({"what": "adds", "bytes": a.bytes, "rounds": a.rounds, "tensors": a.tensors}, k)
            slowest = {name: [max(times) for times in zip(*(one["seconds"][name] for one in told))] for name in ("push_pull", "add")}
            medians = {name: statistics.median(times) for name, times in slowest.items()}
            self.show(f"adds: {a.bytes >> 20} MB, k = {k}: push_pull {medians['push_pull']:.3f} s, add {medians['add']:.3f} s: "
                      f"{medians['add'] / medians['push_pull']:.3f} x",
                      series="adds", k=k, bytes=a.bytes, tensors=a.tensors, seconds=slowest, ratio=medians["add"] / medians["push_pull"])

    def death(self):
        """A tallyd dies while all ranks add."""
        a, n, k = self.arguments, self.arguments.n, 2
        told, killed = self.run_with_death({"what": "death", "bytes": a.bytes, "seconds": a.seconds}, k)
        usual = statistics.median(end - begin for one in told for begin, end in one["times"] if end < killed)
        longest = max(end - begin for one in told for begin, end in one["times"] if end >= killed)
        share = a.bytes * 2 * (n - 1) / (n * n + k * n - 2 * k) / (parse_rate(a.rate) / 8 * PAYLOAD)
        self.show(f"death: {a.bytes >> 20} MB, k = {k}: an addition {usual:.3f} s, around the death {longest:.3f} s; the share's time "
                  f"over a card {share:.3f} s, the pause {longest - usual:.3f} s, bound {1.5 * share + 0.1:.3f} s",
                  series="death", k=k, bytes=a.bytes, usual=usual, longest=longest, share=share, pause=longest - usual,
                  killed=killed, times=[one["times"] for one in told])

    def sleeper(self):
        """One rank computes longer, and no rank is held up."""
        a = self.arguments
        count = int(10 * a.seconds / a.compute)
        delays = [[a.compute] * count for _ in range(a.n - 1)] + [[SLOW * a.compute] * count]
        told = self.run({"what": "steps", "bytes": a.step_bytes, "delays": delays, "seconds": a.seconds})
        rates = [(len(one["ended"]) / one["ended"][-1]) / (len(one["alone"]) / one["alone"][-1]) for one in told]
        self.show("sleeper: steps made, of those made alone: " + ", ".join(f"{rate:.3f}" for rate in rates),
                  series="sleeper", k=0, bytes=a.step_bytes, steps=[len(one["ended"]) for one in told], ratios=rates)

    def stragglers(self):
        """A tenth of all steps takes longer, within a bound."""
        a = self.arguments
        for staleness in (1, 4):
            delays = drawn(a.n, int(a.seconds / a.compute), a.compute, staleness)
            told = self.run({"what": "steps", "bytes": a.step_bytes, "delays": delays, "staleness": staleness})
            took = max(one["ended"][-1] for one in told)
            best = recurrence(delays, staleness)
            free, lockstep = recurrence(delays, 0), sum(map(max, zip(*delays)))
            self.show(f"stragglers: s = {staleness}: {took:.2f} s, the recurrence {best:.2f} s: {best / took:.3f} "
                      f"(no bound: {free:.2f} s, every step together: {lockstep:.2f} s)",
                      series="stragglers", k=0, bytes=a.step_bytes, staleness=staleness, seconds=took, recurrence=best,
                      fraction=best / took, free=free, lockstep=lockstep)

    def train(self):
        """A training with a slow rank, asynchronous and synchronous."""
        a = self.arguments
        for seed in a.seeds:
            for way, rate in ("synchronous", a.learning_rate), ("asynchronous", a.learning_rate / a.n):
                told = self.run({"what": "train", "way": way, "seed": seed, "rate": rate, "seconds": a.seconds,
                                 "delays": [a.compute / 5] * (a.n - 1) + [SLOW * a.compute / 5]})
                curve = told[0]["curve"]
                reached = next((now for now, loss, _ in curve if loss <= TARGET_LOSS), None)
                self.show(f"train: seed {seed}, {way:12}: loss {TARGET_LOSS} after {goodput.figure(reached, 5, 2)} s; at the end loss "
                          f"{curve[-1][1]:.3f}, accuracy {curve[-1][2]:.3f}; steps {[one['steps'] for one in told]}",
                          series="train", k=0, seed=seed, way=way, learning_rate=rate, curve=curve, reached_s=reached,
                          steps=[one["steps"] for one in told])


SERIES = ["adds", "death", "sleeper", "stragglers", "train"]


def parse():
    parser = argparse.ArgumentParser(description="asynchronous training on an emulated cluster")
    parser.add_argument("--series", nargs="+", choices=SERIES, default=SERIES)
    parser.add_argument("-n", type=int, default=4, help="worker machines, with a rank each (4)")
    parser.add_argument("-k", type=int, nargs="+", default=[0, 4], help="CPU machines, of adds (0 4)")
    parser.add_argument("--rate", default="500mbit", help="of every card (500mbit)")
    parser.add_argument("--bytes", type=goodput.size, help="of adds (64M)")
    parser.add_argument("--rounds", type=int, help="of adds (7)")
    parser.add_argument("--tensors", type=int, default=1, help="of adds: shared tensors that hold the parameters (1)")
    parser.add_argument("--step-bytes", type=goodput.size, default=1 << 20, help="of the parameters, of sleeper and stragglers (1M)")
    parser.add_argument("--compute", type=float, default=0.1, help="seconds that a step computes; a fifth of it in train (0.1)")
    parser.add_argument("--seconds", type=float, help="of a run (20)")
    parser.add_argument("--seeds", type=int, nargs="+", help="of train (0 1 2)")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="of train, synchronous; divided by n for asynchronous (0.1)")
    systems.add_arguments(parser, "8 MB, two rounds, runs of two seconds, one seed")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.bytes = arguments.bytes or (8 << 20 if quick else 64 << 20)
    arguments.rounds = arguments.rounds or (2 if quick else 7)
    arguments.seconds = arguments.seconds or (2 if quick else 20)
    arguments.seeds = arguments.seeds if arguments.seeds is not None else ([0] if quick else [0, 1, 2])
    if arguments.n < 2 or min(arguments.k) < 0 or arguments.tensors < 1 or arguments.compute <= 0:
        parser.error("two workers are the least, and a step computes for some time")
    return arguments


def main():
    arguments = parse()
    if why_not():
        sys.exit(f"asynchronous: {why_not()}")
    bench = Bench(arguments)
    for name in arguments.series:
        getattr(bench, name)()
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ValueError) as problem:
        sys.exit(f"asynchronous: {problem}")

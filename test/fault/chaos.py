#!/usr/bin/env python3
"""Jobs of random shape to which random things happen: `make chaos SEEDS=1000`, and a few of them in every test run.

    test/fault/chaos.py [--seeds N] [--first SEED] [--only SEED] [--folder DIR]

A seed gives a job (ranks, tallyd, settings, orders, sizes) and a list of faults, one or two at a time.  The times at
which they strike depend on the machine, so a seed that failed may have to be tried more than once.  Every job must end
as its faults promise: with the bits of the reference on all ranks, or, where a rank died, with one sentence that names
it.  The folder of a job that failed stays and is named.
"""

import argparse
import errno
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time
import traceback

from fault import Job

# What is promised to be survived; each is a function of (job, random).


def pause(job, rnd):
    job.await_steps(rnd.randrange(1, 4))
    time.sleep(rnd.random() * 0.03)


def stop_briefly(job, rnd):
    process = rnd.choice(job.services + job.ranks)
    job.stop(process)
    time.sleep(rnd.random() * 1.5)
    job.resume(process)


def stop_several(job, rnd):
    everybody = job.services + job.ranks
    some = rnd.sample(everybody, rnd.randrange(1, len(everybody) + 1))
    for process in some:
        job.stop(process)
    time.sleep(rnd.random())
    for process in some:
        job.resume(process)


def slow_path(job, rnd):
    proxies = job.all_proxies()
    if proxies:
        proxy = rnd.choice(proxies)
        job.mark("slow path")
        proxy.delay_s, proxy.rate = rnd.choice([(0.01, None), (0, 3e6)])
        job.await_steps(2)
        proxy.delay_s, proxy.rate = 0, None


def dead_path(job, rnd):
    """Nothing passes between a rank and a tallyd for a while, as behind a switch that starts anew."""
    proxies = job.all_proxies()
    if proxies:
        proxy = rnd.choice(proxies)
        job.mark("dead path")
        proxy.hold(*rnd.choice([(True,), (False,), (True, False)]))
        time.sleep(rnd.random() * 1.5)
        proxy.pass_all()


def living(job):
    return [s for s in job.services if s.running()]


def kill(job, rnd):
    for process in rnd.sample(living(job), min(len(living(job)), rnd.choice([1, 1, 2]))):
        job.kill(process)


def evict(job, rnd):
    """Stopped for longer than a tallyd may be silent; it comes back to a job that goes on without it."""
    if living(job):
        process = rnd.choice(living(job))
        job.stop(process)
        time.sleep(5.5 + rnd.random())
        job.resume(process)


def join(job, rnd):
    if len(job.services) < 6:
        job.add_service()
        time.sleep(rnd.random() * 0.3)


def drain(job, rnd):
    if living(job):
        job.drain(rnd.choice(living(job)))


def cut(job, rnd):
    """Some connections break, while both ends live."""
    job.mark("cut")
    for proxy in job.all_proxies():
        if rnd.random() < 0.6:
            proxy.cut_all()


def damage(job, rnd):
    """Bytes are altered on their way; only where payloads are checked too."""
    proxies = job.all_proxies()
    if proxies:
        altering = ["flip", "duplicate", "lose", "reorder"] if "TALLY_CHECKSUM" in job.env else []
        kind = rnd.choice(["truncate", "cut", *altering])
        job.mark(kind)
        rnd.choice(proxies).play(kind, up=rnd.random() < 0.5, after=rnd.randrange(1, 300000))


def kill_at_a_byte(job, rnd):
    """A tallyd dies when a rank has so many bytes of a result."""
    numbers = [n for n in job.proxies if isinstance(n, int) and n < len(job.services) and job.services[n].running()]
    if numbers:
        number = rnd.choice(numbers)
        proxy = rnd.choice(job.proxies[number])
        proxy.play("die", up=False, after=rnd.randrange(1, 200000), action=lambda: job.kill(job.services[number]))


def lose_coordinator(job, rnd):
    """Where it is a process of its own; changes of services wait until there is one again."""
    if job.coordinator:
        job.kill(job.coordinator)
        time.sleep(rnd.random())
        job.start_coordinator()


HARMLESS = [stop_briefly, stop_several, slow_path, dead_path]
CHANGES = [kill, kill, kill_at_a_byte, join, join, drain, cut, cut, damage, lose_coordinator]
SURVIVED = HARMLESS + CHANGES * 2 + [evict]


class Shape:
    """The job that a seed gives.  kinds: worker.c's operations; None: the seed says which."""

    def __init__(self, seed, kinds=None):
        rnd = self.rnd = random.Random(f"chaos {seed}")  # of a number, near seeds would give like jobs
        self.ranks = rnd.randrange(2, 5)
        self.services = rnd.randrange(0, 4)
        self.sizes = [rnd.choice([1, 7, 1000, 20000, 100000, 300000]) + rnd.randrange(3) for _ in range(rnd.randrange(1, 12))]
        self.env = {}
        if rnd.random() < 0.4:
            self.env["TALLY_PART_BYTES"] = str(rnd.choice([4096, 16384, 65536, 1 << 20]))
        if rnd.random() < 0.2:
            self.env["TALLY_WINDOW_PARTS"] = "1"
            self.env["TALLY_CREDIT_BYTES"] = "4096"
        if rnd.random() < 0.3:
            self.env["TALLY_MEMORY"] = str(rnd.choice([1 << 20, 8 << 20]))
        if rnd.random() < 0.5:
            self.env["TALLY_CHECKSUM"] = "1"
        self.words = [f"shuffle={rnd.randrange(2)}", f"pause_ms={rnd.choice([0, 5, 20])}"]
        everything = [*range(self.services), *(f"rank-{r}" for r in range(self.ranks))]
        self.proxied = [s for s in everything if rnd.random() < 0.4]
        self.faults = [rnd.choice(SURVIVED) for _ in range(rnd.randrange(1, 7))]
        self.together = [rnd.random() < 0.3 for _ in self.faults]  # with the one before it
        self.apart = rnd.random() < 0.3  # the coordinator
        self.victim = rnd.randrange(self.ranks) if rnd.random() < 0.15 and not self.apart else None
        self.pairs = rnd.random() < 0.3  # two ranks a machine, which push once
        if rnd.random() < 0.4:
            self.words.append(f"cancel={rnd.choice([30, 300])}")
        if rnd.random() < 0.4:
            self.words.append("group=1")
        # From numbers of their own: the seeds of before stand for the same jobs.
        self.kinds = random.Random(f"kinds {seed}").randrange(3) if kinds is None else kinds
        if self.kinds:
            self.words.append(f"kinds={self.kinds}")
            self.sizes += [rnd.choice([1000, 20000, 100000]) + rnd.randrange(3) for _ in range(8 - len(self.sizes))]
        alike = not self.kinds and not re.search("cancel|group", str(self.words))
        if alike and random.Random(f"uneven {seed}").random() < 0.3:
            self.words.append("uneven=1")

    def rank_env(self):
        return {r: {"TALLY_HOST_ID": f"pair-{r // 2}"} for r in range(self.ranks)} if self.pairs else {}

    def __str__(self):
        what = ", ".join(f.__name__ + ("+" if t else "") for f, t in zip(self.faults, self.together))
        end = "" if self.victim is None else f", kill rank {self.victim}"
        return (f"{self.ranks} ranks{' in pairs' if self.pairs else ''}, {self.services} tallyd, {len(self.sizes)} tensors, {self.env}, {self.words}, "
                f"proxied {self.proxied}, coordinator {'apart' if self.apart else 'in rank 0'}: {what}{end}")


def run(seed, folder, kinds=None):
    """One seed; raises AssertionError where the job does not keep what is promised.  Returns the longest pause
    between two steps, in milliseconds, and what was done last before its end."""
    s = Shape(seed, kinds)
    with Job(folder, s.ranks, s.services, seed, s.sizes, s.env, s.words, proxied=s.proxied,
             rank_env=s.rank_env(), coordinator=s.apart) as job:
        job.await_steps(1)
        for fault, together in zip(s.faults, s.together):
            if not together:
                pause(job, s.rnd)
            fault(job, s.rnd)
        job.await_steps(3)
        if s.victim is None:
            for rank in job.finish():
                for key, (status, text) in rank.ends.items():
                    taken_back = status == -errno.ECANCELED and re.search(r"rank [0-3] has cancelled it: by chance", text)
                    assert status == 0 or (taken_back and "cancel" in str(s.words)), f"{key}: {status} {text}"
        else:
            job.kill(job.ranks[s.victim])
            others = [r for r in range(s.ranks) if r != s.victim]
            job.fail(others, rf"rank {s.victim}\b", same=s.victim != 0)
    return job.longest_pause_ms()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--folder", type=pathlib.Path)
    arguments = parser.parse_args()
    seeds = [arguments.only] if arguments.only else range(arguments.first, arguments.first + arguments.seeds)
    base = arguments.folder or pathlib.Path(tempfile.mkdtemp(prefix="tally-chaos-"))
    failed = []
    for seed in seeds:
        folder, begin = base / str(seed), time.monotonic()
        print(f"seed {seed}: {Shape(seed)}", flush=True)
        try:
            pause_ms, mark = run(seed, folder)
            shutil.rmtree(folder)
            print(f"seed {seed}: as promised ({time.monotonic() - begin:.1f} s; longest pause {pause_ms:.0f} ms, at: {mark})",
                  flush=True)
        except (AssertionError, OSError):
            failed.append(seed)
            print(f"seed {seed}: FAILED, see {folder}\n{traceback.format_exc()}", flush=True)
    print(f"{len(seeds) - len(failed)} passed, {len(failed)} failed" + (f": seeds {failed}" if failed else ""))
    if not failed and not arguments.folder:
        shutil.rmtree(base, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

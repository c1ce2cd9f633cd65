#!/usr/bin/env python3
"""How long a fault is felt: the figures of docs/failures.md.

    test/fault/recovery.py [--times N] [FAULT...]

Each fault strikes N jobs of 4 ranks and 3 tallyd on this machine.  What is survived is felt as a pause: the longest time
between two steps from the fault on, less the usual one (the median); and then steps may be slow for a while: until, after
the fault was noticed, a step and most of the second that follows take no more than a tenth more than in the job's last
seconds.  What is not survived is felt as the time until the last of the others has been told.  Prints of each the median and
the longest of N, in milliseconds.
"""

import argparse
import math
import pathlib
import re
import statistics
import tempfile
import time

from fault import Job

LEVEL_S = 2  # so long at the job's end is taken for its new speed
NEAR = 1.1
NOTICED = re.compile(r"(?:rank \d+ )?join: .*( is out: | has left| is in; )")  # the coordinator says so, inside rank 0

SHORT = {"TALLY_DEAD_TIMEOUT": "2"}


def kill(job):
    job.kill(job.services[0])


def kill_two(job):
    job.kill(job.services[0])
    job.kill(job.services[1])


def stop(job):
    job.stop(job.services[0])


def drain(job):
    job.drain(job.services[0])


def join(job):
    job.add_service()


def cut(job):
    job.mark("cut")
    for proxy in job.proxies[0]:
        proxy.cut_all()


def kill_rank(job):
    job.kill(job.ranks[2])


def stop_rank(job):
    job.stop(job.ranks[2])


# what: (does it, settings, which ranks are told; None: survived)
FAULTS = {
    "kill": (kill, {}, None),
    "kill-two": (kill_two, {}, None),
    "stop": (stop, {}, None),
    "drain": (drain, {}, None),
    "join": (join, {}, None),
    "cut": (cut, {}, None),
    "kill-rank": (kill_rank, {}, [0, 1, 3]),
    "stop-rank": (stop_rank, SHORT, [0, 1, 3]),
}


def survived(job, act):
    job.await_steps(30)
    begin = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    act(job)
    job.await_steps(60)
    time.sleep(2 * LEVEL_S)
    rank = job.finish()[0]
    steps = [(a, b - a) for (_, a), (_, b) in zip(rank.steps, rank.steps[1:])]  # begin, how long
    usual = statistics.median(took for at, took in steps if at + took < begin)
    pause = max(took for at, took in steps if at + took > begin) - usual
    noticed = max((at for at, line in rank.log if at > begin and NOTICED.match(line)), default=begin)
    return pause / 1e6, slow(steps, noticed) / 1e6


def slow(steps, since):
    """For how long they are slower than in the end."""
    near = NEAR * statistics.median(took for at, took in steps if at > steps[-1][0] - LEVEL_S * 1e9)

    def is_near(i):
        second = [took for at, took in steps[i:] if at <= steps[i][0] + 1e9]
        return steps[i][1] <= near and statistics.median(second) <= near

    return next((at - since for i, (at, _) in enumerate(steps) if at >= since and is_near(i)), math.inf)


def told(job, act, others):
    job.await_steps(5)
    begin = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    act(job)
    job.await_ends([job.ranks[rank] for rank in others])
    job.check()
    return (max(job.histories()[rank].failed[2] - begin for rank in others) / 1e6,)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("faults", nargs="*", default=list(FAULTS), metavar="FAULT", help=", ".join(FAULTS))
    arguments = parser.parse_args()
    print(f"{'':10} {'median':>8} {'longest':>8}  {'slow for':>8} {'at most':>8}")
    for name in arguments.faults:
        act, env, others = FAULTS[name]
        felt = []
        for seed in range(arguments.times):
            with tempfile.TemporaryDirectory() as folder:
                with Job(pathlib.Path(folder), 4, 3, seed, env=env, proxied=[0] if act is cut else ()) as job:
                    felt.append(told(job, act, others) if others else survived(job, act))
        figures = [f"{statistics.median(times):8.0f} {max(times):8.0f}" for times in zip(*felt)]
        print(f"{name:10} {'  '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()

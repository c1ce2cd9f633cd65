#!/usr/bin/env python3
"""How long a fault is felt: the figures of docs/failures.md.

    test/fault/recovery.py [--times N] [FAULT...]

Each fault strikes N jobs of 4 ranks and 3 tallyd on this machine.  What is survived is felt as a pause: the longest time
between two steps from the fault on, less the usual one (the median).  What is not survived is felt as the time until the
last of the others has been told.  Prints the median and the longest of N, in milliseconds.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

from fault import Job

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
    times = [at for _, at in job.finish()[0].steps]
    usual = statistics.median(b - a for a, b in zip(times, times[1:]) if b < begin)
    return (max(b - a for a, b in zip(times, times[1:]) if b > begin) - usual) / 1e6


def told(job, act, others):
    job.await_steps(5)
    begin = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    act(job)
    job.await_ends([job.ranks[rank] for rank in others])
    job.check()
    return max(job.histories()[rank].failed[2] - begin for rank in others) / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("faults", nargs="*", default=list(FAULTS), metavar="FAULT", help=", ".join(FAULTS))
    arguments = parser.parse_args()
    for name in arguments.faults:
        act, env, others = FAULTS[name]
        felt = []
        for seed in range(arguments.times):
            with tempfile.TemporaryDirectory() as folder:
                with Job(pathlib.Path(folder), 4, 3, seed, env=env, proxied=[0] if act is cut else ()) as job:
                    felt.append(told(job, act, others) if others else survived(job, act))
        print(f"{name:10} {statistics.median(felt):8.0f} {max(felt):8.0f}", flush=True)


if __name__ == "__main__":
    main()

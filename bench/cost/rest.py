#!/usr/bin/env python3
"""What a job uses while it does nothing: processor time and wake-ups of each thread, for a minute.

    bench/cost/rest.py [--ways plain backend optimizer wait gloo] [--seconds 60] [--json FILE]    # 4 + 4 machines
    bench/cost/rest.py -n 1 --ranks-per-machine 4 -k 0
    bench/cost/rest.py --quick

README.md beside this file says what the ways and columns are.  Needs root (test/lab/lab.py says what else).
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "goodput")]

import rest_rank  # noqa: E402
import systems  # noqa: E402
import usage  # noqa: E402
from systems import Lab, LabError  # noqa: E402

SETTLE_S = 3  # after the last rank has come to rest
PATIENCE_S = 120


def at_rest(processes):
    """Wait until all ranks have said that they rest."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(rest_rank.RESTING in process.output() for process in processes):
        ended = next((process for process in processes if process.poll() is not None), None)
        if ended or time.monotonic() > deadline:
            raise LabError(f"a rank does not come to rest:\n{(ended or processes[0]).output()}")
        time.sleep(0.1)
    time.sleep(SETTLE_S)


def watch(lab, seconds):
    """What the job uses a second: ({role: numbers of its busiest thread}, {"rank" or "tallyd": numbers of the busiest})."""
    pids = usage.of_jobs(lab.pids())
    before, begin = usage.Snapshot(pids), time.monotonic()
    time.sleep(seconds)
    after, lasted = usage.Snapshot(pids), time.monotonic() - begin
    roles, processes = {}, {}
    for tid, numbers in after.threads.items():
        used = [(b - a) / lasted for a, b in zip(before.threads.get(tid, [0, 0, 0, 0]), numbers)]
        pid = after.process_of[tid]
        roles[after.roles[tid]] = max(roles.get(after.roles[tid], used), used)
        processes[pid] = [total + one for total, one in zip(processes.get(pid, [0, 0, 0, 0]), used)]
    kinds = {}
    for pid, used in processes.items():
        kind = "tallyd" if pids[pid] == "tallyd" else "rank"
        kinds[kind] = max(kinds.get(kind, used), used)
    return roles, kinds


def measure(lab, workers, services, way, arguments):
    """The row of one way, on a cluster of its own."""
    env = {"PYTHONPATH": str(systems.BUILD / "python"), "TALLY_LOG": "warning", "GLOO_SOCKET_IFNAME": "eth0"}
    ranks, daemons = lab.environment(workers, services, arguments.ranks_per_machine, env)
    tallyd = systems.built("bin/tallyd", "src/tallyd/tallyd")
    running = [lab.start(host, [tallyd, "--once"], daemons[host], inherit=False) for host in services]
    places = [host for host in workers for _ in range(arguments.ranks_per_machine)]
    argv = [sys.executable, HERE / "rest_rank.py", way]
    ranks = [lab.start(host, argv, one, inherit=False) for host, one in zip(places, ranks)]
    try:
        at_rest(ranks)
        roles, kinds = watch(lab, arguments.seconds)
    finally:
        for process in ranks + running:
            process.kill()
    names = ("cpu_s", "kernel_s", "sleeps", "preemptions")
    return {"bench": "rest", "way": way, "n": len(workers), "ranks_per_machine": arguments.ranks_per_machine, "k": len(services),
            "seconds": arguments.seconds, "of_roles": {role: dict(zip(names, used)) for role, used in roles.items() if any(used)},
            "of_processes": {kind: dict(zip(names, used)) for kind, used in kinds.items()}}


def show(row):
    print(f"\n{row['way']}, {row['n']} machines of {row['ranks_per_machine']}, {row['k']} tallyd")
    for busiest, used in [*row["of_roles"].items(), *((f"all of a {kind}", used) for kind, used in row["of_processes"].items())]:
        print(f"    {busiest:18} {100 * used['cpu_s']:7.3f} % {used['sleeps']:7.1f} sleeps/s {used['preemptions']:6.1f} preemptions/s")
    sys.stdout.flush()


def parse():
    parser = argparse.ArgumentParser(description="what a job uses at rest, on an emulated cluster")
    parser.add_argument("-n", type=int, help="worker machines (4)")
    parser.add_argument("-k", type=int, help="CPU machines (4)")
    parser.add_argument("--ranks-per-machine", type=int, default=1, metavar="R", help="on every worker machine (1)")
    parser.add_argument("--rate", default="1gbit", help="of every card (1gbit)")
    parser.add_argument("--ways", nargs="+", choices=list(rest_rank.WAYS), default=list(rest_rank.WAYS))
    parser.add_argument("--seconds", type=float, help="(60)")
    parser.add_argument("--quick", action="store_true", help="2 + 1 machines, 3 seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    arguments = parser.parse_args()
    arguments.n = (2 if arguments.quick else 4) if arguments.n is None else arguments.n
    arguments.k = (1 if arguments.quick else 4) if arguments.k is None else arguments.k
    arguments.seconds = arguments.seconds or (3 if arguments.quick else 60)
    if min(arguments.n, arguments.ranks_per_machine) < 1 or arguments.k < 0 or arguments.n * arguments.ranks_per_machine < 2:
        parser.error("two ranks are the least")
    return arguments


def main():
    arguments = parse()
    if systems.why_not():
        sys.exit(f"rest: {systems.why_not()}")
    workers, services = [f"w{i}" for i in range(arguments.n)], [f"c{i}" for i in range(arguments.k)]
    rows = systems.Rows(arguments.json)
    for way in arguments.ways:
        here = services if way != "gloo" else []
        with Lab(workers + here, arguments.rate, congestion="cubic") as lab:
            rows.add(measure(lab, workers, here, way, arguments))
        show(rows[-1])


if __name__ == "__main__":
    try:
        main()
    except (LabError, ValueError) as problem:
        sys.exit(f"rest: {problem}")

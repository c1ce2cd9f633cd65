"""What each thread of an emulated cluster's jobs has used: processor time and switches, by the thread's role; and what the
whole machine has.  Read from /proc while the ranks wait for it (Observer), or rest (rest.py).  SPDX-License-Identifier: Apache-2.0
"""

import collections
import contextlib
import os
import pathlib
import threading

TICKS = os.sysconf("SC_CLK_TCK")
# By the thread's name; in a tallyd the main thread is the service's loop.
ROLES = {
    "tally-comm": "rank's loop",
    "tally-sum": "service's loop",
    "tally-crew": "crew",
    "tally-local": "engine",
    "tally-coord": "coordinator",
}
NOT_OF_JOBS = ("lab-keeper", "lab:", "nsenter", "env", "sh", "perf")


def role(process, name, is_main):
    """Of a thread, by its process's name and its own."""
    if process == "tallyd":
        return "tallyd: " + ("loop" if is_main else ROLES.get(name, "other"))
    return "caller" if is_main and not process.startswith(("mpirun", "orted", "prte")) else ROLES.get(name, "other")


def words(*path):
    return pathlib.Path("/proc", *map(str, path)).read_text(encoding="utf-8", errors="replace")


def thread(pid, tid):
    """Of one thread: (name, [seconds of a processor, of it in the kernel, sleeps, preemptions])."""
    status = dict(line.split(":\t", 1) for line in words(pid, "task", tid, "status").splitlines() if ":\t" in line)
    system = int(words(pid, "task", tid, "stat").rpartition(")")[2].split()[12])
    seconds = int(words(pid, "task", tid, "schedstat").split()[0]) / 1e9
    return status["Name"], [seconds, system / TICKS, int(status["voluntary_ctxt_switches"]),
                            int(status["nonvoluntary_ctxt_switches"])]


def machine():
    """Seconds of all processors: as users, in the kernel, in interrupts, in soft interrupts; idle."""
    user, nice, system, idle, waiting, hard, soft = map(int, words("stat").split()[1:8])
    return [(user + nice) / TICKS, system / TICKS, hard / TICKS, soft / TICKS, (idle + waiting) / TICKS]


def packets(pids):
    """What all cards of these processes' networks have sent: packets, as the kernel handles them, uncut."""
    sent, seen = 0, set()
    for pid in pids:
        with contextlib.suppress(OSError):
            network = os.readlink(f"/proc/{pid}/ns/net")
            if network not in seen:
                seen.add(network)
                for line in words(pid, "net", "dev").splitlines()[2:]:
                    name, _, numbers = line.partition(":")
                    sent += int(numbers.split()[9]) if name.strip().startswith("eth") else 0
    return sent


def of_jobs(table):
    """{pid: name} of the jobs' processes among the cluster's, {pid: (parent, name)}."""
    return {pid: name for pid, (_, name) in table.items() if not name.startswith(NOT_OF_JOBS)}


class Snapshot:
    """What has been used until now by processes {pid: name}."""

    def __init__(self, processes):
        self.machine = machine()
        self.threads, self.roles, self.process_of = {}, {}, {}
        for pid, process in processes.items():
            with contextlib.suppress(OSError):
                for tid in map(int, os.listdir(f"/proc/{pid}/task")):
                    with contextlib.suppress(OSError):
                        name, numbers = thread(pid, tid)
                        self.threads[tid] = numbers
                        self.roles[tid] = role(process, name, tid == pid)
                        self.process_of[tid] = pid
        self.packets = packets(processes)


class Used:
    """The sum of what was used between pairs of snapshots."""

    def __init__(self):
        self.roles = collections.defaultdict(lambda: [0.0, 0.0, 0, 0])
        self.machine, self.packets = [0.0] * 5, 0

    def add(self, before, after):
        self.machine = [total + b - a for total, a, b in zip(self.machine, before.machine, after.machine)]
        self.packets += after.packets - before.packets
        for tid, numbers in after.threads.items():
            start = before.threads.get(tid, [0, 0, 0, 0])
            name = after.roles[tid]
            self.roles[name] = [total + b - a for total, a, b in zip(self.roles[name], start, numbers)]


class Observer:
    """Calls begin() and end() in turns, before and after each timed iteration, while all ranks of a job wait.

    The ranks' side is be_observed() in bench/goodput/rank.c.  Two FIFOs in `folder` are between; environment() names them."""

    def __init__(self, folder, begin, end):
        self.fifos = os.path.join(folder, "observer")
        self.calls, self.problem = (begin, end), None
        for name in ("ask", "answer"):
            os.mkfifo(f"{self.fifos}.{name}")
        # Opened both ways, so that neither opening waits for the ranks, and no rank's end is the FIFO's.
        self.ask, self.answer = (os.open(f"{self.fifos}.{name}", os.O_RDWR) for name in ("ask", "answer"))
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self):
        turn = 0
        while os.read(self.ask, 1) == b"x":
            try:
                if not self.problem:
                    self.calls[turn % 2]()
            except Exception as problem:  # noqa: BLE001  the ranks must not wait for ever
                self.problem = problem
            turn += 1
            os.write(self.answer, b"x")

    def __enter__(self):
        os.environ["BENCH_OBSERVER"] = self.fifos
        self.thread.start()
        return self

    def __exit__(self, kind, *_):
        del os.environ["BENCH_OBSERVER"]
        os.write(self.ask, b"e")
        self.thread.join()
        os.close(self.ask)
        os.close(self.answer)
        if self.problem and not kind:
            raise self.problem

"""What a job leaves behind: nothing, however it ends; and what it takes while it runs: no more in the thousandth round
than in the hundredth."""

import os
import pathlib
import signal
import socket

import pytest

from fault import Job, free_port
from soak import SIZES, soak

SHM = pathlib.Path("/dev/shm")


def sockets():
    """Inodes of all sockets that there are, by /proc/net."""
    found = set()
    for name, column in (("unix", 6), ("tcp", 9), ("tcp6", 9), ("udp", 9)):
        lines = pathlib.Path("/proc/net", name).read_text(encoding="utf-8", errors="replace").splitlines()[1:]
        found |= {line.split()[column] for line in lines}
    return found - {"0"}


def sockets_of(process):
    found = set()
    for fd in pathlib.Path(f"/proc/{process.popen.pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def mentions(pid, text):
    """Does this process stand for `text`, in its environment?"""
    try:
        return text.encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def of_job(mark):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid() and mentions(pid, mark)]


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_kill_of_everybody(tmp_path, together):
    """kill -9 of all processes: no file, no shared memory, no socket, no process; and the next job has the port at once."""
    home = tmp_path / "home"
    for name in ("tmp", "run", "config"):
        (home / name).mkdir(parents=True)
    mark, port = f"LEFTOVERS={tmp_path}", free_port()
    env = {"TMPDIR": str(home / "tmp"), "XDG_RUNTIME_DIR": str(home / "run"), "XDG_CONFIG_HOME": str(home / "config"),
           "HOME": str(home), "TALLY_PORT": str(port), "TALLY_COORD": f"127.0.0.1:{port}", "LEFTOVERS": str(tmp_path)}
    rank_env = {rank: {"TALLY_HOST_ID": "one"} for rank in range(3)} if together else {}
    for again in range(3):
        files = sorted(str(p) for p in home.rglob("*"))
        with Job(tmp_path / str(again), ranks=3, services=2, env=env, rank_env=rank_env) as job:
            job.await_steps(3)
            mine = set().union(*map(sockets_of, job.ranks + job.services)) & sockets()
            assert mine and of_job(mark)
            for process in job.ranks + job.services:
                job.kill(process)
            job.await_ends(job.ranks + job.services)
            assert [p.popen.returncode for p in job.ranks + job.services] == [-signal.SIGKILL] * 5
            job.await_true(lambda: not of_job(mark), "a process is left")
            job.await_true(lambda: not mine & sockets(), "a socket is left")
        assert sorted(str(p) for p in home.rglob("*")) == files
        assert not [p for p in SHM.iterdir() if "tally" in p.name.lower()]
        with socket.socket() as s: # as the coordinator binds it
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("127.0.0.1", port))
    with Job(tmp_path / "last", ranks=3, services=2, env=env, rank_env=rank_env) as job:
        job.await_steps(3)
        job.finish()


@pytest.mark.parametrize("settings, shuffle, churn",
                         [({}, 0, False), ({}, 1, True), ({"TALLY_CHECKSUM": "1"}, 0, False),
                          ({"TALLY_MEMORY": "1M", "TALLY_PART_BYTES": "16K"}, 1, False)],
                         ids=["plain", "joins and leaves", "checksums", "little memory, other orders"])
def test_a_thousand_rounds_take_no_more_than_a_hundred(tmp_path, settings, shuffle, churn):
    words = ("pause_ms=0", f"shuffle={shuffle}")
    with Job(tmp_path, ranks=2, services=1, sizes=SIZES, env=settings, words=words) as job:
        assert soak(job, 1500, churn=churn) == []
        job.finish()


@pytest.mark.long
def test_many_rounds(tmp_path):
    with Job(tmp_path, ranks=3, services=2, sizes=SIZES, words=("pause_ms=0",)) as job:
        assert soak(job, 20000) == []  # soak.py does 100000
        job.finish()

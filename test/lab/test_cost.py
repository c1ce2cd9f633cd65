"""The benchmark bench/cost: what it makes of threads' names and of perf's lines, and a quick run.  No time is looked at."""

import json
import os
import pathlib
import subprocess
import sys
import types

import lab as cluster
import pytest

BENCHMARK = pathlib.Path(__file__).resolve().parents[2] / "bench" / "cost"
PATIENCE_S = 240

sys.path.insert(0, str(BENCHMARK))

import cost  # noqa: E402
import systems  # noqa: E402
import traced  # noqa: E402
import usage  # noqa: E402


def test_role_of_each_thread():
    assert usage.role("collectives", "collectives", True) == "caller"
    assert usage.role("collectives", "tally-comm", False) == "rank's loop"
    assert usage.role("collectives", "tally-local", False) == "engine"
    assert usage.role("collectives", "somebody", False) == "other"
    assert usage.role("tallyd", "tallyd", True) == "tallyd: loop"
    assert usage.role("tallyd", "tally-crew", False) == "tallyd: crew"
    assert usage.role("mpirun", "mpirun", True) == "other"
    assert usage.of_jobs({1: (0, "lab:w0"), 2: (1, "tallyd"), 3: (1, "nsenter")}) == {2: "tallyd"}


def test_calls_are_counted_with_their_time_on_a_processor():
    numbers = {name: number for number, name in traced.call_names().items()}
    wait, read = numbers["epoll_pwait2"], numbers["readv"]
    counter = traced.Counter({7: "rank's loop"}, {7: "PUSH"})
    for seconds, text in (
        (0.5, f"raw_syscalls:sys_exit: NR {read} = 9"),  # began before
        (1.0, f"raw_syscalls:sys_enter: NR {wait} (5, 6)"),
        (1.5, "PERF_RECORD_SWITCH OUT         "),
        (5.0, "PERF_RECORD_SWITCH IN          "),
        (5.25, f"raw_syscalls:sys_exit: NR {wait} = 1"),
        (5.5, f"raw_syscalls:sys_enter: NR {read} (5, 6)"),
        (5.75, "PERF_RECORD_SWITCH OUT preempt"),
        (6.0, "PERF_RECORD_SWITCH IN          "),
        (6.5, f"raw_syscalls:sys_exit: NR {read} = -11"),
        (6.5, "tallycost12:out1: (55e1) type=7"),
        (6.5, "tallycost12:in0: (55e1) type=99"),
    ):
        counter.take(7, seconds, text)
    calls = {name: dict(call) for name, call in counter.calls["rank's loop"].items()}
    assert calls == {
        "epoll_pwait2": {"calls": 1, "again": 0, "nothing": 0, "results": 1, "sleeps": 1, "seconds": 0.75},
        "readv": {"calls": 1, "again": 1, "nothing": 0, "results": 0, "sleeps": 0, "seconds": 0.75},
    }
    assert counter.seconds == {"rank's loop": 0.75}
    assert counter.frames["rank's loop"] == {("out", "PUSH"): 1, ("in", "99"): 1}


def test_place_of_a_sample():
    kernel, library = "[kernel.kallsyms]", "/x/build/libtally.so.0"
    assert traced.place([("tly_sum", library), ("main", "/x/y")]) == ("libtally.so.0", "tly_sum")
    chain = [("copy", kernel), ("tcp_recvmsg", kernel), ("do_readv", kernel), ("do_syscall_64", kernel), ("readv", "/libc")]
    assert traced.place(chain) == ("kernel: readv", "copy")
    chain = [("rcv", kernel), ("handle_softirqs", kernel), ("__x64_sys_sendmsg", kernel), ("do_syscall_64", kernel)]
    assert traced.place(chain) == ("kernel: sendmsg, packets", "rcv")
    assert traced.place([("tick", kernel), ("asm_sysvec", kernel)]) == ("kernel: interrupts", "tick")


def test_types_of_frames_are_read_from_the_header():
    names = traced.frame_names(systems.ROOT / "src" / "wire" / "frame.h")
    assert (names[1], names[8], names[9], names[25]) == ("HELLO", "PUSH", "RESULT", "JOINED")


def test_fit_of_a_cost_by_parts():
    assert cost.fit([(1, 5), (2, 7), (4, 11)]) == pytest.approx((3, 2))
    assert cost.fit([(1, 0), (2, 0)]) == (0, 0)


def test_only_parts_of_a_set_size_have_figures():
    machines = types.SimpleNamespace(hosts=["a", "b"], n=2, rate="1gbit")
    for part, parts in (("32768", 1e9 / 32768), (None, None)):
        found = {"time_s": 1.0, "iterations": 1, "ranks": 2, "part_bytes": 32768}
        row = cost.row_of(("all-reduce", 1 << 20), found, machines, [1, 1], 0, "tally", "times", {"a": 1e8, "b": 1e8}, part)
        assert row["parts_per_gb"] == parts and (cost.per_part(row, 1.0) is None) == (part is None)


@pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
def test_quick_run(tmp_path):
    if not systems.built("meson/bench/collectives/collectives", "bench/collectives/collectives"):
        pytest.skip(f"the benchmark's program is not built in {systems.BUILD}")
    rows_file, looks = tmp_path / "rows.json", ["times"] if traced.why_not() else cost.LOOKS
    argv = [sys.executable, BENCHMARK / "cost.py", "--quick", "-k", "1", "--systems", "tally", "--operations", "all-reduce",
            "broadcast", "--parts", "64K", "--look", *looks, "--json", rows_file]
    env = {**os.environ, "TALLY_TEST_BUILD": str(systems.BUILD)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
    assert [(row["look"], row["operation"]) for row in rows] == [(look, o) for look in looks for o in ("all-reduce", "broadcast")]
    assert all(row["wrong"] == 0 and row["part_bytes"] == 64 << 10 and row["ranks"] == 2 for row in rows)
    times = rows[0]["per_gb"]
    assert times["roles"]["rank's loop"]["cpu_s"] > 0 and times["roles"]["tallyd: loop"]["sleeps"] > 0 and times["packets"] > 0
    for row in rows:
        if row["look"] == "calls":
            calls, frames = row["per_gb"]["calls"], row["per_gb"]["frames"]
            assert calls["rank's loop"]["sendmsg"]["results"] > 0 and calls["tallyd: loop"]["epoll_pwait2"]["sleeps"] > 0
            pushed = sum(of_role.get("out PUSH", 0) for of_role in frames.values()) * row["iterations"] * row["bytes"] / 1e9
            assert not frames or round(pushed) >= 2 * row["bytes"] // row["part_bytes"]  # both ranks push, or ask for, each part


@pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
def test_a_job_at_rest_sleeps(tmp_path):
    """Wake-ups are counted, not timed: a busy machine makes them fewer.  A loop has five ticks a second and a beat from each peer."""
    if not systems.built("bin/tallyd", "src/tallyd/tallyd") or not (systems.BUILD / "python").exists():
        pytest.skip(f"Tally is not built in {systems.BUILD}")
    rows_file = tmp_path / "rows.json"
    argv = [sys.executable, BENCHMARK / "rest.py", "--quick", "--ways", "plain", "wait", "--json", rows_file]
    env = {**os.environ, "TALLY_TEST_BUILD": str(systems.BUILD)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, wait = (json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines())
    assert "caller" not in plain["of_roles"], plain
    assert 0 < wait["of_roles"]["caller"]["sleeps"] < 10, wait  # 20 at first, 4 from 3 s on
    for row in (plain, wait):
        assert {"rank's loop", "tallyd: loop"} <= set(row["of_roles"])
        assert all(used["sleeps"] < 40 for used in row["of_roles"].values()), row


def test_bad_arguments():
    for program, arguments, word in (
        ("cost.py", ["-n", "1"], "two workers"),
        ("cost.py", ["-n", "4", "--layouts", "4x2"], "exclude each other"),
        ("cost.py", ["--parts", "many"], "'many' is no size"),
        ("cost.py", ["--look", "closely"], "invalid choice"),
        ("cost.py", ["--set", "TALLY_PART_BYTES"], "NAME=VALUE"),
        ("rest.py", ["-n", "1"], "two ranks"),
        ("rest.py", ["--ways", "sleep"], "invalid choice"),
    ):
        argv = [sys.executable, BENCHMARK / program, *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and word in done.stderr, done.stderr

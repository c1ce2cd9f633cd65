"""scripts/run_tests: what counts as failed, what runs again, what runs when."""

import collections
import importlib.machinery
import importlib.util
import os
import pathlib
import select
import shutil
import signal
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(name="runner")
def _runner(tmp_path):
    """The script, for a project in a folder of its own."""
    loader = importlib.machinery.SourceFileLoader("run_tests", str(ROOT / "scripts" / "run_tests"))
    runner = importlib.util.module_from_spec(importlib.util.spec_from_loader("run_tests", loader))
    loader.exec_module(runner)
    runner.ROOT, runner.LOGS = tmp_path, tmp_path / "logs"
    runner.LOGS.mkdir()
    (tmp_path / "test" / "suite").mkdir(parents=True)
    shutil.copy(ROOT / "test" / "conftest.py", tmp_path / "test")
    return runner


def count(runner, text):
    (runner.ROOT / "test" / "suite" / "test_it.py").write_text(text)
    return runner.count_pytest("suite", ["test_it.py"], (), "none")


ENDLESS = """
import os
import pathlib
import subprocess

def test_endless():
    job = subprocess.Popen(["sleep", "600"], start_new_session=True)
    left = subprocess.check_output("setsid sleep 600 >/dev/null 2>&1 & echo $!", shell=True).decode()
    seen = pathlib.Path(__file__).with_name("seen")
    seen.with_name("new").write_text(f"{os.getpid()} {job.pid} {left}")
    seen.with_name("new").rename(seen)
    job.wait()
"""


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_what_ends_the_runner_ends_all_that_it_started(runner, number):
    (runner.ROOT / "test" / "suite" / "test_it.py").write_text(ENDLESS)
    runner.meson_suites = lambda: []
    pid = os.fork()
    if not pid:
        try:
            sys.argv[1:] = ["suite"]
            runner.main()
        finally:
            os._exit(1)
    seen = runner.ROOT / "test" / "suite" / "seen"
    patience = time.monotonic() + 60
    while not seen.exists():
        assert time.monotonic() < patience, "in vain: the test has not begun"
        time.sleep(0.01)
    ends = [os.pidfd_open(int(one)) for one in seen.read_text().split()]
    os.kill(pid, number)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number
    for end in ends:
        assert select.select([end], [], [], 60)[0], "in vain: it goes on"
        os.close(end)


SLOW_ONCE = """
import pathlib
seen = pathlib.Path(__file__).with_name("seen")

def test_slow_once():
    first = not seen.exists()
    seen.touch()
    assert not first, "in vain: the end"
"""


def test_what_was_slow_runs_again_alone(runner):
    total = count(runner, SLOW_ONCE + "def test_good(): pass\n")
    assert (total.passed, total.failed) == (1, 1)
    assert str(total.failures[0]).endswith("test_it.test_slow_once: AssertionError: in vain: the end")
    (slow,) = runner.run_again(total)
    assert slow.title.endswith("test_slow_once")
    assert (total.passed, total.failed, total.failures) == (2, 0, [])


def test_what_is_slow_again_has_failed(runner):
    total = count(runner, "def test_slow(): raise AssertionError('in vain: the end')\n")
    assert runner.run_again(total) == []
    assert (total.passed, total.failed, len(total.failures)) == (0, 1, 1)


def test_what_is_wrong_does_not_run_again(runner):
    total = count(runner, SLOW_ONCE.replace("in vain: the end", "wrong bits"))
    assert runner.run_again(total) == []
    assert (total.passed, total.failed) == (0, 1)


SLOW_EACH = """
import pathlib
import pytest

@pytest.mark.parametrize("i", range(%d))
def test_slow_once(i):
    seen = pathlib.Path(__file__).with_name(f"seen{i}")
    first = not seen.exists()
    seen.touch()
    assert not first, "in vain: the end"
"""


@pytest.mark.parametrize("more", (0, 1))
def test_many_failures_are_not_chance(runner, more):
    total = count(runner, SLOW_EACH % (runner.AGAIN + more))
    assert len(runner.run_again(total)) == (0 if more else runner.AGAIN)
    assert total.failed == (runner.AGAIN + more if more else 0)


def meson_test(name, *suites):
    return {"name": name, "suite": [f"tally:{suite}" for suite in suites]}


def test_long_c_tests_have_their_turn(runner, monkeypatch):
    tests = [meson_test("always", "unit"), *(meson_test(f"rare {i}", "service", "long") for i in range(20)),
             *(meson_test(f"often {i}", "service", "long-4") for i in range(20))]
    monkeypatch.setattr(runner, "introspect", lambda builddir, what: tests)

    def names(long, suite=None):
        return [test["name"] for test in runner.choose(runner.ROOT / "build", suite, long)]

    assert names("none") == ["always"] and names("none", "service") == []
    assert names("all") == [test["name"] for test in tests]
    turns = collections.Counter(name for part in range(1, 17) for name in names(f"{part}/16"))
    assert {turns[test["name"]] for test in tests[1:21]} == {1}
    assert {turns[test["name"]] for test in tests[21:]} == {4}
    tests.append(meson_test("always", "service", "long"))
    with pytest.raises(AssertionError, match="another one's name"):
        names("none")


LONG = """
import pytest

@pytest.mark.parametrize("i", range(20))
@pytest.mark.long
def test_rare(i): pass

@pytest.mark.parametrize("i", range(20))
@pytest.mark.long(turn=1)
def test_often(i): pass
"""


def test_long_python_tests_have_their_turn(runner):
    (runner.ROOT / "test" / "suite" / "test_it.py").write_text(LONG)
    seen = collections.Counter()
    for part in (1, 2):
        seen.update(name for _, name in runner.count_pytest("suite", ["test_it.py"], (), f"{part}/2").times)
    assert collections.Counter(seen.values()) == {1: 20, 2: 20}
    assert runner.count_pytest("suite", ["test_it.py"], (), "none").times == []


def test_files_that_go_together_are_all_there(runner):
    folder = runner.ROOT / "test" / "python"
    folder.mkdir()
    files = [f"test_{i}.py" for i in range(10)]
    for i, file in enumerate(files):
        (folder / file).write_text("#" * (100 * i * i))
    tasks = runner.python_tasks("python")
    assert len(tasks) == runner.TOGETHER["python"]
    assert sorted(sum(tasks, [])) == files
    assert runner.python_tasks("suite") == []


@pytest.mark.parametrize("idle, at_once", ((0.9, 3), (0.1, 1)))
def test_more_run_at_once_while_processors_are_idle(runner, monkeypatch, idle, at_once):
    monkeypatch.setattr(runner, "LOOK_S", 0.01)
    running, most, lock, enough = 0, 0, threading.Lock(), threading.Event()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if most == at_once:
                enough.set()
        enough.wait(60)
        if at_once == 1:
            time.sleep(0.05)  # several looks
        with lock:
            running -= 1
        return runner.Count()

    class Idle:
        def look(self):
            return idle

    tasks = [runner.Task("suite", str(i), work) for i in range(5)]
    ended = [task.name for task, _, _ in runner.in_turn(tasks, 1, 3, Idle)]
    assert sorted(ended) == [task.name for task in tasks] and most == at_once


def test_idle_is_that_of_our_cores(runner, tmp_path):
    ours, stat = min(runner.os.sched_getaffinity(0)), tmp_path / "stat"
    text = "cpu  0 0 0 0 0 0 0 0 0 0\ncpu%d %d 0 0 %d 0 0 0 0 0 0\ncpu9999 1 0 0 1000 0 0 0 0 0 0\nintr 5\n"
    stat.write_text(text % (ours, 10, 10))
    idle = runner.Idle(stat)
    stat.write_text(text % (ours, 40, 20))
    assert idle.look() == 0.25


def test_one_python_test_runs(runner, capfd):
    (runner.ROOT / "test" / "suite" / "test_it.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    assert runner.run_one("test/suite/test_it.py::test_a", ()) == 0
    assert runner.run_one("test/suite/test_it.py::test_b", ()) == 1
    assert runner.run_one("test/suite/test_it.py::test_c", ()) != 0
    assert "-m pytest" in capfd.readouterr().out


def test_one_c_test_runs(runner, capfd):
    runner.ROOT = ROOT
    assert runner.run_one("src/base/heap_test.c::test_reserve", ()) == 0
    said = capfd.readouterr().out
    assert "ok 1 - test_reserve" in said and said.endswith("1 passed, 0 failed\n")
    assert runner.run_one("src/base/heap_test.c::test_nothing", ()) == 1
    assert "no test has this name" in capfd.readouterr().out


@pytest.mark.parametrize("what, why", (("src/none_test.c", "there is no file"), ("src/base/heap.c", "is no test")))
def test_one_refuses_what_is_no_test(runner, what, why):
    runner.ROOT = ROOT
    with pytest.raises(ValueError, match=why):
        runner.run_one(what, ())

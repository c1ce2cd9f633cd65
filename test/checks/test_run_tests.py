"""scripts/run_tests: what counts as failed, and what runs again."""

import importlib.machinery
import importlib.util
import pathlib
import shutil

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
    return runner.count_pytest("suite", "test_it.py", (), "none")


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

"""The benchmark bench/async: its recurrence, and a quick run of two series.  Times are not looked at."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import lab as cluster
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "bench" / "async"
PATIENCE_S = 200

sys.path.insert(0, str(BENCHMARK))

import asynchronous  # noqa: E402


@pytest.mark.parametrize(
    "delays, staleness, seconds",
    [
        ([[1, 1, 1], [1, 1, 1]], 1, 3),
        ([[1, 1, 1], [3, 3, 3]], 0, 9),
        ([[1] * 9, [3, 1, 1, 1, 1, 1, 1, 1, 1]], 0, 11),
        # Rank 0's third addition waits for the values of its second, which wait for rank 1's first, at 9.
        ([[1, 1, 1, 5], [9, 1, 1, 1]], 1, 14),
        # With a bound of 2 its third is sent at 3, and its fourth at 9, behind the values of the third.
        ([[1, 1, 1, 5], [9, 1, 1, 1]], 2, 12),
        ([[1, 1, 1, 5], [9, 1, 1, 1]], 4, 12),
    ],
)
def test_recurrence(delays, staleness, seconds):
    assert asynchronous.recurrence(delays, staleness) == pytest.approx(seconds)


def test_a_bound_costs_at_most_what_lockstep_costs():
    for seed in range(5):
        delays = asynchronous.drawn(4, 50, 1.0, seed)
        times = [asynchronous.recurrence(delays, staleness) for staleness in (0, 8, 4, 2, 1)]
        assert times == sorted(times) and times[0] == max(map(sum, delays))
        assert times[-1] <= sum(map(max, zip(*delays)))


@pytest.mark.long
@pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no PyTorch")
def test_quick_run(tmp_path):
    file = tmp_path / "rows.json"
    argv = [BENCHMARK / "asynchronous.py", "--quick", "-n", "3", "-k", "1", "--rate", "200mbit", "--bytes", "2M", "--json", file]
    argv += ["--seconds", "1", "--tensors", "2"]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [row["series"] for row in rows] == ["adds", "death", "sleeper", "stragglers", "stragglers", "train", "train"]
    assert all(len(times) == 2 for times in rows[0]["seconds"].values())
    assert all(steps > 1 for row in rows if "steps" in row for steps in row["steps"])
    assert [row["way"] for row in rows[-2:]] == ["synchronous", "asynchronous"]
    assert all(len(row["curve"]) > 2 for row in rows[-2:])

"""The benchmark bench/starts: which cards it calls wrong, and a quick run.  What cards carry is not looked at."""

import json
import pathlib
import subprocess
import sys

import lab as cluster
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "bench" / "starts"
PATIENCE_S = 120

sys.path.insert(0, str(BENCHMARK))

import starts  # noqa: E402


def test_wrong_is_what_is_far_from_the_card_or_missing():
    line = "tally info rank 0 join: network cards were measured: w0 0.478 Gbit/s, w1 0.31 Gbit/s (once), c0 0.5 Gbit/s"
    judged = starts.judge("something else\n" + line, ["w0", "w1", "c0", "c1"], 478e6)
    assert judged["found"] == {"w0": 478e6, "w1": 310e6, "c0": 500e6}
    assert judged["wrong"] == {"w1": 310e6, "c1": 0.0}
    assert judged["once"] == ["w1"]


@pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
def test_quick_run(tmp_path):
    file = tmp_path / "starts.json"
    argv = [sys.executable, BENCHMARK / "starts.py", "--quick", "--rate", "200mbit", "--json", file]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert "2+1 at 200mbit: 2 starts, 6 cards, " in done.stdout, done.stdout + done.stderr
    assert [sorted(row["found"]) for row in rows] == [["c0", "w0", "w1"]] * 2
    assert done.returncode == (1 if any(row["wrong"] for row in rows) else 0)

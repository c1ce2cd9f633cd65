"""The benchmark bench/gradientflow: what its systems send, and a quick run in which all ranks must come to the right
parameters.  Times are not looked at."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import lab as cluster
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
PROGRAM = ROOT / "bench" / "gradientflow" / "gradientflow.py"
PATIENCE_S = 240

sys.path.insert(0, str(PROGRAM.parent))

import gradientflow  # noqa: E402
import profiles  # noqa: E402

needs_lab = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no PyTorch")


def test_lists():
    """One tensor has the bytes of ResNet-50's list; 1,000 tensors have 4 KB each."""
    resnet50 = gradientflow.list_of("resnet50", 1 << 40)
    assert resnet50.bytes == gradientflow.list_of("one", 1 << 40).bytes == profiles.profile("resnet50").bytes
    assert sum(len(layer.tensors) for layer in resnet50.layers) == 161
    small = [tensor for layer in gradientflow.list_of("small", 1 << 40).layers for tensor in layer.tensors]
    assert len(small) == len(dict(small)) == 1000 and {count for _, count in small} == {1024}


def test_what_is_sent():
    profile = gradientflow.idle("two", [[("a.weight", 900)], [("a.bias", 100)]])
    assert gradientflow.sent_of("csc", profile, 0.1) == pytest.approx(0.1 * 0.9 + 0.1)
    assert [gradientflow.sent_of(system, profile, 0.1) for system in ("tensor", "bfloat16", "lazy")] == [1, 0.5, 1]


@pytest.mark.long(turn=4)
@needs_lab
@needs_torch
def test_all_systems_come_to_right_parameters(tmp_path):
    """Gradients are small integers, so sums are exact, in 16 bits, too.  What csc has not sent yet counts as of an earlier step."""
    if not gradientflow.systems.built("bin/tallyd") or not (BUILD / "python").exists():
        pytest.skip(f"there is no bin/tallyd, or no Python package, in {BUILD}")
    rows_file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, PROGRAM, "--quick", "--clusters", "4+0", "2+1", "--models", "alexnet", "--lists", "small", "one", "--rate",
         "200mbit", "--bytes", "2M", "--json", rows_file],
        env={**os.environ, "TALLY_TEST_BUILD": str(BUILD)}, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    taken = {("alexnet", "tensor"), ("alexnet", "bfloat16"), ("alexnet", "lazy"), ("alexnet", "csc"), ("small list", "tensor"),
             ("small list", "lazy"), ("one tensor", "tensor")}
    for machines in ((4, 0), (2, 1)):
        found = {(row["model"], row["system"]) for row in rows if (row["n"], row["k"]) == machines}
        assert found == taken
    for row in rows:
        assert row["wrong"] == 0 and row["agree"] and len(row["steps_s"]) == 3, row
        assert row["ideal_s"] >= row["communication_s"] * (1 - 1e-9), row


def test_bad_arguments():
    for arguments, word in ((["--clusters", "1+0"], "two workers"), (["--clusters", "four"], "4+0"), (["--share", "0"], "above 0"),
                            (["--steps", "0"], "least"), (["--set", "TALLY_PART_BYTES"], "NAME=VALUE")):
        done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and word in done.stderr, done.stderr

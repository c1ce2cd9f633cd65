"""The benchmark bench/train: quick runs of it, in which every way of Tally's must train to the bits of one process that
does all ranks' work, and Gloo's close to it.  Times are not looked at."""

import gzip
import importlib.util
import json
import os
import pathlib
import random
import struct
import subprocess
import sys

import lab as cluster
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
BENCHMARK = ROOT / "bench" / "train"
PATIENCE_S = 500

sys.path.insert(0, str(BENCHMARK))

import curves  # noqa: E402
import train  # noqa: E402

TALLY = ["hook", "backend", "optimizer"]


def write_idx(path, sizes, data):
    path.write_bytes(gzip.compress(struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes) + data, 1))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of files like Fashion-MNIST's: 1024 images of noise, brighter in the row that is their label."""
    folder = tmp_path_factory.mktemp("images")
    draw = random.Random(3)
    labels = bytes(draw.randrange(10) for _ in range(1024))
    pixels = bytearray(draw.randbytes(1024 * 784))
    for i, label in enumerate(labels):
        start = i * 784 + 28 * 2 * label
        pixels[start : start + 28] = bytes([255]) * 28
    write_idx(folder / "train-images-idx3-ubyte.gz", (1024, 28, 28), bytes(pixels))
    write_idx(folder / "train-labels-idx1-ubyte.gz", (1024,), labels)
    return folder


needs_lab = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no PyTorch")


def benchmark(rows, images, *arguments):
    """The rows that a run wrote."""
    if not train.systems.built("bin/tallyd") or not (BUILD / "python").exists():
        pytest.skip(f"there is no bin/tallyd, or no Python package, in {BUILD}")
    done = subprocess.run(
        [sys.executable, BENCHMARK / "train.py", "--quick", "--data", images, "--json", rows, *arguments],
        env={**os.environ, "TALLY_TEST_BUILD": str(BUILD)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in rows.read_text().splitlines()]


@pytest.mark.long(turn=4)
@needs_lab
@needs_torch
def test_ways_train_to_the_same_bits(tmp_path, images):
    """n = 2, where Gloo adds as Tally does: a + b."""
    rows = benchmark(tmp_path / "rows.json", images, "--models", "mlp", "--ways", "gloo", *TALLY)
    assert [(row["way"], row["k"]) for row in rows] == [("gloo", 0)] + [(way, k) for way in TALLY for k in (0, 1)]
    assert all(row["same_bits"] for row in rows)
    assert all(len(row["losses"]) == 6 and row["losses"] == rows[0]["losses"] for row in rows)
    assert len(set(rows[0]["losses"])) == 6, "it does not train"
    speeds, losses = curves.columns(rows)["mlp: 2 workers, 200mbit"]
    assert set(speeds) == {"gloo", "eq. 7", *TALLY} and [k for k, _ in speeds["hook"]] == [0, 1]
    assert set(losses) == {"gloo", *TALLY}


@needs_lab
@needs_torch
def test_chosen_buckets_on_one_machine(tmp_path, images):
    rows = benchmark(
        tmp_path / "rows.json",
        images,
        *("-n", "1", "--ranks", "2", "--models", "convnet", "--batch", "8", "--buckets", "0.25", "1"),
        *("--ways", "hook", "--steps", "2"),
    )
    (row,) = rows
    assert (row["way"], row["k"], row["ranks"]) == ("hook", 0, 2)
    assert row["same_bits"] and row["bucket_mb"] in (0.25, 1)
    assert row["alone_s"] > 0 and row["none_s"] > 0
    assert row["not_hidden_s"] == pytest.approx(row["time_s"] - row["none_s"])  # of one block
    assert row["hidden"] == pytest.approx(1 - row["not_hidden_s"] / row["alone_s"])


@pytest.mark.long(turn=4)
@needs_lab
@needs_torch
@pytest.mark.parametrize("what", ("model", "layers"))
def test_compiled(tmp_path, images, what):
    """Compiled alike, the optimizer's ranks and the reference get the same bits; DDP cuts a whole model's graph."""
    machine = ("-n", "1", "--ranks", "2", "--models", "mlp")
    rows = benchmark(tmp_path / "rows.json", images, *machine, "--ways", "hook", "optimizer", "--compile", what)
    assert [(row["way"], row["compile"]) for row in rows] == [("hook", what), ("optimizer", what)]
    assert rows[1]["same_bits"] and (rows[0]["same_bits"] or what == "model")


def test_eq_7():
    """32 workers and 16 CPU machines, and 8 and 8, as BytePS's paper has them."""
    assert train.eq_7(32, 16) == pytest.approx(1.469, abs=5e-4)
    assert train.eq_7(8, 8) == 1.75
    assert train.eq_7(4, 0) == train.eq_7(2, 2) == 1


def test_bad_arguments():
    for arguments, word in (
        (["-n", "1"], "two ranks"),
        (["-n", "1", "--ranks", "2", "-k", "1"], "no CPU machines"),
        (["--series", "four", "-n", "4"], "series"),
        (["--steps", "0"], "least"),
        (["--ways", "carrier-pigeon"], "invalid choice"),
        (["--set", "TALLY_PART_BYTES"], "NAME=VALUE"),
    ):
        done = subprocess.run(
            [sys.executable, BENCHMARK / "train.py", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and word in done.stderr, done.stderr

"""The benchmark bench/models: its profiles, its ideal against every schedule there is, and a quick run in which all systems
must come to the same parameters.  Times are not looked at."""

import functools
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys

import lab as cluster
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
BENCHMARK = ROOT / "bench" / "models"
PATIENCE_S = 240

sys.path.insert(0, str(BENCHMARK))

import ideal  # noqa: E402
import pictures  # noqa: E402
import profiles  # noqa: E402
import schedule  # noqa: E402

# --- the ideal ----------------------------------------------------------------------------------------------


def every_order(layers):
    """The least step over all that a server can do, a unit of time after the other.  layers: as of ideal.step(), whole
    numbers, a byte a unit of work."""
    released, at = [0] * len(layers), 0
    for i in reversed(range(len(layers))):
        at += layers[i][2]
        released[i] = at
    backward = at

    def forward(ends):
        now = backward
        for end, (size, seconds, _) in zip(ends, layers):
            now = (max(now, end) if size else now) + seconds
        return now

    @functools.lru_cache(maxsize=None)
    def least(now, left, ends):
        if not any(left):
            return forward(ends)
        best = float("inf")
        ready = [i for i, work in enumerate(left) if work and released[i] <= now]
        for i in ready:
            less = tuple(work - (j == i) for j, work in enumerate(left))
            best = min(best, least(now + 1, less, tuple(now + 1 if j == i else e for j, e in enumerate(ends))))
        return best if ready else least(now + 1, left, ends)

    sizes = tuple(size for size, _, _ in layers)
    return least(0, sizes, (0,) * len(layers))


@pytest.mark.parametrize("seed", range(60))
def test_no_order_is_faster_than_the_ideal(seed):
    draw = random.Random(seed)
    layers = [(draw.randrange(4), draw.randrange(4), draw.randrange(4)) for _ in range(draw.randrange(1, 5))]
    assert ideal.step(layers, 1) == every_order(layers), layers


def unit_by_unit(layers, steps):
    """Steps of the same, simulated a unit of time after the other with all queues carried over: when each backward began."""
    begun, now = [], 0
    free_at = 0  # the server's; the queue is [(place, work)]
    pending = {}
    for _ in range(steps):
        begun.append(now)
        done = {}
        events = []
        at = now
        for i in reversed(range(len(layers))):
            at += layers[i][2]
            events.append((at, i))
        tick = max(free_at, now)
        while events or pending:
            while events and events[0][0] <= tick:
                i = events.pop(0)[1]
                if layers[i][0]:
                    pending[i] = layers[i][0]
            if pending:
                first = min(pending)
                pending[first] -= 1
                if not pending[first]:
                    del pending[first]
                    done[first] = tick + 1
            tick += 1
        free_at, now = tick, at
        for i, (size, seconds, _) in enumerate(layers):
            now = max(now, done.get(i, 0)) + seconds
    return begun


@pytest.mark.parametrize("seed", range(30))
def test_one_step_is_the_steady_state(seed):
    draw = random.Random(1000 + seed)
    layers = [(draw.randrange(30), draw.randrange(20), draw.randrange(20)) for _ in range(draw.randrange(1, 12))]
    begun = unit_by_unit(layers, 4)
    assert [b - a for a, b in zip(begun, begun[1:])] == [ideal.step(layers, 1)] * 3


def test_the_ideal_by_hand():
    """Two layers of 1 + 2 seconds: the second gradient comes at 2, the first at 4.  4 seconds of sums each: the second's
    stands back at 4 for the first's, which ends at 8; forward of the first until 9; the second's other half until 10."""
    assert ideal.step([(4, 1, 2), (4, 1, 2)], 1) == 11
    assert ideal.finished([(4, 4), (2, 4)]) == [8, 10]
    assert ideal.step([(0, 3, 4)], 1) == 7


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds(seed):
    """Without overlap against the ideal; and it is at most 2."""
    draw = random.Random(seed)
    layers = [(draw.randrange(1, 50), draw.random(), draw.random()) for _ in range(8)]
    forward, backward = sum(f for _, f, _ in layers), sum(b for _, _, b in layers)
    total = 0.02 * sum(size for size, _, _ in layers)
    bound = ideal.bound(forward, backward, total)
    assert (forward + backward + total) / ideal.step(layers, 0.02) <= bound * (1 + 1e-12) and bound <= 2
    assert ideal.bound(1, 2, 3) == 2


# --- profiles -----------------------------------------------------------------------------------------------


def test_profiles_multiply_as_often_as_the_literature_says():
    """Multiplications of an image, in 10⁹: torchvision's figures; of a token of a transformer: its weights."""
    macs = {model: sum(layer.macs for layer in profiles.layers_of(model)) for model in profiles.MODELS}
    assert macs["resnet50"] / 1e9 == pytest.approx(4.09, abs=0.01)
    assert macs["vgg16"] / 1e9 == pytest.approx(15.47, abs=0.01)
    assert macs["alexnet"] / 1e9 == pytest.approx(0.714, abs=0.001)
    assert macs["gpt2"] / 1e6 == pytest.approx(124, abs=1)


@pytest.mark.parametrize("model", profiles.MODELS)
def test_profiles_have_all_tensors_and_all_time(model):
    profile, (seconds, _) = profiles.profile(model), profiles.published()[model]
    tensors = [tensor for layer in profile.layers for tensor in layer.tensors]
    assert tensors == profiles.MODELS[model][0]()
    assert profile.forward_s + profile.backward_s == pytest.approx(seconds)
    small = profile.scaled(1 << 20, 3.0)
    assert small.bytes == pytest.approx(1 << 20, rel=0.01)
    assert small.forward_s == pytest.approx(3 * profile.forward_s)
    assert profile.scaled(1 << 40, 1.0).bytes == profile.bytes


def test_published_steps():
    steps = profiles.published()
    assert steps["resnet50"][0] == pytest.approx(32 / 405)
    assert steps["transformer"][0] == pytest.approx(512 / 7635)
    assert steps["vgg16"][0] == pytest.approx(32 / (405 * 154 / 219))


def test_computing_and_communication_keep_their_ratio():
    sys.argv, kept = ["schedule.py", "--quick", "--rate", "100mbit", "--models", "vgg16", "--equivalents", "10"], sys.argv
    try:
        arguments = schedule.parse()
    finally:
        sys.argv = kept
    (cell,) = schedule.cells_of(arguments)
    whole, small = profiles.profile("vgg16"), cell["profile"]
    assert small.bytes <= 1.01 * (8 << 20)
    ratio = whole.bytes / 10e9 / (whole.forward_s + whole.backward_s)
    assert small.bytes / 100e6 / (small.forward_s + small.backward_s) == pytest.approx(ratio)


def test_systems_with_the_same_settings_take_turns():
    assert schedule.groups_of(["ddp", "fifo", "p3", "priority", "cross"]) == [["ddp"], ["fifo", "priority", "cross"], ["p3"]]


# --- a run --------------------------------------------------------------------------------------------------

needs_lab = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no PyTorch")


def benchmark(*arguments):
    if not schedule.systems.built("bin/tallyd") or not (BUILD / "python").exists():
        pytest.skip(f"there is no bin/tallyd, or no Python package, in {BUILD}")
    done = subprocess.run(
        [sys.executable, BENCHMARK / "schedule.py", "--quick", "--rate", "200mbit", "--bytes", "512K", "--steps", "1", *arguments],
        env={**os.environ, "TALLY_TEST_BUILD": str(BUILD)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long(turn=4)
@needs_lab
@needs_torch
def test_all_systems_come_to_the_same_parameters(tmp_path):
    """Gradients are small integers: what each element must be is known exactly, and is the same for all orders, settings and
    numbers of services."""
    rows_file = tmp_path / "rows.json"
    told = benchmark("-n", "2", "-k", "0", "1", "--models", "gpt2", "--equivalents", "25", "--buckets", "1", "--json", rows_file)
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    found = {(row["system"], row["k"]) for row in rows}
    tally = ("fifo", "whole", "p3", "dear", "priority", "cross", "optimizer")
    assert found - {("cross_barrier", 0), ("cross_barrier", 1)} == {("ddp", 0), *((s, k) for s in tally for k in (0, 1))}
    for row in rows:
        assert row["wrong"] == 0 and row["warnings"] == "" or row["system"] == "ddp", row
        assert len(row["steps_s"]) == 1 and row["fraction"] == row["ideal_s"] / row["step_s"] and str(row["system"]) in told
        assert 1 < row["bound"] <= 2 and row["ideal_s"] >= max(row["communication_s"], row["forward_s"] + row["backward_s"]) - 1e-9
    lines = pictures.panels(rows)["gpt2", 1]
    assert {"ddp", "cross", "ideal", "no communication"} <= set(lines) and len(lines["cross"]) == 1


@pytest.mark.long(turn=4)
@needs_lab
@needs_torch
def test_the_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    for option in ("--timeline", "--plot"):
        picture = tmp_path / f"{option[2:]}.png"
        benchmark("-n", "2", "-k", "1", "--models", "alexnet", "--equivalents", "10", "--systems", "priority", "cross", option,
                  picture)
        assert picture.stat().st_size > 5000


def test_bad_arguments():
    for arguments, word in (
        (["-n", "1"], "two workers"),
        (["--steps", "0"], "least"),
        (["--systems", "carrier-pigeon"], "invalid choice"),
        (["--set", "TALLY_PART_BYTES"], "NAME=VALUE"),
        (["--equivalents", "0"], "least"),
    ):
        done = subprocess.run(
            [sys.executable, BENCHMARK / "schedule.py", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and word in done.stderr, done.stderr

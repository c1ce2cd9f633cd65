"""The benchmark bench/goodput: the tensors of its models, its optimum, and a quick run of it in which every sum must be
right and every link carry what the plan says.  Times are not looked at."""

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
BENCHMARK = ROOT / "bench" / "goodput"
PATIENCE_S = 240

sys.path.insert(0, str(BENCHMARK))

import goodput  # noqa: E402
import models  # noqa: E402
import optimum  # noqa: E402
import plot  # noqa: E402
import systems  # noqa: E402


@pytest.mark.parametrize("model", models.MODELS)
def test_models_have_the_parameters_that_the_literature_says(model):
    _, millions, tolerance, _ = models.MODELS[model]
    tensors = models.tensors(model)
    assert abs(sum(count for _, count in tensors) / 1e6 - millions) <= tolerance
    assert len({name for name, _ in tensors}) == len(tensors)


def test_models_exactly():
    """Figures that are known to the last parameter, and tensors known by name."""
    total = {model: sum(count for _, count in models.tensors(model)) for model in models.MODELS}
    assert (total["resnet50"], total["vgg16"], total["gpt2"]) == (25557032, 138357544, 124439808)
    resnet = dict(models.tensors("resnet50"))
    assert len(resnet) == 161
    assert resnet["layer4.0.downsample.0.weight"] == 2048 * 1024 and resnet["fc.bias"] == 1000
    ugatit = dict(models.tensors("ugatit"))
    assert sum(count for name, count in ugatit.items() if name.startswith("dis")) == pytest.approx(112.8e6, abs=5e4)


def test_backward_order_and_scale():
    tensors = models.backward("vgg16")
    assert (tensors[0][0], tensors[-1][0]) == ("classifier.6.bias", "features.0.weight")
    tenth = models.backward("vgg16", 0.1)
    assert all(abs(small - 0.1 * whole) <= 1 for (_, small), (_, whole) in zip(tenth, tensors))
    assert min(count for _, count in models.backward("vgg16", 1e-9)) == 1


@pytest.mark.parametrize("k, large, small", [(0, 0.994, 0.98), (1, 0.993, 0.976), (4, 0.99, 0.954), (7, 0.987, 0.934),
                                             (8, 0.982, 0.938)])
def test_what_the_schedule_makes_of_the_optimum(k, large, small):
    """In the model of cards as queues, where no time is measured: no less than it did when these were written."""
    program = systems.built("meson/bench/goodput/cards", "bench/goodput/cards")
    for size, least in ((128 << 20, large), (16 << 20, small)):
        told = subprocess.run([program, "8", str(k), str(size)], check=True, capture_output=True, text=True).stdout
        assert least <= float(told.split()[0]) < 1, told


def test_buckets_are_those_of_distributed_data_parallel():
    mega = 1 << 20
    counts = [c for _, c in systems.buckets([("a", 100), ("b", mega), ("c", 6 * mega), ("d", mega), ("e", 5)])]
    assert counts == [100 + mega, 7 * mega, 5]
    assert [c for _, c in systems.buckets([("x", 40 * mega)])] == [40 * mega]
    tensors = models.backward("bert-large")
    assert sum(c for _, c in systems.buckets(tensors)) == sum(c for _, c in tensors)


def test_series_of_slow_cards_have_the_burst_of_their_figures():
    for name in ("main", "models", "unequal", "small"):
        for one in goodput.series(name, None):
            slow = any(cluster.parse_rate(rate) < 1e9 for rate in [one.rate, *one.rate_of.values()])
            assert one.burst == (96 << 10 if slow else None), str(one)


def seconds_are_enough(seconds, workers, services, total):
    """Whether shares that add up to 1 fit into a time: the definition of the problem, not its solution."""
    n = len(workers)
    if min(workers) * seconds < total * (1 - 1e-12):
        return False
    room = sum(1 if n == 2 else (seconds * b / total - 1) / (n - 2) for b in workers)
    return room + sum(seconds * b / (n * total) for b in services) >= 1


def machines(draw):
    n, k = draw.randint(2, 9), draw.randint(0, 9)
    return [draw.uniform(1e7, 4e7) for _ in range(n)], [draw.uniform(1e6, 1e8) for _ in range(k)]


def test_optimum_is_the_least_time():
    draw = random.Random(12)
    for _ in range(200):
        workers, services = machines(draw)
        best = optimum.optimum(workers, services, 1e8)
        assert seconds_are_enough(best * (1 + 1e-9), workers, services, 1e8)
        assert not seconds_are_enough(best * (1 - 1e-9), workers, services, 1e8)


def test_optimum_of_equal_cards_is_eq_6():
    for n in range(3, 33):
        for k in range(n + 1):
            expected = 2 * n * (n - 1) * 7e8 / ((n * n + k * n - 2 * k) * 1e8)
            assert optimum.optimum([1e8] * n, [1e8] * k, 7e8) == pytest.approx(expected)
    assert optimum.optimum([1e8] * 8, [1e8] * 20, 7e8) == pytest.approx(7)
    assert optimum.optimum([1e8] * 2, [1e8] * 2, 7e8) == pytest.approx(7)


def program(*names):
    path = systems.built(*names)
    if not path:
        pytest.skip(f"{names[0]} is not built in {BUILD}")
    return path


def test_tally_plan_agrees(tmp_path):
    """Two derivations of the same problem."""
    draw = random.Random(5)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}
    for _ in range(10):
        workers, services = machines(draw)
        listing = tmp_path / "machines"
        listing.write_text(
            "".join(f"worker {round(8 * b)}\n" for b in workers) + "".join(f"cpu {round(8 * b)}\n" for b in services)
        )
        argv = [program("bin/tally", "src/cli/tally"), "plan", "--machines", listing, "-M", "128M", "--json"]
        done = subprocess.run(argv, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        planned = json.loads(done.stdout)
        assert planned["time_s"] == pytest.approx(optimum.optimum(workers, services, 128 << 20), rel=1e-5)
        for operation in ("all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all"):
            least = planned[operation.replace("-", "_") + "_time_s"]
            assert least == pytest.approx(optimum.collective(operation, workers, services, 128 << 20), rel=1e-5), operation
        shares = [service["bytes"] / (128 << 20) for service in planned["services"]]
        due = optimum.traffic(len(workers), shares, 128 << 20)
        assert [service["each_way_bytes"] for service in planned["services"]] == pytest.approx(due, abs=20)


needs_lab = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))


def benchmark(rows, *arguments):
    """The rows that a run wrote."""
    program("meson/bench/goodput/goodput", "bench/goodput/goodput")
    done = subprocess.run(
        [sys.executable, BENCHMARK / "goodput.py", "--quick", "--rate", "200mbit", "--json", rows, *arguments],
        env={**os.environ, "TALLY_TEST_BUILD": str(BUILD)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in rows.read_text().splitlines()]


def as_planned(rows):
    """Parts are so small that the split is nearly as exact as the plan's, to 1.5%.  Up to 8% more is headers of frames
    and packets, acknowledgements, joining, and of the many small tensors of a list a header each."""
    assert all(row["wrong"] == 0 for row in rows)
    assert all(0.985 < row["traffic"] < 1.08 for row in rows), [row["traffic"] for row in rows]
    assert all(row["optimum_s"] > 0 and row["fraction"] > 0 for row in rows)


SMALL_PARTS = ["--set", "TALLY_PART_BYTES=16K", "--set", "TALLY_WINDOW_PARTS=64"]


@needs_lab
def test_quick_run(tmp_path):
    """n = 4, k = 0, 2, 4; one tensor and a model's list."""
    rows = benchmark(
        tmp_path / "rows.json",
        *("-n", "4", "-k", "0", "2", "4", "--bytes", "4M", "--model", "resnet50", "--scale", "0.1"),
        *("--iterations", "2", "--warm-up", "0", "--systems", "tally", *SMALL_PARTS),
    )
    assert [(row["work"], row["tensors"], row["k"], len(row["iterations_s"])) for row in rows] == [
        (work, tensors, k, 2) for work, tensors in (("tensor", 1), ("resnet50", 161)) for k in (0, 2, 4)
    ]
    as_planned(rows)
    # A list's beginning and end are planned for, at most a sixteenth of it: that makes the whole not much longer.
    assert all(0.999 < row["plan"] < 1.01 for row in rows), "Tally's split is not the best"
    drawn = plot.panels(rows)
    assert len(drawn) == 2 and all(set(lines) == {"optimum", "tally"} for lines in drawn.values())
    assert [[k for k, _ in lines["tally"]] for lines in drawn.values()] == [[0, 2, 4]] * 2


@needs_lab
def test_ranks_of_a_machine_push_once(tmp_path):
    """Two ranks on each of 4 machines: every link carries what it carries with one, to 2%."""
    rows = [
        benchmark(
            tmp_path / f"{ranks}.json",
            *("-n", "4", "-k", "0", "2", "4", "--bytes", "8M", "--iterations", "2", "--warm-up", "0"),
            *("--systems", "tally", "--ranks-per-machine", str(ranks)),
        )
        for ranks in (1, 2)
    ]
    for one, two in zip(*rows):
        as_planned([one, two])
        assert one["k"] == two["k"] and (one["ranks_per_machine"], two["ranks_per_machine"]) == (1, 2)
        assert two["traffic"] == pytest.approx(one["traffic"], rel=0.02)


@needs_lab
def test_cards_that_differ(tmp_path):
    rows = benchmark(
        tmp_path / "rows.json",
        *("-n", "4", "-k", "2", "--bytes", "4M", "--iterations", "2", "--warm-up", "0", "--systems", "tally"),
        *("--rate-of", "w1=160mbit", "w2=160mbit", "w3=160mbit", "c0=160mbit", "c1=80mbit", *SMALL_PARTS),
    )
    as_planned(rows)
    workers, services = [2e8, 1.6e8, 1.6e8, 1.6e8], [1.6e8, 8e7]
    shares = [s["share"] for s in sorted(rows[0]["report"]["services"], key=lambda s: s["address"])]
    busiest = max(due / rate for due, rate in zip(optimum.traffic(4, shares, 1), workers + services))
    assert busiest == pytest.approx(optimum.optimum(workers, services, 1), rel=1e-3), "Tally's split is not the best"


@needs_lab
def test_other_splits(tmp_path):
    """A parameter server needs 2M / B here, all-reduce 1.5 M / B, the best split 1.2 M / B."""
    rows = benchmark(
        tmp_path / "rows.json",
        *("-n", "4", "-k", "2", "--bytes", "4M", "--iterations", "2", "--warm-up", "0"),
        *("--systems", "server", "all-reduce", "tally", *SMALL_PARTS),
    )
    assert [row["system"] for row in rows] == ["server", "all-reduce", "tally"]
    as_planned(rows)
    assert [row["plan"] for row in rows] == pytest.approx([2 / 1.2, 1.5 / 1.2, 1], rel=1e-2)


def test_bad_arguments():
    for arguments, word in (
        (["-n", "1"], "two workers"),
        (["--model", "alexnet"], "invalid choice"),
        (["--scale", "0"], "no scale"),
        (["--bytes", "0"], "no size"),
        (["-n", "2", "-k", "1", "--rate-of", "w9=1gbit"], "no host w9"),
        (["--series", "main", "-n", "4"], "series"),
        (["--iterations", "0"], "least"),
        (["--ranks-per-machine", "0"], "least"),
    ):
        done = subprocess.run(
            [sys.executable, BENCHMARK / "goodput.py", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and word in done.stderr, done.stderr

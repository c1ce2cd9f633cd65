"""The benchmark bench/adapt: when a change counts as followed, the optimum of the moment, and a quick run.  Times are not
looked at."""

import json
import pathlib
import subprocess
import sys

import lab as cluster
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "bench" / "adapt"
PATIENCE_S = 120
SECOND = 32 << 20  # bytes that a card of 32 MB/s carries in a second

sys.path.insert(0, str(BENCHMARK))

import adapt  # noqa: E402


def steps(*fractions, seconds=2.0, begin=10.0):
    """One behind the other."""
    return [
        {"at_s": begin + seconds * (i + 1), "seconds": seconds, "fraction": fraction} for i, fraction in enumerate(fractions)
    ]


@pytest.mark.parametrize(
    "fractions, since, until, took",
    [
        ([0.5, 0.96, 0.96, 0.96], 10, 99, (1, 2.0)),
        ([0.5, 0.96, 0.94, 0.96, 0.95, 0.99], 10, 99, (3, 6.0)),  # three in a row
        ([0.96, 0.96, 0.96, 0.96], 11, 99, (0, 1.0)),  # the first began before
        ([0.96, 0.96, 0.96], 11, 99, None),
        ([0.5, 0.96, 0.96, 0.96], 10, 17, None),  # the last ended after the next change
    ],
)
def test_when_a_change_has_been_followed(fractions, since, until, took):
    assert adapt.settled(steps(*fractions), since, until) == took


class StillLab:
    def rate(self, host):
        return 8 * SECOND / adapt.PAYLOAD  # bit/s of a card that carries SECOND bytes in a second


def test_the_optimum_of_the_moment():
    """Two workers: what a step takes is what the slower card takes, whoever sums."""
    network = adapt.Network(StillLab(), ["w0", "w1"], [])
    full, half = network.base, {"w0": network.base["w0"], "w1": network.base["w1"] / 2}
    network.history = [(0.0, full, frozenset()), (5.0, half, frozenset())]
    workers = ["w0", "w1"]
    assert adapt.fraction(network, workers, SECOND, 1.0, 1.0) == pytest.approx(1)
    assert adapt.fraction(network, workers, SECOND, 6.0, 2.0) == pytest.approx(1)
    assert adapt.fraction(network, workers, SECOND, 6.0, 4.0) == pytest.approx(0.5)
    # Half a second at the whole rate and a second at half of it make one step.
    assert adapt.fraction(network, workers, SECOND, 4.5, 1.5) == pytest.approx(1)


def test_services_count_while_they_are_there():
    """Of n = 3 workers and a tallyd: 1 + 3 / (3 - 2) over 3 + 1/3 cards; without it over 3, as Eq. 1 and 2 have it."""
    hosts = ["w0", "w1", "w2"]
    network = adapt.Network(StillLab(), [*hosts, "c0"], [])
    there = frozenset(["c0"])
    network.history = [(0.0, network.base, frozenset()), (5.0, network.base, there)]
    assert adapt.fraction(network, hosts, SECOND, 1.0, 4 / 3) == pytest.approx(1)
    assert adapt.fraction(network, hosts, SECOND, 6.0, 4 / (3 + 1 / 3)) == pytest.approx(1)


@pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))
def test_quick_run(tmp_path):
    file, log = tmp_path / "steps.json", tmp_path / "log"
    argv = [BENCHMARK / "adapt.py", "-n", "3", "-k", "1", "--scenario", "right", "--seconds", "12", "--rate", "200mbit"]
    argv += ["--bytes", str(4 << 20), "--json", file, "--log", log, "--verbose"]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("right       3+1 ")
    run = json.loads(file.read_text(encoding="utf-8"))["right"]
    assert (run["layout"], run["rate"], run["bytes"], run["events_s"]) == ("3+1", "200mbit", 4 << 20, [])
    ends = [step["at_s"] for step in run["steps"]]
    assert len(ends) > 3 and ends == sorted(ends) and all(step["fraction"] > 0 for step in run["steps"])
    assert "service 3: " in log.read_text(encoding="utf-8")

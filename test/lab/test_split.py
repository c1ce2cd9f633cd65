"""The split over machines that differ, on the emulated cluster: what crosses each link is what `tally plan` says, and
who is slower than it said is named, and why a rank keeps the others waiting."""

import json
import os
import pathlib
import re
import subprocess
import sys

import lab as cluster
import pytest
from lab import Host, Lab

pytestmark = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
PATIENCE_S = 60
BYTES = 4 * 1000000  # of examples/push_pull


def built(*names):
    """A program: in the build folder of `make`, or in one of Meson's own."""
    for name in names:
        if (BUILD / name).exists():
            return str(BUILD / name)
    pytest.fail(f"there is no {names[0]} in {BUILD}")


def tallyd():
    return built("bin/tallyd", "src/tallyd/tallyd")


def planned(machines):
    """What `tally plan` says of [(kind, rate)]."""
    listed = "".join(f"{kind} {rate}\n" for kind, rate in machines)
    tool = [built("bin/tally", "src/cli/tally"), "plan", "--machines", "-", "-M", str(BYTES), "--json"]
    done = subprocess.run(tool, input=listed, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return json.loads(done.stdout)


def test_bytes_on_every_link_of_unequal_machines():
    rates = {"w0": "200M", "w1": "200M", "w2": "100M", "c0": "50M", "c1": "100M"}
    p = planned([("worker" if host[0] == "w" else "cpu", rate) for host, rate in rates.items()])

    def settings(host):
        return {"TALLY_PART_BYTES": "8192", "TALLY_WINDOW_PARTS": "64", "TALLY_BANDWIDTH": rates[host]}

    with Lab([Host(host, rate=rate.replace("M", "mbit")) for host, rate in rates.items()]) as lab:
        done = lab.job(
            [built("meson/examples/push_pull", "examples/push_pull")],
            ["w0", "w1", "w2"],
            ["c0", "c1"],
            tallyd(),
            env=settings,
            timeout_s=PATIENCE_S,
        )
    assert done.ok, str(done)
    assert "each of 1000000 sums is 6, 0 are wrong" in done.ranks[0].output
    assert f"at best {p['time_s'] / BYTES * 1e9:.3g} s for 1 GB" in done.ranks[0].output
    for host, service in zip(rates, p["services"]):
        due = service["each_way_bytes"]
        for way, measured in zip(("sent", "received"), done.traffic[host]):
            # Below: a part more or less than the share.  Above: headers of frames and packets, acknowledgements.
            assert 0.985 * due < measured < 1.08 * due, f"{host} {way} {measured} bytes, the plan says {due:.0f}"


def name_who_is_slower(slow, workers, tallyds, ranks_per_host, tmp_path):
    """One card carries a quarter of what its machine says; what that does to the others names it, however busy the
    test's own machine is.  (The split would follow at once: test_adapt.py.)"""
    name = r"tallyd [01] \(c1\)" if slow == "c1" else rf"the machine of rank {int(slow[1]) * ranks_per_host} \({slow}\)"
    tensors = tmp_path / "list"
    tensors.write_text("1500000 x\n", encoding="ascii")
    with Lab([Host(h, rate="25mbit") if h == slow else h for h in workers + tallyds], rate="100mbit") as lab:
        done = lab.job(
            [built("meson/bench/goodput/goodput", "bench/goodput/goodput"), "8", "0", str(tensors)],
            workers,
            tallyds,
            tallyd(),
            ranks_per_host,
            env={
                "TALLY_PART_BYTES": "48K",
                "TALLY_FRAGMENT_BYTES": "24K",
                "TALLY_BANDWIDTH": "100M",
                "TALLY_REPLAN": "0",
            },
            timeout_s=2 * PATIENCE_S,
        )
    assert done.ok, str(done)
    said = done.ranks[0].output
    warnings = [line for line in said.splitlines() if "the job is held up by" in line]
    what = f"{name}, which carries 0\\.0[0-9]+ of 0\\.1 Gbit/s since"
    assert warnings and all(re.search(f"the job is held up by {what}", line) for line in warnings), said
    assert re.search(rf"predicted [0-9.]+ s, [0-9.]+ Gbit/s\), held up by {what}", said), said
    for rank in done.ranks[1:]:
        assert "Gbit/s since" not in rank.output, "the coordinator says it"


def one_of_each(ordinary, others):
    """What the ordinary run leaves out differs from what it has in where a machine stands, not in what is looked at."""
    return [*ordinary, *(pytest.param(*other, marks=pytest.mark.long(turn=4)) for other in others)]


@pytest.mark.parametrize(
    "slow,ranks_per_host", one_of_each([("c1", 1), ("w2", 2)], [("c1", 2), ("w2", 1), ("w0", 1), ("w0", 2)])
)
def test_who_is_slower_than_it_said_is_named(slow, ranks_per_host, tmp_path):
    name_who_is_slower(slow, ["w0", "w1", "w2", "w3"], ["c0", "c1"], ranks_per_host, tmp_path)


@pytest.mark.parametrize("slow,workers", one_of_each([("w0", 3)], [("w2", 3), ("w0", 4), ("w2", 4)]))
def test_who_is_slower_than_it_said_is_named_without_tallyd(slow, workers, tmp_path):
    """Its rank and its service hold up all alike."""
    name_who_is_slower(slow, [f"w{i}" for i in range(workers)], [], 1, tmp_path)


# So many steps, and more until the file STOP is there, if one is named; all stop after the same step.
STEPS = """
import array, itertools, os, subprocess, time
import tally
tally.init()
x = array.array("f", [0.0]) * int(os.environ["COUNT"])
steps, stop = int(os.environ["STEPS"]), os.environ.get("STOP")
for step in itertools.count(1):
    time.sleep(0.2 if os.environ["RANK"] == os.environ.get("LONGER") else 0.05)
    x[0] = step >= steps and (stop is None or os.path.exists(stop))
    if tally.push_pull(x, name="gradient")[0] > 0:
        break
if os.environ["RANK"] == "0" and "LINGER" in os.environ:
    time.sleep(float(os.environ["LINGER"]))
    asked = subprocess.run([os.environ["CLI"], "status"], capture_output=True, text=True)
    print("status:", asked.stdout + asked.stderr, "end of status", flush=True)
tally.shutdown()
"""


@pytest.mark.parametrize("said", ["100M", "180M"])
def test_who_computes_longer_is_named_at_the_end(said):
    """What was reached counts the time in which the others wait for a rank's gradients: that is no machine's network, also
    where that rank's own time is longer than predicted.  The others may have left by then, and hold nobody up now."""
    hosts = ["w0", "w1", "w2"]
    with Lab(hosts, rate="100mbit") as lab:
        done = lab.job(
            [sys.executable, "-c", STEPS],
            hosts,
            timeout_s=2 * PATIENCE_S,
            env={
                "PYTHONPATH": str(BUILD / "python"),
                "COUNT": "300000",
                "STEPS": "45",
                "LONGER": "2",
                "LINGER": "1.5",
                "CLI": built("bin/tally", "src/cli/tally"),
                "TALLY_BANDWIDTH": said,
            },
        )
    assert done.ok, str(done)
    output = done.ranks[0].output
    why = r"held up by rank 2 \(w2\), which computes longer than the others since \d\d:\d\d:\d\d: they wait for it for \d+% of"
    assert re.search(rf"predicted [0-9.]+ s, [0-9.]+ Gbit/s\), {why}", output), output
    assert re.search(f"the job is {why}", output), output
    assert "Gbit/s since" not in output
    status = output.partition("status:")[2].partition("end of status")[0]
    assert "left" in status and "held up" not in status, output


def test_a_rank_behind_a_slow_card_does_not_compute_longer(tmp_path):
    """Its sums come late, too, so it begins late.  On a busy machine it may take a while until its card is what holds the
    job up."""
    ranks, services = [f"w{i}" for i in range(4)], ["c0", "c1"]
    hosts = [Host(h, rate="25mbit") if h == "w2" else h for h in ranks + services]
    stop = tmp_path / "stop"
    due = r"is held up by the machine of rank 2 \(w2\), which carries 0\.0[0-3]\d* Gbit/s since"
    env = {"TALLY_MEASURE": "off", "COUNT": "100000", "STEPS": "100", "STOP": str(stop)}
    env["PYTHONPATH"] = str(BUILD / "python")

    def watch(running):
        if re.search(due, running[0].output()):
            stop.touch()

    with Lab(hosts, rate="100mbit") as lab:
        command = [sys.executable, "-c", STEPS]
        done = lab.job(command, ranks, services, tallyd(), timeout_s=2 * PATIENCE_S, env=env, watch=watch)
    judged = "\n".join(line for line in done.ranks[0].output.splitlines() if "carries" in line or "held up" in line)
    assert stop.exists(), f"waited in vain for the judgement:\n{judged}"
    assert done.ok, str(done)
    assert "rank 2 (w2), which computes longer" not in judged, judged

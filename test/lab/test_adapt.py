"""The plan follows the network: cards of the emulated cluster change while a job runs, and its split follows, without anybody
coming or going; and what has changed is said.  Times are not looked at (bench/adapt does)."""

import json
import os
import random
import re
import signal
import sys
import time

import lab as cluster
import pytest
from lab import Lab
from test_lab import BUILD, PATIENCE_S, built, eventually, tallyd

pytestmark = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))

WORKERS, SERVICES = ["w0", "w1", "w2", "w3"], ["c0", "c1"]


def measured(rate):
    return ",".join(f"{h}={rate}" for h in WORKERS + SERVICES)


FAR_TOO_MUCH = measured("2G")  # 40 times what the cards carry

# Sums again and again until the file is there; all stop after the same step.  "mixed": each step has a reduce_scatter, too.
# "idle": the last rank takes no part.
STEPS = """
import array, logging, pathlib, sys, time
import tally
from tally import _calls, _job, _operations
logging.basicConfig(level="INFO", format="%(message)s")
tally.init()
x = array.array("f", [0.0]) * 400000
FLOAT32 = 0
wrong, stop, n, group = 0, pathlib.Path(sys.argv[1]), tally.size(), None
if "idle" in sys.argv:
    n -= 1
    if tally.rank() < n:
        group = _job.make_group("all but the last", range(n))
    while tally.rank() == n and not stop.exists():
        time.sleep(0.1)

def address(x):
    return x.buffer_info()[0]

def total(x, name):
    call = _calls.Call(name, tally.Sum, group)
    _operations.push_pull(call, address(x), address(x), len(x), FLOAT32, (len(x),)).wait()
    return x

for step in range(100000 if tally.rank() < n else 0):
    for i in range(0, len(x), 1000):
        x[i] = tally.rank() + step % 3
    due = n * (n - 1) / 2 + n * (step % 3)
    if "mixed" in sys.argv:
        part = array.array("f", [0.0]) * (len(x) // 8)
        call = _calls.Call("part", tally.Sum)
        _operations.reduce_scatter(call, address(x), address(part), [len(part)] * n, FLOAT32).wait()
        wrong += any(part[i] != due for i in range(0, len(part), 1000))
    total(x, "x")
    wrong += any(x[i] != due for i in range(0, len(x), 1000))
    if total(array.array("f", [float(stop.exists())]), "stop")[0] > 0:
        break
print(f"{wrong} steps are wrong", flush=True)
tally.shutdown()
"""


def program(env):
    """One with fail points if the environment names one (test/fault/fail.c)."""
    return built("meson/test/fault/fault_failing_tallyd") if "FAULT_FAIL" in env else tallyd()


class Running:
    """A job that goes on until finish().  first: settings that only rank 0 has; apart: those of a coordinator of its own on
    rank 0's host, if there is to be one.  steps: words that STEPS knows."""

    def __init__(self, net, folder, env, first=None, apart=None, failing=None, steps=()):
        self.stop = folder / "stop"
        base = {"PYTHONPATH": str(BUILD / "python"), **env}
        ranks, daemons = net.environment(WORKERS, SERVICES, env=base)
        argv = [sys.executable, "-c", STEPS, str(self.stop), *steps]
        ranks[0] |= first or {}
        self.net, self.env, self.daemons = net, ranks[1], daemons
        if apart is not None:
            self.start_coordinator(apart)
        self.services = [self.start_service(h, **(failing or {}).get(h, {})) for h in SERVICES]
        self.ranks = [net.start(h, argv, ranks[i], inherit=False) for i, h in enumerate(WORKERS)]

    def start_coordinator(self, env):
        env = {**self.daemons["c0"], "TALLY_HOST_ID": "w0", "TALLY_SERVERS": "2", **env}
        self.coordinator = self.net.start("w0", [program(env), "--coordinator"], env, inherit=False)
        asked = [built("bin/tally", "src/cli/tally"), "status"]
        eventually(lambda: self.net.run("w1", asked, self.env, inherit=False).status == 0)

    def start_service(self, host, **env):
        env = {**self.daemons[host], **env}
        return self.net.start(host, [program(env), "--once"], env, inherit=False)

    def said(self, pattern):
        return re.findall(pattern, self.ranks[0].output())

    def status(self):
        """What `tally status` says on another rank's host."""
        done = self.net.run("w1", [built("bin/tally", "src/cli/tally"), "status", "--json"], self.env, inherit=False)
        assert done.status == 0, done.output
        return json.loads(done.output)

    def replace(self, i, drains=False):
        """A tallyd dies, or is told to leave, and another comes on its host."""
        if drains:
            self.services[i].signal(signal.SIGTERM)
            assert self.services[i].wait(PATIENCE_S).status == 0
        else:
            self.services[i].kill()
        self.services[i] = self.start_service(SERVICES[i])

    def lose_coordinator(self, for_s):
        self.coordinator.kill()
        time.sleep(for_s)
        self.start_coordinator({})

    def share(self, host):
        """Of a tallyd, 0 to 1; 1: there is none."""
        return next((x.get("share", 1) for x in self.status()["services"] if x["host"] == host and x["kind"] == "tallyd"), 1)

    def finish(self):
        self.stop.touch()
        results = [p.wait(PATIENCE_S) for p in self.ranks + self.services]
        assert [r.status for r in results] == [0] * len(results), [r.output[-2000:] for r in results]
        assert all("0 steps are wrong" in r.output for r in results[: len(WORKERS)])
        return results[0].output


def share(line):
    return int(re.search(r"its share is now (\d+)%", line)[1])


def check_times(line):
    """1 GB took as long as what crosses the slow card: each of four workers' inputs of its share, 8 bits a byte."""
    number = r"([\d.]+)"
    words = rf"carries {number} of .* \(was {number}%\), 1 GB takes {number} s \(was {number}\)"
    carries, share_before, takes, took = map(float, re.search(words, line).groups())
    assert took * carries == pytest.approx(len(WORKERS) * 8 * share_before / 100, rel=0.1), line
    assert takes < took, line


def test_a_tallyd_that_slows_down_and_returns(tmp_path):
    slow = r"tallyd [01] \(c1\) carries 0\.0\d+ of 0\.05 Gbit/s since \d\d:\d\d:\d\d: its share is now \d+%[^\n]*"
    back = r"tallyd [01] \(c1\) (?:carries|seems to carry) 0\.0[45]\d* Gbit/s since \d\d:\d\d:\d\d: its share is now \d+%[^\n]*"
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        job = Running(net, tmp_path, {"TALLY_BANDWIDTH": "50M"})
        eventually(lambda: net.counters()["w1"][0] > 3 * 1600000)
        net.set_rate("c1", "10mbit")
        eventually(lambda: any(share(line) < 15 for line in job.said(slow)))
        check_times(job.said(slow)[0])
        seen = job.status()
        assert re.match(slow, seen["split_changed"]), seen["split_changed"]
        assert abs(time.time() - seen["split_changed_at"]) < PATIENCE_S
        last = seen["services"][-1 if seen["services"][-1]["host"] == "c1" else -2]
        assert last["declared_bits_per_s"] == 50e6 and last["bandwidth_bits_per_s"] < 15e6 and last["share"] < 0.15
        assert last["current_bits_per_s"] < 15e6
        net.set_rate("c1", "50mbit")
        eventually(lambda: any(share(line) > 22 for line in job.said(back)))
        job.finish()


# The coordinator's setting counts, and no other one: rank 0's unless there is a coordinator of its own.
@pytest.mark.parametrize("apart", [False, True], ids=["rank 0", "apart"])
def test_a_split_that_is_to_stay_stays(tmp_path, apart):
    what = r"tallyd [01] \(c1\), which carries 0\.0\d+ of 0\.05 Gbit/s since \d\d:\d\d:\d\d"
    line = rf"the job is held up by {what}; the split stays as it is"
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        stays = {"TALLY_REPLAN": "0"}
        where = {"apart": stays} if apart else {"first": stays}
        job = Running(net, tmp_path, {"TALLY_BANDWIDTH": "50M", "TALLY_REPLAN": "1"}, **where)
        eventually(lambda: net.counters()["w1"][0] > 3 * 1600000)
        net.set_rate("c1", "10mbit")
        eventually(lambda: re.search(line, (job.coordinator if apart else job.ranks[0]).output()))
        seen = job.status()
        assert re.fullmatch(what, seen["held_up_by"]) and seen["held_up_why"] == "card", seen
        last = next(x for x in seen["services"] if x["host"] == "c1")
        assert last["bandwidth_bits_per_s"] == 50e6 and last["current_bits_per_s"] < 15e6, last
        output = job.finish()
        said = output
        if apart:
            job.coordinator.kill()
            said = job.coordinator.output()
    assert "its share is now" not in said
    assert re.search(rf"\), held up by {what}", output), output


def test_a_start_of_which_the_figures_were_wrong_mends(tmp_path):
    """Of one card a third of what it carries has been measured: such figures are mended upwards."""
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        job = Running(net, tmp_path, {"TALLY_MEASURED": "w0=50M,w1=50M,w2=50M,w3=50M,c0=50M,c1=17M"})
        eventually(lambda: job.said(r"tallyd [01] \(c1\) seems to carry 0\.0[3-5]\d* Gbit/s since"))
        job.finish()


LARGE, SMALLEST = 124 << 10, 32 << 10  # bytes of a part at 2 Gbit/s, and at up to 512 Mbit/s


def test_parts_follow_the_network_too(tmp_path):
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        job = Running(net, tmp_path, {"TALLY_MEASURED": FAR_TOO_MUCH}, steps=["mixed"])
        eventually(lambda: net.counters()["w1"][0] > 1600000)
        seen = job.status()
        assert seen["epoch"] > 1 or seen["part_bytes"] == LARGE, seen
        eventually(lambda: job.status()["part_bytes"] == SMALLEST)
        job.finish()


def test_a_rank_that_takes_no_part_keeps_no_split(tmp_path):
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        job = Running(net, tmp_path, {"TALLY_BANDWIDTH": "50M"}, steps=["idle"])
        eventually(lambda: net.counters()["w1"][0] > 3 * 1600000)
        net.set_rate("c1", "10mbit")
        eventually(lambda: job.share("c1") < 0.15)
        job.finish()


# `make chaos SEEDS=N` has a twelfth of them here, for each takes as long as a dozen of chaos.py's.
CHAOS = int(os.environ.get("TALLY_CHAOS", "0"))
SEEDS = range(1, max(1, CHAOS // 12) + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_cards_change_at_random_while_tallyds_die(tmp_path, seed):
    """Whatever the cards do, and in whatever phase of a change a tallyd dies or leaves, or the coordinator is lost: each step's
    sums are right, and nobody else ends."""
    rnd = random.Random(f"rates {seed}")
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        job = Running(net, tmp_path, {"TALLY_MEASURED": measured("50M")}, apart={}, steps=["mixed"])
        eventually(lambda: net.counters()["w1"][0] > 3 * 1600000)
        for _ in range(10):
            for host in rnd.sample(WORKERS + SERVICES, rnd.randrange(1, 4)):
                net.set_rate(host, f"{rnd.choice([10, 20, 35, 50])}mbit")
            time.sleep(rnd.random() * 2)
            strikes = rnd.random()
            if strikes < 0.3:
                job.replace(rnd.randrange(len(SERVICES)), drains=strikes < 0.1)
            elif strikes < 0.4:
                job.lose_coordinator(rnd.random())
        for host in WORKERS + SERVICES:  # what may have changed too briefly for a new split stays changed now
            net.set_rate(host, "10mbit" if host == SERVICES[1] else "50mbit")
        eventually(lambda: job.share(SERVICES[1]) < 0.2)
        job.finish()
        job.coordinator.kill()


# --- somebody dies in a change that nobody's coming or going has caused ------------------------------------

# How often the start comes to the moment, and how often the change does.
START = len(WORKERS) + len(SERVICES)
MOMENTS = {"has sent PREPARE": (0, len(WORKERS)), "gets BEGUN": (START, len(WORKERS)), "sends COMMIT": (START, START),
           "has sent COMMIT": (START, START - 1)}


def slow_down(net, job):
    eventually(lambda: net.counters()["w1"][0] > 3 * 1600000)
    net.set_rate("c1", "10mbit")


def await_moment(process, ends=True):
    eventually(lambda: "fail point:" in process.output() and (process.poll() or not ends))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", MOMENTS if CHAOS else ["gets BEGUN", "has sent COMMIT"])
def test_the_coordinator_dies_while_the_split_changes(tmp_path, moment, seed):
    """The next one completes the change, or makes it by what it sees itself."""
    before, times = MOMENTS[moment]
    number = before + random.Random(f"{moment} {seed}").randrange(1, times + 1)
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        apart = {"FAULT_FAIL": f"coordinator {moment}:{number}:kill"}
        job = Running(net, tmp_path, {"TALLY_BANDWIDTH": "50M"}, apart=apart)
        slow_down(net, job)
        await_moment(job.coordinator)
        job.start_coordinator({})
        eventually(lambda: job.share("c1") < 0.15)
        job.finish()
        job.coordinator.kill()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "moment,host", [(m, h) for m in ("gets COMMIT", "has done COMMIT") for h in SERVICES if CHAOS or (m[0] == "g") == (h == "c1")]
)
def test_a_tallyd_dies_of_the_split_that_changes(tmp_path, moment, host, seed):
    failing = {host: {"FAULT_FAIL": f"tallyd {moment}:2:kill"}}
    dies = SERVICES.index(host)
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        job = Running(net, tmp_path, {"TALLY_BANDWIDTH": "50M"}, failing=failing)
        slow_down(net, job)
        await_moment(job.services[dies])
        job.services[dies] = job.start_service(host)
        eventually(lambda: job.said(rf"tallyd \d+ on {host} .* is in"))
        eventually(lambda: job.share("c1") < 0.15)
        job.finish()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", ["has sent PREPARE", "gets BEGUN"] if CHAOS else ["has sent PREPARE"])
def test_a_tallyd_dies_while_the_split_is_prepared(tmp_path, moment, seed):
    """The coordinator stands still in the change for as long as it takes.  The split and the size of parts change together."""
    rnd = random.Random(f"prepared {moment} {seed}")
    before, times = MOMENTS[moment]
    dies = rnd.randrange(len(SERVICES))
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        apart = {"FAULT_FAIL": f"coordinator {moment}:{before + rnd.randrange(1, times + 1)}:1000"}
        job = Running(net, tmp_path, {"TALLY_MEASURED": FAR_TOO_MUCH}, apart=apart, steps=["mixed"])
        slow_down(net, job)
        await_moment(job.coordinator, ends=False)
        job.replace(dies)
        eventually(lambda: job.status()["part_bytes"] == SMALLEST)
        eventually(lambda: job.share("c1") < 0.15)
        eventually(lambda: job.said("its share is"))  # rank 0 has it from the coordinator
        job.finish()
        job.coordinator.kill()


def test_rank_0_dies_while_the_split_changes(tmp_path):
    """The coordinator dies with it, and one tallyd has yet to hear of the change.  All end, and name rank 0."""
    failing = {"c1": {"FAULT_FAIL": "tallyd gets COMMIT:2:1000"}}
    with Lab(WORKERS + SERVICES, rate="50mbit", congestion="cubic") as net:
        job = Running(net, tmp_path, {"TALLY_BANDWIDTH": "50M"}, failing=failing)
        slow_down(net, job)
        await_moment(job.services[1], ends=False)
        job.ranks[0].kill()
        results = [p.wait(PATIENCE_S) for p in job.ranks[1:]]
        assert all(r.status == 1 and "rank 0 on w0, which holds the coordinator" in r.output for r in results), results
        assert all(p.wait(PATIENCE_S).status == 1 for p in job.services)

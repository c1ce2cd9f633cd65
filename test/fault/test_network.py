"""Faults of the network, in an emulated cluster (test/lab): hosts that are cut off from each other, cards that get slow."""

import pathlib
import re
import shutil
import sys
import time

import pytest

from fault import GONE_OVER, Job

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lab"))
from lab import Lab, why_not

RATE = "300mbit"

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
cuts = pytest.mark.skipif(not shutil.which("nft"), reason="no nft to cut hosts off with")


class InLab:
    """Rank i on host wi, tallyd i on host ci."""

    def __init__(self, lab, ranks, services):
        self.lab = lab
        self.hosts = {f"rank-{i}": f"w{i}" for i in range(ranks)} | {f"tallyd-{i}": f"c{i}" for i in range(services)}
        workers, spare = [f"w{i}" for i in range(ranks)], [f"c{i}" for i in range(services)]
        of_ranks, of_services = lab.environment(workers, spare, secret="only for this test")
        self.envs = {f"rank-{i}": env for i, env in enumerate(of_ranks)}
        self.envs |= {f"tallyd-{i}": of_services[host] for i, host in enumerate(spare)}

    def environment(self, name):
        return self.envs[name]

    def start(self, name, argv, env, output):
        """What Job wants of a Popen; the command writes to its log by itself."""
        words = ["sh", "-c", 'log=$1; shift; exec "$@" >>"$log" 2>&1', "sh", output.name, *argv]
        process = self.lab.start(self.hosts[name], words, env, inherit=False)
        process.send_signal = process.signal
        return process

    def run(self, host, *argv):
        done = self.lab.run(host, argv)
        assert done.status == 0, done.output

    def cut(self, host, *others):
        """No packet passes between a host and the others, either way; nobody is told."""
        rules = "add table inet cut; "
        for hook, word in ("input", "saddr"), ("output", "daddr"):
            rules += f"add chain inet cut {hook} {{ type filter hook {hook} priority 0; }}; "
            for other in others:
                rules += f"add rule inet cut {hook} ip {word} {self.lab.address(other)} drop; "
        self.run(host, "nft", rules)

    def heal(self, host):
        self.run(host, "nft", "delete table inet cut")

    def slow(self, host, rate):
        self.run(host, "tc", "qdisc", "change", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32768", "limit",
                 "2000000")


class LabJob(Job):
    def __init__(self, folder, ranks=3, services=1, **more):
        self.lab = Lab([f"w{i}" for i in range(ranks)] + [f"c{i}" for i in range(services)], rate=RATE)
        self.lab.up()
        super().__init__(folder, ranks, services, where=InLab(self.lab, ranks, services), **more)

    def close(self):
        self.lab.down()
        super().close()


def test_a_card_gets_slow_and_fast_again(tmp_path):
    with LabJob(tmp_path) as job:
        job.await_steps(3)
        for host in "w1", "c0":
            job.where.slow(host, "10mbit")
            job.await_steps(1)
            job.where.slow(host, RATE)
        job.await_steps(5)
        job.finish()


@cuts
@pytest.mark.parametrize(
    "host, others",
    [
        ("c0", ["w1"]),
        pytest.param("w1", ["w0", "w2", "c0"], marks=pytest.mark.long),
        pytest.param("w2", ["w1"], marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_hosts_that_are_cut_off_briefly_go_on(tmp_path, host, others):
    with LabJob(tmp_path) as job:
        job.await_steps(3)
        job.where.cut(host, *others)
        time.sleep(2)
        job.where.heal(host)
        job.await_steps(5)
        job.finish()


@cuts
def test_a_rank_that_is_cut_off_is_named_to_all(tmp_path):
    with LabJob(tmp_path, env={"TALLY_DEAD_TIMEOUT": "3"}) as job:
        job.await_steps(3)
        job.where.cut("w1", "w0", "w2", "c0")
        job.fail([0, 2], r"rank 1\b")
        assert job.await_ends() == [GONE_OVER] * 3, job.account()  # rank 1 too, by itself
        job.check()


@cuts
@pytest.mark.long
def test_two_ranks_that_cannot_reach_each_other_are_named(tmp_path):
    with LabJob(tmp_path, env={"TALLY_DEAD_TIMEOUT": "3"}) as job:
        job.await_steps(3)
        job.where.cut("w1", "w2")
        assert job.await_ends() == [GONE_OVER] * 3, job.account()
        job.check()
        for history in job.histories():
            assert re.search(r"rank 1\b.*rank 2\b|rank 2\b.*rank 1\b", history.failed[1]), job.account()


@cuts
@pytest.mark.parametrize(
    "others",
    [pytest.param(["w1"], id="from one", marks=pytest.mark.long), pytest.param(["w0", "w1", "w2"], id="from all")],
)
def test_a_service_that_is_cut_off_is_evicted(tmp_path, others):
    with LabJob(tmp_path) as job:
        job.await_steps(3)
        job.where.cut("c0", *others)
        job.await_steps(10)
        time.sleep(3)
        job.where.heal("c0")
        job.await_steps(10)
        if len(others) > 1:
            job.await_true(lambda: job.services[0].output().count("serving") == 2, "its return")
            said = job.services[0].output()
            assert re.search(r"cut off from the coordinator for \d.* and is out.*: joining again", said), said
            assert " has died" not in said.split("(", 1)[0], said
        job.finish()


@cuts
@pytest.mark.long
def test_a_service_that_sees_everybody_but_the_coordinator_serves_on_or_is_evicted(tmp_path):
    with LabJob(tmp_path, services=2) as job:
        job.await_steps(3)
        job.where.cut("c1", "w0")
        job.await_steps(20)
        job.finish()

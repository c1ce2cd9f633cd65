"""A job in which one rank cannot reach a service: a spare machine never stops a start, and a machine's own service that
cannot be reached ends it with both ends named."""

import re
import sys
import time

import lab as cluster
import pytest
from lab import Lab
from test_addresses import finish, refusals, start, sums
from test_lab import BUILD, PATIENCE_S, eventually, push_pull, tallyd

pytestmark = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))


@pytest.fixture(scope="module")
def net():
    with Lab(["w0", "w1", "w2", "c0", "c1", "c2"], rate="1gbit") as lab:
        yield lab


def reject(address, verdict):
    """nftables' rule for what this host sends there."""
    chain = "add table inet t; add chain inet t out { type filter hook output priority 0; }; add rule inet t out "
    return f"{chain} ip daddr {address} tcp dport 1-65535 {verdict}"


class Cut:
    """While it lasts, `host` cannot reach any of these others; `way`: what it sees then."""

    WAYS = {
        "No route to host": (["ip", "route", "add", "unreachable"], ["ip", "route", "del", "unreachable"]),
        "Invalid argument": (["ip", "route", "add", "blackhole"], ["ip", "route", "del", "blackhole"]),
        "Permission denied": (["ip", "route", "add", "prohibit"], ["ip", "route", "del", "prohibit"]),
        "Connection refused": "reject with tcp reset",
        "no answer within 4 s": "drop",
    }

    def __init__(self, lab, host, others, way):
        self.lab, self.host = lab, host
        self.others, self.way = [lab.address(o) for o in others], self.WAYS[way]

    def run(self, argv):
        done = self.lab.run(self.host, argv)
        assert done.status == 0, done.output

    def __enter__(self):
        for address in self.others:
            if isinstance(self.way, str):
                self.run(["nft", reject(address, self.way)])
            else:
                self.run([*self.way[0], address])

    def __exit__(self, *_):
        if isinstance(self.way, str):
            self.run(["nft", "flush ruleset"])
        else:
            for address in self.others:
                self.run([*self.way[1], address])


@pytest.mark.parametrize("way", list(Cut.WAYS))
def test_a_spare_machine_never_stops_a_start(net, way):
    with Cut(net, "w1", ["c0"], way):
        *ranks, daemon = start(net, ["w0", "w1"], ["c0"])
        results = finish(ranks)
        said = sums(results, 2, 2, 2)
        out = [line for r in results for line in r.output.splitlines() if "is out" in line]
        assert len(out) == 1, said
        assert re.search(
            r"tallyd 0 on c0 \(10\.77\.0\.4 port \d+\) is out: "
            rf"rank 1 on w1 cannot reach it from 10\.77\.0\.2: {way}; the job goes on without it",
            out[0],
        ), said
        assert " 0 tallyd;" in said, said
        told = rf"the job goes on without this tallyd: rank 1 on w1 cannot reach it from 10\.77\.0\.2: {way}"
        eventually(lambda: re.search(told, daemon.output()))
        daemon.kill()


def test_a_rank_that_reaches_no_spare_machine(net):
    """It is not taken for cut off, though they are most of the services."""
    with Cut(net, "w1", ["c0", "c1", "c2"], "Connection refused"):
        *ranks, a, b, c = start(net, ["w0", "w1"], ["c0", "c1", "c2"])
        said = sums(finish(ranks), 2, 2, 2)
        assert said.count("the job goes on without it") == 3, said
        for daemon in (a, b, c):
            daemon.kill()


@pytest.mark.parametrize("way", ["No route to host", "Invalid argument", "Connection refused"])
def test_a_machine_that_cannot_be_reached(net, way):
    """All ranks hear which end could not reach which."""
    with Cut(net, "w1", ["w2"], way):
        results = finish(start(net, ["w0", "w1", "w2"]))
    refusals(results, "rank 1", "rank 2 on w2 (10.77.0.3 port ", f" from 10.77.0.2: {way}")
    refusals([results[0], results[2]], "rank 1 on w1: cannot reach")


@pytest.mark.parametrize("verdict", ["drop", "reject with icmpx admin-prohibited"])
def test_a_firewall_before_the_coordinator(net, verdict):
    """Where another port of the machine answers it is a firewall; where none does it may be the address."""
    ranks, _ = net.environment(["w0", "w1"], [])
    shut = "add table inet t; add chain inet t in { type filter hook input priority 0; }; add rule inet t in "
    for ports, words in (
        ("29777", "answers, but not at this port: a firewall keeps it shut; open it, or set another TALLY_PORT"),
        ("1-65535", "nothing at that address answers: is it rank 0's, and is a firewall between?"),
    ):
        assert net.run("w0", ["nft", f"{shut} tcp dport {ports} {verdict}"]).status == 0
        try:
            done = finish([net.start("w1", push_pull(), {**ranks[1], "TALLY_JOIN_TIMEOUT": "2"}, inherit=False)])[0]
        finally:
            net.run("w0", ["nft", "flush ruleset"])
        assert done.status == 1 and "no coordinator at 10.77.0.1:29777" in done.output, done.output
        assert words in done.output, done.output


LOOP = """
import os, sys, time
import numpy, tally
tally.init()
found = 0
while not found:  # by any rank, so that all do the same number of steps
    x = numpy.full(1000, os.path.exists(sys.argv[1]), numpy.float32)
    found = tally.push_pull(x, name="x")[0]
    time.sleep(0.01)
tally.shutdown()
"""


def test_a_spare_machine_that_comes_later_is_tried_less_and_less_often(net, tmp_path):
    """One rank cannot reach it: the log says so once, until it can."""
    ranks, daemons = net.environment(["w0", "w1"], ["c0"])
    end = tmp_path / "end"
    for one in ranks:
        one |= {"TALLY_SERVERS": "0", "PYTHONPATH": str(BUILD / "python")}
    running = [
        net.start(h, [sys.executable, "-c", LOOP, str(end)], env, inherit=False) for h, env in zip(("w0", "w1"), ranks)
    ]
    eventually(lambda: "coordinator 10.77.0.1" in running[0].output())
    with Cut(net, "w1", ["c0"], "Connection refused"):
        daemon = net.start("c0", [tallyd(), "--once"], daemons["c0"], inherit=False)
        eventually(lambda: "is out: rank 1 on w1 cannot reach it" in running[0].output())
        time.sleep(7)  # the second invitation comes after 2 s at most, the third after 4 s more, the next after 8
    eventually(lambda: "serving job" in daemon.output())
    said = running[0].output()
    assert said.count("is out") == 1, said
    assert daemon.output().count("goes on without this tallyd") == 1, daemon.output()
    end.touch()
    results = [p.wait(PATIENCE_S) for p in [*running, daemon]]
    assert [r.status for r in results] == [0, 0, 0], "\n".join(r.output for r in results)

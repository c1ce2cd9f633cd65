"""`tally status`: of a job that gathers, runs and ends, over several machines; and of what is no job of ours."""

import json
import re
import signal
import sys

import lab as cluster
import pytest
from lab import Lab
from test_lab import BUILD, PATIENCE_S, built, eventually, push_pull, tallyd

pytestmark = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))

SECRET = {"TALLY_SECRET": "a secret of sixteen bytes and more"}

# Sums, then holds on until the file is there, so that somebody can look.
HOLDS = """
import pathlib, sys, time
import numpy, tally
tally.init()
tally.push_pull(numpy.ones(1 << 20, "float32"), name="x")
print("summed", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
tally.shutdown()
"""


@pytest.fixture(scope="module")
def net():
    with Lab(["w0", "w1", "c0"], rate="1gbit") as lab:
        yield lab


def status(net, host, *arguments, env=None, timeout_s=PATIENCE_S):
    command = [built("bin/tally", "src/cli/tally"), "status", *arguments]
    keep = net.environment([host])[0][0]
    keep = {k: v for k, v in keep.items() if not k.startswith(("TALLY_", "MASTER_"))}
    return net.run(host, command, {**keep, "XDG_CONFIG_HOME": "/nowhere", **(SECRET if env is None else env)}, inherit=False,
                   timeout_s=timeout_s)


def seen(net, host="c0", *arguments):
    """What --json says; {} while there is nothing to see."""
    done = status(net, host, "--json", *arguments)
    return json.loads(done.output) if done.status == 0 else {}


def until(net, condition, *arguments):
    """The first answer for which this holds."""
    found = {}

    def look():
        found.clear()
        found.update(seen(net, "c0", *arguments))
        return found and condition(found)

    eventually(look)
    return found


def launch(net, places, services, argv, **env):
    ranks, daemons = net.environment(list(dict.fromkeys(places)), services, {h: places.count(h) for h in places}, env)
    started = [net.start(h, [tallyd(), "--once"], daemons[h], inherit=False) for h in services]
    return ranks, [lambda i=i, h=h: net.start(h, argv, ranks[i], inherit=False) for i, h in enumerate(places)], started


def test_from_gathering_to_the_end(net, tmp_path):
    pytest.importorskip("numpy")
    go = tmp_path / "go"
    env = {**SECRET, "PYTHONPATH": str(BUILD / "python"), "TALLY_JOB": "seven", "TALLY_SERVERS": "2", "TALLY_COORD": "w0"}
    argv = [sys.executable, "-c", HOLDS, str(go)]
    _, ranks, daemons = launch(net, ["w0", "w0", "w1", "w1"], ["c0"], argv, **env)
    running = [ranks[0](), ranks[3]()]

    s = until(net, lambda s: len(s["missing_ranks"]) == 2 and s["tallyd"] == 1, "w0")
    assert (s["state"], s["job"], s["size"], s["missing_ranks"]) == ("gathering", "seven", 4, [1, 2])
    assert (s["tallyd"], s["tallyd_expected"]) == (1, 2)
    assert [r["state"] for r in s["ranks"]] == ["joined", "missing", "missing", "joined"]
    assert s["ranks"][3]["host"] == "w1" and s["ranks"][3]["address"] == "10.77.0.2"
    assert [(x["kind"], x["host"], x["answers"]) for x in s["services"]] == [("tallyd", "c0", True)]
    text = status(net, "c0", "w0").output
    assert "missing: rank 1-2\n" in text and "missing: 1 of 2 tallyd\n" in text and "gathering" in text
    start = s["start"]

    daemons.append(net.start("w1", [tallyd(), "--once"], net.environment(["w0"], ["w1"], env=env)[1]["w1"], inherit=False))
    running += [ranks[1](), ranks[2]()]
    eventually(lambda: all("summed" in p.output() for p in running))
    s = seen(net, "c0", "w0:29777")
    assert (s["state"], s["start"], s["machines"], s["missing_ranks"]) == ("running", start, 2, [])
    assert [(r["machine"], r["host"], r["state"]) for r in s["ranks"]] == [
        (0, "w0", "running"), (0, "w0", "running"), (1, "w1", "running"), (1, "w1", "running")
    ]
    assert [r["address"] for r in s["ranks"]] == ["10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.2"]
    assert len({r["process"] for r in s["ranks"]}) == 4
    assert [(x["kind"], x["host"]) for x in s["services"][:2]] == [("embedded", "w0"), ("embedded", "w1")]
    assert {(x["kind"], x["host"]) for x in s["services"][2:]} == {("tallyd", "c0"), ("tallyd", "w1")}
    assert all(x["answers"] for x in s["services"])
    # And the byte by which the ranks of a machine agree to push as one.
    assert sum(x["bytes_summed"] for x in s["services"]) == (4 << 20) + 1
    assert all(x["address"].startswith("10.77.0.") for x in s["services"])
    text = status(net, "w1", "w0").output
    assert "job 'seven', start " + start in text and "4 ranks on 2 machines, 4 services" in text and "missing" not in text

    # A tallyd at its own port says the same of itself.
    daemon = next(x for x in s["services"] if x["host"] == "c0")
    alone = seen(net, "w1", f"{daemon['address']}:{daemon['port']}")
    assert (alone["job"], alone["start"]) == ("seven", start) and alone["bytes_summed"] == daemon["bytes_summed"] > 0
    assert "a service of job 'seven'" in status(net, "w1", f"{daemon['address']}:{daemon['port']}").output

    # One that is stopped does not answer; the rest do.
    stopped = next(p for p in daemons if p.host == "c0")
    stopped.signal(signal.SIGSTOP)
    s = seen(net, "w1", "--timeout", "1", "w0")
    stopped.signal(signal.SIGCONT)
    assert {x["host"]: x["answers"] for x in s["services"] if x["kind"] == "tallyd"} == {"c0": False, "w1": True}

    go.touch()
    results = [p.wait(PATIENCE_S) for p in running + daemons]
    assert [r.status for r in results] == [0] * 6, results
    done = status(net, "c0", "10.77.0.1")
    assert done.status == 1 and "nobody listens at 10.77.0.1:29777" in done.output


SILENT = """
import socket, sys
listener = socket.create_server(("", 5000))
print("listening", flush=True)
while True:
    peer = listener.accept()[0]
    held = peer if sys.argv[1] == "silent" else peer.sendall(b"220 mail.example.org ESMTP" + b" " * 200)
"""


def test_who_is_turned_away_or_asks_somebody_else(net, tmp_path):
    _, ranks, _ = launch(net, ["w0", "w1"], [], push_pull(), **SECRET)
    rank = ranks[0]()
    until(net, lambda s: s["missing_ranks"] == [1], "w0")
    for env, why in (
        ({"TALLY_SECRET": "another secret of this size"}, "10.77.0.1:29777 refuses to answer: the job secret differs"),
        ({}, "needs a secret"),
        ({**SECRET, "TALLY_JOB": "other"}, "job 'default' here, job 'other' there"),
    ):
        done = status(net, "c0", "10.77.0.1", env=env)
        assert done.status == 1 and why in done.output and "10.77.0.2" not in done.output, done
    for kind, why in (("silent", "no answer"), ("talks", "is not Tally")):
        other = net.start("w1", [sys.executable, "-c", SILENT, kind])
        eventually(lambda other=other: "listening" in other.output())
        done = status(net, "c0", "--timeout", "1", "10.77.0.2:5000")
        assert done.status == 1 and why in done.output and "10.77.0.2:5000" in done.output, done
        other.kill()
    for arguments, why in (
        (["10.77.0.1:1"], "nobody listens at 10.77.0.1:1"),
        (["no-such-host"], "no-such-host"),
        (["w0:99999"], "no HOST or HOST:PORT"),
    ):
        done = status(net, "c0", *arguments)
        assert done.status == 1 and why in done.output, done
    # Asking has done the job no harm.
    done = [p.wait(PATIENCE_S) for p in (rank, ranks[1]())]
    assert [p.status for p in done] == [0, 0] and re.search("each of 1000000 sums is 3, 0 are wrong", done[0].output)


def test_command_line(net):
    for arguments, why in ((["a", "b"], "unexpected argument b"), ([], "HOST"), (["--timeout", "0", "w0"], "--timeout 0")):
        done = status(net, "c0", *arguments)
        assert done.status == 2 and why in done.output, done

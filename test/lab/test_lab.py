"""Jobs over several machines, on the emulated cluster: sums, bytes on every link, hosts as real ones are, and that
the cluster leaves nothing behind."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import lab as cluster
import pytest
from lab import Host, Lab, odd

pytestmark = pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not()))

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
PATIENCE_S = 60
COUNT = 1000000  # of examples/push_pull, float32


def built(*names):
    """A program: in the build folder of `make`, or in one of Meson's own."""
    for name in names:
        if (BUILD / name).exists():
            return str(BUILD / name)
    pytest.fail(f"there is no {names[0]} in {BUILD}")


def push_pull():
    return [built("meson/examples/push_pull", "examples/push_pull")]


def tallyd():
    return built("bin/tallyd", "src/tallyd/tallyd")


def job(lab, workers, services=(), **more):
    done = lab.job(push_pull(), workers, services, tallyd(), timeout_s=PATIENCE_S, **more)
    assert done.ok, str(done)
    return done


def eventually(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


# --- Tally over several machines ------------------------------------------------------------------------


def plan(n, k, total):
    """What a worker's and a CPU machine's link carry each way (Eq. 1 to 4 of BytePS)."""
    parts = n * n + k * n - 2 * k
    return total + (n - 2) * total * (n - k) / parts, n * total * 2 * (n - 1) / parts


def counted(lab, workers, services):
    """The traffic of one push_pull with parts so small that the split is as exact as the plan's."""
    done = job(lab, workers, services, env={"TALLY_PART_BYTES": "8192", "TALLY_WINDOW_PARTS": "64", "TALLY_MEASURE": "off"})
    said = done.ranks[0].output
    assert f"{len(workers)} ranks on {len(workers)} machines, {len(workers) + len(services)} services" in said
    assert "each of 1000000 sums is 10, 0 are wrong" in said
    return done.traffic


@pytest.fixture(scope="module")
def six():
    with Lab(["w0", odd("w1"), "w2", odd("w3"), "c0", odd("c1"), "c2", "c3"], rate="200mbit") as lab:
        yield lab


@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_sums_and_bytes_on_every_link(six, k):
    workers, services = ["w0", "w1", "w2", "w3"], [f"c{i}" for i in range(k)]
    total = 4 * COUNT
    on_worker, on_service = plan(4, k, total)
    traffic = counted(six, workers, services)
    for host in workers + services:
        due = on_worker if host in workers else on_service
        for way, measured in zip(("sent", "received"), traffic[host]):
            # Below: a part more or less than the share.  Above: headers of frames and packets, acknowledgements.
            assert 0.985 * due < measured < 1.08 * due, f"{host} {way} {measured} bytes, the plan says {due:.0f}"
    for host in set(six.hosts) - set(workers + services):
        assert sum(traffic[host]) < 0.01 * total, f"{host} has no part in the job"


def test_hosts_whose_own_name_is_wrong(six):
    """Rank 0, a rank and a service with docker0, with 127.0.1.1 for a name, and with a network that others lack."""
    assert "127.0.1.1" in six.run("w1", ["getent", "hosts", "w1"]).output
    assert "172.17.0.1" in six.run("w1", ["ip", "-o", "addr", "show", "docker0"]).output
    assert "10.78.0." in six.run("w1", ["ip", "-o", "addr", "show", "eth1"]).output
    done = job(six, ["w1", "w2", "w3"], ["c1", "c0"])
    assert "each of 1000000 sums is 6, 0 are wrong" in done.ranks[0].output


def test_ipv6_and_several_ranks_a_host(six):
    done = job(six, ["w0", "w1"], ["c0"], ranks_per_host=2, family=6)
    assert "each of 1000000 sums is 10, 0 are wrong" in done.ranks[0].output
    assert "[fd77::1]" in done.ranks[0].output


# --- the cluster itself ---------------------------------------------------------------------------------


def test_output_and_status_of_each_host(six):
    running = [six.start(h, ["sh", "-c", "hostname; echo oh >&2; exit 3"], apart=True) for h in ("w0", "c1")]
    for process, name in zip(running, ("w0", "c1")):
        result = process.wait(PATIENCE_S)
        assert (result.host, result.status, result.output, result.error) == (name, 3, name + "\n", "oh\n")
    sleeper = six.start("w0", ["sleep", "1000"])
    eventually(lambda: sleeper.pid is not None and cluster.processes()[sleeper.pid][1] == "sleep")
    sleeper.signal(signal.SIGKILL)
    assert sleeper.wait(PATIENCE_S).status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert six.run("w0", ["sleep", "1000"], timeout_s=0.2).status is None


def test_names_and_neighbours(six):
    addresses = six.run("w0", ["getent", "ahosts", "c3"]).output
    assert "10.77.0.8" in addresses and "fd77::8" in addresses


SINK = """
import socket
listener = socket.create_server(("", 5000))
print("listening", flush=True)
peer = listener.accept()[0]
while peer.recv(1 << 16):
    pass
"""


def test_rates_hold_both_ways():
    """The token bucket's own account is looked at, not a clock: what is beyond the rate has been made to wait."""
    with Lab(["a", Host("b", rate="20mbit")], rate="100mbit") as lab:
        for sender, getter in (("a", "b"), ("b", "a")):
            sink = lab.start(getter, [sys.executable, "-c", SINK])
            eventually(lambda sink=sink: "listening" in sink.output())
            send = (
                "import socket\n"
                f"s = socket.create_connection(('{lab.address(getter)}', 5000))\n"
                "s.sendall(bytes(3 << 20))\n"
            )
            assert lab.run(sender, [sys.executable, "-c", send]).status == 0
            assert sink.wait(PATIENCE_S).status == 0
        account = ["tc", "-s", "qdisc", "show", "dev"]
        sends = lab.run("b", [*account, "eth0"]).output
        switch = ["nsenter", f"--target={lab._keeper.pid}", "--net", "--"]
        gets = subprocess.run([*switch, *account, "p2.0"], capture_output=True, text=True, check=True).stdout
        for delayed in (sends, gets):
            assert "tbf" in delayed and "rate 20Mbit" in delayed
            assert int(re.search(r"overlimits (\d+)", delayed)[1]) > 10, delayed
        sent, received = lab.counters()["b"]
        assert sent > 3 << 20 and received > 3 << 20
        assert lab.rate("a") == 100e6 and lab.rate("b") == 20e6


def test_congestion_control_is_what_was_asked_for():
    """One that is not this machine's default, at both ends, also where the machine does not allow it to all."""
    settings = pathlib.Path("/proc/sys/net/ipv4")
    default = (settings / "tcp_congestion_control").read_text().strip()
    others = set((settings / "tcp_available_congestion_control").read_text().split()) - {default}
    name = "import socket; name = lambda s: s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode()\n"
    accept = "s = socket.create_server(('::', 5000), family=socket.AF_INET6, dualstack_ipv6=True)\nprint('listening', flush=True)\n"
    for other in others:
        with Lab(["a", "b"], congestion=other) as lab:
            getter = lab.start("b", [sys.executable, "-c", name + accept + "print(*(name(s.accept()[0]) for _ in range(2)))"])
            eventually(lambda: "listening" in getter.output())
            for family in (4, 6):
                connect = f"print(name(socket.create_connection(('{lab.address('b', family)}', 5000))))"
                assert lab.run("a", [sys.executable, "-c", name + connect]).output == other + "\n"
            assert getter.wait(PATIENCE_S).output == f"listening\n{other} {other}\n"


def alive(pid):
    try:
        return pathlib.Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def marked(mark):
    """Processes with the mark in their environment."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = pathlib.Path("/proc", pid, "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in text and alive(pid):
            found.add(int(pid))
    return found


OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from lab import Lab
with Lab(["w0", "w1"], rate="200mbit") as lab:
    # One that ignores polite signals, and one that has left its parent and its session.
    lab.start("w0", ["sh", "-c", "trap '' TERM HUP INT; setsid sleep 1000 & sleep 1000"])
    lab.start("w1", ["sleep", "1000"])
    print("up", lab._keeper.pid, *lab._pid.values(), flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_nothing_is_left_behind_after_kill(victim):
    mark = f"LAB_TEST_MARK={os.getpid()}-{victim}"
    name, value = mark.split("=")
    interfaces, mounts = os.listdir("/sys/class/net"), pathlib.Path("/proc/mounts").read_text()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(pathlib.Path(__file__).parent)],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        word, *pids = owner.stdout.readline().split()
        assert word == "up"
        eventually(lambda: len(marked(mark)) >= 5)  # the owner, and on the hosts the commands
        os.kill(owner.pid if victim == "owner" else int(pids[0]), signal.SIGKILL)
        eventually(lambda: not any(map(alive, pids)))
        if victim == "owner":
            owner.wait(PATIENCE_S)
        eventually(lambda: marked(mark) <= {owner.pid})
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert os.listdir("/sys/class/net") == interfaces
    assert pathlib.Path("/proc/mounts").read_text() == mounts
    assert not [f for f in (os.listdir("/run/netns") if os.path.isdir("/run/netns") else []) if f in ("w0", "w1")]


def test_what_cannot_be_built_says_why():
    with pytest.raises(ValueError, match="no rate"):
        Lab(["a"], rate="fast")
    with pytest.raises(ValueError, match="no rate"):
        Lab([Host("a", rate=0)], rate="1gbit")
    with pytest.raises(cluster.LabError, match="names"):
        Lab(["a", "a"])
    with pytest.raises(cluster.LabError, match="no host name"):
        Lab(["a/b"])
    with pytest.raises(cluster.LabError, match="cannot be built"):
        Lab(["a"], queue_bytes="many").up()
    with pytest.raises(cluster.LabError, match="no host x"):
        Lab(["a"]).start("x", ["true"])
    for arguments, word in (
        (["--ranks", "0"], "--ranks 0: at least one"),
        (["-n", "0", "-k", "1"], "-n 0 -k 1: there is one worker machine at least"),
        (["-n", "1", "-k", "-1"], "-n 1 -k -1"),
        (["-n", "1", "--rate-of", "w0"], "--rate-of w0: HOST=RATE"),
        (["-n", "1", "--congestion", "nope"], "congestion"),
    ):
        none = subprocess.run(
            [sys.executable, cluster.__file__, "run", *arguments, "--", "true"], capture_output=True, text=True, check=False
        )
        assert none.returncode == 2 and none.stderr.startswith("lab: ") and word in none.stderr, none.stderr


def test_without_root_it_says_so():
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-I", "-", "run", "true"],
        stdin=open(cluster.__file__, "rb"),
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert done.returncode == 2 and "needs root" in done.stderr


def test_command_line():
    done = subprocess.run(
        [sys.executable, cluster.__file__, "run", "-n", "2", "-k", "1", "--tallyd", tallyd(), "--rate", "200mbit"]
        + ["--odd", "w1", "--traffic", "--", *push_pull()],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 on w0: status 0" in done.stdout and "tallyd on c0: status 0" in done.stdout
    bad = subprocess.run(
        [sys.executable, cluster.__file__, "run", "-n", "2", "--", "sh", "-c", "exit $RANK"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert bad.returncode == 1 and "rank 1 on w1: status 1" in bad.stdout

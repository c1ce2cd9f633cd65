"""`tallyd --health`: what probes and Prometheus are told while it waits, serves and has served, and who cannot disturb
that: visitors that send nothing, too much, nonsense, or come in crowds."""

import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from programs import BUILD, environment, tally

PATIENCE_S = 60
TALLYD = str(BUILD / "bin" / "tallyd")

# Two rounds; rank 0 does the second at once, the others when the file says so.
RANK = """
import array, os, sys, time
import tally
tally.init()
for round in range(2):
    while tally.rank() > 0 and os.path.getsize(sys.argv[1]) < round:
        time.sleep(0.02)
    x = array.array("f", [1.0] * 100000)
    tally.push_pull(x, name="x")
    print("summed", flush=True)
tally.shutdown()
"""


# Rank 1 computes for three times as long, until rank 0 finds the file filled.
UNEVEN = """
import array, os, sys, time
import tally
tally.init()
stop = 0
while not stop:
    time.sleep(0.06 if tally.rank() == 1 else 0.02)
    tally.push_pull(array.array("f", [1.0] * 100000), name="x")
    stop = tally.push_pull(array.array("f", [float(os.path.getsize(sys.argv[1]))]), name="stop")[0]
tally.shutdown()
"""


# Rank 1 adds nothing to a shared tensor until the file is filled, and rank 0 may be one addition ahead.
BEHIND = """
import ctypes, os, sys, time
import tally
from tally import _lib, _operations
from tally._calls import Call
tally.init()
values, one, call = ctypes.c_double(0), ctypes.c_double(1), Call("w")
_operations.shared_create(call, ctypes.addressof(values), 1, _lib.DTYPE_CODES["float64"], 1, (1,)).wait(60)
while tally.rank() == 1 and os.path.getsize(sys.argv[1]) == 0:
    time.sleep(0.02)
for step in range(3):
    _operations.shared_add(call, ctypes.addressof(one)).wait(60)
tally.shutdown()
"""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def eventually(condition):
    end = time.monotonic() + PATIENCE_S
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def exchange(port, request):
    """All that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as s:
        s.sendall(request)
        parts = []
        while True:
            try:
                part = s.recv(65536)
            except ConnectionResetError:
                break
            if not part:
                break
            parts.append(part)
    return b"".join(parts).decode()


def get(port, path):
    """Status and body."""
    answer = exchange(port, f"GET {path} HTTP/1.1\r\nHost: here\r\nUser-Agent: test\r\n\r\n".encode())
    head, _, body = answer.partition("\r\n\r\n")
    version, status = head.split()[:2]
    assert version == "HTTP/1.0"
    assert int(re.search(r"(?m)^Content-Length: (\d+)\r?$", head)[1]) == len(body)
    return int(status), body


def samples(port):
    """The metrics: {name: value}, each of which must have its HELP and TYPE before it."""
    status, body = get(port, "/metrics")
    assert status == 200 and body.endswith("\n")
    found, described = {}, {}
    for line in body.splitlines():
        if line.startswith("# "):
            _, kind, name, rest = line.split(" ", 3)
            described.setdefault(name, {})[kind] = rest
            continue
        name, labels, value = re.fullmatch(r"(tally_[a-z_]+)(\{[^{}]*\})? (\S+)", line).groups()
        assert described[name]["HELP"] and described[name]["TYPE"] in ("gauge", "counter"), name
        assert name.endswith("_total") == (described[name]["TYPE"] == "counter"), name
        found[name + (labels or "")] = float(value)
    return found


class Daemon:
    wrap = ()  # a command that runs tallyd

    def __init__(self, *arguments, **env):
        self.coordinator, self.port = free_ports(2)
        self.env = {"TALLY_COORD": f"127.0.0.1:{self.coordinator}", "TALLY_SERVERS": "1", **env}
        self.process = subprocess.Popen([*self.wrap, TALLYD, "--health", str(self.port), *arguments],
                                        env=environment(self.env),
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True)
        eventually(self.listens)

    def listens(self):
        assert self.process.poll() is None, self.process.stderr.read()
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


def ranks(daemon, go, count=2, program=RANK):
    env = {**daemon.env, "WORLD_SIZE": str(count), "TALLY_JOB": 'the "job"', "PYTHONPATH": str(BUILD / "python")}
    return [
        subprocess.Popen([sys.executable, "-c", program, str(go)],
                         env=environment({**env, "RANK": str(i), "TALLY_LOG": "warning", "TALLY_HOST_ID": f"host{i}"}), stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(count)
    ]


def test_from_waiting_to_the_next_job(tmp_path):
    go = tmp_path / "go"
    with Daemon() as daemon:
        assert get(daemon.port, "/live")[0] == 200
        assert get(daemon.port, "/ready") == (503, "waiting for a job\n")
        before = samples(daemon.port)
        assert before["tally_serving"] == before["tally_jobs_total"] == 0
        for job in (1, 2):
            go.write_bytes(b"")
            running = ranks(daemon, go)
            for process in running:
                said = process.stdout.readline()
                assert said == "summed\n", said + process.communicate()[0]
            assert eventually(lambda: get(daemon.port, "/ready") == (200, "serving job 'the \"job\"'\n"))
            during = eventually(lambda: (m := samples(daemon.port))["tally_jobs_total"] == job and m)
            assert during['tally_info{version="%s",job="the \\"job\\""}' % version()] == 1
            assert (during["tally_serving"], during["tally_ranks"], during["tally_services"]) == (1, 2, 3)
            assert during["tally_share"] == 0.5 and before["tally_share"] == 0  # Eq. 1, 2 for n = 2, k = 1
            card = {name: during[f"tally_card_{name}_bits_per_second"] for name in ("current", "planned", "declared", "measured")}
            assert card["current"] == card["planned"] == card["declared"] and card["measured"] == 0, card
            go.write_bytes(b"x")
            for process in running:
                process.communicate(timeout=PATIENCE_S)
                assert process.returncode == 0
            after = eventually(lambda: (m := samples(daemon.port))["tally_serving"] == 0 and m)
            assert get(daemon.port, "/ready")[0] == 503
            for name in before:
                assert not name.endswith("_total") or after[name] >= during.get(name, 0) >= before[name], name
            assert after["tally_summed_bytes_total"] > before["tally_summed_bytes_total"]
            assert after["tally_cpu_seconds_total"] > before["tally_cpu_seconds_total"]
            assert after["tally_receive_bytes_total"] > 2 * 1e5 * job
            before = after


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
@pytest.mark.parametrize(
    "group, limits",
    [
        ("0::/slice/job", {"slice/memory.max": 800 << 20, "slice/job/memory.max": 100 << 20}),
        ("0::/slice/job", {"slice/memory.max": 100 << 20, "slice/job/memory.max": "max"}),
        ("4:memory:/docker/1", {"memory/docker/1/memory.limit_in_bytes": 100 << 20}),
    ],
    ids=["v2", "v2 above", "v1"],
)
def test_half_of_its_groups_memory(tmp_path, group, limits):
    """A service takes half of what the least of its process's cgroup and those above allows, not of the root's."""
    go, groups, line = tmp_path / "go", tmp_path / "groups", tmp_path / "cgroup"
    go.write_bytes(b"x")
    line.write_text(group + "\n", encoding="ascii")
    for name, limit in limits.items():
        folder = groups / os.path.dirname(name)
        folder.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{limit}\n", encoding="ascii")

    class Confined(Daemon):
        wrap = ("unshare", "--mount", "sh", "-ec",
                'mount --bind "$0" /proc/$$/cgroup; mount --bind "$1" /sys/fs/cgroup; shift; exec "$@"', line, groups)

    if subprocess.run([*Confined.wrap, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no mounts can be made here")
    with Confined() as daemon:
        running = ranks(daemon, go)
        limit = eventually(lambda: samples(daemon.port).get("tally_memory_limit_bytes"))
        for process in running:
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        assert limit == 50 << 20


def test_a_coordinator_apart():
    """It lives for as long as its main thread turns, not from its start alone."""
    with Daemon("--coordinator", TALLY_JOB="j") as daemon:
        assert eventually(lambda: get(daemon.port, "/ready") == (200, "coordinating job 'j'\n"))
        time.sleep(3)
        assert any(float(get(daemon.port, "/live")[1].split()[-3]) < 2 for _ in range(20))
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(timeout=PATIENCE_S) == 0


def test_a_coordinator_apart_tells_of_its_job(tmp_path):
    go = tmp_path / "go"
    go.write_bytes(b"")
    with Daemon("--coordinator", TALLY_JOB='the "job"') as daemon:
        assert samples(daemon.port)["tally_ranks"] == 0
        running = ranks(daemon, go, program=UNEVEN)
        try:
            with Daemon(**daemon.env):
                found = eventually(lambda: (m := samples(daemon.port))["tally_ranks"] and m)
                assert (found["tally_ranks"], found["tally_machines"], found["tally_services"]) == (2, 2, 3)
                assert found["tally_epoch"] >= 1 and found["tally_serving"] == 0
                assert found['tally_info{version="%s",job="the \\"job\\""}' % version()] == 1
                assert found["tally_split_changed_timestamp_seconds"] == 0
                held_up = re.compile(r'tally_held_up{by="rank 1 .*",why="computing"}')
                eventually(lambda: [value for name, value in samples(daemon.port).items() if held_up.match(name)] == [1])
            eventually(lambda: samples(daemon.port)["tally_split_changed_timestamp_seconds"])  # the tallyd is gone
            go.write_bytes(b"x")
            for process in running:
                process.communicate(timeout=PATIENCE_S)
                assert process.returncode == 0
        finally:
            for process in running:
                process.kill()
                process.communicate()
        eventually(lambda: samples(daemon.port)["tally_ranks"] == 0)
        assert samples(daemon.port)['tally_held_up{by="",why=""}'] == 0


def test_who_is_late_and_why(tmp_path):
    go = tmp_path / "go"
    go.write_bytes(b"")
    with Daemon() as daemon:
        running = ranks(daemon, go, 3)

        def status(*arguments):
            return tally("status", *arguments, env={**daemon.env, "TALLY_JOB": 'the "job"'}).stdout

        def waiting():
            answer = status("--json", daemon.env["TALLY_COORD"])
            found = json.loads(answer) if answer else {"services": []}
            return [s for s in found["services"] if s.get("waiting_s", 0) >= 1] and found

        found = eventually(waiting)
        assert (found["epoch"], found["part_bytes"]) >= (1, 4096)
        late = [s for s in found["services"] if s["waiting_s"] >= 1]
        assert {s["waits_for"] for s in late} == {"ranks 1-2, which did not send any of it yet"}
        assert all(s["bytes_received"] > 0 and s["bytes_sent"] > 0 and s["cpu_s"] > 0 for s in found["services"])
        text = status(daemon.env["TALLY_COORD"])
        assert re.search(r"late: an operation at [a-z]+ \d has waited \d+\.\d s for ranks 1-2, which did not send any of it yet", text), text
        assert "split no. 1, parts of %d KB\n" % (found["part_bytes"] >> 10) in text and "bandwidth" in text
        if any(s["kind"] == "tallyd" for s in late):
            eventually(lambda: samples(daemon.port)["tally_waiting_seconds"] >= 1)
        go.write_bytes(b"x")
        for process in running:
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0


def test_who_is_behind_at_a_shared_tensor(tmp_path):
    go = tmp_path / "go"
    go.write_bytes(b"")
    with Daemon() as daemon:
        running = ranks(daemon, go, program=BEHIND)

        def status(*arguments):
            return tally("status", *arguments, env={**daemon.env, "TALLY_JOB": 'the "job"'}).stdout

        def waiting():
            answer = status("--json", daemon.env["TALLY_COORD"])
            return answer and [s for s in json.loads(answer)["services"] if s.get("waiting_s", 0) >= 1]

        late = eventually(waiting)
        why = "rank 1 (1 step too far behind), which did not add enough to a shared tensor yet"
        assert [s["waits_for"] for s in late] == [why]
        assert f"s for {why}\n" in status(daemon.env["TALLY_COORD"])
        if late[0]["kind"] == "tallyd":
            eventually(lambda: samples(daemon.port)["tally_waiting_seconds"] >= 1)
        go.write_bytes(b"x")
        for process in running:
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0


def test_who_holds_the_job_up_is_said_alike_everywhere(tmp_path):
    """The log, `tally status` and the metrics have one source."""
    go = tmp_path / "go"
    go.write_bytes(b"")
    with Daemon() as daemon:
        running = ranks(daemon, go, program=UNEVEN)

        def status(*arguments):
            return tally("status", *arguments, env={**daemon.env, "TALLY_JOB": 'the "job"'}).stdout

        def judged():
            answer = status("--json", daemon.env["TALLY_COORD"])
            found = json.loads(answer) if answer else {}
            return found.get("held_up_by") and found

        found = eventually(judged)
        assert re.match(r"rank 1 \(\S+\), which computes longer than the others since ", found["held_up_by"])
        assert found["held_up_why"] == "computing"
        assert f"held up by {found['held_up_by']}\n" in status(daemon.env["TALLY_COORD"])
        who = found["held_up_by"].split(",")[0]
        eventually(lambda: samples(daemon.port).get(f'tally_held_up{{by="{who}",why="computing"}}') == 1)
        go.write_bytes(b"x")
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0]
        assert f"the job is held up by {found['held_up_by']}\n" in said[0] and "held up" not in said[1], said
        assert samples(daemon.port)['tally_held_up{by="",why=""}'] == 0


def test_what_has_changed_the_split(tmp_path):
    """Another tallyd comes: its share, and when that was, in words and for programs."""
    go = tmp_path / "go"
    go.write_bytes(b"")
    with Daemon() as daemon:
        running = ranks(daemon, go, program=UNEVEN)
        secret = {**daemon.env, "TALLY_JOB": 'the "job"'}

        def status(*arguments):
            return tally("status", *arguments, daemon.env["TALLY_COORD"], env=secret).stdout

        assert eventually(lambda: samples(daemon.port)["tally_serving"])
        before = json.loads(status("--json"))
        assert before["split_changed"] == "" and "split_changed_at" not in before
        assert samples(daemon.port)["tally_split_changed_timestamp_seconds"] == 0
        with Daemon(**daemon.env):
            changed = eventually(lambda: samples(daemon.port)["tally_split_changed_timestamp_seconds"])
            found = json.loads(status("--json"))
            assert re.fullmatch(r"tallyd 1 \(\S+\) has joined: its share is [1-9]\d*%", found["split_changed"])
            assert found["split_changed_at"] == changed and 0 <= time.time() - changed < PATIENCE_S
            at = time.strftime("%H:%M:%S", time.localtime(changed))
            assert f"the split last changed at {at}: {found['split_changed']}\n" in status()
        go.write_bytes(b"x")
        for process in running:
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0


def version():
    return subprocess.run([TALLYD, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


@pytest.mark.parametrize(
    "request_, status",
    [
        (b"GET /live HTTP/1.0\n\n", 200),
        (b"GET /live?verbose HTTP/1.1\r\n\r\n", 200),
        (b"HEAD /live HTTP/1.1\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /live/../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /" + b"a" * 500 + b" HTTP/1.1\r\n\r\n", 404),
        (b"POST /live HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"GET /live\r\n\r\n", 400),
        (b"get /live HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nCookie: " + b"a" * 4000 + b"\r\n\r\n", 431),
    ],
)
def test_requests(daemon, request_, status):
    answer = exchange(daemon.port, request_)
    assert answer.startswith(f"HTTP/1.0 {status} "), answer
    assert not request_.startswith(b"HEAD") or answer.endswith("\r\n\r\n")


@pytest.fixture(scope="module")
def daemon():
    with Daemon() as started:
        yield started


def test_the_slow_and_the_many_hold_up_nobody(daemon):
    idle = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(100)]
    for s in idle[::2]:
        s.sendall(b"GET /li")
    assert get(daemon.port, "/live")[0] == 200
    crowd = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(200)]
    assert get(daemon.port, "/live")[0] == 200
    # Their places are taken from them, at the latest when their time is up.
    for s in idle + crowd:
        readable, _, _ = select.select([s], [], [], PATIENCE_S)
        assert readable
        s.close()
    assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 40
    assert get(daemon.port, "/metrics")[0] == 200


def test_one_that_never_ceases_to_send_holds_up_nobody(daemon):
    """Its answer is due, and it sends faster than the daemon reads."""
    done = threading.Event()

    def flood():
        while not done.is_set():
            with socket.create_connection(("127.0.0.1", daemon.port), timeout=PATIENCE_S) as s:
                try:
                    s.sendall(b"GET /live HTTP/1.0\r\n\r\n")
                    while not done.is_set():
                        s.sendall(b"x" * (1 << 20))
                except OSError:
                    pass  # it has been cut off

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            assert get(daemon.port, "/live")[0] == 200
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_without_descriptors_it_sleeps():
    """It does not try to accept a visitor over and over, and serves it once it can."""

    def sleeps():
        """How often its thread has waited for something."""
        for task in os.scandir(f"/proc/{daemon.process.pid}/task"):
            with open(f"{task.path}/status", encoding="ascii") as status:
                text = status.read()
            if text.startswith("Name:\ttally-health\n"):
                return int(re.search(r"(?m)^voluntary_ctxt_switches:\s*(\d+)$", text)[1])
        raise AssertionError("no thread")

    with Daemon("--coordinator", TALLY_JOB="j") as daemon:
        eventually(lambda: get(daemon.port, "/ready")[0] == 200)
        used = {int(fd) for fd in os.listdir(f"/proc/{daemon.process.pid}/fd")}
        soft, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (min(set(range(soft)) - used), hard))
        silent = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(3)]  # what was free a moment later
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=PATIENCE_S) as s:
            s.sendall(b"GET /live HTTP/1.0\r\n\r\n")
            start = sleeps()
            eventually(lambda: sleeps() > start + 5)
            assert select.select([s], [], [], 0)[0] == []
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
            assert s.recv(100).startswith(b"HTTP/1.0 200 ")
        for other in silent:
            other.close()


def test_loopback_unless_told(daemon):
    listening = [line.split()[1] for line in open("/proc/net/tcp", encoding="ascii") if line.split()[3] == "0A"]
    assert f"0100007F:{daemon.port:04X}" in listening and f"00000000:{daemon.port:04X}" not in listening
    with Daemon() as other:
        port = free_ports(1)[0]
        more = subprocess.Popen([TALLYD, "--health", f"0.0.0.0:{port}"], env=environment(other.env), stderr=subprocess.DEVNULL)
        try:
            eventually(lambda: f"00000000:{port:04X}" in open("/proc/net/tcp", encoding="ascii").read())
        finally:
            more.kill()
            more.wait()


def test_a_stopped_daemon_is_not_alive(daemon):
    tasks = f"/proc/{daemon.process.pid}/task"
    daemon.process.send_signal(signal.SIGSTOP)
    eventually(lambda: all(open(f"{tasks}/{t}/stat", encoding="ascii").read().rpartition(")")[2].split()[0] == "T"
                           for t in os.listdir(tasks)))
    try:
        with socket.create_connection(("127.0.0.1", daemon.port)) as s:
            s.sendall(b"GET /live HTTP/1.0\r\n\r\n")
            assert select.select([s], [], [], 1)[0] == []
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("where", ["", "0", "65536", "x", "-1", "127.0.0.1", "host:80", "127.0.0.1:", "[::1]:x", "1" * 300])
def test_addresses_that_are_none(where):
    done = subprocess.run([TALLYD, "--health", where], env=environment({"TALLY_COORD": "127.0.0.1"}), capture_output=True,
                          text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and "--health" in done.stderr, done


def test_a_port_that_is_taken(daemon):
    done = subprocess.run([TALLYD, "--health", str(daemon.port)], env=environment({"TALLY_COORD": "127.0.0.1"}),
                          capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and "in use" in done.stderr

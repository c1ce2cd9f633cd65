"""The job secret is nowhere but where it was put: not in what a core dump would hold of a tallyd or a rank, not in the
environment or command line of a tallyd, not in what anybody logs."""

import hashlib
import subprocess
import sys

import pytest
from programs import BUILD, TALLY, environment
from test_health import PATIENCE_S, TALLYD, eventually, free_ports

SECRET = "5ba1c0ffee-the-secret-of-this-test-feedface"
KEY = hashlib.blake2b(SECRET.encode(), key=b"tally job secret 1", digest_size=32).digest()

RANK = """
import array, sys, tally
tally.init()
tally.push_pull(array.array("f", [1.0] * 100000), name="x")
print("summed", flush=True)
sys.stdin.read()
tally.shutdown()
"""


def dumped(pid):
    """The memory that a core dump would hold: what may be read and is not left out (VmFlags dd)."""
    with open(f"/proc/{pid}/smaps", encoding="ascii", errors="replace") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
        start = end = None
        for line in maps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(x, 16) for x in first.split("-"))
                readable = line.split()[1][0] == "r"
            elif first == "VmFlags:" and readable and "dd" not in line.split():
                try:
                    memory.seek(start)
                    yield memory.read(end - start)
                except (OSError, OverflowError, ValueError):
                    pass


def holds(pid, what):
    return any(what in part for part in dumped(pid))


@pytest.fixture(scope="module")
def may_look():
    child = subprocess.Popen(["sleep", "60"], env={"MARK": SECRET})
    try:
        eventually(lambda: b"sleep" in open(f"/proc/{child.pid}/cmdline", "rb").read())
        if not holds(child.pid, SECRET.encode()):
            pytest.skip("the memory of other processes cannot be read here")
    except PermissionError:
        pytest.skip("the memory of other processes cannot be read here")
    finally:
        child.kill()
        child.wait()


@pytest.fixture(scope="module", params=["file", "variable"])
def job(request, tmp_path_factory):
    """A tallyd and two ranks in the middle of their job: (processes, log files, how the secret came)."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "secret").write_text(SECRET + "\n")
    (folder / "secret").chmod(0o600)
    env = {"TALLY_COORD": f"127.0.0.1:{free_ports(1)[0]}", "TALLY_SERVERS": "1", "TALLY_LOG": "debug",
           "PYTHONPATH": str(BUILD / "python"), "WORLD_SIZE": "2"}
    env |= {"TALLY_SECRET_FILE": str(folder / "secret")} if request.param == "file" else {"TALLY_SECRET": SECRET}
    logs = [open(folder / f"log{i}", "wb+") for i in range(3)]
    commands = [([TALLYD, "--once"], {})] + [([sys.executable, "-c", RANK], {"RANK": str(i)}) for i in range(2)]
    processes = [
        subprocess.Popen(argv, env=environment({**env, **more}), stdin=subprocess.PIPE, stdout=log, stderr=log)
        for (argv, more), log in zip(commands, logs)
    ]
    try:
        for log in logs[1:]:
            eventually(lambda log=log: b"summed" in open(log.name, "rb").read())
        yield processes, logs, request.param
        for process in processes:
            process.stdin.close()
        for process in processes:
            process.wait(timeout=PATIENCE_S)
            assert process.returncode == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_core_dumps(job, may_look):
    processes, _, how = job
    for process in processes if how == "file" else processes[:1]: # a rank's environment is not ours to change
        assert not holds(process.pid, SECRET.encode()), process.args
    for process in processes:
        assert not holds(process.pid, KEY), process.args


def test_title_and_environment(job):
    (daemon, *ranks), _, how = job
    for process in (daemon, *ranks):
        assert SECRET.encode() not in open(f"/proc/{process.pid}/cmdline", "rb").read()
    assert SECRET.encode() not in open(f"/proc/{daemon.pid}/environ", "rb").read()


def test_logs(job):
    for log in job[1]:
        text = open(log.name, "rb").read()
        assert SECRET.encode() not in text and KEY not in text and KEY.hex().encode() not in text.lower()


@pytest.mark.parametrize(
    "text, why",
    [("short", "at least 16"), (SECRET + "\0" + SECRET, "a zero byte"), ("x" * 5000, "more than")],
    ids=["short", "zero", "long"],
)
def test_files_that_are_refused(tmp_path, text, why):
    (tmp_path / "secret").write_text(text)
    (tmp_path / "secret").chmod(0o600)
    done = subprocess.run([TALLY, "status", "127.0.0.1:1"], env=environment({"TALLY_SECRET_FILE": str(tmp_path / "secret")}),
                          capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and why in done.stderr and text[:20] not in done.stderr.replace(str(tmp_path), "")

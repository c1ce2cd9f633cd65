"""`tally run` with plain shell commands as ranks, and a shell script in tallyd's place."""

import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
from programs import TALLY, environment, tally

PATIENCE_S = 60


def run(*arguments, script, **more):
    return tally("run", *arguments, "--", "sh", "-c", script, **more)


def alive(mark):
    """Processes that carry the mark on their command line or in their environment, zombies aside."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                text = f.read()
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
                state = f.read().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in text and state != "Z":
            found.append(int(pid))
    return found


def eventually(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Job:
    """A `tally run` in the background whose processes can be found by a mark in their environment."""

    count = 0

    def __init__(self, *arguments, script, **more):
        Job.count += 1
        self.mark = f"RUN_TEST_MARK={os.getpid()}-{Job.count}-end"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [TALLY, "run", *arguments, "--", "sh", "-c", script],
            env=environment({name: value}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **more,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pid in alive(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.stdout.close()
        self.process.wait()

    def wait_for(self, count, word="ready"):
        """Lines with the word, `count` of them."""
        for line in self.process.stdout:
            count -= word in line
            if count == 0:
                return
        raise AssertionError("the job ended early")

    def end(self):
        """The rest of its output, and its exit status.  Then none of its processes is left."""
        rest, _ = self.process.communicate(timeout=PATIENCE_S)
        assert alive(self.mark) == []
        return rest, self.process.returncode


@pytest.fixture
def fake_tallyd(tmp_path):
    """A tallyd that runs a shell script, with the arguments of the real one."""

    def make(script):
        path = tmp_path / "fake-tallyd"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return make


# --- variables ---------------------------------------------------------------------------------------

VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS "
    "TALLY_COORD TALLY_SERVERS TALLY_SECRET TALLY_HOST_ID"
).split()
PRINT = "echo " + " ".join(f"{name}=${{{name}-unset}}" for name in VARIABLES)


def by_rank(output):
    """{0: {"RANK": "0", …}, …} of what PRINT has printed."""
    found = {}
    for line in output.splitlines():
        prefix, rank, rest = re.match(r"\[(rank|tallyd) (\d+)\] (.*)", line).groups()
        found[int(rank) if prefix == "rank" else f"tallyd {rank}"] = dict(w.split("=", 1) for w in rest.split())
    return found


def test_variables_of_one_machine():
    done = run("-n", 3, script=PRINT)
    ranks = by_rank(done.stdout)
    assert done.returncode == 0 and done.stderr == "" and sorted(ranks) == [0, 1, 2]
    for rank, v in ranks.items():
        assert v["RANK"] == v["LOCAL_RANK"] == str(rank)
        assert v["WORLD_SIZE"] == v["LOCAL_WORLD_SIZE"] == "3"
        assert v["MASTER_ADDR"] == "127.0.0.1"
        assert v["TALLY_SERVERS"] == "0"
        assert v["TALLY_HOST_ID"] == "unset"
        assert v["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        host, port = v["TALLY_COORD"].split(":")
        assert host == "127.0.0.1" and port != v["MASTER_PORT"]
        assert re.fullmatch("[0-9a-f]{64}", v["TALLY_SECRET"])
    for shared in ("TALLY_COORD", "TALLY_SECRET", "MASTER_PORT"):
        assert len({v[shared] for v in ranks.values()}) == 1


def cpu_group():
    """A control group of version 1 or 2 in which no more than one core may be used; None: cannot be made here."""
    for root, name, one_core in (("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "100000"),
                                 ("/sys/fs/cgroup", "cpu.max", "100000 100000")):
        group = f"{root}/tally-test-{os.getpid()}"
        try:
            os.mkdir(group)
        except OSError:
            continue
        try:
            with open(f"{group}/{name}", "r+", encoding="ascii") as quota:
                quota.write(one_core)
            return group
        except OSError:
            os.rmdir(group)
    return None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: a quota changes nothing")
def test_threads_within_a_quota():
    group = cpu_group()
    if group is None:
        pytest.skip("no control group with a quota of CPU time can be made here")
    try:
        enter = ["sh", "-c", f'echo 0 > {group}/cgroup.procs; exec "$@"', "sh"]
        done = subprocess.run([*enter, TALLY, "run", "-n", "1", "--", "sh", "-c", PRINT], env=environment(),
                              capture_output=True, text=True, timeout=60)
        assert by_rank(done.stdout)[0]["OMP_NUM_THREADS"] == "1", done
    finally:
        os.rmdir(group)


def test_ports_are_free_and_none_that_connections_get():
    v = by_rank(run("-n", 1, script=PRINT).stdout)[0]
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as f:
        low, high = map(int, f.read().split())
    for port in (int(v["MASTER_PORT"]), int(v["TALLY_COORD"].split(":")[1])):
        assert not low <= port <= high
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))


def test_secrets_differ_between_jobs():
    secrets = {by_rank(run("-n", 1, script=PRINT).stdout)[0]["TALLY_SECRET"] for _ in range(2)}
    assert len(secrets) == 2


def test_what_is_set_stays(tmp_path):
    env = {"TALLY_SECRET": "x" * 20, "OMP_NUM_THREADS": "7", "TALLY_HOST_ID": "me", "TORCHELASTIC_RUN_ID": "other"}
    v = by_rank(run("-n", 2, "--port", 12345, script=PRINT, env=env).stdout)[1]
    assert v["TALLY_SECRET"] == "x" * 20
    assert v["OMP_NUM_THREADS"] == "7"
    assert v["TALLY_HOST_ID"] == "me"
    assert v["TALLY_COORD"] == "127.0.0.1:12345"
    assert by_rank(run("-n", 1, script=PRINT, env={"TALLY_SECRET_FILE": "f"}).stdout)[0]["TALLY_SECRET"] == "unset"
    assert run("-n", 1, script="echo ${TORCHELASTIC_RUN_ID-unset}", env=env).stdout == "[rank 0] unset\n"


def test_with_services_each_rank_is_a_machine(fake_tallyd):
    tallyd = fake_tallyd(PRINT + "; echo \"RANK=$RANK ARGUMENTS=$(echo $* | tr ' ' ,)\"")
    done = run("-n", 2, "-k", 2, "--tallyd", tallyd, script=PRINT + "; sleep 0.5")
    lines = [line for line in done.stdout.splitlines() if "ARGUMENTS" in line]
    seen = by_rank("\n".join(line for line in done.stdout.splitlines() if "ARGUMENTS" not in line))
    assert sorted(seen, key=str) == [0, 1, "tallyd 0", "tallyd 1"]
    assert len({v["TALLY_HOST_ID"] for v in seen.values()}) == 4
    assert {v["TALLY_SERVERS"] for v in seen.values()} == {"2"}
    assert {(v["LOCAL_RANK"], v["LOCAL_WORLD_SIZE"]) for r, v in seen.items() if r in (0, 1)} == {("0", "1")}
    assert seen["tallyd 0"]["RANK"] == "unset"
    assert seen["tallyd 0"]["TALLY_SECRET"] == seen[0]["TALLY_SECRET"]
    for line in lines:
        assert line.endswith(f"ARGUMENTS=--coord,{seen[0]['TALLY_COORD']}")


def test_machines_get_ranks_in_blocks():
    ranks = by_rank(run("-n", 5, "--machines", 3, script=PRINT).stdout)
    assert [ranks[r]["LOCAL_RANK"] for r in range(5)] == ["0", "1", "0", "1", "0"]
    assert [ranks[r]["LOCAL_WORLD_SIZE"] for r in range(5)] == ["2", "2", "2", "2", "1"]
    hosts = [ranks[r]["TALLY_HOST_ID"] for r in range(5)]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3] != hosts[4] != hosts[0]


# --- output ------------------------------------------------------------------------------------------


def test_lines_stay_whole_and_carry_their_rank():
    script = "i=0; while [ $i -lt 200 ]; do printf 'a%s' $i; printf 'b\\n'; i=$((i+1)); done; printf end; echo err >&2"
    done = run("-n", 3, script=script)
    for rank in range(3):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] a{i}b" for i in range(200)] + [f"[rank {rank}] end"]
    assert len(done.stdout.splitlines()) == 603
    assert sorted(done.stderr.splitlines()) == [f"[rank {rank}] err" for rank in range(3)]


# A part of it is there from each rank before one has written its end.
TRACEBACK = """
trap '' TERM
p="%(prefix)s"
until_all() { touch $1$RANK; until [ -e ${1}0 -a -e ${1}1 -a -e ${1}2 ]; do sleep .01; done; }
until_all come
printf '%%s\\n' "${p}Traceback (most recent call last):" "$p  File \\"x\\"" >&2
until_all begun
printf '%%s\\n' "$p    call()" "${p}%(reason)s" >&2
exit 1
"""


def test_tracebacks_stand_one_behind_the_other(tmp_path):
    """Of ranks that fail together, each line by line."""
    done = run("-n", 3, script=TRACEBACK % {"reason": "$RANK", "prefix": "[rank$RANK]: "}, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if "tally run" not in line]
    assert len(lines) == 3 * 4
    for at in range(0, 12, 4):
        rank = lines[at][6]
        assert [line[len("[rank 0] "):] for line in lines[at:at + 4]] == [
            f"[rank{rank}]: {text}" for text in ("Traceback (most recent call last):", '  File "x"', "    call()", rank)]
        assert all(line.startswith(f"[rank {rank}] ") for line in lines[at:at + 4])


@pytest.mark.parametrize("prefix", ("", "[rank$RANK]: "))
def test_the_same_traceback_once(tmp_path, prefix):
    done = run("-n", 3, script=TRACEBACK % {"reason": "reason", "prefix": prefix}, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if "tally run" not in line]
    assert len(lines) == 4 + 2 and done.stderr.count("reason") == 1
    whole = next(line[:8] for line in lines if "reason" in line)
    assert sorted(line for line in lines if "same" in line) == sorted(
        f"[rank {rank}] the same traceback as {whole[1:7]}" for rank in range(3) if whole != f"[rank {rank}]")


def test_a_traceback_is_not_kept_from_a_rank_that_goes_on(tmp_path):
    goes_on = tmp_path / "goes on"
    job = Job("-n", "1", script=f"echo 'Traceback (most recent call last):'; echo reason; "
                              f"while ! [ -e '{goes_on}' ]; do sleep .01; done; echo end")
    assert [job.process.stdout.readline() for _ in range(2)] == [
        "[rank 0] Traceback (most recent call last):\n", "[rank 0] reason\n"]
    goes_on.touch()
    assert job.process.stdout.read() == "[rank 0] end\n" and job.process.wait(PATIENCE_S) == 0


def test_bytes_pass_unchanged():
    done = subprocess.run(
        [TALLY, "run", "-n", "1", "--", "printf", r"\000\377\r\n\n\303"],
        env=environment(),
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == b"[rank 0] \x00\xff\r\n[rank 0] \n[rank 0] \xc3\n"


def test_a_line_without_end_is_cut():
    done = run("-n", 1, script="head -c 3000000 /dev/zero | tr '\\0' x")
    assert sum(line.count("x") for line in done.stdout.splitlines()) == 3000000
    assert 2 <= len(done.stdout.splitlines()) <= 100


def test_much_output_at_the_end_is_not_lost():
    done = run("-n", 2, script="seq 100000")
    assert len(done.stdout.splitlines()) == 200000
    assert done.stdout.count("[rank 1] 100000\n") == 1


def test_output_without_prefix():
    done = run("-n", 2, "--no-prefix", script="echo $RANK; echo e$RANK >&2")
    assert sorted(done.stdout.splitlines()) == ["0", "1"]
    assert sorted(done.stderr.splitlines()) == ["e0", "e1"]


def test_a_reader_that_leaves_ends_the_job():
    with Job("-n", "2", script="while :; do echo line; done") as job:
        job.wait_for(3, "line")
        job.process.stdout.close()
        assert job.process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
        assert alive(job.mark) == []


def test_a_reader_that_waits_stops_nothing_but_output():
    with Job("-n", "2", script="while :; do echo line; done") as job:
        job.wait_for(1, "line")
        job.process.send_signal(signal.SIGTERM)  # while nobody reads
        eventually(lambda: len(alive(job.mark)) <= 2)  # the two of `tally run`, which still has lines to pass on
        assert job.end()[1] == 128 + signal.SIGTERM


# --- ends --------------------------------------------------------------------------------------------


def test_status_of_the_first_failure():
    done = run("-n", 4, script='if [ $RANK = 2 ]; then exit 7; fi; trap "exit 9" TERM; sleep 1000 & wait')
    assert done.returncode == 7
    assert "rank 2 ended with status 7" in done.stderr


def test_status_of_a_signal():
    done = run("-n", 2, script="if [ $RANK = 1 ]; then kill -SEGV $$; fi; exec sleep 1000")
    assert done.returncode == 128 + signal.SIGSEGV
    assert "rank 1 was ended by signal 11" in done.stderr


def test_a_rank_that_ends_well_ends_nobody(tmp_path):
    done = run("-n", 2, script=f"if [ $RANK = 1 ]; then while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; echo last; "
               f"else (sleep 0.5; touch {tmp_path}/go) > /dev/null & fi")
    assert done.returncode == 0 and done.stdout == "[rank 1] last\n"


def test_a_command_that_is_not_there():
    done = tally("run", "-n", 2, "--", "no-such-command-here")
    assert done.returncode == 127 and "cannot run no-such-command-here: No such file" in done.stderr
    assert tally("run", "-n", 1, "--", "/").returncode == 126


def test_one_that_ignores_sigterm_is_killed(tmp_path):
    failing = f"while ! [ -e {tmp_path}/up ]; do sleep 0.05; done; exit 3"
    script = f'[ $RANK = 0 ] && {{ {failing}; }}; trap "" TERM; touch {tmp_path}/up; while :; do sleep 1000; done'
    with Job("-n", "2", script=script) as job:
        assert job.end()[1] == 3


def test_a_stopped_rank_is_ended(tmp_path):
    failing = f"while ! grep -q ') T' /proc/$(cat {tmp_path}/up)/stat; do sleep 0.05; done; exit 4"
    script = f"if [ $RANK = 0 ]; then {failing}; fi 2> /dev/null; echo $$ > {tmp_path}/up; kill -STOP $$"
    with Job("-n", "2", script=script) as job:
        assert job.end()[1] == 4


def test_what_ranks_leave_behind_is_ended():
    with Job("-n", "2", script="setsid sh -c 'sleep 1000; :' & sleep 1000 & echo ready") as job:
        assert job.end()[1] == 0


def test_what_ranks_leave_behind_may_end_well(tmp_path):
    left = f"setsid sh -c 'trap \"touch {tmp_path}/well; exit\" TERM; touch {tmp_path}/up; while :; do sleep 0.1; done' &"
    with Job("-n", "1", script=f"{left} while ! [ -e {tmp_path}/up ]; do sleep 0.05; done") as job:
        assert job.end()[1] == 0
    assert (tmp_path / "well").exists()


def test_a_service_that_fails_ends_the_job(fake_tallyd):
    done = run("-n", 2, "-k", 1, "--tallyd", fake_tallyd("exit 5"), script="sleep 1000")
    assert done.returncode == 5 and "tallyd 0 ended with status 5" in done.stderr


def test_a_service_that_fails_at_the_end_is_a_failure(fake_tallyd, tmp_path):
    tallyd = fake_tallyd(f"trap 'exit 6' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done")
    script = f"while ! [ -e {tmp_path}/up ]; do sleep 0.05; done"
    assert run("-n", 1, "-k", 1, "--tallyd", tallyd, script=script).returncode == 6


def test_a_service_may_end_before_the_ranks(fake_tallyd):
    done = run("-n", 1, "-k", 2, "--tallyd", fake_tallyd("exit 0"), script="sleep 0.5; echo done")
    assert done.returncode == 0 and done.stdout == "[rank 0] done\n"


def test_a_service_is_ended_with_the_ranks(fake_tallyd):
    done = run("-n", 1, "-k", 1, "--tallyd", fake_tallyd("exec sleep 1000"), script=":")
    assert done.returncode == 0


def test_a_tallyd_that_is_not_there():
    done = run("-n", 1, "-k", 1, "--tallyd", "/no/such/tallyd", script="sleep 1000")
    assert done.returncode == 127 and "[tallyd 0] cannot run /no/such/tallyd" in done.stderr


# --- signals -----------------------------------------------------------------------------------------

# A rank that has a child of its own, one in another session, and one whose parent is gone.
FAMILY = "sleep 1000 & setsid sh -c 'sleep 1000; :' & (sleep 1000 & setsid sleep 1000 &); echo ready; wait"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("option", [[], ["--no-prefix"]])
def test_a_signal_leaves_nobody(number, option):
    with Job("-n", "3", *option, script=FAMILY) as job:
        job.wait_for(3)
        job.process.send_signal(number)
        assert job.end()[1] == 128 + number


def test_a_signal_to_the_whole_group_is_one_signal(tmp_path):
    """It reaches the guard twice; ranks still get their time to end well."""
    script = f'trap "sleep 0.5; touch {tmp_path}/well; exit" TERM; echo ready; while :; do sleep 0.1; done'
    with Job("-n", "1", script=script, start_new_session=True) as job:
        job.wait_for(1)
        os.killpg(job.process.pid, signal.SIGTERM)
        assert job.end()[1] == 128 + signal.SIGTERM
    assert (tmp_path / "well").exists()


def test_a_second_signal_loses_patience():
    with Job("-n", "2", script='trap "echo term" TERM; echo ready; while :; do sleep 1000 & wait; done') as job:
        job.wait_for(2)
        job.process.send_signal(signal.SIGTERM)
        job.wait_for(2, "term")
        time.sleep(1.2)  # a second one within a second counts as the same
        job.process.send_signal(signal.SIGINT)
        assert job.end()[1] == 128 + signal.SIGTERM


def test_kill_of_the_command_leaves_nobody():
    with Job("-n", "3", script=FAMILY) as job:
        job.wait_for(3)
        job.process.kill()
        job.process.wait()
        eventually(lambda: alive(job.mark) == [])


def test_kill_of_its_guard_leaves_nobody():
    with Job("-n", "3", script=FAMILY) as job:
        job.wait_for(3)
        with open(f"/proc/{job.process.pid}/task/{job.process.pid}/children", encoding="ascii") as f:
            os.kill(int(f.read()), signal.SIGKILL)
        assert job.end()[1] == 128 + signal.SIGKILL


def test_ctrl_c_at_a_terminal():
    """The terminal signals its foreground group."""
    mark = f"RUN_TEST_MARK={os.getpid()}-terminal-end"
    pid, master = pty.fork()
    if pid == 0:
        os.execve(TALLY, [TALLY, "run", "-n", "2", "--", "sh", "-c", FAMILY], environment(dict([mark.split("=")])))
    seen = b""
    while seen.count(b"ready") < 2:
        seen += os.read(master, 1000)
    os.write(master, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(master)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert alive(mark) == []


def test_signals_reach_ranks_as_usual():
    """What the launcher blocks and ignores for itself, its children do not: they get what any child of ours would."""
    grep = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]
    usual = subprocess.run(grep, capture_output=True, text=True, check=True).stdout
    done = run("-n", 1, script=shlex.join(grep))
    internal = 1 << 31 | 1 << 32  # signals 32 and 33 are the C library's; make passes them on as ignored
    masks = [[int(line.split()[-1], 16) & ~internal for line in text.splitlines()] for text in (usual, done.stdout)]
    assert masks[0] == masks[1] and len(masks[0]) == 2


def test_no_files_are_left(tmp_path):
    done = run("-n", 2, script="echo $TALLY_COORD", cwd=tmp_path, env={"TMPDIR": str(tmp_path), "HOME": str(tmp_path)})
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []


# --- misuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, piece",
    [
        (["--", "true"], "-n, the number of ranks, is needed"),
        (["-n", "2"], "a command is needed"),
        (["-n", "0", "true"], "-n 0"),
        (["-n", "x", "true"], "-n x"),
        (["-n", "100000", "true"], "1 to 1000"),
        (["-n", "1", "-k", "-1", "true"], "-k -1"),
        (["-n", "2", "--machines", "3", "true"], "there are only 2 ranks"),
        (["-n", "2", "--port", "70000", "true"], "1 to 65535"),
        (["-n", "2", "--bogus", "true"], "bogus"),
    ],
)
def test_misuse(arguments, piece):
    done = tally("run", *arguments)
    assert done.returncode == 2 and piece in done.stderr


def test_wrong_settings_are_refused_before_anything_starts():
    done = run("-n", 4, script="echo started", env={"TALLY_SERVERZ": "2"})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "tally run: unknown setting TALLY_SERVERZ; did you mean TALLY_SERVERS?\n"


def test_settings_that_do_not_count_are_named():
    env = {"TALLY_COORD": "10.0.0.9", "TALLY_PORT": "1234", "TALLY_SERVERS": "2", "TALLY_HOST_ID": "here"}
    done = run("-n", 2, "--machines", 2, script="echo $TALLY_SERVERS", env=env)
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == ["[rank 0] 0", "[rank 1] 0"]
    assert done.stderr.splitlines() == [
        "tally run: TALLY_COORD=10.0.0.9 does not count: rank 0 of this job listens at 127.0.0.1",
        "tally run: TALLY_PORT=1234 does not count: --port says where rank 0 of this job listens",
        "tally run: TALLY_SERVERS=2 does not count: -k says how many tallyd this job has, 0",
        "tally run: TALLY_HOST_ID=here does not count: the ranks appear as 2 machines"]


def test_settings_that_agree_are_not_named(fake_tallyd):
    done = run("-n", 1, "-k", 2, "--port", 12345, "--tallyd", fake_tallyd("exit 0"), script="true",
               env={"TALLY_SERVERS": "2", "TALLY_PORT": "12345"})
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("module", ("tally.py", "tally/__init__.py"))
def test_a_module_that_hides_the_package_is_named(tmp_path, module):
    script, other = tmp_path / "train.py", tmp_path / "other"
    script.touch()
    other.mkdir()
    hides = f"tally run: {tmp_path / module} hides the Python package tally from scripts in its folder: rename it\n"
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).touch()
    assert tally("run", "-n", 1, "--", "true", "-u", script, cwd=other).stderr == hides
    assert tally("run", "-n", 1, "--", "true", "-m", "train", cwd=tmp_path).stderr == hides
    assert tally("run", "-n", 1, "--", "true", cwd=other).stderr == ""
    (tmp_path / "tally").mkdir(exist_ok=True)
    (tmp_path / "tally" / "_lib.py").touch()  # the package itself
    if "/" in module:
        assert tally("run", "-n", 1, "--", "true", script, cwd=other).stderr == ""


LATE = """
import os, time
rank = int(os.environ["RANK"])
if rank == 1:
    os.environ["TALLY_LATE_WARNING"] = "11"
time.sleep(0 if rank else 12.5)
import tally
tally.init()
tally.shutdown()
"""


def test_a_rank_0_that_imports_for_long_is_no_failure():
    """The others speak of it when they would of any late rank."""
    done = tally("run", "-n", 3, "--", sys.executable, "-c", LATE)
    assert done.returncode == 0, done.stderr
    assert [line[:8] for line in done.stderr.splitlines() if "still trying" in line] == ["[rank 1]"], done.stderr

"""Ranks of one machine where little is allowed: a plain user without capabilities, a root that cannot be written, a
/dev/shm of 64 MB; and limits that are met."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
NOBODY = 65534
PATIENCE_S = 120


def find(*places):
    """The program at the first of these places of the build that has it."""
    return next(str(BUILD / p) for p in places if (BUILD / p).exists())


def run(prefix, ranks=4, **settings):
    """(exit status, output) of a job of all operations, with a command before it."""
    tally = find("bin/tally", "src/cli/tally")
    job = find("meson/test/jobs/every_operation", "test/jobs/every_operation")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}
    env.update(TALLY_LOG="info", HOME="/nonexistent", TMPDIR="/nonexistent", XDG_CONFIG_HOME="/nonexistent", **settings)
    done = subprocess.run([*prefix, tally, "run", "-n", str(ranks), "--", job], env=env, cwd="/", text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=PATIENCE_S)
    return done.returncode, done.stdout


CONFINE = """
mount --make-rprivate / && mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -o remount,bind,ro / || exit 77
exec setpriv --reuid={0} --regid={0} --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
""".format(NOBODY)


@pytest.mark.parametrize("settings, way", [({}, "shared memory"), ({"TALLY_LOCAL": "off"}, "")], ids=["local", "service"])
def test_plain_user_on_a_root_that_cannot_be_written(settings, way):
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("another user and a mount namespace need root, unshare and setpriv")
    confine = ["unshare", "--mount", "sh", "-c", CONFINE, "sh"]
    check = ("test -x '%s' && ! touch /tally-was-here 2>/dev/null && [ $(id -u) = %d ] && grep -q '^CapBnd:\t0*$' "
             "/proc/self/status" % (find("bin/tally", "src/cli/tally"), NOBODY))
    if subprocess.run([*confine, "sh", "-c", check], capture_output=True).returncode:
        pytest.skip("no such namespace here, or the build cannot be read by another user")
    status, output = run(confine, **settings)
    assert status == 0 and way in output, output


@pytest.mark.parametrize("limit", ["--memlock=0", "--nofile=128", "--stack=1048576"])
def test_limits_that_do_not_matter(limit):
    status, output = run(["prlimit", limit])
    assert status == 0 and "shared memory" in output, output


def test_no_room_for_addresses():
    """The segments of all ranks do not fit (ulimit -v): the ranks do without, and say why."""
    status, output = run(["prlimit", "--as=%d" % (1 << 30)])
    assert status == 0 and "cannot share memory: cannot map" in output, output


def test_files_may_not_be_as_large(tmp_path):
    """ulimit -f: smaller segments, or none, but no signal."""
    for limit in (1 << 30, 1 << 20):
        status, output = run(["prlimit", "--fsize=%d" % limit])
        assert status == 0, output
        assert ("shared memory" in output) if limit == 1 << 30 else ("is not allowed (ulimit -f)" in output), output

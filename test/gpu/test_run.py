"""test/gpu/run on the tests' driver: what it runs, when it skips, and that it finds what is wrong."""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DRIVER = ROOT / "build" / "meson" / "test" / "device"


def run(*arguments, driver="gpus=1", root=ROOT, **more):
    """(exit status, output)"""
    env = {**os.environ, "LD_LIBRARY_PATH": str(DRIVER), "FAKE_CUDA": driver, **more}
    done = subprocess.run([str(root / "test" / "gpu" / "run"), "--no-build", "--quick", *map(str, arguments)], env=env,
                          cwd="/", text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=240)
    return done.returncode, done.stdout


@pytest.mark.parametrize("driver, visible, error", [("", None, 100), ("gpus=1", "", 101)])
def test_skips_where_no_gpu_is(driver, visible, error):
    status, output = run(driver=driver, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert (status, output) == (77, "skipped: the driver finds no GPU (error %d)\n" % error)


def test_all_checks(tmp_path):
    path = tmp_path / "found.json"
    status, output = run("--json", path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == 0, output
    assert [row["check"] for row in rows].count("conform") == 6
    assert {row["outcome"] for row in rows if row["check"] != "python"} == {"ok"}, output
    assert all(row["share_of_copies"] > 0 for row in rows if row["case"].startswith("one rank, 25"))
    assert all(row["times_as_fast"] > 0 for row in rows if row["case"].startswith("two groups of two, 64"))


def test_failure_of_the_driver():
    status, output = run("speed", driver="gpus=1 fail=copy-to-GPU:719:12")
    assert status == 1 and "one rank, 25 MB              failed" in output and "(719)" in output, output


def test_groups_that_the_driver_refuses():
    """The host sums then, which is right, so it is no failure, but groups were not tested."""
    status, output = run("conform", driver="gpus=1 fail=cuIpcOpenMemHandle:801:1:100")
    assert status == 0, output
    refused = [line for line in output.splitlines() if "skipped" in line]
    assert len(refused) == 2 and all("the host sums" in line and "cuIpcOpenMemHandle" in line for line in refused), output


def test_gpus_in_turn():
    """Ranks on two GPUs that do not reach each other: a job of one group says so."""
    status, output = run("speed", "--gpus", 2, driver="gpus=2")
    assert status == 0 and "two groups of two, 64 MB     skipped: " in output, output


def test_pack(tmp_path):
    """A folder that another machine can take: it needs neither these sources nor this build."""
    made = subprocess.run([str(ROOT / "test" / "gpu" / "run"), "--no-build", "--pack", str(tmp_path)], text=True, timeout=100,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert made.returncode == 0, made.stdout
    status, output = run("speed", root=tmp_path)
    assert status == 0 and output.count(" ok: ") == 3, output
    linked = subprocess.run(["ldd", str(tmp_path / "build" / "meson" / "test" / "gpu" / "gpu_speed")], text=True, check=True,
                            stdout=subprocess.PIPE, env={**os.environ, "LD_LIBRARY_PATH": "%s:%s" % (tmp_path / "build" / "lib", DRIVER)})
    own = [line for line in linked.stdout.splitlines() if "libtally" in line or "libsodium" in line or "libhwloc" in line]
    assert own and all(str(tmp_path) in line for line in own), linked.stdout


@pytest.mark.parametrize("body, outcome", [
    ("def test_it():\n    pass\n", "ok"),
    ("def test_it():\n    assert 0\n", "failed"),
    ("import pytest\n@pytest.mark.skip(reason='no GPU here')\ndef test_it():\n    pass\n", "no GPU here")])
def test_tests_that_are_skipped(tmp_path, body, outcome):
    """pytest ends well if it has skipped all tests; test/gpu/run says that they were."""
    script = runpy.run_path(str(ROOT / "test" / "gpu" / "run"), run_name="script")
    path = tmp_path / "test_it.py"
    path.write_text(body)
    good, output = script["finish"]([sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", path], os.environ)
    found = script["outcome_of_tests"](good, output)
    assert found == outcome or outcome in found and found.startswith("SKIPPED"), output


def test_a_check_that_is_none():
    status, output = run("everything")
    assert status == 2 and "the checks are conform, speed, python" in output

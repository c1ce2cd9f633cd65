"""JAX over Tally on the emulated cluster, without and with CPU machines, and a quick run of bench/jax, whose results must be
right.  Times are not looked at."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import lab as cluster
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
PROGRAMS = ROOT / "test" / "jax" / "programs.py"
BENCHMARK = ROOT / "bench" / "jax" / "collectives.py"

pytestmark = [
    pytest.mark.skipif(cluster.why_not() is not None, reason=str(cluster.why_not())),
    pytest.mark.skipif(importlib.util.find_spec("jaxlib") is None, reason="there is no JAX"),
]


@pytest.mark.parametrize("services", (pytest.param([], marks=pytest.mark.long), ["c0", "c1"]))
def test_collectives(services):
    workers = ["w0", "w1", "w2"]
    env = {"PYTHONPATH": str(BUILD / "python"), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    with cluster.Lab(workers + services, rate="1gbit") as lab:
        for program in (["collectives"], ["scatter", "3", "512"]):
            command = [sys.executable, str(PROGRAMS), *program]
            job = lab.job(command, workers, services, str(BUILD / "bin" / "tallyd"), env=env, timeout_s=200)
            assert job.ok, str(job)
            assert all("%s ended" % program[0] in rank.output for rank in job.ranks)
            # What the CPU machines have summed has gone over their links.
            assert all(sum(job.traffic[host]) > 100_000 for host in services), job.traffic


@pytest.mark.long(turn=4)
def test_benchmark(tmp_path):
    rows = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--quick", "--sizes", "64K", "--seconds", "0.1", "--json", rows],
        env={**os.environ, "TALLY_TEST_BUILD": str(BUILD)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in rows.read_text().splitlines()]
    kinds = {(row["layout"], row["way"], row["operation"]) for row in rows}
    assert len(rows) == len(kinds) == 2 * 2 * 4
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in rows)
    assert {row["tallyd"] for row in rows if row["way"] == "tally"} == {0, 1}

"""The examples of frameworks, run as their first lines say: all ranks end with the same parameters, the ways agree, and
the gradients have gone through Tally.

SPDX-License-Identifier: Apache-2.0
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "python"))
import jobs  # noqa: E402

BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))
FOLDER = ROOT / "examples" / "frameworks"
RANKS = [BUILD / "bin" / "tally", "run", "-n", "2", "--", sys.executable]

# To import a framework takes most of a test's time.
IN_TURN = pytest.mark.long(turn=4)

# Bytes of the gradients that a rank has in all steps: of problem.py's network, of transformers_trainer.py's, of jax_arrays.py's.
NETWORK, GPT2, JAX = 12 * 2704, 6 * 29184, 20 * 640


def summed(timeline):
    """Bytes of a rank's operations."""
    events = json.loads(timeline.read_text())["traceEvents"]
    return sum(event["args"]["bytes"] for event in events if (event["name"], event["ph"]) == ("operation", "b"))


def ranks(script, *arguments):
    return [*RANKS, script, *arguments]


def run(gradients, launched, script, *arguments):
    """What the ranks print last: {loss and parameters}.  gradients: bytes that each has at least to give to Tally.
    launched: a function that makes the command line."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}
    with tempfile.TemporaryDirectory() as folder:
        env.update(PYTHONPATH=str(BUILD / "python"), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
                   CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu", TALLY_TRACE=folder + "/run")
        done = subprocess.run([*map(str, launched(FOLDER / script, *arguments))], env=env,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-6000:]
        given = [summed(timeline) for timeline in pathlib.Path(folder).glob("run.*.rank-*.json")]
    assert len(given) == 2 and min(given) >= gradients, "of %d bytes Tally had %s" % (gradients, given)
    lines = re.findall(r"rank (\d): (loss [\d.]+, parameters [-+.0-9a-f]+)", done.stdout)
    assert sorted(rank for rank, _ in lines) == ["0", "1"], done.stdout[-6000:]
    results = {result for _, result in lines}
    assert len(results) == 1, "the ranks differ: %s" % results
    return results.pop()


def needs(*packages):
    lacking = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(lacking), reason="not installed: %s" % ", ".join(lacking))


@pytest.mark.parametrize("script", ("torchrun.py", pytest.param("lightning_ddp.py", marks=[needs("lightning"), IN_TURN]),
                                    pytest.param("accelerate_loop.py", marks=[needs("accelerate"), IN_TURN])))
def test_hook_and_backend_agree(script):
    # Two ranks: the average is rounded once in both.
    backend, hook = (run(NETWORK, jobs.torchrun, script, "--way", way) for way in ("backend", "hook"))
    assert backend == hook


@pytest.mark.parametrize("script", (pytest.param("lightning_ddp.py", marks=[needs("lightning"), IN_TURN]),
                                    pytest.param("accelerate_loop.py", marks=[needs("accelerate"), IN_TURN])))
def test_without_the_barrier(script):
    assert run(NETWORK, jobs.torchrun, script, "--way", "cross_barrier") == run(NETWORK, jobs.torchrun, script, "--way", "hook")


@IN_TURN
@needs("transformers", "accelerate")
def test_transformers_trainer():
    run(GPT2, jobs.torchrun, "transformers_trainer.py")


@needs("jax")
def test_jax():
    run(JAX, ranks, "jax_arrays.py")


@needs("jax")
def test_jax_collectives():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TALLY_", "JAX_", "MPITRAMPOLINE_"))}
    env.update(PYTHONPATH=str(BUILD / "python"), OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu")
    done = subprocess.run([*map(str, RANKS), str(ROOT / "examples" / "jax_train.py")], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:]
    results = set(re.findall(r"rank \d: (loss .*)", done.stdout))
    assert len(results) == 1 and done.stdout.count("loss") == 2, done.stdout[-6000:]
    assert "is done after" in done.stdout, "Tally was not asked"

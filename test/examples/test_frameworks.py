"""The examples of frameworks, run as their first lines say: all ranks end with the same parameters, and the ways agree.

SPDX-License-Identifier: Apache-2.0
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))
FOLDER = ROOT / "examples" / "frameworks"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RANKS = [BUILD / "bin" / "tally", "run", "-n", "2", "--", sys.executable]


def run(launcher, script, *arguments):
    """What the ranks print last: {loss and parameters}."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}
    env.update(PYTHONPATH=str(BUILD / "python"), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
               CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    done = subprocess.run([*map(str, launcher), str(FOLDER / script), *arguments], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:]
    lines = re.findall(r"rank (\d): (loss [\d.]+, parameters [-+.0-9a-f]+)", done.stdout)
    assert sorted(rank for rank, _ in lines) == ["0", "1"], done.stdout[-6000:]
    results = {result for _, result in lines}
    assert len(results) == 1, "the ranks differ: %s" % results
    return results.pop()


def needs(*packages):
    lacking = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(lacking), reason="not installed: %s" % ", ".join(lacking))


@pytest.mark.parametrize("script", ("torchrun.py", pytest.param("lightning_ddp.py", marks=needs("lightning")),
                                    pytest.param("accelerate_loop.py", marks=needs("accelerate"))))
def test_hook_and_backend_agree(script):
    # Two ranks: the average is rounded once in both.
    assert run(TORCHRUN, script, "--way", "backend") == run(TORCHRUN, script, "--way", "hook")


@needs("transformers", "accelerate")
def test_transformers_trainer():
    run(TORCHRUN, "transformers_trainer.py")


@needs("jax")
def test_jax():
    run(RANKS, "jax_arrays.py")

"""The examples, run as their first lines say.

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TEST_BUILD", ROOT / "build"))
MESON = BUILD / "meson" if (BUILD / "meson").exists() else BUILD


@pytest.mark.parametrize("ranks, services", [(1, 0), (4, 2), (3, 3)])
def test_push_pull(ranks, services):
    program = MESON / "examples" / "push_pull"
    done = subprocess.run(
        [BUILD / "bin" / "tally", "run", "-n", str(ranks), "-k", str(services), "--", program],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    each = ranks * (ranks + 1) // 2
    machines = ranks if services else 1
    assert done.stdout == (f"[rank 0] {ranks} ranks on {machines} machines, {machines + services} services: "
                           f"each of 1000000 sums is {each}, 0 are wrong\n")

"""The examples, run as their first lines say.

SPDX-License-Identifier: Apache-2.0
"""

import io
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test" / "python"))
import jobs  # noqa: E402

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


@pytest.mark.parametrize("ranks, services", [(1, 0), (3, 1)])
def test_lars(ranks, services):
    """It learns, and all ranks have the same bits at the end."""
    status, output = jobs.run(ranks, services, [ROOT / "examples" / "lars.py", "--epochs", "8"])
    assert status == 0, output[-6000:]
    losses, accuracies = zip(*re.findall(r"epoch \d+  loss ([\d.]+)  accuracy ([\d.]+)", output))
    assert len(losses) == 8 and float(losses[-1]) < float(losses[0]) / 3 and float(accuracies[-1]) > 0.75, output[-6000:]
    assert len(re.findall(r"rank \d: parameters", output)) == ranks
    assert len(set(re.findall(r"rank \d: parameters ([0-9a-f]{8})", output))) == 1, output[-6000:]


def test_lars_goes_on_from_a_saved_state(monkeypatch):
    """An optimizer that has been saved and loaded makes the same steps, to the last bit."""
    import torch
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from lars import Lars
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draw).bfloat16()) for shape in ((8, 8), (8,))]
    optimizer = Lars(parameters, lr=0.5)

    def gradients():
        return [torch.randn(p.shape, generator=draw).bfloat16() for p in parameters]

    def step(optimizer, gradients):
        """The bits behind it, also those of the state, of which a parameter shows half."""
        own = optimizer.param_groups[0]["params"]
        for p, gradient in zip(own, gradients):
            p.grad = gradient.clone()
        optimizer.step()
        return [t.numpy().tobytes() for p in own for t in (p.detach().view(torch.int16), *optimizer.state[p].values())]

    step(optimizer, gradients())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = Lars([torch.nn.Parameter(p.detach().clone()) for p in parameters], lr=0.1)
    other.load_state_dict(torch.load(file))
    for several in [gradients() for _ in range(3)]:
        assert step(other, several) == step(optimizer, several)

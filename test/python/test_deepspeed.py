"""DeepSpeed over the backend "tally" beside Gloo, where it is installed."""

import importlib.util
import json
import re

import pytest

import jobs


@pytest.mark.long
def test_stages_and_pipeline(tmp_path):
    """Its clipping under a pipeline sums a tensor without dimensions on one rank and one of one element on another."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (requirements-frameworks.txt)")
    told = []
    for backend in ("gloo", "tally"):
        status, output = jobs.run(2, 1, [jobs.HERE / "deepspeed_steps.py", backend, tmp_path / backend], timeout=580)
        assert status == 0, output[-8000:]
        told.append(json.loads(re.search(r"steps (\{.*\})", output)[1]))
    assert list(told[0]) == ["0", "1", "2", "3", "None"]
    for stage, steps in told[0].items():
        for ours, with_gloo in zip(told[1][stage], steps, strict=True):
            assert ours == pytest.approx(with_gloo, rel=1e-5), (stage, told[1][stage], steps)

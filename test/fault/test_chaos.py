"""A few of chaos.py's seeds; `make chaos SEEDS=1000` tries as many as there is time for."""

import pytest

import chaos


@pytest.mark.parametrize("seed", range(1, 5))
def test_seed(tmp_path, seed):
    chaos.run(seed, tmp_path)

"""A few of chaos.py's seeds; `make chaos SEEDS=1000` tries as many as there is time for."""

import pytest

import chaos


# 16: a push that broke inside a block was asked for from there; 60, 215: operations of all and of a group taken back
@pytest.mark.parametrize("seed", [*range(1, 5), 16, 60, 215])
def test_seed(tmp_path, seed):
    chaos.run(seed, tmp_path, kinds=0)


@pytest.mark.parametrize("seed, kinds", [(seed, kinds) for seed in (301, 302, 303) for kinds in (1, 2)])
def test_seed_of_every_kind(tmp_path, seed, kinds):
    """Reduces, pieces, exchanges and messages beside the others."""
    chaos.run(seed, tmp_path, kinds)

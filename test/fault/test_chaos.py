"""A few of chaos.py's seeds; `make chaos SEEDS=1000` tries as many as there is time for."""

import pytest

import chaos


def some(values, *short):
    """All of them, of which only those of `short` run always."""
    return [value if value in short else pytest.param(*value, marks=pytest.mark.long) for value in values]


# 16: a push that broke inside a block was asked for from there; 60, 215: operations of all and of a group taken back
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3, 4)), 16, 60, 215])
def test_seed(tmp_path, seed):
    chaos.run(seed, tmp_path, kinds=0)


@pytest.mark.parametrize("seed, kinds", some([(seed, kinds) for seed in (301, 302, 303) for kinds in (1, 2)], (301, 1), (302, 2)))
def test_seed_of_every_kind(tmp_path, seed, kinds):
    """Reduces, pieces, exchanges and messages beside the others."""
    chaos.run(seed, tmp_path, kinds)

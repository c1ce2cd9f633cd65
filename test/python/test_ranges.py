"""Reductions of ranges of a buffer, and sums with the norms of their chunks: what `_operations` has of them, on addresses."""

import numpy as np
import pytest

import reference
from test_ops import fails

COUNT = 50_000
RANGES = [(0, 1), (64, 7_000), (7_072, 64), (20_000, 29_999)]  # at 64 bytes in elements of 4, with gaps, the end left out


def submit(source, target, ranges, name="ranges", **call):
    from tally import _lib, _operations
    from tally._calls import Call
    return _operations.push_pullv(Call(name, **call), source.ctypes.data, target.ctypes.data, ranges,
                                  _lib.DTYPE_CODES[source.dtype.name], (source, target), target)


def reduced(dtype):
    """Which elements of the target are not the reference's, in place and apart; outside of the ranges nothing changes."""
    import tally
    inputs = [reference.make(dtype, COUNT, rank, 3, special=True) for rank in range(tally.size())]
    own = inputs[tally.rank()]
    listed = np.zeros(COUNT, bool)
    for begin, count in RANGES:
        listed[begin:begin + count] = True
    wrong = 0
    for op in ("Sum", "Average"):
        expected = reference.reduce(dtype, op, inputs)
        expected[~listed] = own[~listed]
        for in_place in (False, True):
            target = own.copy()
            source = target if in_place else own
            result = submit(source, target, RANGES, dtype + op, reduction=tally.Reduction[op]).wait(60)
            wrong += reference.same(result, expected)
    return wrong


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_reduced(four, dtype):
    assert four(reduced, dtype) == [0] * 4


def test_reduced_in_one_machine(machine):
    assert machine(reduced, "float32") == [0] * 3


def bad_ranges():
    import tally
    x = np.zeros(1000, np.float32)
    rank = tally.rank()
    for ranges, words in (([(0, 17), (16, 16)], ("range 1 begins at element 16, before range 0 ends, at 17",)),
                          ([(0, 8), (24, 8)], ("range 1 begins at element 24 of 4 bytes", "multiple of 64 bytes")),
                          ([(0, 8), (16, 0)], ("range 1 has no elements",))):
        if rank == 1:
            fails(ValueError, lambda: submit(x, x, ranges), *words)
        else:
            fails(RuntimeError, submit(x, x, [(0, 8)]).wait, "rank 1", *words)
    # Unlike lists: every rank names both.
    operation = submit(x, x, [(0, 32), (64, 32)] if rank != 2 else [(0, 32), (80, 32)])
    fails(RuntimeError, operation.wait, "'ranges': the ranks disagree", "0-31, 64-95", " 80-111 on rank 2")
    x[:] = rank
    submit(x, x, [(16, 4)]).wait(60)
    return x[14:22].tolist()


def test_bad_ranges(four):
    for rank, seen in enumerate(four(bad_ranges)):
        assert seen == [rank] * 2 + [6] * 4 + [rank] * 2


def norms():
    import torch

    from tally import _operations
    generator = torch.Generator().manual_seed(1)
    wrong = []
    for count, chunk in ((1, 1), (1000, 64), (100_000, 32_768), (65_536, 32_768), (63, 1000)):
        a, b = (torch.randint(-100, 100, (count,), generator=generator) / 8 for _ in range(2))  # whose sums are exact
        a[count // 2] = float("nan") if count == 1000 else a[count // 2]
        expected, got = a + b, torch.full((-(-count // chunk) + 1,), 77.0)
        _operations.add_norms(a.data_ptr(), b.data_ptr(), a.data_ptr(), count, chunk, got.data_ptr())
        exact = torch.stack([part.abs().sum() for part in expected.split(chunk)] + [torch.tensor(77.0)])
        if not (torch.equal(a.nan_to_num(7e9), expected.nan_to_num(7e9)) and torch.equal(got.nan_to_num(-1), exact.nan_to_num(-1))):
            wrong.append((count, chunk))
    fails(ValueError, lambda: _operations.add_norms(a.data_ptr(), b.data_ptr(), a.data_ptr(), 1, 0, got.data_ptr()), "chunk is 0")
    fails(ValueError, lambda: _operations.add_norms(a.data_ptr(), b.data_ptr(), None, 63, 8, got.data_ptr()), "a NULL pointer for 63")
    return wrong


def test_norms(four):
    assert four(norms) == [[]] * 4

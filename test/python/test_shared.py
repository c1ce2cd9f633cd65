"""Shared tensors, to which each rank adds at its own pace: what `_operations` has of them, on addresses."""

import ctypes

import numpy as np
import pytest

import jobs
from test_ops import fails

COUNT, STEPS = 50_000, 5


def values(operation, dtype):
    operation.wait(60)
    memory = (ctypes.c_char * (COUNT * np.dtype(dtype).itemsize)).from_address(operation.values())
    return np.frombuffer(memory, dtype)


def create(name, first, **call):
    import tally
    from tally import _lib, _operations
    from tally._calls import Call
    address = first.ctypes.data if tally.rank() == 0 else None
    operation = _operations.shared_create(Call(name, **call), address, first.size, _lib.DTYPE_CODES[first.dtype.name], 0, first.shape)
    operation.wait(60)
    return operation


def added(dtype):
    """How many elements are not what they should be."""
    import tally
    from tally import _operations
    from tally._calls import Call
    call, first = Call("w" + dtype), np.arange(COUNT).astype(dtype)
    operation = create("w" + dtype, first)
    wrong = int((values(operation, dtype) != first).sum())
    mine = np.full(COUNT, tally.rank() + 1, dtype)
    for step in range(STEPS):
        newest = values(_operations.shared_add(call, mine.ctypes.data, mine), dtype)
        wrong += int((newest < first + (step + 1) * mine).sum())
    values(_operations.shared_add(call, None), dtype)
    tally.barrier()
    newest = values(_operations.shared_read(call), dtype)
    wrong += int((newest != first + STEPS * sum(range(1, tally.size() + 1))).sum())
    tally.barrier()
    return wrong


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_added(four, dtype):
    assert four(added, dtype) == [0] * 4


def refused():
    import tally
    from tally import _operations
    from tally._calls import Call
    first = np.zeros(COUNT, np.float32)
    return [
        fails(tally.Error, lambda: _operations.shared_add(Call("v"), first.ctypes.data)),
        fails(tally.Error, lambda: create("v", np.zeros(COUNT + tally.rank() // 3, np.float32))),
        # One rank's arguments make no sense: all hear of it.
        fails(ValueError if tally.rank() == 1 else tally.Error,
              lambda: create("v", first, prescale=2.0 if tally.rank() == 1 else 1.0)),
    ]


def test_refused(four):
    for unknown, differs, refuses in four(refused):
        assert "there is no shared tensor 'v'" in unknown
        assert "[50000] on ranks 0-2, [50001] on rank 3" in differs
        assert "a shared tensor is not scaled" in refuses


def twice():
    import tally
    from tally import _operations
    from tally._calls import Call
    first = np.full(COUNT, 3, np.float32)
    create("t", first)
    again = fails(tally.Error, lambda: create("t", first))
    newest = values(_operations.shared_add(Call("t"), first.ctypes.data, first), "float32")
    tally.barrier()
    return again, float(newest[0]) >= 6


def test_created_twice(four):
    for again, added in four(twice):
        assert "'t' has been created already: use another name" in again
        assert added


def added_twice():
    import tally
    from tally import _operations
    from tally._calls import Call
    create("l", np.zeros(COUNT, np.float64))
    mine = np.ones(COUNT)
    for _ in range(2):
        values(_operations.shared_add(Call("l"), mine.ctypes.data, mine), "float64")
    tally.barrier()


def test_log_of_additions(tmp_path):
    job = jobs.Ranks(3, 1, env={"TALLY_SHARED_LOG": str(tmp_path / "log")})
    try:
        job(added_twice)
    finally:
        job.close()
    lines = [line.split() for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    parts = {int(line[2]): int(line[4]) for line in lines}
    assert sum(parts.values()) == 8 * COUNT and len({line[0] for line in lines}) == 1
    assert sorted((line[8], int(line[2]), int(line[10]), int(line[12])) for line in lines) == sorted(
        (what, part, rank, number) for what in ("add", "get") for part in parts for rank in range(3) for number in (1, 2))
    for part in parts:
        assert [int(line[7]) for line in lines if line[8] == "add" and int(line[2]) == part] == [1, 2, 3, 4, 5, 6]

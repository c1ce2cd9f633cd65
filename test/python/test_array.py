"""tally.push_pull on arrays of any library."""

import numpy as np
import pytest

import reference
from test_ops import fails


def numpy_arrays():
    import tally
    n, r = tally.size(), tally.rank()
    wrong = 0
    for dtype in ("float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool"):
        inputs = [reference.make(dtype, 1001, rank, 2) for rank in range(n)]
        own = inputs[r].copy()
        assert tally.push_pull(own, name=dtype, op=tally.Sum) is own
        wrong += reference.same(own, reference.reduce(dtype, "Sum", inputs))
    assert wrong == 0
    x = np.full((3, 4), r, np.float32)
    assert tally.push_pull(x) is x and (x == (n - 1) / 2).all(), "the average is the default"

    x = np.full((3, 4), r, np.float32)
    x.flags.writeable = False
    y = tally.push_pull(x, op=tally.Sum)
    assert y is not x and (x == r).all() and (y == n * (n - 1) / 2).all()
    x = np.arange(12.0).reshape(3, 4).T
    x.flags.writeable = False
    assert (tally.push_pull(x, op=tally.Sum) == x * n).all()

    wide = np.zeros((4, 6))
    view = wide[:, 1:3]
    view[:] = r
    assert tally.push_pull(view, op=tally.Max) is view
    assert (view == n - 1).all() and wide.sum() == 8 * (n - 1)
    assert tally.push_pull(np.float32(r), op=tally.Sum) == n * (n - 1) / 2
    assert tally.push_pull(np.zeros((0, 3), np.float32)).shape == (0, 3)

    operation = tally.push_pull_async(np.ones(5), "later", tally.Sum)
    assert (operation.wait(60) == n).all() and operation.done()
    # A rank that cannot, and others that learn why.
    for bad, word in ((np.zeros(5, "m8[s]"), "timedelta64"), (np.zeros(5, ">f4"), "cannot be summed; hand over array.astype('<f4')"),
                      (object(), "buffer")):
        if r == 1:
            fails(TypeError, lambda: tally.push_pull(bad, "bad"), word)
        else:
            fails(RuntimeError, lambda: tally.push_pull(np.zeros(5), "bad"), word)


def test_numpy(four):
    four(numpy_arrays)


def wide_types():
    """Complex and unsigned numbers, bit by bit."""
    import tally
    n, r = tally.size(), tally.rank()
    for dtype in ("complex64", "complex128"):
        half = np.float32 if dtype == "complex64" else np.float64
        inputs = [np.random.default_rng(rank).standard_normal((2, 999)).astype(half) for rank in range(n)]
        own = np.ascontiguousarray(inputs[r].T).view(dtype)[:, 0]
        for op, expected in (
                ("Sum", reference.tree(inputs, lambda a, b: a + b)),
                ("Average", reference.tree(inputs, lambda a, b: a + b) / half(n)),
                ("Product", reference.tree(inputs, lambda a, b: np.array(
                    [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]])))):
            got = tally.push_pull(own.copy(), op=tally.Reduction[op])
            assert got.dtype == dtype
            assert reference.same(got.view(half).reshape(-1, 2), expected.T) == 0, (dtype, op)
        for op, word in ((tally.Min, "minimum"), (tally.Max, "maximum")):
            fails(ValueError, lambda: tally.push_pull(own.copy(), op=op), "complex numbers have no " + word)
    for dtype in ("uint16", "uint32", "uint64"):
        inputs = [reference.make(dtype, 1001, rank, 5) for rank in range(n)]
        for op in ("Sum", "Average", "Min", "Max", "Product"):
            got = tally.push_pull(inputs[r].copy(), op=tally.Reduction[op])
            assert got.dtype == dtype
            assert reference.same(got, reference.reduce(dtype, op, inputs)) == 0, (dtype, op)


def test_wide_types(four):
    four(wide_types)


def buffers():
    import array
    import mmap
    import tally
    n = tally.size()
    x = array.array("d", [1.0, 2.0])
    assert tally.push_pull(x, op=tally.Sum) is x and x.tolist() == [n, 2 * n]
    x = bytearray(b"\1\2\3")
    assert tally.push_pull(x, op=tally.Sum) is x and x == bytes([n, 2 * n, 3 * n])
    assert tally.push_pull(b"\1\2\3", op=tally.Sum).tolist() == [n, 2 * n, 3 * n]
    with mmap.mmap(-1, 4096) as x:
        x[:4] = b"\1\1\1\1"
        tally.push_pull(x, op=tally.Sum)
        assert x[:5] == bytes([n] * 4 + [0])
    x = memoryview(bytearray(12)).cast("f")
    assert tally.push_pull(x) is x


def test_buffers(four):
    four(buffers)


class Exporter:
    """An array that speaks DLPack alone, in the version and manner that is asked for."""

    def __init__(self, tensor, versioned, device=None):
        self.tensor, self.versioned, self.device = tensor, versioned, device

    def __dlpack_device__(self):
        return self.device or self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument")
        return self.tensor.__dlpack__(**options)


def dlpack():
    import torch
    import tally
    n, r = tally.size(), tally.rank()
    for versioned in (False, True):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
                      torch.int32, torch.int64, torch.bool):
            x = torch.ones(2, 3, dtype=dtype)
            exporter = Exporter(x, versioned)
            try:
                x.__dlpack__()
            except RuntimeError:
                continue  # a PyTorch that cannot export truths
            assert tally.push_pull(exporter, op=tally.Sum) is exporter
            assert x.eq(1 if dtype == torch.bool else n).all(), dtype
    part = torch.zeros(10)
    tally.push_pull(Exporter(part[4:].fill_(1), False), op=tally.Sum)
    assert part.tolist() == [0] * 4 + [n] * 6
    scalar = torch.tensor(float(r))
    tally.push_pull(scalar, op=tally.Sum)
    assert scalar.item() == n * (n - 1) / 2
    for bad, kind, word in ((Exporter(torch.ones(3, 4).t(), True), ValueError, "contiguous"),
                            (Exporter(torch.ones(2), True, (2, 0)), NotImplementedError, "device"),
                            (Exporter(torch.zeros(2, dtype=torch.complex32), True), TypeError, "complex32")):
        fails(kind, lambda: tally.push_pull(bad, "bad"), word)
    if hasattr(np.ndarray, "__dlpack__"):
        class ReadOnly:
            def __init__(self, array):
                self.array = array

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)

        x = np.full(4, r, np.float32)
        x.flags.writeable = False
        try:
            x.__dlpack__(max_version=(1, 0))
        except (TypeError, BufferError):
            return  # a NumPy that cannot export it
        got = tally.push_pull(ReadOnly(x), op=tally.Sum)
        assert (got == n * (n - 1) / 2).all() and (x == r).all()


def test_dlpack(four):
    four(dlpack)


def bfloat16_numpy():
    import ml_dtypes
    import tally
    n = tally.size()
    x = np.ones(5, ml_dtypes.bfloat16)
    assert tally.push_pull(x, op=tally.Sum) is x and (x == n).all()
    x.flags.writeable = False
    assert (tally.push_pull(x, op=tally.Sum) == n * n).all()


def test_bfloat16_of_ml_dtypes(four):
    pytest.importorskip("ml_dtypes")
    four(bfloat16_numpy)


def jax_arrays():
    import jax.numpy as jnp
    import tally
    n, r = tally.size(), tally.rank()
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
        x = jnp.full((2, 3), r, dtype)
        y = tally.push_pull(x, op=tally.Sum)
        assert type(y) is type(x) and y.dtype == dtype and (y == n * (n - 1) // 2).all() and (x == r).all()


def test_jax(four):
    pytest.importorskip("jax")
    four(jax_arrays)

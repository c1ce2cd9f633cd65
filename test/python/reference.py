"""What the ranks must get, to the last bit: the balanced tree over ranks in plain NumPy.

float16 and bfloat16 are added in float32 and rounded once; bfloat16 travels here as its bits, uint16.  With several
ranks a machine each machine's ranks are a tree of their own, rounded too, and then the machines; one machine alone is
the tree over its ranks, rounded once.
"""

import numpy as np

INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = FLOATS + INTEGERS + ("bool",)
NAN = {"float32": (np.uint32, 0x7fc00000), "float64": (np.uint64, 0x7ff8000000000000),
       "float16": (np.uint16, 0x7e00), "bfloat16": (np.uint16, 0x7fc0)}


def widen(bits):
    """bfloat16's bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """float32 to bfloat16's bits, to nearest even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7fc0, rounded).astype(np.uint16)


def make(dtype, count, rank, seed, special=False):
    """Rank `rank`'s input: the same on whichever rank it is made."""
    random = np.random.default_rng([seed, rank, count])
    if dtype == "bool":
        return random.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)
    values = random.standard_normal(count) * 10.0 ** random.integers(-4, 4, count)
    if special and count:
        tiny = 1e-310 if dtype == "float64" else 1e-41 if dtype in ("float32", "bfloat16") else 1e-7
        picks = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, tiny, -tiny, 6e4])
        where = random.random(count) < 0.3
        values[where] = picks[random.integers(0, len(picks), int(where.sum()))]
    if dtype == "bfloat16":
        return narrow(values.astype(np.float32))
    return values.astype(dtype)


def _pick(a, b, smaller):
    """min or max: NaN wins, of equal values the first stays."""
    chosen = np.where(b < a, b, a) if smaller else np.where(b > a, b, a)
    if a.dtype.kind == "f":
        chosen = np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), chosen)
    return chosen


_COMBINE = {
    "Sum": lambda a, b: a + b,
    "Average": lambda a, b: a + b,
    "Product": lambda a, b: a * b,
    "Min": lambda a, b: _pick(a, b, True),
    "Max": lambda a, b: _pick(a, b, False),
}


def tree(inputs, combine):
    """T(0, n) of the design: T(lo, lo + m) + T(lo + m, hi), m the largest power of two below hi - lo."""
    if len(inputs) == 1:
        return inputs[0]
    m = 1 << ((len(inputs) - 1).bit_length() - 1)
    return combine(tree(inputs[:m], combine), tree(inputs[m:], combine))


def reduce(dtype, op, inputs, prescale=1.0, postscale=1.0, machines=None):
    """The result of `op` ("Sum", ...) over the ranks' inputs.  machines: their numbers of ranks; None: one each."""
    n = len(inputs)
    cuts = np.cumsum([0, *(machines if machines and len(machines) > 1 else [1] * n)])

    def total_of(values, combine, round_hop=lambda x: x):
        groups = [values[a:b] for a, b in zip(cuts, cuts[1:])]
        return tree([tree(g, combine) if len(g) == 1 else round_hop(tree(g, combine)) for g in groups], combine)

    with np.errstate(all="ignore"):
        if dtype == "bool":
            return total_of(inputs, np.logical_or if op in ("Sum", "Max") else np.logical_and)
        if dtype in INTEGERS:
            if prescale != 1 or postscale != 1:
                raise NotImplementedError("scaled integers")
            total = total_of(inputs, _COMBINE[op])
            if op == "Average":
                total = np.array([int(abs(int(x)) // n) * (1 if x >= 0 else -1) for x in total],
                                 dtype).reshape(total.shape)
            return total
        wide = np.float64 if dtype == "float64" else np.float32
        values = [(widen(x) if dtype == "bfloat16" else x.astype(wide)) for x in inputs]
        if prescale != 1:
            values = [x * wide(prescale) for x in values]
        hop = {"bfloat16": lambda x: widen(narrow(x)),
               "float16": lambda x: x.astype(np.float16).astype(np.float32)}.get(dtype, lambda x: x)
        total = total_of(values, _COMBINE[op], hop).astype(wide)
        if op == "Average":
            total = total / wide(n)
        if postscale != 1:
            total = total * wide(postscale)
        if dtype == "bfloat16":
            return narrow(total)
        result = total.astype(dtype)
    kind, pattern = NAN[dtype]
    bits = result.view(kind).copy()
    bits[np.isnan(result)] = pattern
    return bits.view(dtype)


def same(a, b):
    """Whether two arrays have the same bits; returns the number of elements that differ."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
    if a.size == 0:
        return 0
    a, b = (x.reshape(-1).view(np.uint8).reshape(-1, a.itemsize) for x in (a, b))
    return int((a != b).any(axis=1).sum())

"""Calls of the backend "tally" as chance has them: operation, type, shape, strides, group, in or out of turn, beside results
made in one process."""

import random

import pytest

from test_ddp import group

CALLS = 400
MEMBERS = ([0, 1, 2], [0, 1], [1, 2], [0, 2])


def draw(chance):
    """One call: what all ranks know of it."""
    import torch
    import torch.distributed as dist
    shape = tuple(chance.choice([1, 2, 3, 17]) for _ in range(chance.randrange(4)))
    some = chance.random()
    dtype = chance.choice([torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8,
                           torch.float16, torch.bfloat16, torch.bool, torch.complex64])
    fits = ["SUM"]
    if not dtype.is_complex:
        fits += ["MIN", "MAX", "PRODUCT"]
    if not dtype.is_complex and not dtype.is_floating_point:
        fits += ["BAND", "BOR", "BXOR"]
    group = chance.randrange(len(MEMBERS))
    return {"kind": chance.choice(sorted(KINDS)), "dtype": dtype, "group": group,
            "shape": (0, *shape) if some < 0.05 else (40000,) if some < 0.1 else shape,
            "op": chance.choice(fits if chance.random() < 0.5 else ["SUM"]), "root": chance.choice(MEMBERS[group]),
            "strides": chance.choice(["none", "none", "turned", "spread"]), "late": chance.random() < 0.4,
            "rows": [[chance.randrange(3) for _ in range(3)] for _ in range(3)], "seed": chance.randrange(1 << 40),
            "ReduceOp": dist.ReduceOp}


def made(call, shape, rank, number=0):
    """Rank `rank`'s input: small whole numbers, whose sums and products are exact in each type."""
    import torch
    source = torch.Generator().manual_seed(call["seed"] + 1000 * rank + number)
    dtype = call["dtype"]
    least = 0 if dtype in (torch.uint8, torch.bool) else -4
    return torch.randint(least, 2 if dtype == torch.bool else 5, shape, generator=source).to(dtype)


def laid_out(call, x):
    """The same numbers, lying otherwise in memory."""
    if call["strides"] == "turned" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if call["strides"] == "spread":
        wide = x.new_zeros((*x.shape, 2))
        wide[..., 0] = x
        return wide[..., 0]
    return x


def folded(call, inputs):
    """Their reduction; 16-bit floats are rounded once."""
    import torch
    op, dtype = call["op"], call["dtype"]
    ways = {"SUM": torch.add, "MIN": torch.minimum, "MAX": torch.maximum, "PRODUCT": torch.mul,
            "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    if dtype == torch.bool:
        ways.update(SUM=torch.logical_or, MAX=torch.logical_or, MIN=torch.logical_and, PRODUCT=torch.logical_and)
    wide = [x.float() if dtype in (torch.float16, torch.bfloat16) else x for x in inputs]
    result = wide[0]
    for x in wide[1:]:
        result = ways[op](result, x)
    return result.to(dtype)


# Each: (call, ranks, my place among them, function to call) -> (tensors, those expected in them).


def _all_reduce(c, ranks, me, do):
    x = laid_out(c, made(c, c["shape"], ranks[me]))
    do("all_reduce", x, op=getattr(c["ReduceOp"], c["op"]))
    return [x], [folded(c, [made(c, c["shape"], r) for r in ranks])]


def _reduce(c, ranks, me, do):
    x = laid_out(c, made(c, c["shape"], ranks[me]))
    do("reduce", x, c["root"], op=getattr(c["ReduceOp"], c["op"]))
    return ([x], [folded(c, [made(c, c["shape"], r) for r in ranks])]) if ranks[me] == c["root"] else ([], [])


def _broadcast(c, ranks, me, do):
    x = laid_out(c, made(c, c["shape"], ranks[me]))
    do("broadcast", x, c["root"])
    return [x], [made(c, c["shape"], c["root"])]


def _all_gather(c, ranks, me, do):
    x = laid_out(c, made(c, c["shape"], ranks[me]))
    out = [laid_out(c, made(c, c["shape"], 7)) for _ in ranks]
    do("all_gather", out, x)
    return out, [made(c, c["shape"], r) for r in ranks]


def _all_gather_into_tensor(c, ranks, me, do):
    import torch
    shape = c["shape"] or (1,)
    out = made(c, (shape[0] * len(ranks), *shape[1:]), 7)
    do("all_gather_into_tensor", out, laid_out(c, made(c, shape, ranks[me])))
    return [out], [torch.cat([made(c, shape, r) for r in ranks])]


def _reduce_scatter(c, ranks, me, do):
    out = laid_out(c, made(c, c["shape"], 7))
    do("reduce_scatter", out, [laid_out(c, made(c, c["shape"], ranks[me], n)) for n in range(len(ranks))],
       op=getattr(c["ReduceOp"], c["op"]))
    return [out], [folded(c, [made(c, c["shape"], r, me) for r in ranks])]


def _gather(c, ranks, me, do):
    mine = ranks[me] == c["root"]
    out = [laid_out(c, made(c, c["shape"], 7)) for _ in ranks] if mine else None
    do("gather", laid_out(c, made(c, c["shape"], ranks[me])), out, c["root"])
    return (out, [made(c, c["shape"], r) for r in ranks]) if mine else ([], [])


def _scatter(c, ranks, me, do):
    out = laid_out(c, made(c, c["shape"], 7))
    given = [laid_out(c, made(c, c["shape"], c["root"], n)) for n in range(len(ranks))]
    do("scatter", out, given if ranks[me] == c["root"] else None, c["root"])
    return [out], [made(c, c["shape"], c["root"], me)]


def _all_to_all_single(c, ranks, me, do):
    import torch
    places = range(len(ranks))
    parts = [[made(c, (c["rows"][a][b], *c["shape"]), ranks[a], b) for b in places] for a in places]
    gives, gets = [c["rows"][me][b] for b in places], [c["rows"][a][me] for a in places]
    out = made(c, (sum(gets), *c["shape"]), 7)
    do("all_to_all_single", out, torch.cat(parts[me]), gets, gives)
    return [out], [torch.cat([parts[a][me] for a in places])]


def _round_the_ranks(c, ranks, me, do):
    import torch.distributed as dist
    out, x = made(c, c["shape"], 7), made(c, c["shape"], ranks[me])
    do.waited(dist.isend(x, ranks[(me + 1) % len(ranks)], group=do.group, tag=3))
    do.waited(dist.irecv(out, ranks[me - 1], group=do.group, tag=3))
    return [out], [made(c, c["shape"], ranks[me - 1])]


KINDS = {one.__name__: one for one in (
    _all_reduce, _reduce, _broadcast, _all_gather, _all_gather_into_tensor, _reduce_scatter, _gather, _scatter,
    _all_to_all_single, _round_the_ranks)}


class Calls:
    """Makes calls in a group, and waits for what is under way when it is asked."""

    def __init__(self):
        self.group, self.late, self.works = None, False, []

    def waited(self, work):
        if self.late:
            self.works.append(work)
        else:
            work.wait()

    def __call__(self, name, *arguments, **more):
        import torch.distributed as dist
        self.waited(getattr(dist, name)(*arguments, group=self.group, async_op=True, **more))

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()


def wrong_results(path, seed):
    """The calls whose results are not as expected."""
    import torch
    import torch.distributed as dist
    import tally.torch
    chance, do, wrong, open_calls = random.Random(seed), Calls(), [], []
    with group("tally", path):
        groups = [dist.group.WORLD] + [dist.new_group(ranks) for ranks in MEMBERS[1:]]
        for number in range(CALLS):
            call = draw(chance)
            ranks = MEMBERS[call["group"]]
            if tally.rank() in ranks:
                do.group, do.late = groups[call["group"]], call["late"]
                open_calls.append((number, call, *KINDS[call["kind"]](call, ranks, ranks.index(tally.rank()), do)))
            if number % 7 == 6 or number == CALLS - 1:
                do.wait()
                wrong += [(number, call["kind"], call["dtype"], call["op"], call["shape"], call["strides"])
                          for number, call, got, expected in open_calls
                          if len(got) != len(expected) or not all(map(torch.equal, got, expected))]
                open_calls.clear()
    return [str(one) for one in wrong]


@pytest.mark.parametrize("job", ["three", "machine"])
def test_calls_as_chance_has_them(job, request, store):
    assert request.getfixturevalue(job)(wrong_results, store, 1) == [[], [], []]

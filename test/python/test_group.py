"""The backend "tally" of torch.distributed: each operation on each type against Gloo and against arithmetic."""

import gc
import re
import time

import pytest

import jobs
from test_ddp import group

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64",
          "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn")
REDUCTIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
MOVES = ("broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all", "all_to_all_single")
REDUCING = ("reduce", "reduce_scatter", "reduce_scatter_tensor")
MESSAGES = ("send_recv", "recv_any")


# --- on the ranks ----------------------------------------------------------------------------------------------


def make(dtype, rank, seed=0, shape=(2, 3)):
    """Small whole numbers, exact in every type and in every order of addition."""
    import torch
    generator = torch.Generator().manual_seed(100 * seed + rank)
    numbers = torch.randint(0, 4, shape, generator=generator)
    kind = getattr(torch, dtype)
    if kind.is_complex:
        return torch.complex(numbers.double(), torch.randint(0, 4, shape, generator=generator).double()).to(kind)
    return numbers.to(kind)


def bits(tensor):
    """What a tensor holds, comparable in every type.  (Gloo's sum of truths leaves other bytes than 0 and 1.)"""
    import torch
    held = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return (held != 0 if tensor.dtype is torch.bool else held).tolist()


def reduced(reduction, tensors):
    """The reduction by arithmetic on wide types."""
    import functools
    import torch
    dtype = tensors[0].dtype
    if dtype is torch.bool:
        one = {"SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or, "MIN": torch.logical_and,
               "PRODUCT": torch.logical_and, "BAND": torch.logical_and, "BXOR": torch.logical_xor}[reduction]
        return functools.reduce(one, tensors)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([tensor.to(wide) for tensor in tensors])
    if reduction == "AVG":
        total = stack.sum(0)
        if wide is torch.int64:
            return torch.div(total, len(tensors), rounding_mode="trunc").to(dtype)
        return torch.view_as_complex(torch.view_as_real(total) / len(tensors)).to(dtype) if dtype.is_complex else (
            (total / len(tensors)).to(dtype))
    if reduction in ("MIN", "MAX"):
        return getattr(stack, "a" + reduction.lower())(0).to(dtype)
    one = {"SUM": torch.add, "PRODUCT": torch.mul, "BAND": torch.bitwise_and, "BOR": torch.bitwise_or,
           "BXOR": torch.bitwise_xor}[reduction]
    return functools.reduce(one, stack.unbind()).to(dtype)


def joined(tensors):
    """torch.cat(), which does not know all types in an older PyTorch."""
    import torch
    if tensors[0].element_size() > 1:
        return torch.cat(tensors)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


def perform(operation, dtype, group, strided=False):
    """Run one operation; returns (its results, what they must be)."""
    import torch
    import torch.distributed as dist
    rank, size = dist.get_rank(), dist.get_world_size()
    name, _, reduction = operation.partition(" ")
    inputs = [[make(dtype, r, seed) for seed in range(size)] for r in range(size)]  # [rank][to whom]
    mine = [tensor.clone() for tensor in inputs[rank]]
    if strided:
        mine = [tensor.t().contiguous().t() for tensor in mine]
    empty = [torch.zeros_like(tensor) for tensor in mine]
    op = getattr(dist.ReduceOp, reduction) if reduction else None
    root = 1
    if name == "all_reduce":
        dist.all_reduce(mine[0], op, group=group)
        return mine[:1], lambda: [reduced(reduction, [one[0] for one in inputs])]
    if name == "reduce":
        dist.reduce(mine[0], root, op, group=group)
        return mine[:1] if rank == root else [], lambda: (
            [reduced(reduction, [one[0] for one in inputs])] if rank == root else [])
    if name == "reduce_scatter":
        dist.reduce_scatter(empty[0], mine, op, group=group)
        return empty[:1], lambda: [reduced(reduction, [one[rank] for one in inputs])]
    if name == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(empty[0], joined(mine), op, group=group)
        return empty[:1], lambda: [reduced(reduction, [one[rank] for one in inputs])]
    if name == "broadcast":
        dist.broadcast(mine[0], root, group=group)
        return mine[:1], lambda: [inputs[root][0]]
    if name == "all_gather":
        dist.all_gather(empty, mine[0], group=group)
        return empty, lambda: [one[0] for one in inputs]
    if name == "all_gather_into_tensor":
        whole = joined(empty)
        dist.all_gather_into_tensor(whole, mine[0], group=group)
        return [whole], lambda: [joined([one[0] for one in inputs])]
    if name == "gather":
        dist.gather(mine[0], empty if rank == root else None, root, group=group)
        return empty if rank == root else [], lambda: [one[0] for one in inputs] if rank == root else []
    if name == "scatter":
        dist.scatter(empty[0], mine if rank == root else None, root, group=group)
        return empty[:1], lambda: [inputs[root][rank]]
    if name == "all_to_all":
        dist.all_to_all(empty, mine, group=group)
        return empty, lambda: [one[rank] for one in inputs]
    if name == "all_to_all_single":
        whole = joined(empty)
        dist.all_to_all_single(whole, joined(mine), group=group)
        return [whole], lambda: [joined([one[rank] for one in inputs])]
    if name == "send_recv":
        before = (rank - 1) % size
        work = dist.isend(mine[0], (rank + 1) % size, group=group, tag=7)
        dist.recv(empty[0], before, group=group, tag=7)
        work.wait()
        return empty[:1], lambda: [inputs[before][0]]
    if rank != root:
        dist.send(mine[0], root, group=group, tag=8)
        dist.barrier(group)  # or one rank's next is taken for another's
        return [], list
    senders = [dist.recv(one, group=group, tag=8) for one in empty[:size - 1]]
    dist.barrier(group)
    pairs = sorted(zip(senders, empty), key=lambda pair: pair[0])
    return [one for _, one in pairs], lambda: [inputs[one][0] for one in range(size) if one != root]


def operations():
    return ["all_reduce " + one for one in REDUCTIONS] + [one + " SUM" for one in REDUCING] + [*MOVES, *MESSAGES]


def survey(path):
    """{operation: a mark for each type}, and what is wrong."""
    import torch
    import torch.distributed as dist
    import tally.torch  # noqa: F401 - it registers the backend
    marks, wrong = {}, []
    with group("gloo", path):
        ours = dist.new_group(backend="tally")
        for operation in operations():
            for dtype in DTYPES:
                if not hasattr(torch, dtype):
                    continue
                try:
                    with_gloo = [bits(one) for one in perform(operation, dtype, None)[0]]
                except Exception:  # whatever Gloo says to it
                    with_gloo = None
                try:
                    results, expected = perform(operation, dtype, ours)
                except NotImplementedError:
                    mark = "-"
                except (ValueError, RuntimeError) as error:  # by torch, before any backend sees it
                    mark = "-"
                    if "complex tensors" not in str(error):
                        wrong.append((operation, dtype, str(error)))
                else:
                    mark = "+" if with_gloo is None else "x"
                    results, expected = [bits(one) for one in results], [bits(one) for one in expected()]
                    if results != expected:
                        wrong.append((operation, dtype, results, expected))
                    if with_gloo not in (None, results):
                        wrong.append((operation, dtype, results, "gloo", with_gloo))
                marks[operation] = marks.get(operation, "") + mark
        for operation in operations():
            results, expected = perform(operation, "int32", ours, strided=True)
            if [one.tolist() for one in results] != [one.tolist() for one in expected()]:
                wrong.append((operation, "strided"))
    return marks, wrong


def table(marks):
    """The survey as docs/pytorch.md shows it."""
    lines = ["| operation | %s |" % " | ".join(DTYPES), "|---" * (len(DTYPES) + 1) + "|"]
    for operation, row in marks.items():
        names = {"send_recv": "send, recv", "recv_any": "recv from any"}
        words = [{"x": "yes", "+": "more", "-": "no"}[mark] for mark in row]
        lines.append("| %s | %s |" % (names.get(operation, operation), " | ".join(words)))
    return lines


def documented():
    """{operation: "x" or "-" for each type that this PyTorch has}, as docs/pytorch.md says it."""
    import torch
    document = (jobs.ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split(" | ")[0][2:]: line.strip("| ").split(" | ")[1:] for line in document if line.startswith("| ")}
    names = {"send_recv": "send, recv", "recv_any": "recv from any"}
    return {operation: "".join("-" if word == "no" else "x" for word, dtype
                               in zip(rows[names.get(operation, operation)], DTYPES) if hasattr(torch, dtype))
            for operation in operations()}


def test_operations(three, store):
    """Right where the document says so, and refused where it says that."""
    import torch
    surveys = three(survey, store)
    assert [wrong for _, wrong in surveys] == [[]] * 3
    assert surveys[0][0] == surveys[1][0] == surveys[2][0]
    assert {operation: row.replace("+", "x") for operation, row in surveys[0][0].items()} == documented()
    pinned = (jobs.ROOT / "requirements-torch.txt").read_text(encoding="utf-8").splitlines()
    if "torch==" + torch.__version__.split("+")[0] not in pinned:
        return  # what Gloo takes is another matter in each PyTorch
    document = (jobs.ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8").splitlines()
    written = [line for line in document if line.startswith(("| operation", "|---|---|---|---|---", "| all_reduce")) or
               line.split(" | ")[0][2:] in surveys[0][0] or line.startswith(("| send, recv", "| recv from any"))]
    assert written == table(surveys[0][0]), "docs/pytorch.md needs:\n" + "\n".join(table(surveys[0][0]))


# --- calls that do not fit together ----------------------------------------------------------------------------


def said(call):
    """The error that a call ends with."""
    try:
        call()
        return "nothing"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return "%s: %s" % (type(error).__name__, error)


def factored(path, seed=None):
    """What PREMUL_SUM gives, by call and type: [(case, result, what it must be)]; and what ranks with other factors hear."""
    import contextlib
    import fake_device
    import tally.torch
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _make_nccl_premul_sum
    from torch.distributed.distributed_c10d import _coalescing_manager
    rank, size, found = tally.rank(), tally.size(), []
    device, put, read = contextlib.nullcontext(), lambda tensor: tensor, lambda tensor: tensor
    if seed is not None:
        device, put, read = fake_device.install(seed, 1 << 12, 1 << 19), fake_device.tensor, fake_device.read

    def note(case, tensors, number):
        found.extend((case, read(tensor).flatten().tolist(), [number] * tensor.numel()) for tensor in tensors)

    with device, group("tally", path):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32):
            for factor in (0.5, torch.tensor(0.25)):
                op, number = _make_nccl_premul_sum(factor), float(factor)
                # Inputs of 8, 16 and 24; the type's range of whole numbers is enough.
                total = number * 8 * size * (size + 1) // 2

                def mine(*shape):
                    return put(torch.full(shape, 8 * (rank + 1), dtype=dtype))

                def empty(count):
                    return put(torch.zeros(count, dtype=dtype))

                x, ys = mine(5000), [mine(3), mine(2)]
                dist.all_reduce(x, op)
                note("all_reduce", [x], total)
                several = [mine(4), mine(4)]
                dist.group.WORLD.allreduce(several, op).wait()
                note("allreduce of a list", several, 2 * total)
                x = mine(3)
                dist.reduce(x, 1, op)
                note("reduce", [x][:rank == 1], total)
                x, y = empty(4), empty(4)
                dist.reduce_scatter(x, [mine(4) for _ in range(size)], op)
                dist.reduce_scatter_tensor(y, mine(4 * size), op)
                note("reduce_scatter", [x, y], total)
                with _coalescing_manager():
                    for y in ys:
                        dist.all_reduce(y, op)
                zs = [empty(2), empty(3)]
                with _coalescing_manager():
                    for z in zs:
                        dist.reduce_scatter_tensor(z, mine(z.numel() * size), op)
                note("coalesced", [*ys, *zs], total)
        told = said(lambda: dist.all_reduce(torch.ones(3), _make_nccl_premul_sum(1.0 + rank)))
        refused = [said(lambda: dist.all_reduce(tensor, _make_nccl_premul_sum(factor))) for tensor, factor in (
            (torch.ones(3), 0.0), (torch.ones(3, dtype=torch.bool), 0.5), (torch.eye(3).to_sparse(), 0.5))]
        dist.all_reduce(torch.ones(3))
    return found, told, refused


@pytest.mark.parametrize("seed", [None, 1])
def test_sums_with_a_factor(three, store, seed):
    for found, told, refused in three(factored, store, seed, timeout=300):
        assert len(found) >= 12 * 9 and [case for case, given, right in found if given != right] == []
        assert "the ranks disagree" in told and "prescale 2" in told
        assert "PREMUL_SUM" in refused[0] and "PREMUL_SUM" in refused[2] and "booleans" in refused[1], refused


def mismatches(path):
    """{case: what this rank was told}; rank 1 does something else each time, then all do the same."""
    import tally.torch
    import torch
    import torch.distributed as dist
    odd = tally.rank() == 1
    told = {}
    with group("tally", path):
        def each(case, call):
            told[case] = said(call)
            x = torch.ones(5)
            dist.all_reduce(x)
            assert x.tolist() == [3] * 5, case

        def gather(count):
            dist.all_gather([torch.zeros(4) for _ in range(3)] if not odd else
                            [torch.zeros(count) for _ in range(3)], torch.ones(count if odd else 4))

        kinds = (torch.int8, torch.float8_e4m3fn)

        def several(call):
            """A call of two tensors on some ranks and of one on another; the next ones meet."""
            call([torch.ones(4)] if odd else [torch.ones(2), torch.ones(2)]).wait()

        each("count", lambda: dist.all_reduce(torch.ones(4 + odd)))
        each("type", lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)))
        each("reduction", lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM))
        each("root", lambda: dist.broadcast(torch.ones(4), int(odd)))
        each("seen as another type", lambda: dist.group.WORLD.allreduce(
            [torch.ones(4, dtype=torch.complex64) if odd else torch.ones(4, 2)]).wait())
        each("bytes", lambda: dist.all_gather([torch.ones(4).to(kinds[odd]) for _ in range(3)],
                                              torch.ones(4).to(kinds[odd])))
        each("count of a broadcast", lambda: dist.broadcast(torch.ones(2 + odd, 3), 0))
        each("count of pieces", lambda: dist.reduce_scatter_tensor(torch.ones(2 + odd, 3), torch.ones(6 + 3 * odd, 3)))
        each("count at a root", lambda: dist.reduce(torch.ones(2 + odd, 3), 0))
        each("gathered count", lambda: dist.gather(
            torch.ones(2 + odd, 3), [torch.ones(2, 3) for _ in range(3)] if tally.rank() == 0 else None, 0))
        each("scattered count", lambda: dist.scatter(
            torch.ones(2 + odd, 3), [torch.ones(2, 3) for _ in range(3)] if tally.rank() == 0 else None, 0))
        world = dist.group.WORLD
        each("numbers of tensors", lambda: several(world.allreduce_coalesced))
        each("numbers of pieces", lambda: several(lambda xs: world.reduce_scatter_tensor_coalesced(
            xs, [torch.ones(3 * x.numel()) for x in xs])))
        each("numbers of gathered", lambda: several(lambda xs: world.allgather_into_tensor_coalesced(
            [torch.ones(3 * x.numel()) for x in xs], xs)))

        def seventh(shapes):
            """A call of tensors of the shapes, of which on some rank the seventh is longer, and the eighth is shorter."""
            shapes = [(rows + odd * ((place == 6) - (place == 7)), width) for place, (rows, width) in enumerate(shapes)]
            world.allgather_into_tensor_coalesced([torch.ones(3 * a * b) for a, b in shapes],
                                                  [torch.ones(shape) for shape in shapes]).wait()

        each("seventh of equals", lambda: seventh([(3, 2)] * 10))
        each("seventh of others", lambda: seventh([(1000 + place, 10) for place in range(10)]))
        each("seventh of many", lambda: seventh([(100 + place, 2) for place in range(1000)]))

        def sparse(*shape, dims=1):
            places = torch.zeros(dims, 1, dtype=torch.int64)
            dist.all_reduce(torch.sparse_coo_tensor(places, torch.ones(1, *shape[dims:]), shape, check_invariants=True))

        each("length of a sparse tensor", lambda: sparse(4 + odd))
        each("dimensions of a sparse tensor", lambda: sparse(4, 3, dims=1 + odd))
        each("sparse and dense", lambda: sparse(4) if odd else dist.all_reduce(torch.ones(4)))
        each("call", lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(4)))
        each("other call", lambda: dist.broadcast(torch.ones(4), 0) if odd else gather(4))
        each("lengths", lambda: gather(5))
        each("refused", lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND if odd else dist.ReduceOp.SUM))
        each("layout", lambda: dist.all_reduce(torch.eye(2).to_sparse_csr() if odd else torch.ones(4)))
        each("splits", lambda: dist.all_to_all_single(torch.ones(6), torch.ones(6), [2, 2, 2],
                                                      [1, 2, 3] if odd else [2, 2, 2]))
        each("coalesced", lambda: dist.group.WORLD.allreduce_coalesced(
            [torch.ones(4), torch.ones(4).to(torch.float8_e4m3fn if odd else torch.float32), torch.ones(2)]).wait())
    return told


def test_calls_that_differ(three, store):
    told = three(mismatches, store)
    for case in ("count", "type", "reduction", "root", "seen as another type", "bytes", "count of a broadcast",
                 "count of pieces", "count at a root", "numbers of tensors", "numbers of pieces", "numbers of gathered",
                 "seventh of equals", "seventh of others", "seventh of many", "length of a sparse tensor",
                 "dimensions of a sparse tensor", "sparse and dense", "call", "other call", "lengths"):
        for one in told:
            assert "Error: " in one[case] and "disagree" in one[case] and "rank 1" in one[case], (case, one[case])
    for one in told:
        for meant in ("10 tensors: float32 [6] x10)", "10 tensors: float32 [6] x6 [8] [4] [6] x2)"):
            assert meant in one["seventh of equals"], one["seventh of equals"]
        for case, count, differ in (("seventh of others", "10 tensors, digests after each", [False] * 6 + [True] * 4),
                                    ("seventh of many", "1000 tensors, digests after every 100", [True] * 10)):
            lists = [digests.split() for digests in re.findall(count + ": ([0-9a-f ]+)", one[case])]
            assert [ours != others for ours, others in zip(*lists, strict=True)] == differ, one[case]
    for one in (told[0], told[2]):
        assert "rank 1 refuses" in one["refused"] and "BAND" in one["refused"], one["refused"]
        assert "rank 1 refuses" in one["layout"] and "sparse_csr" in one["layout"], one["layout"]
        assert "rank 1 refuses" in one["coalesced"] and "float8" in one["coalesced"], one["coalesced"]
    for one in told:
        assert "rank 1 gives rank 0 1 elements, and 2 are expected" in one["splits"], one["splits"]
        assert "rank 1 gives rank 0 9 elements, and 6 are expected" in one["gathered count"], one["gathered count"]
        assert "rank 0 gives rank 1 6 elements, and 9 are expected" in one["scattered count"], one["scattered count"]
        assert re.fullmatch(r"\w*Error: all_gather no\. \d+: the ranks disagree: float32 \[4\] on ranks 0, 2, "
                            r"\[5\] on rank 1 \(\S*test_group\.py:\d+\)", one["lengths"]), one["lengths"]
    assert told[1]["refused"].startswith("NotImplementedError: all_reduce: BAND"), told[1]["refused"]
    assert told[1]["layout"].startswith("NotImplementedError"), told[1]["layout"]


def unlike_shapes(path):
    """{call: what Gloo and we make of it where rank 1's tensors have as many elements in another shape, and we where all
    have one shape}; None: not asked."""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank, size, results = tally.rank(), 3, {}

    def calls(shape, gloo):
        def x(seed=0):
            count = torch.Size(shape).numel()
            return (torch.arange(count) + 10. * rank + seed).reshape(shape)

        def each():
            return [x(seed) for seed in range(size)]

        world, root, a, b = dist.group.WORLD, rank == 1, x(), x(1)
        yield "all_reduce", dist.all_reduce(a), [a]
        yield "broadcast", dist.broadcast(b, 1), [b]
        a, b, lists = x(), x(), each()
        yield "reduce", dist.reduce(a, 1), [a] * root
        yield "all_gather", dist.all_gather(lists, x()), lists
        yield "gather", dist.gather(x(), lists if root else None, 1), lists
        yield "scatter", dist.scatter(b, each() if root else None, 1), [b]
        yield "reduce_scatter", dist.reduce_scatter(b, each()), [b]
        if gloo:  # the others insist on shapes that suit another, or crash
            return
        whole, more = torch.zeros(2, size * a.numel())
        parts = torch.stack(each())
        yield "all_gather_into_tensor", dist.all_gather_into_tensor(whole, x()), [whole]
        yield "reduce_scatter_tensor", dist.reduce_scatter_tensor(b, parts), [b]
        a, b = x(), x(1)
        apart = torch.stack([a, b], -1)[..., 0]
        yield "of a copy", dist.all_reduce(apart), [apart]
        yield "allreduce_coalesced", world.allreduce_coalesced([a, b]).wait(), [a, b]
        with dist._coalescing_manager(world):
            for one in (a, b):
                dist.all_reduce(one)
        yield "together", None, [a, b]
        lists = [each() for _ in range(size)]
        yield "allgather_coalesced", world.allgather_coalesced(lists, each()).wait(), sum(lists, [])
        yield "into tensors", world.allgather_into_tensor_coalesced([whole, more], [x(), x(1)]).wait(), [whole, more]
        yield "scatter tensors", world.reduce_scatter_tensor_coalesced([a, b], [parts, parts + 1]).wait(), [a, b]

    shapes = ((2, 3), (6,)), ((), (1,)), ((3, 2), (2, 3))
    for backend, unlike in (("gloo", True), ("tally", True), ("tally", False)):
        with group(backend, path + backend + str(unlike)):
            for one, other in shapes:
                for name, _, tensors in calls(other if rank == 1 and unlike else one, backend == "gloo"):
                    flat = [tensor.reshape(-1).tolist() for tensor in tensors]
                    results.setdefault((name, one), {})[backend, unlike] = flat
    return results


def test_equal_counts_in_other_shapes(three, store):
    for rank, results in enumerate(three(unlike_shapes, store)):
        assert len(results) == 3 * 15
        for call, told in results.items():
            wanted = told["tally", False]
            assert all(one == wanted for one in told.values()), (rank, call, told)


def lines(path):
    """{operation: what this rank was told}, with another type on rank 1."""
    import tally.torch
    import torch.distributed as dist
    with group("tally", path):
        return {one: said(lambda: perform(one, "int32" if tally.rank() == 1 else "float32", dist.group.WORLD))
                for one in ("all_reduce SUM", *(one + " SUM" for one in REDUCING), *MOVES)}


def test_lines_of_calls_that_differ(three, store):
    """Each error has this file's line, whatever torch wraps the operation in."""
    for told in three(lines, store):
        for operation, sentence in told.items():
            assert re.search(r"rank 1 \(\S*test_group\.py:\d+\)$", sentence), (operation, sentence)


def test_lists_that_look_alike():
    """Of more of them than the short digests can tell apart."""
    import torch
    from tally.torch.group.vectors import _SHOWN, _list_note
    tensors = [torch.empty(length, 1) for length in range(30)]
    notes = {_list_note([*tensors, torch.empty(length)]) for length in range(5000)}
    assert len(notes) == 5000 and max(map(len, notes)) <= 2 * _SHOWN


def several_at_once(path):
    """Coalesced calls, whose tensors go as one vector: of other shapes, strides and, where they are moved, types."""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank = tally.rank()
    with group("tally", path):
        world = dist.group.WORLD

        def inputs(r=rank):
            return [torch.arange(6.0).view(2, 3).t() + r, torch.full((), r, dtype=torch.complex64).conj(),
                    torch.tensor([True, False, r == 1]), torch.zeros(0), torch.full((2,), r, dtype=torch.int16)]

        def like(tensors):
            return [torch.zeros_like(one) for one in tensors]

        def same(ours, wanted):
            assert all(torch.equal(one, other) for one, other in zip(ours, wanted, strict=True)), (ours, wanted)

        everyone = [inputs(r) for r in range(3)]
        each = [[one[place] for one in everyone] for place in range(5)]
        lists = [like(inputs()) for _ in range(3)]
        world.allgather_coalesced(lists, inputs()).wait()
        for ours, wanted in zip(lists, everyone):
            same(ours, wanted)
        tensors = [one.contiguous() for one in inputs()]
        flat = [torch.zeros(3 * one.numel(), dtype=one.dtype) for one in tensors]
        world.allgather_into_tensor_coalesced(flat, tensors).wait()
        same(flat, [torch.cat([one.reshape(-1) for one in ones]) for ones in each])

        for kind in (torch.float32, torch.complex64, getattr(torch, "uint16", torch.int16)):
            def numbers(r=rank):
                return [torch.arange(6).view(2, 3).t().to(kind), torch.full((3, 1), 2 + r).to(kind),
                        torch.ones(()).to(kind)]

            sums = [torch.stack(ones).to(torch.complex64).sum(0).to(kind)
                    for ones in zip(*(numbers(r) for r in range(3)))]
            own = numbers()
            world.allreduce_coalesced(own).wait()
            same(own, sums)
            own = like(numbers())
            world.reduce_scatter_tensor_coalesced(own, [torch.stack([torch.roll(one, r) for r in range(3)])
                                                        for one in numbers()]).wait()
            same(own, [torch.roll(one, rank) for one in sums])
    return True


def test_several_tensors_at_once(three, store):
    assert three(several_at_once, store) == [True] * 3


def lists_of_tensors(path):
    """{call: what Gloo's and our group make of a list of several tensors, and of options that are left out}."""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank, results = tally.rank(), {}

    def pair(dtype):
        return [torch.tensor([rank + 1, 2 * rank + 3]).to(dtype).repeat(2, 1).t(),
                torch.tensor([rank + 2, 2]).to(dtype).repeat(2, 1).t()]

    def options(kind, **fields):
        made = kind()
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    with group("gloo", path):
        for backend, one in (("gloo", dist.group.WORLD), ("tally", dist.new_group(backend="tally"))):
            def note(call, *tensors):
                results.setdefault(call, {})[backend] = [tensor.tolist() for tensor in tensors]

            for operator, dtype in [(name, dtype) for name in ("SUM", "PRODUCT", "MIN", "MAX") for dtype in
                                    (torch.float32, torch.float16, torch.int32, torch.bool)] + [
                                        ("SUM", torch.complex64), ("BAND", torch.int32), ("BXOR", torch.uint8)]:
                own = pair(dtype)
                one.allreduce(own, options(dist.AllreduceOptions, reduceOp=getattr(dist.ReduceOp, operator))).wait()
                note(("allreduce", operator, dtype), *own)
            own = [torch.sparse_coo_tensor([[place, rank]], [1.0, rank], (4,), check_invariants=True)
                   for place in (1, 3)]
            one.allreduce(own).wait()
            note("allreduce of sparse ones", *[tensor.to_dense() for tensor in own])
            for root, place in ((0, 0), (2, 1)):
                own = pair(torch.float32)
                one.broadcast(own, options(dist.BroadcastOptions, rootRank=root, rootTensor=place)).wait()
                note(("broadcast", root, place), *own)
            own = [torch.full((2,), 10.0 * rank + place) for place in range(2)]
            outputs = [[torch.zeros(2) for _ in range(6)] for _ in range(2)]
            one.allgather(outputs, own).wait()
            note("allgather", *outputs[0], *outputs[1])

            x = torch.full((2,), float(rank))
            one.broadcast([x]).wait()
            note("broadcast's defaults", x)
            x = torch.full((2,), rank + 1.0)
            one.reduce([x]).wait()
            note("reduce's defaults", *([x] if rank == 0 else []))
            pieces = [torch.zeros(2) for _ in range(3)]
            one.gather([pieces] if rank == 0 else [], [torch.full((2,), float(rank))]).wait()
            note("gather's defaults", *pieces)
            one.scatter([x], [[torch.full((2,), 5.0 + r) for r in range(3)]] if rank == 0 else []).wait()
            note("scatter's defaults", x)
            one.reduce_scatter([x], [[torch.full((2,), rank + r) for r in (1.0, 2.0, 3.0)]]).wait()
            note("reduce_scatter's defaults", x)
        # Where Gloo averages the first tensor and leaves a sum in the second.
        told = said(lambda: one.allreduce([torch.ones(2), torch.ones(2)],
                                          options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)).wait())
    return results, told


def test_lists_of_tensors(three, store):
    """The same numbers as Gloo's."""
    for results, told in three(lists_of_tensors, store):
        assert len(results) == 28
        for call, of in results.items():
            assert of["tally"] == of["gloo"], call
        assert told == "NotImplementedError: all_reduce: AVG of several tensors is not supported"


def bad_lists(path):
    """{call: (what it must say, what Gloo's group says, what ours does)}"""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank, size = tally.rank(), 3
    x, double, longer = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    sparse, longer_sparse = (torch.sparse_coo_tensor([[0]], [1.0], (n,), check_invariants=True) for n in (1, 4))
    other = (rank + 1) % size

    def options(kind, root, tensor=None):
        made = getattr(dist, kind + "Options")()
        made.rootRank = root
        if tensor is not None:
            made.rootTensor = tensor
        return made

    def broadcast(tensors, *where):
        return lambda one: one.broadcast(tensors, options("Broadcast", *where))

    def reduce(tensors, *where):
        return lambda one: one.reduce(tensors, options("Reduce", *where))

    def scatter(outputs, inputs, root):
        return lambda one: one.scatter(outputs, inputs, options("Scatter", root))

    def gather(outputs, inputs, root):
        return lambda one: one.gather(outputs, inputs, options("Gather", root))

    def allgather(outputs, inputs):
        return lambda one: one.allgather(outputs, inputs)

    kind, length = "invalid tensor type", "invalid tensor size"
    wrong_input, wrong_output = ("Incorrect %s list size %d" % one for one in (("input", 2), ("output", 4)))
    cases = [
        ("invalid root rank: -1", broadcast([x], -1)), ("invalid root rank: 3", broadcast([x], size)),
        ("invalid root tensor: -1", broadcast([x], rank, -1)), ("invalid root tensor: 1", broadcast([x], rank, 1)),
        (kind, broadcast([x, double], 0)), (length, broadcast([x, longer], 0)),
        (kind, lambda one: one.allreduce([x, double])), (length, lambda one: one.allreduce([x, longer])),
        ("invalid tensor layout at index 1", lambda one: one.allreduce([x, sparse])),
        (length, lambda one: one.allreduce([sparse, longer_sparse])),
        ("tensors must all have the same type", lambda one: one.allreduce_coalesced([x, double])),
        ("invalid root rank: -1", reduce([x], -1)), ("invalid root rank: 3", reduce([x], size)),
        ("invalid root tensor: 1", reduce([x], rank, 1)),
        ("requires a single-element tensor list", reduce([x, x], rank)),
        ("invalid root rank: -1", scatter([x], [], -1)),
        ("requires a single-element output tensor list", scatter([x, x], [], 0)),
        ("requires a single-element input list", scatter([x], [], rank)),
        ("requires a single-element input list", scatter([x], [[x] * size] * 2, rank)),
        (wrong_input, scatter([x], [[x] * 2], rank)),
        (kind, scatter([x], [[double] * size], rank)), (length, scatter([x], [[longer] * size], rank)),
        ("requires empty input on non-root", scatter([x], [[x] * size], other)),
        ("invalid root rank: 3", gather([], [x], size)),
        ("requires a single-element input tensor list", gather([], [x, x], 0)),
        ("requires a single-element output list", gather([], [x], rank)),
        ("requires a single-element output list", gather([[x] * size] * 2, [x], rank)),
        (wrong_output, gather([[x] * 4], [x], rank)),
        (kind, gather([[double] * size], [x], rank)), (length, gather([[longer] * size], [x], rank)),
        ("requires empty output on non-root", gather([[x] * size], [x], other)),
        ("to have the same length", allgather([], [x])), ("to have the same length", allgather([[x] * size] * 2, [x])),
        ("invalid output tensor list at index 0 (expected length 3, got 2)", allgather([[x] * 2], [x])),
        ("invalid output tensor list at index 0 (expected length 3, got 4)", allgather([[x] * 4], [x])),
        (kind, allgather([[x] * 2 * size] * 2, [x, double])), (length, allgather([[x] * 2 * size] * 2, [x, longer])),
        (kind, allgather([[x, double, x]], [x])), (length, allgather([[x, longer, x]], [x])),
        ("invalid size of output tensor at index 0",
         lambda one: one.allgather_coalesced([[longer], [x], [x]], [x])),
        (kind, lambda one: one.allgather_coalesced([[double], [x], [x]], [x])),
        ("output lists should be equal to world size", lambda one: one.allgather_coalesced([[x]] * 4, [x]))]
    # Of these Gloo does not see any: torch finds no tensor in them.
    empty = [("invalid root tensor", broadcast([], 0)), ("non-empty tensor list", lambda one: one.allreduce([])),
             ("non-empty tensor list", lambda one: one.allreduce_coalesced([])),
             ("single-element output tensor list", scatter([], [], 0)),
             ("single-element input tensor list", gather([], [], 0)), ("non-empty input tensor list", allgather([], []))]
    told = []
    with group("gloo", path):
        ours = dist.new_group(backend="tally")
        for words, call in cases + empty:
            told.append((words, [said(lambda: call(one).wait()) for one in (dist.group.WORLD, ours)]))
            dist.all_reduce(y := torch.ones(2), group=ours)
            assert y.tolist() == [3, 3], words
    return told, len(cases)


def test_lists_that_are_refused(three, store):
    """Where Gloo refuses them, in the words that torch's own tests look for."""
    for told, seen in three(bad_lists, store):
        for words, (with_gloo, ours) in told:
            assert ours.startswith("RuntimeError: ") and words in ours, (words, ours)
        for words, (with_gloo, _) in told[:seen]:
            assert with_gloo.startswith("RuntimeError: ") and words in with_gloo, (words, with_gloo)


def odd_tensors(path):
    """One number out of a row, a row that stands for many, sparse tensors of one place, and of none."""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank = tally.rank()
    with group("tally", path):
        number = torch.full((4, 2), rank, dtype=torch.complex64)[:1, 0]
        dist.broadcast(number, 2)
        assert number.tolist() == [2]
        number, whole = torch.full((4, 2), float(rank))[:1, 0], torch.zeros(3)
        flags = torch.zeros(3, dtype=torch.int16)
        dist.group.WORLD.allgather_into_tensor_coalesced(
            [whole, flags], [number, torch.ones(1, dtype=torch.int16)]).wait()
        assert whole.tolist() == [0, 1, 2] and flags.tolist() == [1] * 3
        row = torch.full((1,), 7.0).expand(4) if rank == 0 else torch.zeros(4)
        dist.broadcast(row, 0)
        assert row.tolist() == [7] * 4
        places = torch.full((1, 3), rank)  # coalesced it is one place, whose stride is 3
        sparse = torch.sparse_coo_tensor(places, torch.ones(3, 2), (4, 2), check_invariants=True)
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [[3, 3]] * 3 + [[0, 0]]
        sparse = torch.sparse_coo_tensor(torch.zeros((0, 1), dtype=torch.int64), torch.ones(1, 4), (4,),
                                         check_invariants=True)
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [3] * 4
        sparse = torch.sparse_coo_tensor(torch.zeros((0, 1), dtype=torch.int64), torch.ones(1, 0), (0,),
                                         check_invariants=True)
        dist.all_reduce(sparse)  # not a byte
        assert sparse.shape == (0,)
    return True


def test_odd_tensors(three, store):
    assert three(odd_tensors, store) == [True] * 3


def in_inference_mode(path):
    """Sums that end in another thread, which has no inference mode, of tensors whose numbers do not lie in a row."""
    import torch
    import torch.distributed as dist
    with group("tally", path), torch.inference_mode():
        rank, size = dist.get_rank(), dist.get_world_size()
        column = (torch.ones(4, 3) * (rank + 1))[:, 1]
        image = (torch.ones(2, 3, 2, 2) * (rank + 1)).to(memory_format=torch.channels_last)
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (column, image, sparse)]
        time.sleep(0.2)  # most likely they have ended, and nobody asked
        for work in works:
            work.wait()
        total = size * (size + 1) / 2
        return bool((column == total).all() and (image == total).all() and (sparse.to_dense() == 1).all())


def test_inference_mode(three, store):
    assert all(three(in_inference_mode, store))


def let_go(path):
    """{call: whether its tensor is still there after it, where no garbage is collected}."""
    import weakref
    import tally.torch
    import torch
    import torch.distributed as dist
    rank = tally.rank()
    calls = {"sum": lambda x: dist.all_reduce(x, async_op=True).wait(),
             "future": lambda x: dist.all_reduce(x, async_op=True).get_future().wait(),
             "gather": lambda x: dist.all_gather_into_tensor(x, torch.ones(3), async_op=True).wait(),
             "messages": lambda x: [one.wait() for one in (dist.isend(x, (rank + 1) % 3),
                                                           dist.irecv(torch.ones(9), (rank + 2) % 3))],
             "failure": lambda x: said(lambda: dist.all_reduce(x[rank:], async_op=True).wait()),
             "failed future": lambda x: said(lambda: dist.all_reduce(x[rank:], async_op=True).get_future().wait())}
    kept = {}
    with group("tally", path):
        gc.collect()
        gc.disable()
        for name, call in calls.items():
            x = torch.ones(9)
            call(x)
            held = weakref.ref(x)
            del x
            end = time.monotonic() + 5  # the thread that has seen the end may be about to let go
            while held() is not None and time.monotonic() < end:
                time.sleep(0.01)
            kept[name] = held() is not None
        gc.enable()
    return kept


def test_calls_let_go_of_tensors(three, store):
    import torch
    if torch.__version__ < (2, 7):
        pytest.skip("for this PyTorch calls stay until garbage is collected")
    for kept in three(let_go, store):
        assert not any(kept.values()), kept

"""Horovod's API beyond reductions and optimizers: signatures, exchanges, sparse sums, process sets, SyncBatchNorm,
elastic.
"""

import importlib
import inspect

import numpy as np
import pytest

import jobs
import reference
from test_ops import fails, hvd

# --- signatures of 0.28 ------------------------------------------------------------------------------------------

_REDUCE = "tensor average name op prescale_factor postscale_factor process_set"
_GROUPED = _REDUCE.replace("tensor", "tensors", 1)
_SCATTER = "tensor name op process_set prescale_factor postscale_factor"
SIGNATURES = {
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_": _REDUCE, "allreduce_async": _REDUCE, "allreduce_async_": _REDUCE,
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "grouped_allreduce_": _GROUPED, "grouped_allreduce_async": _GROUPED, "grouped_allreduce_async_": _GROUPED,
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set", "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set", "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set", "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set", "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set", "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": _SCATTER,
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": _SCATTER.replace("tensor", "tensors", 1),
    "join": "device", "barrier": "process_set", "poll": "handle", "synchronize": "handle",
    "init": "comm process_sets", "shutdown": "", "size": "", "rank": "", "local_size": "", "local_rank": "",
    "cross_size": "", "cross_rank": "", "is_initialized": "", "nccl_built": "", "mpi_threads_supported": "",
    "broadcast_parameters": "params root_rank process_set",
    "broadcast_optimizer_state": "optimizer root_rank model process_set",
    "broadcast_object": "obj root_rank name process_set", "allgather_object": "obj name",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
                            "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
    "start_timeline": "file_path mark_cycles", "stop_timeline": "",
    **dict.fromkeys("mpi_enabled mpi_built gloo_enabled gloo_built ddl_built ccl_built cuda_built rocm_built".split(), ""),
    "add_process_set": "process_set", "remove_process_set": "process_set", "ProcessSet": "ranks",
}

# By the argument's name; what is not here has none.  Then those of single functions.
DEFAULTS = {
    "average": None, "name": None, "compression": "none", "op": None, "prescale_factor": 1.0, "postscale_factor": 1.0,
    "process_set": "all", "splits": None, "device": -1, "comm": None, "process_sets": None, "model": None,
    "named_parameters": None, "backward_passes_per_step": 1, "gradient_predivide_factor": 1.0, "num_groups": 0,
    "groups": None, "sparse_as_dense": False, "eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True,
    "mark_cycles": False,
}
OTHER_DEFAULTS = {
    ("broadcast_object", "root_rank"): 0, ("sparse_allreduce_async", "name"): inspect.Parameter.empty,
    ("sparse_allreduce_async", "op"): inspect.Parameter.empty,
    **{(name, "process_set"): inspect.Parameter.empty for name in ("add_process_set", "remove_process_set")},
    **{(name, "op"): "Average" for name in ("DistributedOptimizer", "reducescatter", "reducescatter_async",
                                            "grouped_reducescatter", "grouped_reducescatter_async")},
}
NO_FUNCTIONS = {"Average", "Sum", "Min", "Max", "Product", "Adasum", "Compression", "HorovodInternalError", "elastic",
                "global_process_set"}


def test_signatures():
    for name, wanted in SIGNATURES.items():
        parameters = inspect.signature(getattr(hvd(), name)).parameters.values()
        ours = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert ours[:len(wanted.split())] == wanted.split(), name
        for p in parameters:
            if p.name in wanted.split():
                default = OTHER_DEFAULTS.get((name, p.name), DEFAULTS.get(p.name, p.empty))
                if isinstance(default, str):
                    default = {"none": hvd().Compression.none, "all": hvd().global_process_set,
                               "Average": hvd().Average}[default]
                assert p.default is default or p.default == default, (name, p.name)
            else:
                assert p.default is not p.empty, name


def test_exports():
    import tally
    for name in NO_FUNCTIONS | set(SIGNATURES):
        assert hasattr(hvd(), name) and name in hvd().__all__, name
    assert hvd().HorovodInternalError is tally.Error
    for call in (lambda: hvd().start_timeline("timeline.json"), hvd().stop_timeline):
        fails(NotImplementedError, call, "TALLY_TRACE")


@pytest.mark.parametrize("module, name", [("compression", "Compression"), ("functions", "broadcast_object"),
                                          ("optimizer", "DistributedOptimizer"), ("sync_batch_norm", "SyncBatchNorm")])
def test_modules_of_horovod(module, name):
    """Programs import from them by Horovod's lines."""
    assert getattr(importlib.import_module("tally.torch." + module), name) is getattr(hvd(), name)


# --- alltoall, reducescatter, grouped forms ----------------------------------------------------------------------


def exchanges():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    # Rank r has i + r rows for rank i, each of which says from whom to whom.
    splits = [i + r for i in range(n)]
    rows = torch.tensor([[r, i] for i in range(n) for _ in range(splits[i])], dtype=torch.int32).reshape(-1, 2)
    for name, given in (("exchange", splits), (None, torch.tensor(splits))):
        got, received = t.alltoall(rows, given, name=name)
        assert received.tolist() == [r + i for i in range(n)]
        assert received.dtype == (torch.int32 if name else torch.int64)
        assert got.tolist() == [[i, r] for i in range(n) for _ in range(r + i)]
    even = torch.arange(n * 2.0).reshape(n, 2) + 100 * r
    assert torch.equal(t.alltoall(even), torch.stack([torch.arange(2.0) + 2 * r + 100 * i for i in range(n)]))
    got, received = t.synchronize(t.alltoall_async(torch.empty(0, 3), name="nothing"))
    assert got.shape == (0, 3) and received.tolist() == [0] * n
    x = torch.ones(sum(splits), 2, requires_grad=True)
    got, received = t.alltoall(x, splits)
    (got * (r + 1)).sum().backward()
    assert x.grad[:, 0].tolist() == [float(i + 1) for i in range(n) for _ in range(splits[i])]
    good = [2] + [1] * (n - 1)
    for bad in ([1] * n, [5] * (n - 1), [-1, 3] + [1] * (n - 1)):
        # Rank 2 says what is wrong with its splits, and the others hear it.
        odd = r == 2
        fails(ValueError if odd else RuntimeError, lambda: t.alltoall(torch.ones(n + 1), bad if odd else good),
              "splits")
    assert t.allgather(torch.tensor(r)).tolist() == list(range(n)), "calls without a name still meet"


def test_alltoall(four):
    four(exchanges)


def scatters():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    for rows in (0, 1, n, 4 * n + 3):
        own = [reference.make("float32", rows * 5, i, 3).reshape(rows, 5) for i in range(n)]
        for op in ("Sum", "Average", "Max"):
            total = torch.from_numpy(reference.reduce("float32", op, own))
            want = total.tensor_split(n)[r]
            x = torch.from_numpy(own[r])
            assert torch.equal(t.reducescatter(x, op=getattr(t, op), name="scatter"), want)
            assert torch.equal(t.synchronize(t.reducescatter_async(x, op=getattr(t, op))), want)
    halves = t.reducescatter(torch.full((n,), 1.5), compression=t.Compression.fp16)
    assert halves.dtype == torch.float32 and halves.tolist() == [1.5]
    for op, factor in ((t.Sum, n), (t.Average, 1)):
        x = torch.ones(2 * n, requires_grad=True)
        (t.reducescatter(x, op=op) * (r + 1)).sum().backward()
        assert x.grad.tolist() == [float(factor * (i + 1)) for i in range(n) for _ in "ab"]
    odd = r == 1
    fails(ValueError if odd else RuntimeError, lambda: t.reducescatter(torch.tensor(1.0) if odd else torch.ones(n)),
          "first dimension")
    # As many elements for each rank, in rows of other lengths.
    x, y = torch.ones((2 * n, 3) if odd else (n, 6)), torch.ones(n)
    fails(RuntimeError, lambda: t.reducescatter(x, name="rows"), "disagree", "[%d, 3]" % (2 * n), "[%d, 6]" % n)
    fails(RuntimeError, lambda: t.grouped_reducescatter([y, x], name="more rows"), "disagree")
    # Not the same call as an allreduce of that name.
    both = [t.allreduce_async(torch.ones(n), name="same", op=t.Sum),
            t.reducescatter_async(torch.ones(n), "same", t.Sum)]
    assert t.synchronize(both[0]).tolist() == [float(n)] * n and t.synchronize(both[1]).tolist() == [float(n)]


def test_reducescatter(four):
    four(scatters)


def groups():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    a, b = torch.full((r + 1, 2), float(r), requires_grad=True), torch.tensor([r])
    for results in (t.grouped_allgather([a, b], name="pair"),
                    t.synchronize(t.grouped_allgather_async([a, b]))):
        assert results[0].shape == (n * (n + 1) // 2, 2) and results[1].tolist() == list(range(n))
    (t.grouped_allgather([a, b])[0] * (r + 1)).sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, (n + 1) / 2))
    x, y = torch.ones(n, requires_grad=True), torch.ones(2 * n, requires_grad=True)
    results = t.grouped_reducescatter([x, y], op=t.Sum)
    assert [one.tolist() for one in results] == [[float(n)], [float(n)] * 2]
    (results[0].sum() * (r + 1) + results[1].sum()).backward()
    assert x.grad.tolist() == [float(n * (i + 1)) for i in range(n)] and y.grad.tolist() == [float(n)] * (2 * n)
    results = t.synchronize(t.grouped_reducescatter_async([x.detach(), y.detach()], "pair", t.Average))
    assert [one.tolist() for one in results] == [[1.0], [1.0] * 2]
    x, y = torch.ones(3, requires_grad=True), torch.full((2,), float(r), requires_grad=True)
    results = t.grouped_allreduce([x, y], op=t.Sum, name="grads")
    (results[0].sum() * (r + 1) + results[1].sum()).backward()
    assert x.grad.tolist() == [n * (n + 1) / 2] * 3 and y.grad.tolist() == [float(n)] * 2
    fails(NotImplementedError, lambda: t.allreduce(x, op=t.Adasum), "Adasum")
    assert t.allgather_object({"rank": r, "list": "x" * r}) == [{"rank": i, "list": "x" * i} for i in range(n)]
    assert t.allgather_object(r, name="object") == list(range(n))
    assert not t.nccl_built()


def test_grouped_forms(four):
    four(groups)


# --- sparse ------------------------------------------------------------------------------------------------------


def sparse_sums():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()

    def make(rank, seed):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        count = 0 if rank == 1 else 40
        indices = torch.stack([torch.randint(0, 30, (count,), generator=generator),
                               torch.randint(0, 7, (count,), generator=generator)])
        return torch.sparse_coo_tensor(indices, torch.randn(count, 3, generator=generator), (30, 7, 3))

    for op in ("Sum", "Average"):
        handle = t.sparse_allreduce_async(make(r, 1), "embedding", getattr(t, op))
        got = t.synchronize(handle)
        assert got is handle() and t.poll(handle) and got.is_coalesced()
        dense = [make(rank, 1).to_dense().numpy() for rank in range(n)]
        assert reference.same(got.to_dense().numpy(), reference.reduce("float32", op, dense)) == 0
        rows = torch.stack([make(rank, 1).to_dense().abs().sum(-1) > 0 for rank in range(n)]).any(0)
        assert torch.equal(got.indices().T, rows.nonzero()), "the union of rows, and no more"
    assert t.synchronize(t.sparse_allreduce_async(torch.zeros(4, 2).to_sparse(1), None, t.Sum))._nnz() == 0
    other = torch.eye(5 if r == 3 else 4).to_sparse(1)
    sentence = fails(RuntimeError, lambda: t.synchronize(t.sparse_allreduce_async(other, "differ", t.Sum)), "3",
                     "[5, 5]", "[4, 4]")
    odd = r == 0
    fails(NotImplementedError if odd else RuntimeError, lambda: t.synchronize(
        t.sparse_allreduce_async(make(r, 2), "least", t.Min if odd else t.Sum)), "summed")
    return sentence


def test_sparse_sums(four):
    assert len(set(four(sparse_sums))) == 1


def embeddings():
    """Rows of different ranks, a step that some ranks do not reach, and what it costs on the network."""
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    torch.manual_seed(0)
    table, plain = torch.nn.Embedding(50, 3, sparse=True), torch.nn.Embedding(50, 3)
    plain.load_state_dict(table.state_dict())
    ours = t.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.5), table.named_parameters())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        def use(model, rank):
            return model(torch.tensor([rank, 9, (7 * step + rank) % 50, 9])).square().sum()
        ours.zero_grad()
        if step == 0 or r != 2:
            use(table, r).backward()
        ours.step()
        theirs.zero_grad()
        sum(use(plain, rank) for rank in range(n) if step == 0 or rank != 2).div(n).backward()
        theirs.step()
        assert torch.allclose(table.weight, plain.weight, atol=1e-6)
    return table.weight.detach().numpy()


def test_sparse_gradients_of_ranks_that_differ(four):
    results = four(embeddings)
    assert all(reference.same(one, results[0]) == 0 for one in results)


# --- process sets ------------------------------------------------------------------------------------------------


def in_sets():
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    sets = [t.add_process_set(ranks) for ranks in ([0, 2], [3, 1], [2, 1, 0])]
    assert [one.process_set_id for one in sets] == sorted({one.process_set_id for one in sets})
    assert t.add_process_set([2, 0]).process_set_id == sets[0].process_set_id, "the same again is the same"
    assert t.process_set_by_id(sets[1].process_set_id).ranks == [1, 3] and sets[2] in t.process_sets()
    own = float(r + 1)
    for one in sets:
        if not one.included():
            fails(ValueError, lambda: t.allreduce(torch.ones(1), process_set=one), "rank %d" % r)
            continue
        ranks, m, place = one.ranks, one.size(), one.rank()
        assert ranks[place] == r
        x = torch.full((m, 2), own)
        total = float(sum(rank + 1 for rank in ranks))
        assert t.allreduce(x, op=t.Sum, name="set", process_set=one).eq(total).all()
        assert t.allreduce(x, process_set=one).eq(total / m).all(), "the average over the set"
        assert t.grouped_allreduce([x, x], op=t.Sum, process_set=one)[1].eq(total).all()
        assert t.allgather(x[:1], process_set=one)[:, 0].tolist() == [rank + 1 for rank in ranks]
        assert t.broadcast(x, ranks[-1], process_set=one).eq(ranks[-1] + 1).all(), "roots are ranks of the job"
        assert t.reducescatter(x, op=t.Sum, process_set=one).tolist() == [[total] * 2]
        got, received = t.alltoall(x, [1] * m, process_set=one)
        assert got[:, 0].tolist() == [rank + 1 for rank in ranks] and received.tolist() == [1] * m
        sparse = t.synchronize(t.sparse_allreduce_async(torch.eye(n)[[r]].T.to_sparse(1), "set", t.Sum, one))
        assert sparse.indices().flatten().tolist() == ranks
        fails(RuntimeError, t.sparse_allreduce_async(torch.eye(m + (place == 1)).to_sparse(1), "differ", t.Sum, one),
              "[%d, %d], 1 of its dimensions sparse on rank %d" % (m + 1, m + 1, ranks[1]))
        assert t.broadcast_object(r, ranks[0], process_set=one) == ranks[0]
        assert t.allgather_object(r, process_set=one) == ranks
        odd = place == 1
        fails(ValueError if odd else RuntimeError,
              lambda: t.broadcast(x, ({*range(n)} - {*ranks}).pop() if odd else ranks[0], process_set=one), "root")
        t.barrier(process_set=one)
    mine = sets[0] if sets[0].included() else sets[1]
    # At the same time, under one name, in two sets and in all.
    handles = [t.allreduce_async(torch.full((5,), own), op=t.Sum, name="same", process_set=one)
               for one in (t.global_process_set, mine)]
    assert [t.synchronize(one)[0].item() for one in handles] == [10.0, sum(rank + 1 for rank in mine.ranks)]
    x = torch.ones(3, requires_grad=True)
    (t.allreduce(x, op=t.Sum, process_set=mine) * own).sum().backward()
    assert x.grad.tolist() == [sum(rank + 1 for rank in mine.ranks)] * 3

    model = torch.nn.Linear(2, 1, bias=False)
    t.broadcast_parameters(model.state_dict(), 0)
    before = model.weight.detach().clone()
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(),
                                       op=t.Sum, process_set=mine)
    model(torch.full((1, 2), own)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - sum(rank + 1 for rank in mine.ranks))
    other = sets[1] if mine is sets[0] else sets[0]
    outside = torch.nn.Linear(2, 1, bias=False)  # of a set that this rank is not in: it steps alone
    before = outside.weight.detach().clone()
    optimizer = t.DistributedOptimizer(torch.optim.SGD(outside.parameters(), lr=1.0), process_set=other)
    outside(torch.full((1, 2), own)).sum().backward()
    optimizer.step()
    assert torch.equal(outside.weight, before - own)

    assert t.remove_process_set(sets[1]) and not t.remove_process_set(sets[1])
    assert not t.remove_process_set(t.global_process_set)
    fails(ValueError, lambda: t.allreduce(torch.ones(1), process_set=sets[1]), "added")
    fails(ValueError, lambda: t.add_process_set([0, 17]), "17")
    fails(ValueError, lambda: t.ProcessSet([0, 0]), "different")
    # Rank 0 means another set than the others do, and both learn that where they meet.
    if r in (0, 1):
        wrong = t.ProcessSet([0, 1] if r == 0 else [0, 1, 3])
        wrong.process_set_id = 99
        fails(RuntimeError, lambda: t.allreduce(torch.ones(1), name="wrong", process_set=wrong), "rank")


def test_process_sets(four):
    four(in_sets)


def sets_again():
    """In another job the numbers of sets begin anew, as they do for a rank that was not in the last one."""
    import torch
    t = hvd()
    old = t.add_process_set([0, 2])
    assert old.process_set_id == 1
    for _ in range(t.rank()):  # of numbers that have been given, too, the next job knows nothing
        t.global_process_set.number("sparse")
    t.shutdown()
    t.init()
    fails(ValueError, lambda: t.allreduce(torch.ones(1), process_set=old), "added")
    assert len(t.process_sets()) == 1 and not t.remove_process_set(old)
    one = t.add_process_set([0, 1])
    assert one.process_set_id == 1
    if t.rank() < 2:
        assert t.allreduce(torch.ones(1), op=t.Sum, process_set=one).item() == 2
    assert t.global_process_set.number("sparse") == 0
    assert t.add_process_set(old).process_set_id == 2
    if t.rank() != 1:
        assert t.allreduce(torch.ones(1), op=t.Sum, process_set=old).item() == 2
    t.shutdown()


def test_process_sets_of_another_job():
    job = jobs.Ranks(3, 1)
    try:
        job(sets_again)
    finally:
        job.close()


def unnamed_in_sets():
    """Who is in a set has begun more unnamed operations than the others when all meet; so has who was in a job before."""
    import torch
    t = hvd()
    one, r = t.add_process_set([0, 1]), t.rank()
    if r < 2:
        t.alltoall(torch.ones(2), process_set=one)
        t.sparse_allreduce_async(torch.eye(2).to_sparse(1), None, t.Sum, one)()
    got = t.alltoall(torch.arange(4.0) + 4 * r)
    assert got.tolist() == [r, 4 + r, 8 + r, 12 + r]
    assert t.sparse_allreduce_async(torch.eye(2).to_sparse(1), None, t.Sum)().to_dense().tolist() == [[4, 0], [0, 4]]


def test_unnamed_operations_in_sets(four):
    four(unnamed_in_sets)


@pytest.mark.parametrize("fails", (True, False))
def test_a_sparse_sum_that_ends_at_once(monkeypatch, fails):
    """Who is told at its end may wait for it there."""
    import threading

    import torch
    from tally import _operations
    from tally._calls import GRADIENT, Call
    from tally._errors import Error
    from tally.torch import calls
    from tally.torch.horovod import sparse

    class Gather:
        def __init__(self, tensor, *_):
            self.first_dims, self.wait = [len(tensor)], lambda: tensor

    class Ended:
        def __init__(self, values):
            self.done, self.wait = lambda: True, lambda: values

    def reduce(call, summands, _):
        if fails:
            raise Error("as if a rank had died", 104)
        call.then(None)
        return Ended(summands)

    def told(handle):
        try:
            outcomes.append(handle.wait().to_dense().tolist())
        except Error as error:
            outcomes.append(error.errno)

    outcomes = []
    monkeypatch.setattr(calls, "Gather", Gather)
    monkeypatch.setattr(_operations, "allgather", lambda call, *memory: call.then(memory[-1]))
    monkeypatch.setattr(calls, "reduce", reduce)
    thread = threading.Thread(target=sparse.SparseReduction, daemon=True,
                              args=(Call("s", hvd().Sum, space=GRADIENT, then=told), torch.eye(2).to_sparse(1)))
    thread.start()
    thread.join(60)
    assert outcomes == [104 if fails else [[1, 0], [0, 1]]]


# --- SyncBatchNorm -----------------------------------------------------------------------------------------------


def normalize(dims, affine, momentum):
    """The same as BatchNorm over the batches of all ranks, forward and back."""
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    torch.manual_seed(1)
    if r == 1:
        t.SyncBatchNorm(3).eval()(torch.ones(2, 3, *[1] * (dims - 2)))  # one more, that is not trained
    kind = {2: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[dims]
    ours, whole = t.SyncBatchNorm(3, momentum=momentum, affine=affine), kind(3, momentum=momentum, affine=affine)
    lengths = [rank + 1 for rank in range(n)]
    for _ in range(2):
        x = torch.randn(sum(lengths), 3, *[4, 5][:dims - 2]) * 3 + 1
        x.requires_grad_()
        weights = torch.randn_like(x)
        mine = x.detach().split(lengths)[r].clone().requires_grad_()
        out = ours(mine)
        (out * weights.split(lengths)[r]).sum().backward()
        want = whole(x)
        (want * weights).sum().backward()
        assert torch.allclose(out, want.split(lengths)[r], atol=1e-5)
        assert torch.allclose(mine.grad, x.grad.split(lengths)[r], atol=1e-5)
    for name, value in whole.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, atol=1e-5), name
    if affine:
        total = t.allreduce(ours.weight.grad, op=t.Sum)
        assert torch.allclose(total, whole.weight.grad, atol=1e-3)
    ours.eval(), whole.eval()
    assert torch.allclose(ours(x), whole(x), atol=1e-5)
    fails(ValueError, lambda: ours.train()(torch.ones(3)), "dimensions")
    if r == 1:
        fails(ValueError, lambda: ours(torch.ones(3)), "dimensions")
    else:
        fails(t.Error, lambda: ours(x), "rank 1 refuses", "dimensions")


def in_another_order():
    import tally
    import torch
    t = hvd()
    layers, x = [t.SyncBatchNorm(channels) for channels in (3, 3, 2)], torch.ones(2, 3)
    for layer in layers:
        layer(x[:, :layer.num_features])
    numbers = [layer._number for layer in layers]
    for other, channels in ((1, 3), (2, 2)):
        layer, own = (layers[other], channels) if t.rank() == 1 else (layers[0], 3)
        fails(tally.Error, lambda: layer(x[:, :own]), "SyncBatchNorm: the ranks disagree: layer %d of 3 channels on ranks 0, 2-3" % numbers[0],
              "layer %d of %d channels on rank 1" % (numbers[other], channels))
    layers[0](x)


def test_sync_batch_norms_in_another_order(four):
    four(in_another_order)


@pytest.mark.parametrize("dims, affine, momentum", ((2, True, 0.1), (4, True, None), (4, False, 0.3)))
def test_sync_batch_norm(four, dims, affine, momentum):
    four(normalize, dims, affine, momentum)


# --- elastic -----------------------------------------------------------------------------------------------------


def states():
    """commit, restore and sync of all kinds of state."""
    import torch
    t = hvd()
    r = t.rank()
    torch.manual_seed(r)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + r)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sampler = t.elastic.ElasticSampler(list(range(10)), shuffle=False)
    state = t.elastic.TorchState(model, optimizer, schedule=schedule, sampler=sampler, epoch=r, notes=[r])
    if r == 2:
        state.save()
        state._commits += 1  # the one that has come furthest
        weight = model.weight.detach().clone()
    sampler.record_batch(0, 2)
    state.sync()
    assert state.epoch == 2 and state.notes == [2] and optimizer.param_groups[0]["lr"] == 2.1
    assert t.allgather(model.weight).split(2)[2].equal(model.weight)
    if r == 2:
        assert torch.equal(model.weight, weight)
    assert sampler.processed_indices == set(range(8)) and len(sampler) == 1
    assert sorted(t.allgather_object(list(sampler))) == [[8], [8], [9], [9]]
    state.commit()
    state.epoch, before = 7, model.weight.detach().clone()
    state.notes.append("more")
    with torch.no_grad():
        model.weight.zero_()
    state.restore()
    assert state.epoch == 2 and state.notes == [2] and torch.equal(model.weight, before)
    sampler.set_epoch(1)
    assert len(sampler) == 3 and not sampler.processed_indices


def test_states(four):
    four(states)


def test_reset_of_a_subclass():
    """It comes before the callbacks."""
    called = []

    class State(hvd().elastic.ObjectState):
        def reset(self):
            called.append("reset")

    state = State(epoch=0)
    state.register_reset_callbacks([lambda: called.append("callback")])
    state.on_reset()
    assert called == ["reset", "callback"]


def leave():
    """Rank 1 leaves in the middle and comes back with nothing; all go on from the last commit."""
    import torch
    import tally
    t = hvd()
    r = t.rank()
    torch.manual_seed(r)
    model = torch.nn.Linear(2, 1)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    state = t.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    resets, seen = [], []
    state.register_reset_callbacks([lambda: resets.append(1)])

    @t.elastic.run
    def train(state):
        while state.step < 5:
            if state.step == 3 and r == 1 and not resets:
                t.shutdown()
                raise tally.Error("as if this rank had died", 104)
            optimizer.zero_grad()
            model(torch.ones(1, 2) * (state.step + 1)).sum().backward()
            optimizer.step()
            seen.append(state.step)
            state.step += 1
            state.commit()
        return model.weight.detach().numpy().copy()

    weight = train(state)
    return weight, len(resets), seen


def test_elastic_run():
    job = jobs.Ranks(3, 0)
    try:
        results = job(leave, timeout=100)
    finally:
        job.close()
    for weight, resets, seen in results:
        assert reference.same(weight, results[0][0]) == 0 and resets >= 1 and seen[-1] == 4
        assert sorted(set(seen)) == list(range(5))
    assert np.isfinite(results[0][0]).all()


def test_elastic_run_gives_up(monkeypatch):
    """A rank does not come back: init() says so, and so does run()."""
    from types import SimpleNamespace

    from tally import _errors, _job
    t = hvd()
    starts = []

    def init():
        starts.append(1)
        if len(starts) == 2:
            raise _errors.Error("rank 1 is missing", 110)

    @t.elastic.run
    def train(state):
        raise _errors.Error("rank 1 has died", 104)

    monkeypatch.setattr(_job, "init", init)
    monkeypatch.setattr(_job, "shutdown", lambda: None)
    state = SimpleNamespace(sync=lambda: None, restore=lambda: None, on_reset=lambda: None)
    assert "missing" in fails(_errors.Error, lambda: train(state)) and len(starts) == 2


# --- torch's default device --------------------------------------------------------------------------------------


def elsewhere():
    """What tally.torch makes of its own is on the host, whatever torch's default device is: of "meta" there is no memory
    that could be written, as there is none of a GPU for the host."""
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    cpu, layer = torch.device("cpu"), t.SyncBatchNorm(3)
    torch.set_default_device("meta")
    try:
        model = torch.nn.Linear(3, 2, device=cpu)
        t.broadcast_parameters(model.state_dict(), 0)
        optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                                           model.named_parameters())
        model(torch.ones(1, 3, device=cpu)).sum().backward()
        optimizer.step()
        t.broadcast_optimizer_state(optimizer, 0)
        table = torch.nn.Embedding(4, 2, sparse=True, device=cpu)
        sparse = t.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), [("table", table.weight)])
        table(torch.tensor([r], device=cpu)).sum().backward()
        sparse.step()
        layer(torch.arange(6.0, device=cpu).view(2, 3)).sum().backward()
        results = [
            t.broadcast_object({"a": r}, 0) == {"a": 0},
            t.allgather_object(r) == list(range(n)),
            t.allgather(torch.full((1,), float(r), device=cpu)).tolist() == [float(i) for i in range(n)],
            t.alltoall(torch.arange(float(n), device=cpu)).tolist() == [float(r)] * n,
            t.alltoall(torch.arange(float(n), device=cpu), torch.ones(n, dtype=torch.int64, device=cpu))[1].tolist() == [1] * n,
            t.reducescatter(torch.arange(float(n), device=cpu), op=t.Sum).tolist() == [float(n * r)],
            t.alloc(3).tolist() == [0.0] * 3 and t.alloc(0).device == cpu,
            t.join() >= 0]
    finally:
        torch.set_default_device(None)
    return results


def test_another_default_device(four, machine):
    for job in (four, machine):
        for results in job(elsewhere):
            assert all(results), results

"""CUDA tensors through Tally, on a device that is not there (fake_device.py): the same sums as on the host, whatever
the order in which streams and copies come to an end."""

import contextlib
import functools

import pytest

from test_ddp import group
from test_group import DTYPES, bits, documented, operations, perform

SEEDS = range(3)
PATIENCE = 300


# --- on the ranks ----------------------------------------------------------------------------------------------


def numbers(length, rank, seed=0, dtype="float32"):
    """Small whole numbers, exact in every order of addition."""
    import torch
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 50, (length,), generator=generator).to(getattr(torch, dtype))


def reductions(seed):
    """Long sums in small chunks out of a small pool, between work on the current stream; returns what is wrong."""
    import fake_device as fake
    import tally
    import tally.torch as t
    rank, size, wrong = tally.rank(), tally.size(), []
    with fake.install(seed, 1 << 16, 1 << 19):
        handles, before = [], fake.moved()
        fake.pinned()
        lengths = [(1 << 16) // 4, 100_000, 150_001, 1, 0, 40_000]
        for i, length in enumerate(lengths):
            x = fake.tensor(numbers(length, rank, i))
            x.mul_(2)                                 # before: the sum must be of this
            handles.append((x, t.allreduce_async_(x, op=t.Sum, name="sum %d" % i), length, i))
            y = fake.tensor(numbers(length, rank, i + 50))
            handles.append((None, t.allreduce_async(y + 1, name="mean %d" % i, op=t.Sum), length, i + 50))
            del y
        for x, handle, length, i in handles:
            result = t.synchronize(handle)
            result.add_(1)                            # behind: must see the sum, and not be overwritten
            expected = functools.reduce(lambda a, b: a + b, [numbers(length, r, i) for r in range(size)])
            expected = expected * 2 + 1 if x is not None else expected + size + 1
            if fake.read(result).tolist() != expected.tolist():
                wrong.append((length, i))
        return wrong, fake.pinned(), *(now - then for now, then in zip(fake.moved(), before)), 2 * 4 * sum(lengths)


@pytest.mark.parametrize("name", ["three", "machine"])
def test_sums_in_chunks(request, name):
    job = request.getfixturevalue(name)
    for seed in SEEDS:
        for wrong, pinned, out, back, length in job(reductions, seed, timeout=PATIENCE):
            assert wrong == []
            assert pinned <= 1 << 19  # the pool's bound, though the tensors have five times as much
            assert out == back == length


def flight():
    """The most bytes that are staged at once for a tensor in chunks of 64 KB; and of a thread that may not wait."""
    import fake_device as fake
    import tally
    import tally.torch as t
    with fake.install(1, 1 << 16, 1 << 20) as (on,):
        x = fake.tensor(numbers(200_000, tally.rank()))
        fake.pinned()
        if tally.rank() == 0:  # the others' chunks wait for this one's
            fake.world.hold(on.runtime.current(), True)
        handle = t.allreduce_async_(x, op=t.Sum, name="flight")
        assert not handle.done()
        if tally.rank() == 0:
            fake.world.hold(on.runtime.current(), False)
        t.synchronize(handle)
        right = fake.read(x).tolist() == sum(numbers(200_000, r) for r in range(3)).tolist()
        return right, fake.pinned()


def test_several_chunks_in_flight(three):
    results = three(flight, timeout=PATIENCE)
    assert all(right for right, _ in results)
    assert results[0][1] > 2 << 16


def crossed():
    """Ranks begin tensors in different orders, and each would use the whole pool first."""
    import fake_device as fake
    import tally
    import tally.torch as t
    with fake.install(2, 1 << 16, 1 << 17, patience_s=0.05) as (on,):
        names = ["a", "b", "c"]
        order = names[tally.rank():] + names[:tally.rank()]
        xs = {name: fake.tensor(numbers(50_000, tally.rank(), ord(name))) for name in order}
        handles = {name: t.allreduce_async_(xs[name], op=t.Sum, name="crossed " + name) for name in order}
        for name in order:
            t.synchronize(handles[name])
        return all(fake.read(xs[name]).tolist() == sum(numbers(50_000, r, ord(name)) for r in range(3)).tolist()
                   for name in names)


def test_no_deadlock_where_orders_differ(three):
    assert three(crossed, timeout=PATIENCE) == [True] * 3


def survey(path):
    """{operation: which types work}, what is wrong."""
    import fake_device as fake
    import tally.torch
    import torch
    import test_group
    marks, wrong = {}, []
    with fake.install(3), group("tally", path):
        plain = test_group.make

        def on_device(*arguments, **more):
            return fake.tensor(plain(*arguments, **more))
        for operation in operations():
            for dtype in DTYPES:
                if not hasattr(torch, dtype):
                    continue
                outcomes = []
                for maker in (plain, on_device):
                    test_group.make = maker
                    try:
                        results, expected = perform(operation, dtype, None)
                        outcomes.append([bits(fake.read(one)) for one in results])
                        if maker is plain:
                            expected = [bits(one) for one in expected()]
                    except (RuntimeError, ValueError) as error:
                        if isinstance(error, tally.Error):
                            raise
                        outcomes.append(type(error).__name__)
                    finally:
                        test_group.make = plain
                if outcomes[0] != outcomes[1]:
                    wrong.append((operation, dtype, outcomes))
                marks[operation] = marks.get(operation, "") + ("-" if isinstance(outcomes[1], str) else "x")
        for operation in operations():
            test_group.make = on_device
            try:
                results, _ = perform(operation, "int32", None, strided=True)
            finally:
                test_group.make = plain
            on_host, _ = perform(operation, "int32", None)
            if [fake.read(one).tolist() for one in results] != [one.tolist() for one in on_host]:
                wrong.append((operation, "strided"))
    return marks, wrong


def test_operations(three, store):
    """The backend's table in docs/pytorch.md holds for CUDA tensors too."""
    surveys = three(survey, store, timeout=PATIENCE)
    assert [wrong for _, wrong in surveys] == [[]] * 3
    assert surveys[0][0] == documented()


def beside(path):
    """Operations of a second group of the job, and of one with a store of its own, beside those on the host, and chunks that
    fail; what is wrong."""
    import datetime
    import fake_device as fake
    import tally
    import test_group
    import torch
    import torch.distributed as dist
    from tally.torch import patches
    rank, size, wrong = tally.rank(), tally.size(), []
    with fake.install(3, 1 << 16, 1 << 19), group("tally", path):
        own = patches.make_group(size, rank, [], "tally", dist.FileStore(path + " beside", size), "beside",
                                 datetime.timedelta(seconds=60))
        dist.distributed_c10d._world.pg_group_ranks[own] = {one: one for one in range(size)}
        assert own.job is not None
        plain = test_group.make
        for name, ours in (("second", dist.new_group()), ("beside", own)):
            for operation in operations():
                results, _ = perform(operation, "int32", ours)
                test_group.make = lambda *arguments, **more: fake.tensor(plain(*arguments, **more))
                try:
                    on_device, _ = perform(operation, "int32", ours)
                finally:
                    test_group.make = plain
                if [fake.read(one).tolist() for one in on_device] != [one.tolist() for one in results]:
                    wrong.append((name, operation))
            try:
                dist.all_reduce(fake.tensor(torch.ones(100_000 + rank)), group=ours)  # in several chunks, of which one differs
                wrong.append((name, "a mismatch is not told"))
            except tally.Error as error:
                if not all(word in str(error) for word in ("all_reduce no. ", "100000 elements", "100001 elements")):
                    wrong.append((name, str(error)))
            x = fake.tensor(torch.ones(100_000))
            dist.all_reduce(x, group=ours)
            if fake.read(x).ne(size).any():
                wrong.append((name, "after a mismatch"))
    return wrong


def test_groups_beside_the_first(three, store):
    assert three(beside, store, timeout=PATIENCE) == [[]] * 3


class Bucket:
    """As torch.distributed.GradBucket."""

    def __init__(self, tensor, index):
        self._tensor, self._index = tensor, index

    def buffer(self):
        return self._tensor

    def index(self):
        return self._index

    def parameters(self):
        return []


def hooked(seed):
    """Buckets through the hooks, two at a time, of two models; what is wrong."""
    import fake_device as fake
    import tally
    import tally.torch as t
    import torch
    rank, size, wrong = tally.rank(), tally.size(), []
    with fake.install(seed, 1 << 16, 1 << 18) as (on,):
        for hook in (t.ddp_hook, t.ddp_hook_fp16, t.ddp_hook_bf16):
            state = t.state()
            for step in range(2):
                buckets = [fake.tensor(numbers(length, rank, step + length)) for length in (70_000, 30)]
                futures = [hook(state, Bucket(one.mul_(size), index)) for index, one in enumerate(buckets)]
                for future, bucket in zip(futures, buckets):
                    result = future.wait()
                    result.add_(1)
                    total = sum(numbers(bucket.numel(), r, step + bucket.numel()) for r in range(size)) + 1
                    if fake.read(bucket).tolist() != total.tolist():
                        wrong.append((hook.__name__, step, bucket.numel()))
                del buckets, futures, future, bucket, result
        state = t.state()
        failing = hook(state, Bucket(fake.tensor(torch.ones(3 + (rank == 1))), 0))
        try:
            failing.wait()
            wrong.append("a mismatch is not told")
        except Exception as error:
            if "disagree" not in str(error):
                wrong.append(str(error))
    return wrong


def test_hook(three):
    for seed in SEEDS:
        assert three(hooked, seed, timeout=PATIENCE) == [[]] * 3


def trained(seed, compress):
    """Parameters after steps of DistributedOptimizer, beside those on the host."""
    import fake_device as fake
    import tally
    import tally.torch as t
    import torch
    rank = tally.rank()

    def run(put):
        parameters = [torch.nn.Parameter(put(numbers(length, 9, length)), requires_grad=True)
                      for length in (40_000, 7, 300)]
        optimizer = torch.optim.SGD(parameters, lr=0.5, foreach=False)
        optimizer = t.DistributedOptimizer(optimizer, [("p%d" % i, p) for i, p in enumerate(parameters)], op=t.Sum,
                                           compression=t.Compression.fp16 if compress else t.Compression.none)
        for step in range(3):
            loss = sum((p * put(numbers(p.numel(), rank, step))).sum() for p in parameters[:2])
            loss.backward()
            if step == 1:
                optimizer.synchronize()
                for p in parameters:
                    p.grad.clamp_(max=40)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        t.broadcast_parameters([("b%d" % i, p.detach()) for i, p in enumerate(parameters)], 1)
        return [fake.read(p.detach()).tolist() for p in parameters]

    with fake.install(seed, 1 << 14, 1 << 17):
        return run(fake.tensor) == run(lambda tensor: tensor)


@pytest.mark.parametrize("compress", [False, True])
def test_optimizer(three, compress):
    for seed in SEEDS[:2]:
        assert three(trained, seed, compress, timeout=PATIENCE) == [True] * 3


def joined():
    """Rank 1 joins while the others go on, with gradients in chunks and calls without a name, for two epochs."""
    import fake_device as fake
    import tally
    import tally.torch as t
    import torch
    rank, result = tally.rank(), []
    with fake.install(1, 1 << 14, 1 << 20):
        p = torch.nn.Parameter(fake.tensor(torch.ones(40_000)))
        optimizer = t.DistributedOptimizer(torch.optim.SGD([p], lr=0.0, foreach=False), [("p", p)], op=t.Sum)

        def step(factor):
            optimizer.zero_grad()
            (p * fake.tensor(torch.full((40_000,), factor * (rank + 1.0)))).sum().backward()
            optimizer.step()
            return sorted(set(fake.read(p.grad).tolist()))

        def unnamed():
            return fake.read(t.allreduce(fake.tensor(torch.full((9_000,), rank + 1.0)), op=t.Sum))[-1].item()

        for factor in (1, 10):
            result.append((step(factor), unnamed()))
            if rank != 1:
                assert (step(100), unnamed()) == ([400], 4)
            assert t.join() != 1
    return result


def test_join(three):
    assert three(joined, timeout=PATIENCE) == [[([6], 6), ([60], 6)]] * 3


def api(seed):
    """Horovod's operations beside those on the host; what is wrong."""
    import fake_device as fake
    import tally
    import tally.torch as t
    rank, wrong = tally.rank(), []

    def run(put, read):
        pair = t.add_process_set([0, 2])
        x = put(numbers(6, rank).view(3, 2))
        results = [t.allreduce(x), t.allreduce(x.t(), op=t.Max), t.allreduce(x, op=t.Sum, prescale_factor=0.5),
                   t.allreduce(x, compression=t.Compression.bf16), t.broadcast(x, 2), t.allgather(x[:rank]),
                   t.allgather(x[:0]), t.alltoall(x), t.reducescatter(x, op=t.Sum), t.allreduce(x),
                   *t.alltoall(x, [rank, 3 - rank, 0]), *t.grouped_allreduce([x, x.sum()], op=t.Sum, name="grouped"),
                   *t.grouped_allgather([x, x[1:]]), *t.grouped_reducescatter([x, x[:2]])]
        x.requires_grad_()
        y = t.allreduce(x * 2, op=t.Sum)
        (y * y).sum().backward()
        results.append(x.grad)
        if rank != 1:
            results.append(t.allreduce(x.detach(), op=t.Sum, process_set=pair))
        t.remove_process_set(pair)
        z = x.detach().clone()
        t.broadcast_(z, 0)
        norm = t.SyncBatchNorm(2, affine=False, track_running_stats=False)
        w = x.detach().clone().requires_grad_()
        (norm(w) ** 3).sum().backward()
        return [read(one.detach()).tolist() for one in results + [z, w.grad]]

    with fake.install(seed):
        here, there = run(lambda tensor: tensor, lambda tensor: tensor), run(fake.tensor, fake.read)
        wrong += [(i, pair) for i, pair in enumerate(zip(here, there)) if pair[0] != pair[1]]
    return wrong


def test_api(three):
    for seed in SEEDS:
        assert three(api, seed, timeout=PATIENCE) == [[]] * 3


def joined_again():
    """A job that is left while rank 1's tensors wait for its device, and joined again."""
    import fake_device as fake
    import tally
    import tally.torch as t
    import torch
    told, late = [], tally.rank() == 1
    with fake.install(7) as (on,):
        fake.world.hold(on.runtime.current(), late)
        before = late and t.broadcast_async(fake.tensor(torch.ones(1)), 0)  # its copy holds up what comes behind
        handle = t.allreduce_async(fake.tensor(torch.ones(3)), op=t.Sum, name="x")
        t.shutdown()
        t.init()
        fake.world.hold(on.runtime.current(), False)
        told.append(said(before.wait) + said(handle.wait) if late else "")
        x = t.allreduce(fake.tensor(torch.full((3,), 10.)), op=t.Sum, name="x")
        told.append(fake.read(x).tolist())
    return told


def test_what_was_begun_in_the_last_job(three):
    told = three(joined_again, timeout=30)
    assert [one[1] for one in told] == [[30] * 3] * 3 and told[1][0].count("left the job") == 2


# --- what goes wrong, and what is mixed ------------------------------------------------------------------------


def said(call):
    try:
        return call()
    except Exception as error:
        return "%s: %s" % (type(error).__name__, error)


def refused_unnamed():
    """Calls without a name that rank 1 must refuse; after each, one that all can make."""
    import fake_device as fake
    import tally
    import tally.torch as t
    import torch
    odd, told = tally.rank() == 1, []
    pair = t.add_process_set([0, 1])
    calls = [lambda x: t.allreduce(x, op=t.Sum), lambda x: t.grouped_allreduce([x, x], op=t.Sum)[1],
             lambda x: t.broadcast(x, 0), t.allgather, t.reducescatter]
    with fake.install(8):
        for call in calls:
            x = fake.tensor(torch.ones(3, dtype=torch.complex64 if odd else torch.float32))
            told.append((said(lambda: fake.read(call(x)).tolist()), fake.read(call(fake.tensor(torch.ones(3)))).tolist()))
        if tally.rank() < 2:
            for root in (2 if odd else 0, 1):
                x = fake.tensor(torch.ones(3))
                told.append(said(lambda: fake.read(t.broadcast(x, root, process_set=pair)).tolist()))
    t.remove_process_set(pair)
    return told


def test_refused_without_a_name(three):
    for rank, told in enumerate(three(refused_unnamed, timeout=60)):
        results = [[3] * 3, [3] * 3, [1] * 3, [1] * 9, [1]]
        for (first, second), result in zip(told, results):
            assert ("complex64" if rank == 1 else "rank 1 refuses") in first and second == result
        if rank < 2:
            assert "root rank 2 is not in" in told[5] and told[6] == [1] * 3


def errors():
    """What each rank is told where one of them cannot; after each, the next operation works."""
    import fake_device as fake
    import tally
    import tally.torch as t
    import torch
    rank, told = tally.rank(), {}
    with fake.install(4, 1 << 14, 1 << 16) as (on,):
        def each(case, prepare, length):
            prepare()
            x = fake.tensor(numbers(length, rank))
            told[case] = said(lambda: t.allreduce(x, op=t.Sum, name=case) and "nothing")
            fake.fail("")
            for name, length in (("after " + case, 9000), (case, 20_000), (case, 20_000)):
                y = t.allreduce(fake.tensor(torch.ones(length)), op=t.Sum, name=name)
                assert fake.read(y).tolist() == [3] * length, name

        def fail(what):
            if rank == 1:
                fake.fail(what)
        each("memory", lambda: fail("cuMemHostRegister:2"), 20_000)
        each("copy", lambda: fail("cuMemcpyAsync:999"), 20_000)
        each("shape", lambda: None, 20_000 + (rank == 1))
        each("fewer chunks", lambda: None, 3_000 if rank == 1 else 20_000)
        each("one chunk", lambda: None, 20_000 if rank == 1 else 3_000)
        x = fake.tensor(torch.ones(2))
        with fake.captured(on.runtime) if rank == 1 else contextlib.nullcontext():
            told["capture"] = said(lambda: t.allreduce(x, op=t.Sum, name="capture") and "nothing")
        told["two"] = said(lambda: t.grouped_allreduce([fake.tensor(torch.ones(2)), torch.ones(2)], op=t.Sum,
                                                       name="two")[1].tolist())
        told["sparse"] = said(lambda: t.sparse_allreduce_async(fake.tensor(torch.ones(2)), "sparse", t.Sum))
        told["meta"] = said(lambda: t.allreduce(torch.ones(2, device="meta"), name="meta"))
    return told


def test_errors(three):
    told = three(errors, timeout=PATIENCE)
    assert told[1]["capture"].startswith("NotImplementedError")
    for one in told:
        assert "captured into a graph" in one["capture"]
        assert "cuMemHostRegister failed" in one["memory"] and "cuMemcpyAsync failed" in one["copy"]
        assert all("disagree" in one[case] for case in ("shape", "fewer chunks", "one chunk"))
        assert one["two"] == [3, 3]
        assert one["sparse"].startswith("NotImplementedError") and "cuda:0" in one["sparse"]
        assert one["meta"].startswith("NotImplementedError") and "meta" in one["meta"]


def uncopied():
    """Rank 1 cannot copy the first two calls' sums to its device; who is told, and whether the next calls work."""
    import fake_device as fake
    import tally
    import tally.torch as t
    import torch
    told = []
    with fake.install(4, 1 << 14, 1 << 16):
        for turn in range(5):
            fake.fail("copy-to-GPU:999" if turn < 2 and tally.rank() == 1 else "")
            x = fake.tensor(torch.ones(20_000 if turn else 4000))
            told.append(said(lambda: fake.read(t.allreduce(x, op=t.Sum, name="x" if turn else "one")).sum().item()))
    return told


def test_a_copy_back_that_fails(three):
    told = three(uncopied, timeout=60)
    for rank, (one, chunks, *rest) in enumerate(told):
        assert rest == [60_000] * 3
        assert "cuMemcpyAsync failed" in one if rank == 1 else one == 12_000
        # rank 1 takes back its other chunks, so the other ranks may lack them, too
        assert "cuMemcpyAsync failed" in str(chunks) or (rank != 1 and chunks == 60_000)


def taken_back():
    """Rank 0 cancels a call whose tensor waits for the device; whether the allocator keeps the tensor's memory until the
    library has read it."""
    import fake_device as fake
    import tally
    import tally.torch as t
    import torch
    with fake.install(3) as (on,):
        current, late = on.runtime.current(), tally.rank() == 0
        fake.world.hold(current, late)
        x, y = fake.tensor(torch.ones(4)), fake.tensor(torch.ones(4))
        handle = t.allreduce_async_(x, op=t.Sum, name="x")
        if late:
            handle.cancel("no more")
        failure = said(handle.wait)
        fake.world.hold(current, False)
        t.allreduce_(y, op=t.Sum, name="y")
        return failure, on.leaving in x.block.kept, on.leaving in y.block.kept


def test_a_tensor_whose_call_is_cancelled(three):
    told = three(taken_back, timeout=60)
    assert all("no more" in failure for failure, *_ in told)
    assert [kept for _, *kept in told] == [[True, False]] * 3


def test_a_capture_on_another_device(monkeypatch):
    """Only a capture on the tensor's device counts."""
    import torch
    from tally.torch import device
    current = ["cuda:0"]

    @contextlib.contextmanager
    def on(place):
        current.append(place)
        yield
        current.pop()
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == "cuda:1")
    assert device.Cuda("cuda:1").is_capturing() and not device.Cuda("cuda:0").is_capturing()


def test_chunks_that_end_at_once():
    """One of two fails, and before the other is taken back it has ended."""
    from tally._calls import Call
    from tally.torch import device
    ended = []
    both = device.Transfer(Call(then=ended.append), None, 2, [], None)

    class Lock:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            if both._left == 1:
                both.landed(None, False)
    both._lock = Lock()
    both.landed(RuntimeError("one"), True)
    assert ended == [both] and both.failed()


def mixed(path):
    """Calls of the backend on several devices and the host."""
    import fake_device as fake
    import tally
    import tally.torch
    import torch
    import torch.distributed as dist
    rank, told = tally.rank(), {}
    with fake.install(5, 1 << 14, 1 << 17, ("cuda:0", "cuda:1")) as (zero, _), group("tally", path):
        def ones(place, length=4):
            return torch.ones(length) if place == "cpu" else fake.tensor(torch.ones(length), place)

        # A call on the host comes behind one whose tensor is not ready, and takes its turn.
        a, b, c = ones("cuda:0", 20_000), ones("cpu"), ones("cuda:1")
        fake.world.hold(zero.runtime.current(), rank == 0)
        works = [dist.all_reduce(a, async_op=True), dist.broadcast(b.mul_(rank), 2, async_op=True),
                 dist.all_reduce(c, dist.ReduceOp.MAX, async_op=True), dist.barrier(async_op=True)]
        fake.world.hold(zero.runtime.current(), False)
        for work in reversed(works):
            work.wait()
        told["order"] = (fake.read(a).tolist() == [3] * 20_000, b.tolist(), fake.read(c).tolist())

        x = ones("cuda:%d" % (rank - 1) if rank else "cpu")  # each rank has it somewhere else
        dist.all_reduce(x)
        told["ranks"] = fake.read(x).tolist()
        told["one call"] = said(lambda: dist.all_to_all([ones("cuda:0") for _ in range(3)],
                                                        [ones("cuda:0"), ones("cpu"), ones("cuda:0")]))
        told["two devices"] = said(lambda: dist.all_gather_into_tensor(ones("cuda:0", 12), ones("cuda:1")))
        future = dist.all_reduce(x, async_op=True).get_future()
        told["future"] = fake.read(future.wait()[0]).tolist()
        y = ones("cuda:0")
        dist.all_reduce(y)
        told["after"] = fake.read(y).tolist()
    return told


def test_mixed_devices(three, store):
    for told in three(mixed, store, timeout=PATIENCE):
        assert told["order"] == (True, [2] * 4, [1] * 4)
        assert told["ranks"] == told["after"] == [3] * 4 and told["future"] == [9] * 4
        assert told["one call"].startswith("RuntimeError") and "cpu" in told["one call"] and "cuda:0" in told["one call"]
        assert "cuda:0" in told["two devices"] and "cuda:1" in told["two devices"]


def late(path):
    """Calls that are given up before rank 1 makes them; of the second rank 0's tensor is not ready before it has."""
    import datetime
    import threading
    import time
    import fake_device as fake
    import tally
    import tally.torch
    import torch
    import torch.distributed as dist
    rank, told = tally.rank(), []
    with fake.install(9, 1 << 14, 1 << 20) as (on,), group("tally", path):
        for others_late in (False, True):
            one, stream = dist.new_group(timeout=datetime.timedelta(seconds=1)), on.runtime.current()
            dist.barrier()
            x = fake.tensor(torch.ones(20_000))
            if rank == 1 or (rank and others_late):
                time.sleep(3)
            elif others_late:
                fake.world.hold(stream, True)
                threading.Timer(1.5, fake.world.hold, (stream, False)).start()
            told.append(said(lambda: dist.all_reduce(x, group=one)))
            dist.barrier()
            dist.all_reduce(y := fake.tensor(torch.ones(20_000)))
            assert fake.read(y).tolist() == [3] * 20_000
    return told


def test_a_late_rank(three, store):
    told = three(late, store, timeout=PATIENCE)
    assert all("Timed out after 1 s" in said_ for one in told for said_ in one)
    first, second = ([("has cancelled it" in said_) for said_ in call] for call in zip(*told))
    assert first[1] and not (first[0] and first[2]), told  # of two that wait, one may be the first to give up
    assert second == [False, True, True], told


def other_backend(path):
    """What goes to another backend that was asked for CUDA tensors."""
    import fake_device as fake
    import tally.torch
    import torch
    import torch.distributed as dist
    made = []
    # NCCL's group in PyTorch 2.1, whose names later ones have too.
    has = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "allgather",
           "allgather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_tensor_coalesced", "_allgather_base",
           "_reduce_scatter_base", "alltoall", "alltoall_base", "send", "recv", "_start_coalescing", "_end_coalescing")

    class Other:
        def __getattr__(self, name):
            if name not in has:
                raise AttributeError(name)
            return lambda *arguments, **named: made.append(name) or dist.barrier(async_op=True)

        def _get_backend(self, place):
            return self

    real, calls = tally.torch.group.group._make_beside, []
    with fake.install(6), group("cpu:tally,cuda:nccl", path):
        def make_beside(ours, kind, backend):
            calls.append((dist.get_process_group_ranks(ours), kind, backend))
            return Other()
        tally.torch.group.group._make_beside = make_beside
        try:
            x, y = torch.ones(3), fake.tensor(torch.ones(3))
            dist.all_reduce(x)
            dist.all_reduce(y)
            dist.gather(y, [y, y, y] if dist.get_rank() == 0 else None, 0)
            dist.broadcast(y, 0)
            dist.all_gather_into_tensor(fake.tensor(torch.ones(9)), y)
            dist.reduce_scatter_tensor(y, fake.tensor(torch.ones(9)))
            dist.all_to_all_single(y, y)
            with dist._coalescing_manager(device=y.device):
                dist.isend(y, (dist.get_rank() + 1) % 3)
            dist.broadcast(x, 0)
        finally:
            tally.torch.group.group._make_beside = real
        return x.tolist(), list(made), calls  # an older PyTorch looks for NCCL once more, at the end


def test_cuda_tensors_of_another_backend(three, store):
    called = ["allreduce", "gather", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base",
              "_start_coalescing", "send", "_end_coalescing"]
    expected = [3] * 3, called, [([0, 1, 2], "cuda", "nccl")]
    assert three(other_backend, store, timeout=PATIENCE) == [expected] * 3

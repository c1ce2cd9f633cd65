"""The backend "tally": works and futures, calls in their order, messages."""

import datetime
import threading
import time

import pytest

import jobs
from test_ddp import group
from test_group import said


def works(path):
    """What a Work says of itself, and what its future gives."""
    import tally.torch
    import torch
    import torch.distributed as dist
    with group("tally", path):
        x = torch.full((3,), float(tally.rank()))
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        assert future.then(lambda f: f.value()[0].sum().item()).wait() == 9
        assert work.is_completed() and work.is_success() and work.exception() is None and work.wait()
        assert work.result()[0].tolist() == [3] * 3 and work.get_future() is future
        # A callback that waits for another call, as PowerSGD's do, three deep.
        y = torch.ones(3)

        def again(f):
            y.copy_(f.value()[0])
            return dist.all_reduce(y, async_op=True).get_future().wait()[0]

        chain = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again).then(lambda f: f.value() * 2)
        assert chain.wait().tolist() == [18] * 3
        # Results that come elsewhere are in place once the call has ended, whoever sees it.
        grid = torch.zeros(4, 2).t()
        grid += 1
        work = dist.all_reduce(grid, async_op=True)
        while not work.is_completed():
            pass
        assert grid.tolist() == [[3] * 4] * 2
        conjugate = torch.tensor([1 + 2j] * 3).conj()
        dist.reduce(conjugate, 0)
        assert conjugate.tolist() == ([3 - 6j] * 3 if dist.get_rank() == 0 else [1 - 2j] * 3)
        for tensor in (torch.zeros(0), torch.tensor(2.0), torch.zeros(2, 0, dtype=torch.complex64)):
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 1)
            dist.all_gather([torch.zeros_like(tensor) for _ in range(3)], tensor)
            assert tensor.numel() != 1 or tensor.item() == 6
    return True


def asynchronous(one):
    """Name -> a call that has a future with Gloo, too."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager
    size, root = dist.get_world_size(one), dist.get_rank() == 0

    def mine(*shape):
        return torch.full(shape, dist.get_rank() + 1.0)

    def empty(*shape, several=size):
        return [torch.zeros(shape) for _ in range(several)]

    def together(call):
        with _coalescing_manager(one, async_ops=True) as several:
            call(4)
            call(2)
        return several.works[0]

    more = {"group": one, "async_op": True}
    return {
        "all_reduce": lambda: dist.all_reduce(mine(4), **more),
        "reduce": lambda: dist.reduce(mine(4), 0, **more),
        "broadcast": lambda: dist.broadcast(mine(4), 0, **more),
        "all_gather": lambda: dist.all_gather(empty(4), mine(4), **more),
        "all_gather of no dimension": lambda: dist.all_gather(empty(), mine(), **more),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.zeros(4 * size), mine(4), **more),
        "all_gather_into_tensor, rows": lambda: dist.all_gather_into_tensor(torch.zeros(2 * size, 3), mine(2, 3), **more),
        "gather": lambda: dist.gather(mine(4), empty(4) if root else None, 0, **more),
        "scatter": lambda: dist.scatter(mine(4), empty(4) if root else None, 0, **more),
        "all_to_all": lambda: dist.all_to_all(empty(4), [mine(4)] * size, **more),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(size), mine(size), **more),
        "barrier": lambda: dist.barrier(**more),
        "coalesced all_reduce": lambda: together(lambda count: dist.all_reduce(mine(count), group=one)),
        "coalesced all_gather_into_tensor": lambda: together(
            lambda count: dist.all_gather_into_tensor(torch.zeros(count * size), mine(count), group=one)),
        "allreduce of a list": lambda: one.allreduce([mine(4), mine(4)]),
        "broadcast of a list": lambda: one.broadcast([mine(4), mine(4)]),
        "allgather of a list": lambda: one.allgather([empty(4, several=2 * size) for _ in range(2)], [mine(4), mine(4)]),
        "allgather_coalesced": lambda: one.allgather_coalesced([[torch.zeros(4), torch.zeros(2)] for _ in range(size)],
                                                               [mine(4), mine(2)]),
        "allgather_into_tensor_coalesced": lambda: one.allgather_into_tensor_coalesced(
            [torch.zeros(4 * size), torch.zeros(2 * size)], [mine(4), mine(2)]),
    }


def futures(path):
    """{backend: {call: what its future gives}}, asked for before the end and after it."""
    import torch
    import torch.distributed as dist
    import tally.torch  # noqa: F401 - it registers the backend

    def listed(value):
        return value.tolist() if isinstance(value, torch.Tensor) else list(map(listed, value))

    given = {}
    with group("gloo", path):
        for backend in ("gloo", "tally"):
            one = dist.new_group(backend=backend)
            given[backend] = found = {}
            for name, call in asynchronous(one).items():
                before = call().get_future()
                work = call()
                work.wait()
                after = work.get_future()
                found[name] = [listed(before.wait()), listed(before.value()), listed(after.value()),
                               before.then(lambda future: listed(future.value())).wait()]
    return given


def short_calls(path):
    """c10d's shorter forms: tensors instead of lists, root or reduction instead of options, by position and by name."""
    import tally.torch  # noqa: F401 - it registers the backend
    import torch
    import torch.distributed as dist
    limit = datetime.timedelta(seconds=60)
    with group("tally", path):
        one, rank, top = dist.group.WORLD, dist.get_rank(), dist.ReduceOp.MAX
        outputs = torch.zeros(3)
        views = list(outputs.split(1))
        for calls in range(2):
            x = torch.full((1,), float(rank))
            one.broadcast(x, 2, limit).wait() if calls else one.broadcast(tensor=x, root=2, timeout=limit).wait()
            assert x.item() == 2
            x = torch.full((1,), float(rank))
            one.allreduce(x, top, limit).wait() if calls else one.allreduce(tensor=x, op=top, timeout=limit).wait()
            assert x.item() == 2
            x = torch.full((1,), float(rank))
            (one.reduce(x, 1, top, limit) if calls else one.reduce(tensor=x, root=1, op=top, timeout=limit)).wait()
            assert rank != 1 or x.item() == 2
            x = torch.full((1,), float(rank))
            (one.allgather(views, x, limit) if calls
             else one.allgather(output_tensors=views, input_tensor=x, timeout=limit)).wait()
            assert outputs.tolist() == [0, 1, 2]
            (one.scatter(x, views if rank == 1 else [], 1, limit) if calls else
             one.scatter(output_tensor=x, input_tensors=views if rank == 1 else [], root=1, timeout=limit)).wait()
            assert x.item() == rank
            outputs.zero_()
            (one.gather(views if rank == 1 else [], x, 1, limit) if calls else
             one.gather(output_tensors=views if rank == 1 else [], input_tensor=x, root=1, timeout=limit)).wait()
            assert rank != 1 or outputs.tolist() == [0, 1, 2]
            pieces = list(torch.arange(3.0).split(1))
            (one.reduce_scatter(x, pieces, top, limit) if calls else
             one.reduce_scatter(output_tensors=x, input_tensor=pieces, op=top, timeout=limit)).wait()
            assert x.item() == rank
            (one.alltoall(views, pieces, limit) if calls else one.alltoall(output=views, input=pieces, timeout=limit)).wait()
            assert outputs.tolist() == [rank] * 3
            (one.alltoall_base(outputs, torch.arange(3.0), [], [], limit) if calls else
             one.alltoall_base(output_tensor=outputs, input_tensor=torch.arange(3.0), output_split_sizes=[],
                               input_split_sizes=[], timeout=limit)).wait()
            assert outputs.tolist() == [rank] * 3
            one.barrier(timeout=limit).wait()
        one._set_sequence_number_for_group()
        one._wait_for_pending_works()
        assert one._get_sequence_number_for_group() == 20 and not one._has_hooks()
    return True


def test_short_calls(three, store):
    assert three(short_calls, store) == [True] * 3


def test_futures_hold_what_gloo_s_do(three, store):
    for rank, given in enumerate(three(futures, store)):
        if rank:  # Gloo leaves parts of the sum there
            assert [len(one) for one in given["tally"].pop("reduce")] == [len(one) for one in given["gloo"].pop("reduce")]
        assert given["tally"] == given["gloo"]


def test_work(three, store):
    assert three(works, store) == [True] * 3


def chained(path, cap):
    """PowerSGD, whose hook begins sums when others have ended: its ranks have the same parameters, or are told why not."""
    import tally.torch
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel
    rank = tally.rank()
    with group("tally", path):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)]),
                                        bucket_cap_mb=cap)
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
        steps = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(rank)
        told = ""
        for _ in range(30):
            steps.zero_grad()
            try:
                model(torch.randn(16, 64, generator=draw)).square().mean().backward()
            except RuntimeError as error:
                told = str(error)
                break
            steps.step()
        return told, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def in_place(path):
    """Gathers whose input lies in their output: in its own place, or where other ranks' pieces come."""
    import torch
    import torch.distributed as dist
    with group("tally", path):
        rank, whole = dist.get_rank(), torch.empty(3 * 100000)
        expected = torch.cat([torch.arange(100000.0) + one for one in range(3)])
        for place in (rank * 100000, (rank + 1) % 3 * 100000, 7):
            for count in (100000, 10, 1):
                mine = whole[place:place + count]
                mine.copy_(torch.arange(count) + float(rank))
                dist.all_gather_into_tensor(whole[:3 * count], mine)
                right = torch.cat([one[:count] for one in expected.split(100000)])
                assert torch.equal(whole[:3 * count], right), (place, count)


def test_gathers_in_place(three, store):
    three(in_place, store)


@pytest.mark.parametrize("cap", (25, 0.02))
def test_calls_that_follow_others(store, cap):
    job = jobs.Ranks(2, 1)
    try:
        (told, parameters), (other_told, other_parameters) = job(chained, store, cap, timeout=100)
    finally:
        job.close()
    assert bool(told) == bool(other_told)
    if told:
        assert cap == 0.02 and "one bucket" in told + other_told
    else:
        assert parameters == other_parameters


def follow(path):
    """Calls that are begun when others have ended, in the same order on all ranks."""
    import tally.torch
    import torch
    import torch.distributed as dist
    from tally.torch.group import group as module, work
    rank = tally.rank()
    with group("tally", path):
        dist.all_reduce(torch.ones(2))
        # After a message, which is no collective.
        y, z = torch.ones(3), torch.zeros(1)
        if rank == 0:
            time.sleep(0.3)
            dist.send(torch.ones(1), 1)
            dist.all_reduce(y)
        else:
            dist.irecv(z, 0).get_future().then(lambda _: dist.all_reduce(y)).wait()
        assert y.tolist() == [2] * 3
        # Where the others had been begun before somebody asked to be called.
        first = dist.all_reduce(torch.ones(2), async_op=True)
        dist.all_reduce(torch.ones(3), async_op=True)
        y = torch.ones(4)
        if rank == 0:
            time.sleep(0.3)
        first.get_future().then(lambda _: dist.all_reduce(y)).wait()
        assert y.tolist() == [2] * 4
        # What nobody waits for arrives, in memory of any order.
        strided, plain = torch.ones(3, 4).t(), torch.ones(3)
        kept = [dist.all_reduce(one, async_op=True) for one in (strided, plain)]
        dist.barrier()
        deadline = time.monotonic() + 20
        while not (strided == 2).all() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert strided.tolist() == [[2] * 3] * 4 and plain.tolist() == [2] * 3 and len(kept) == 2
        # While another thread would begin one.
        reduce = module.Group._reduce

        def reduce_for_long(self, *arguments):
            if rank == 0 and work.just_ended() is not None:
                begun.set()
                time.sleep(0.5)  # another thread has the GIL
            reduce(self, *arguments)
        begun = threading.Event()
        module.Group._reduce = reduce_for_long
        b, c = torch.full((5,), 1.0), torch.full((5,), 10.0)
        if rank == 1:
            time.sleep(0.2)
        followed = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda _: dist.all_reduce(b))
        followed.wait() if rank == 1 else begun.wait()
        dist.all_reduce(c)
        followed.wait()
        return b.tolist() + c.tolist()


def test_calls_that_follow_others_in_order(store):
    job = jobs.Ranks(2, 1)
    try:
        assert job(follow, store, timeout=60) == [[2] * 5 + [20] * 5] * 2
    finally:
        job.close()


def messages(path):
    import tally.torch
    import torch
    import torch.distributed as dist
    rank = tally.rank()
    with group("tally", path):
        # Both send first, as they may with Gloo; and a message waits while collectives go on.
        x, y, other = torch.full((1000,), float(rank)), torch.zeros(1000), rank ^ 1
        dist.send(x, other)
        dist.all_reduce(y)
        dist.recv(y, other)
        assert (y == other).all()
        # Large ones around a ring, also in the other direction and into another order of memory.
        large, here = torch.full((300, 1000), float(rank)), torch.zeros(1000, 300).t()
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, large, (rank + 1) % 4), dist.P2POp(dist.irecv, here, (rank - 1) % 4),
            dist.P2POp(dist.isend, x, (rank - 1) % 4), dist.P2POp(dist.irecv, y, (rank + 1) % 4)])
        for work in works:
            work.wait()
        assert (here == (rank - 1) % 4).all() and (y == (rank + 1) % 4).all()
        # From any, with others behind it that may not take its message; tags and groups apart.
        some = dist.new_group([0, 1, 3])
        if rank == 3:
            into = [torch.zeros(2) for _ in range(5)]
            works = [dist.irecv(into[0], tag=1), dist.irecv(into[1], 0, tag=1), dist.irecv(into[2], tag=1),
                     dist.irecv(into[3], tag=2), dist.irecv(into[4], tag=1, group=some)]
            assert not any(work.is_completed() for work in works)
        dist.barrier()
        if rank == 0:
            for value in (1.0, 2.0):
                dist.send(torch.full((2,), value), 3, tag=1)
        dist.barrier()
        if rank == 1:
            dist.send(torch.full((2,), 5.0), 3, tag=1, group=some)
            dist.send(torch.full((2,), 4.0), 3, tag=2)
            dist.send(torch.full((2,), 3.0), 3, tag=1)
        if rank == 3:
            assert works[2].get_future().wait()[0].tolist() == [3, 3]
            for work in works:
                work.wait()
            assert [one[0].item() for one in into] == [1, 2, 3, 4, 5]
            assert [work._source_rank() for work in works] == [0, 0, 1, 1, 1]
        objects = ["a", 2] if rank == 0 else [None, None]
        if rank == 0 and hasattr(dist, "send_object_list"):
            dist.send_object_list(objects, 2)
        if rank == 2 and hasattr(dist, "recv_object_list"):
            assert dist.recv_object_list(objects, 0) == 0 and objects == ["a", 2]
        told = said(lambda: dist.send(torch.ones(70000), 1) if rank == 0 else
                    dist.recv(torch.ones(60000), 0)) if rank < 2 else "disagree"
        assert "disagree" in told, told
        if rank < 2:
            assert "no rank" in said(lambda: dist.group.WORLD.send([x], 4, 0))
    return True


def messages_late(path):
    """The same where operations end before it is said what is to follow them."""
    from unittest import mock
    from tally._events import Events
    expect = Events.expect

    def late(self, *arguments):
        time.sleep(0.02)
        expect(self, *arguments)
    with mock.patch.object(Events, "expect", late):
        return messages(path)


@pytest.mark.parametrize("function", (messages, messages_late))
def test_messages(four, store, function):
    assert four(function, store) == [True] * 4

"""What a barrier of the backend "tally", and a call that its caller waits for, say of the group's earlier calls."""

import datetime
import time

import pytest

from test_ddp import group
from test_group import said

ROUNDS, CALLS = 10, 16


def fences(one):
    """Name -> a call behind which the results of earlier calls of the group are there."""
    import torch
    import torch.distributed as dist
    whole = torch.zeros(dist.get_world_size(one))
    return {
        "barrier": lambda: dist.barrier(one),
        "barrier, async_op": lambda: dist.barrier(one, async_op=True).wait(),
        "barrier, future": lambda: dist.barrier(one, async_op=True).get_future().wait(),
        "monitored_barrier": lambda: one.monitored_barrier(),
        "all_reduce": lambda: dist.all_reduce(torch.ones(1), group=one),
        "broadcast": lambda: dist.broadcast(torch.ones(1), dist.get_global_rank(one, 0), group=one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, torch.ones(1), group=one),
        "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(one), "x", group=one),
    }


def begun(one, make=lambda tensor: tensor):
    """Begin calls whose works nobody keeps.  make: of a tensor in host memory, the one to use.  Returns [(tensor, what each
    of its elements must be)]."""
    import torch
    import torch.distributed as dist
    size, rank = dist.get_world_size(one), dist.get_rank(one)
    total, expected = size * (size + 1) // 2, []
    for call in range(CALLS):
        tensor = make(torch.full((100, 100), rank + 1.0))
        dist.all_reduce(tensor, group=one, async_op=True)
        expected.append((tensor, total))
    strided = make(torch.full((100, 100), rank + 1.0))[:, ::2]  # whose result is copied back at the end
    dist.all_reduce(strided, group=one, async_op=True)
    pieces = [make(torch.zeros(100)) for _ in range(size)]
    dist.all_gather(pieces, make(torch.full((100,), rank + 1.0)), group=one, async_op=True)
    piece = make(torch.zeros(1000))
    dist.reduce_scatter_tensor(piece, make(torch.full((1000 * size,), rank + 1.0)), group=one, async_op=True)
    return [*expected, (strided, total), (piece, total), *((piece, number + 1.0) for number, piece in enumerate(pieces))]


def absent(expected, read=lambda tensor: tensor):
    return sum(not bool((read(tensor) == value).all()) for tensor, value in expected)


def missing(path):
    """How many results are not there behind each of the fences."""
    import tally.torch
    import torch.distributed as dist
    found = {}
    with group("tally", path):
        own = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
        for one in (dist.group.WORLD, own[tally.rank() // 2]):
            for name, fence in fences(one).items():
                for _ in range(ROUNDS):
                    expected = begun(one)
                    fence()
                    found[name] = found.get(name, 0) + absent(expected)
    return found


@pytest.mark.parametrize("job", ["three", "machine"])
def test_earlier_calls_have_ended(request, store, job):
    for found in request.getfixturevalue(job)(missing, store):
        assert len(found) == 8 and not any(found.values()), found


def missing_on_a_device(path, seed):
    import fake_device as fake
    import torch.distributed as dist
    found = {}
    with fake.install(seed, 1 << 12, 1 << 19), group("tally", path):
        for name, fence in fences(dist.group.WORLD).items():
            expected = begun(dist.group.WORLD, fake.tensor)
            fence()
            found[name] = absent(expected, fake.read)
    return found


def test_earlier_calls_of_a_device(three, store):
    for seed in range(2):
        for found in three(missing_on_a_device, "%s.%d" % (store, seed), seed, timeout=300):
            assert len(found) == 8 and not any(found.values()), found


def seen_by_others(path):
    """How many results of other ranks, in memory that all share, are not there behind a barrier."""
    import tally.torch
    import torch
    import torch.distributed as dist
    count, found = 1 << 18, 0
    with group("tally", path):
        memory = [torch.from_file("%s.%d" % (path, rank), shared=True, size=count) for rank in range(tally.size())]
        for number in range(ROUNDS):
            memory[tally.rank()].fill_(number)
            dist.barrier()
            dist.all_reduce(memory[tally.rank()], async_op=True)
            dist.barrier()
            found += sum(not bool((one == number * tally.size()).all()) for one in memory)
            dist.barrier()
    return found


def test_a_barrier_is_one_for_all_ranks(machine, store):
    assert machine(seen_by_others, store) == [0] * 3


def failing(path):
    """Earlier calls that fail, that are late, and messages."""
    import tally.torch
    import torch
    import torch.distributed as dist
    rank, told = tally.rank(), []
    with group("tally", path):
        dist.all_reduce(torch.ones(2 + (rank == 1)), async_op=True)
        told.append(said(dist.barrier))       # nobody else tells
        work = dist.all_reduce(torch.ones(2 + (rank == 1)), async_op=True)
        x = torch.ones(2)
        dist.all_reduce(x)                    # the other one's failure is its work's
        assert x.tolist() == [3, 3]
        told.append(said(work.wait))
        # A barrier does not wait for a message that is sent behind it.
        if rank == 0:
            work = dist.irecv(x, 1)
        dist.barrier()
        if rank == 0:
            work.wait()
            assert x.tolist() == [7, 7]
        if rank == 1:
            dist.send(torch.full((2,), 7.0), 0)
        one = dist.new_group()
        if rank != 1:
            work = dist.all_reduce(torch.ones(3), group=one, async_op=True)
            told.append(said(lambda: one.barrier(timeout=datetime.timedelta(seconds=1)).wait()))
            told.append(said(lambda: dist.barrier(one)))
    return told


def test_calls_that_fail(three, store):
    for rank, told in enumerate(three(failing, store)):
        assert all("the ranks disagree" in one and "all_reduce" in one for one in told[:2]), told
        assert rank == 1 or ("Timed out" in told[2] and "Timed out" in told[3]), told


def dropped(path):
    """{case: what barriers say of failed calls whose works nobody keeps, or of which the caller has been told}"""
    import torch
    import torch.distributed as dist
    told = {}

    def fails(number):
        return dist.all_reduce(torch.ones(number + (dist.get_rank() == 1)), async_op=True)

    def until_ended(work):
        deadline = time.monotonic() + 60
        while not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def then(case, *calls):
        for call in calls:
            call()
        told[case] = [said(dist.barrier), said(dist.barrier)]

    def asynchronous():
        until_ended(dist.all_reduce(torch.ones(3), async_op=True))  # it may be the one that has seen the end
        time.sleep(0.2)  # what comes next finds that all have ended
        dist.all_reduce(torch.ones(3), async_op=True)

    with group("tally", path):
        then("asynchronous call", lambda: fails(3), asynchronous)
        then("blocking call", lambda: fails(3), lambda: dist.all_reduce(torch.ones(3)))
        then("ended", lambda: until_ended(fails(3)))
        then("first of two", lambda: until_ended(fails(3)), lambda: until_ended(fails(5)))
        assert "float32 [3]" in told["first of two"][0], told
        then("asynchronous barrier", lambda: until_ended(fails(3)), lambda: until_ended(dist.barrier(async_op=True)))
        until_ended(fails(3))
        told["monitored"] = [said(dist.group.WORLD.monitored_barrier), said(dist.barrier)]
        then("told by wait()", lambda: said(fails(3).wait))
        then("told by the future", lambda: said(fails(3).get_future().wait))

        def ended_before():
            work = fails(3)
            until_ended(work)
            said(work.wait)

        then("told after the end", ended_before)
    return told


def test_a_failure_that_nobody_has_heard(three, store):
    """The next barrier raises the first one, once, on all ranks alike, whatever has come in between."""
    for told in three(dropped, store):
        for case, (first, second) in told.items():
            heard = "the ranks disagree" in first and "all_reduce" in first
            assert heard != case.startswith("told"), (case, first)
            assert second == "nothing", (case, second)


class Ended:
    """A call, as far as InFlight needs it."""

    def __init__(self, number):
        self.number = number

    def ended_unseen(self):
        return False


def test_failures_of_a_program_without_barriers():
    """Few are kept, the first among them, however late it comes in."""
    from tally.torch.group import earlier
    calls = earlier.InFlight()
    for number in [*range(1, 1000), 0]:
        call = Ended(number)
        calls.add(call)
        calls.ended(call, RuntimeError(f"call {number} failed"))
    assert len(calls._unheard) <= 100
    with pytest.raises(RuntimeError, match="call 0 failed"):
        calls.hear(1000)
    calls.hear(1000)

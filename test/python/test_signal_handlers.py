"""What a signal handler raises comes out at once, whatever the call waits for; Tally keeps it for nobody else."""

import contextlib
import datetime
import os
import signal
import time

import pytest

from test_cross_barrier import distributed, late
from test_ddp import group
from test_ops import hvd

# --- on the ranks ----------------------------------------------------------------------------------------------


def interrupt(path, waiting, later, kind):
    """A handler raises `kind` while rank 0 is in waiting(); rank 1 calls later() once that has come out.  Returns what came
    out on rank 0; on rank 1, whether it came out before rank 0 had what it waited for."""
    import tally
    if tally.rank():
        end = time.monotonic() + 20
        while not os.path.exists(path) and time.monotonic() < end:
            time.sleep(0.01)
        at_once = os.path.exists(path)
        later()
        return at_once

    def handler(number, frame):
        raise kind("from the handler")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        waiting()
        return "nothing"
    except Exception as error:
        return "%s: %s" % (type(error).__name__, error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        open(path, "w").close()


@contextlib.contextmanager
def raises(kind):
    """In the block the handler of SIGUSR1 raises `kind`."""
    def handler(number, frame):
        raise kind("from the handler")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def kinds():
    import tally
    return tally.Error, ValueError


def in_grouped_calls(path):
    import torch
    t = hvd()
    told = []
    for kind in kinds():
        for call in (t.grouped_allreduce, t.grouped_allgather):
            def both(call=call, name="%s %s" % (kind.__name__, call.__name__)):
                return call([torch.ones(4), torch.ones(4)], name=name)
            told.append(interrupt("%s %s %s" % (path, kind.__name__, call.__name__), both, both, kind))
    return told, t.allreduce(torch.ones(1), op=t.Sum, name="later").tolist()


def in_an_optimizer(path, cross):
    """Then the same step goes on."""
    import tally
    import torch
    told = []
    for kind in kinds():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = distributed(model, cross)

        def backward():
            model(torch.ones(1, 4)).sum().backward()

        def step():
            optimizer.step()
            list(model.parameters())

        with late():
            if not tally.rank():
                backward()
            told.append(interrupt("%s %s" % (path, kind.__name__), step, lambda: (backward(), step()), kind))
            if not tally.rank():
                if cross:
                    list(model.parameters())
                else:
                    optimizer.step()
        told.append(model.weight.tolist())
    return told


def in_ddp(path, gone):
    """gone: the garbage collector has taken the optimizer, and forward waits for the buckets that it has left."""
    import gc

    import tally
    import torch
    from torch.nn.parallel import DistributedDataParallel
    t = hvd()
    told = []
    for kind in kinds():
        with group("gloo", "%s %s group" % (path, kind.__name__)), late():
            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Linear(4, 4), gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            t.cross_barrier(model, optimizer)

            def forward():
                return model(torch.ones(1, 4))

            for _ in range(2):  # the first steps agree on buckets
                forward().sum().backward()
                optimizer.step()

            def step(optimizer):
                forward().sum().backward()
                if gone:
                    optimizer.itself = optimizer
                else:
                    optimizer.step()

            if not tally.rank():
                step(optimizer)
            if gone and not tally.rank():
                optimizer = None
                gc.collect()
            told.append(interrupt("%s %s" % (path, kind.__name__), forward, lambda: step(optimizer), kind))
            told.append(forward().tolist())
    return told


def submit(name, finish):
    import numpy
    from tally import _calls, _operations
    x = numpy.ones(4, numpy.float32)
    return _operations.push_pull(_calls.Call(name, finish=finish), x.ctypes.data, x.ctypes.data, 4, 0, (4,), x, x)


def a_handler_that_waits():
    """It is called while its thread is in an operation's finish, and waits for that operation and for another one."""
    import tally

    def finish(result):
        signal.raise_signal(signal.SIGUSR1)
        return result.sum() / tally.size()

    def handler(number, frame):
        if not heard:
            heard.append(None)
            heard[:] = [other.wait(), one.wait()]

    heard = []
    one, other = submit("one", finish), submit("other", lambda result: result.sum() / tally.size())
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        return float(one.wait()), float(one.wait()), heard
    finally:
        signal.signal(signal.SIGUSR1, before)


def a_handler_that_raises():
    """Its exception breaks an operation's finish off.  Then the operation ends as it does."""
    import tally
    told = []
    for kind in (*kinds(), KeyboardInterrupt):
        def finish(result, breaks=[True]):  # noqa: B006
            if breaks:
                breaks.pop()
                signal.raise_signal(signal.SIGUSR1)
            return result.sum() / tally.size()

        operation = submit("broken off by %s" % kind.__name__, finish)
        with raises(kind):
            try:
                operation.wait()
            except BaseException as error:
                told.append("%s: %s" % (type(error).__name__, error))
        told.append(float(operation.wait()))
    return told


def in_a_receive(path):
    """While rank 0 looks for a message from anybody; the next receive gets it."""
    import tally
    import torch
    import torch.distributed as dist
    from tally.torch.group.ranks import Ranks
    told, look = [], Ranks._look

    def interrupted(self, waiting):
        signal.raise_signal(signal.SIGUSR1)
        return look(self, waiting)

    with group("tally", path):
        for kind in kinds():
            x = torch.zeros(4)
            if tally.rank():
                dist.send(x + 1, 0)
            else:
                Ranks._look = interrupted
                try:
                    with raises(kind):
                        dist.recv(x)
                except Exception as error:
                    told.append("%s: %s" % (type(error).__name__, error))
                finally:
                    Ranks._look = look
                told.append((dist.recv(x), x.tolist()))
    return told


# --- the tests -------------------------------------------------------------------------------------------------

RAISED = "Error: from the handler", "ValueError: from the handler"


def test_grouped_calls(two, store):
    answers = two(in_grouped_calls, store)
    assert answers == [([RAISED[0]] * 2 + [RAISED[1]] * 2, [2.0]), ([True] * 4, [2.0])]


def test_an_optimizer(two, store):
    mine, theirs = two(in_an_optimizer, store, False)
    assert (mine[::2], theirs[::2]) == (list(RAISED), [True] * 2) and mine[1::2] == theirs[1::2]


def test_an_optimizer_without_barrier(two, store):
    mine, theirs = two(in_an_optimizer, store, True)
    assert (mine[::2], theirs[::2]) == (list(RAISED), [True] * 2) and mine[1::2] == theirs[1::2]


def test_ddp_without_barrier(two, store):
    mine, theirs = two(in_ddp, store, False)
    assert (mine[::2], theirs[::2]) == (list(RAISED), [True] * 2) and mine[1::2] == theirs[1::2]


def test_ddp_whose_optimizer_has_gone(two, store):
    mine, theirs = two(in_ddp, store, True)
    assert (mine[::2], theirs[::2]) == (list(RAISED), [True] * 2) and mine[1::2] == theirs[1::2]


def test_a_handler_may_wait_within_a_finish(two):
    assert two(a_handler_that_waits) == [(4.0, 4.0, [4.0, 4.0])] * 2


def test_a_handler_breaks_a_finish_off(two):
    wanted = [RAISED[0], 4.0, RAISED[1], 4.0, "KeyboardInterrupt: from the handler", 4.0]
    assert two(a_handler_that_raises) == [wanted] * 2


def test_a_receive_from_anybody(two, store):
    got = (1, [1.0] * 4)
    assert two(in_a_receive, store)[0] == [RAISED[0], got, RAISED[1], got]


class Store:
    """A store whose wait() gets a signal, and then ends as `ends` says."""

    timeout = datetime.timedelta(seconds=60)

    def __init__(self, ends):
        self._ends = ends

    def set(self, key, value):
        pass

    def wait(self, keys, timeout):
        signal.raise_signal(signal.SIGUSR1)
        raise self._ends


@pytest.mark.parametrize("way", ["refuse", "place"])
def test_meeting_by_a_store(way):
    from tally.torch.meeting import _place, _refuse
    store = Store(RuntimeError("of the store"))
    with raises(RuntimeError), pytest.raises(RuntimeError, match="^from the handler$"):
        _refuse(store, "key", 2, 0, "why") if way == "refuse" else _place(store, "key", 0, 1)


def test_a_refusal_that_nobody_hears():
    """The store's own failure is not the reason to raise."""
    from tally.torch.meeting import _refuse
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        _refuse(Store(RuntimeError("of the store")), "key", 2, 0, "why")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_calls_in_flight():
    """While the oldest one is looked for: another thread may have taken it, which is a RuntimeError, too."""
    from tally.torch.group.earlier import InFlight

    class Calls(dict):
        def __iter__(self):
            signal.raise_signal(signal.SIGUSR1)
            return super().__iter__()

    calls = InFlight()
    calls._calls = Calls(one=None)
    with raises(RuntimeError), pytest.raises(RuntimeError, match="^from the handler$"):
        calls.add("other")
    assert dict.__len__(calls._calls) == 1


def test_a_transfer_s_finish():
    """A handler breaks it off once, and once waits for the same transfer within it."""
    from tally._calls import Call
    from tally.torch import device

    def finish(result):
        signal.raise_signal(signal.SIGUSR1)
        return result + 1

    transfer = device.Transfer(Call(finish=finish), None, 1, [], 1)
    transfer.landed(None, True)
    with raises(ValueError), pytest.raises(ValueError, match="^from the handler$"):
        transfer.wait()
    heard = []

    def handler(number, frame):
        if not heard:
            heard.append(None)
            heard[0] = transfer.wait()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert (transfer.wait(), transfer.wait(), heard) == (2, 2, [2])
    finally:
        signal.signal(signal.SIGUSR1, before)

"""What a signal handler raises comes out at once, whatever the call waits for; Tally keeps it for nobody else."""

import os
import time

from test_cross_barrier import distributed, late
from test_ddp import group
from test_ops import hvd

# --- on the ranks ----------------------------------------------------------------------------------------------


def interrupt(path, waiting, later, kind):
    """A handler raises `kind` while rank 0 is in waiting(); rank 1 calls later() once that has come out.  Returns what came
    out on rank 0; on rank 1, whether it came out before rank 0 had what it waited for."""
    import signal

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

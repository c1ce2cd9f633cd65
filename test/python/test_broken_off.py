"""Steps of a DistributedOptimizer that a signal handler breaks off: the next call goes on."""

import contextlib
import copy
import ctypes
import functools
import itertools
import signal
import sys
import threading
import time
from unittest import mock

import pytest

import reference
from test_ops import hvd
from test_signal_handlers import raises


class BrokenOff(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


SYNCHRONIZE = {"synchronize", "_tally_hear_frozen", "_tally_compared", "wait", "_end", "_hear", "_failure_of", "outcome", "advance", "put_off",
               "settle", "runs", "choose_all", "_tally_reduced", "make", "_lay", "lay_out", "start", "_tally_submit", "_take"}
BACKWARD = {"_tally_gradient_ready", "_tally_compare_frozen", "_tally_begin_comparison", "made", "_tally_hold", "_tally_note", "ready",
            "start", "_tally_submit", "_tally_fill", "_take", "_submit", "_end", "_began"}


def broken_off(call, names, number, is_open=lambda: True):
    """Call a function, and break it off at the `number`-th line of the functions of Tally's optimizers with these names.  Returns
    whether it has so many."""
    import torch

    def of_optimizer(frame, event, _):
        path = frame.f_code.co_filename
        return line if "/torch/horovod/" in path and frame.f_code.co_name in names else None

    def line(frame, event, _):
        nonlocal number
        if event == "line" and is_open():
            number -= 1
            if not number:
                raise BrokenOff
        return line

    sys.settrace(of_optimizer)
    try:
        call()
        return False
    except BrokenOff:
        return True
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # torch.no_grad(), broken off as it ends, leaves it off


def break_off(optimizer, errors=()):
    """Call synchronize() until it ends, or raises one of these errors.  It is broken off at its first line, the next time at its
    second one, and so on.  Returns how often."""
    for number in range(1, 10000):
        try:
            if not broken_off(optimizer.synchronize, SYNCHRONIZE, number, lambda: optimizer._tally_handles):  # while a step is open
                return number - 1
        except errors:
            return number - 1


def model_of(kind):
    import torch
    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 16, sparse=kind == "embedding")
    return torch.nn.Sequential(table, *(torch.nn.Linear(16, 16) for _ in range(8)))


def train(kind, broken):
    """(the parameters behind some steps, how often each has been broken off on rank 1)."""
    import torch
    t = hvd()
    kind, _, half = kind.partition(", ")
    model, counts = model_of(kind), []
    options = {"sparse": t.SparseChunks(0.3, 12 * (kind == "warm-up"), 64)} if kind in ("chunks", "warm-up") else \
        {"lazy": 4096 * (kind == "ranges"), "groups": 3 if kind == "groups" else None}
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(),
                                       backward_passes_per_step=2 if half else 1, **options)
    draw = torch.Generator().manual_seed(t.rank())
    for step in range(10):
        optimizer.zero_grad()
        model(torch.randint(10, (4,), generator=draw)).square().sum().backward()
        if broken and t.rank() == 1:
            counts.append(break_off(optimizer))
        else:
            optimizer.synchronize()
        assert kind != "warm-up" or optimizer.history.chunks.step == step + 1  # also of steps that send everything
        with optimizer.skip_synchronize():
            optimizer.step()
    assert bool(optimizer._tally_layout.ranges) == (kind in ("chunks", "ranges", "warm-up"))
    return [p.detach().numpy().copy() for p in model.parameters()], counts


@pytest.mark.parametrize("kind", ("plain", "embedding", "ranges", "chunks", "warm-up", "plain, half of the passes",
                                  "ranges, half of the passes", "chunks, half of the passes"))
def test_a_step_is_broken_off(three, kind):
    plain, broken = three(train, kind, False), three(train, kind, True)
    assert min(broken[1][1]) > 20, broken[1][1]
    for values, _ in broken:
        assert all(reference.same(p, q) == 0 for p, q in zip(values, plain[0][0]))


@pytest.mark.parametrize("kind", ("plain, half of the passes", "groups", "groups, half of the passes"))
def test_a_step_in_shared_memory_is_broken_off(machine, kind):
    """Each gradient moves to its place as it starts."""
    test_a_step_is_broken_off(machine, kind)


def backward(kind):
    """(the parameters behind some steps, at how many lines rank 1 has broken off a backward), where step() goes on each time."""
    import torch
    t = hvd()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    options = {"sparse": t.SparseChunks(0.3, 0, 64)} if kind == "chunks" else \
        {"lazy": 4096 * (kind == "ranges"), "groups": 2 if kind == "groups" else None}
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), **options)
    draw = torch.Generator().manual_seed(t.rank())
    for number in range(1, 400):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 16, generator=draw)).square().sum()
        more = t.rank() == 1 and broken_off(loss.backward, BACKWARD, number)
        if t.rank() != 1:
            loss.backward()
        optimizer.step()
        if not t.broadcast_object(more, 1):
            break
    assert bool(optimizer._tally_layout.ranges) == (kind in ("ranges", "chunks"))
    return [p.detach().numpy().copy() for p in model.parameters()], number - 1


@pytest.mark.parametrize("kind", ("plain", "groups", "ranges", "chunks"))
def test_a_backward_is_broken_off(three, kind):
    """The ranks stay in step: each gradient of a step is submitted once."""
    told = three(backward, kind)
    assert 50 < told[1][1] < 390, told[1][1]
    for values, _ in told:
        assert all(reference.same(p, q) == 0 for p, q in zip(values, told[0][0]))


def refused(kind):
    """The gradients of steps behind one in which rank 1 has frozen a parameter that the others have not."""
    import torch
    import tally
    t = hvd()
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(40))
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), lazy=4096 * (kind == "ranges"))

    def backward(value):
        optimizer.zero_grad()
        sum(layer(torch.full((1, 4), float(value))).sum() for layer in model).backward()

    for _ in range(4):
        backward(1)
        optimizer.step()
    assert bool(optimizer._tally_layout.ranges) == (kind == "ranges")
    odd, errors, found = model[1].weight, [], []
    odd.requires_grad_(t.rank() != 1)
    backward(1)
    if t.rank() == 1:
        errors.append(break_off(optimizer, errors=(tally.Error,)) > 5)
    else:
        with pytest.raises(tally.Error, match="frozen"):
            optimizer.synchronize()
    odd.requires_grad_(True)
    for value in (10, 20, 30):
        backward(value)
        optimizer.synchronize()
        found.append([p.grad.unique().tolist() for p in model.parameters()])
    return errors, found


@pytest.mark.parametrize("kind", ("plain", "ranges"))
def test_a_step_with_unlike_frozen_parameters_is_broken_off(three, kind):
    """The other ranks hear once that a rank does not reduce a parameter, and their next sums are those of one step."""
    told = three(refused, kind)
    assert told[1][0] == [True]
    assert all(found == [[[value]] * 40 for value in (10, 20, 30)] for _, found in told), told


def interrupted(function, is_there):
    """The function, within which a signal arrives once, behind the first call for which is_there(*arguments)."""
    left = [None]

    def call(*arguments):
        result = function(*arguments)
        if left and is_there(*arguments):
            left.pop()
            signal.raise_signal(signal.SIGUSR1)
        return result

    return call


@contextlib.contextmanager
def interrupting(place):
    """A signal arrives once in the submission whose name ends so, behind the start of a plan, or as an Operation is made."""
    from tally import _operations

    def is_there(comm, name, *_):
        return name.endswith(place.encode())

    lib, push_pull = _operations.lib, _operations.push_pull
    push_pull = functools.partial(push_pull, _function=interrupted(lib.tally_push_pull, is_there))
    start = interrupted(threading.Thread.start, lambda thread: place == "plan" and thread.name == "tally-call")
    made = interrupted(_operations.Operation.__init__, lambda *_: place == "Operation")

    def allgather(*arguments, _function=interrupted(lib.tally_allgather, is_there)):
        result = _function(*arguments)
        time.sleep(0.3 * (place == ".values"))  # so that this thread finds that the gather has ended, and submits the sum
        return result

    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(_operations, "push_pull", push_pull))
        patched.enter_context(mock.patch.object(threading.Thread, "start", start))
        patched.enter_context(mock.patch.object(_operations.Operation, "__init__", made))
        patched.enter_context(mock.patch.object(lib, "tally_push_pullv", interrupted(lib.tally_push_pullv, is_there)))
        patched.enter_context(mock.patch.object(lib, "tally_allgather", allgather))
        yield


def submit(place, kind):
    """(the gradients of steps, in which step a handler has raised) where a signal arrives on rank 0 in a submission."""
    import torch
    t = hvd()
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(40))
    if kind == "embedding":
        model.append(torch.nn.Embedding(1, 4, sparse=True))
    options = {"sparse": t.SparseChunks(1.0, 0, 16)} if kind == "chunks" else {"lazy": 4096 * (kind == "ranges")}
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), **options)
    found, broken = [], []
    with raises(TimeoutError), interrupting(place) if t.rank() == 0 else contextlib.nullcontext():
        for step in range(8):
            optimizer.zero_grad()
            try:
                loss = sum(layer(torch.full((1, 4), 1.0 + step)).sum() for layer in model[:40])
                sum(((1.0 + step) * table(torch.tensor([0])).sum() for table in model[40:]), loss).backward()
                optimizer.synchronize()
            except TimeoutError as error:
                assert str(error) == "from the handler"
                broken.append(step)
                optimizer.synchronize()
            found.append([p.grad.to_dense().unique().tolist() for p in model.parameters()])
            with optimizer.skip_synchronize():
                optimizer.step()
    assert bool(optimizer._tally_layout.ranges) == (kind in ("ranges", "chunks"))
    return found, broken


@pytest.mark.parametrize("place, kind", (("/frozen", "plain"), ("39.weight", "plain"), ("/layout", "ranges"), ("plan", "ranges"),
                                         ("/range.0", "ranges"), ("/chunks.0", "chunks"), ("/norms", "chunks"),
                                         ("Operation", "plain"), (".rows", "embedding"), (".values", "embedding")))
def test_a_submission_is_broken_off(three, place, kind):
    """The step goes on with what is under way."""
    told = three(submit, place, kind)
    (step,) = told[0][1]
    assert told[0][0] == told[1][0] == told[2][0], "also in that step, where a backward may lack gradients"
    for other, gradients in enumerate(told[0][0]):
        assert other == step or gradients == [[1.0 + other]] * (40 + (kind == "embedding"))


def with_history(laid_out):
    """(the gradients of a step, with the history of earlier ones; at how many lines of its last hook rank 1 has broken it off).
    laid_out: gradients lie in their places before and behind backward.  Else the step sends everything."""
    import torch
    t = hvd()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 65, bias=False), torch.nn.Linear(65, 1, bias=False))
    state, found, optimizer, last = None, set(), None, []
    model[0].weight.register_hook(lambda _: last.append(None))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(t.rank()))
    for number in itertools.count():
        if optimizer is None:
            optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(),
                                               sparse=t.SparseChunks(0.3, 0, 64))
        for _ in range(8 * (state is None)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        state = state or copy.deepcopy(optimizer.state_dict())
        if number:
            optimizer.load_state_dict(state)
            optimizer.zero_grad(set_to_none=not laid_out)
            loss, more = model(x).square().sum(), False
            last.clear()
            if t.rank() == 1:
                more = broken_off(loss.backward, BACKWARD | {"_tally_start", "add_dense", "add"}, number, lambda: last)
            else:
                loss.backward()
            assert optimizer.history.kept and bool(optimizer._tally_layout.ranges) == laid_out
            optimizer.synchronize()
            found.add(b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
            if not t.broadcast_object(more, 1):
                return found, number - 1
        if not laid_out:
            optimizer = None


@pytest.mark.parametrize("laid_out", (False, True))
def test_a_backward_with_history_is_broken_off(three, laid_out):
    """The history counts once."""
    told = three(with_history, laid_out)
    assert told[1][1] > 20 and len(told[0][0]) == 1 and all(found == told[0][0] for found, _ in told), told[1][1]


def joined():
    """The sum of sparse gradients behind join(), where a signal arrives on rank 0 in the submission of its rows."""
    import torch
    t = hvd()
    table = torch.nn.Embedding(3, 4, sparse=True)
    optimizer = t.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.0), table.named_parameters())
    broken = pytest.raises(TimeoutError, match="from the handler") if t.rank() == 0 else contextlib.nullcontext()
    with raises(TimeoutError), interrupting(".rows") if t.rank() == 0 else contextlib.nullcontext(), broken:
        table(torch.tensor([t.rank()])).sum().backward()
    (handle,) = optimizer._tally_handles.values()
    t.join()
    return handle.wait().to_dense().sum(1).tolist()


def test_join_behind_a_gather_that_is_broken_off(two):
    assert two(joined) == [[2.0, 2.0, 0.0]] * 2


def test_a_signal_as_the_submission_returns():
    """The handler raises behind the call, before anything can hold its result."""
    from tally._operations import submit_to
    held = []
    with raises(TimeoutError), pytest.raises(TimeoutError, match="from the handler"):
        submit_to(held.append, ctypes.CDLL(None)["raise"], int(signal.SIGUSR1))
    assert held and not any(held)

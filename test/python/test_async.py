"""tally.torch.AsyncOptimizer: services keep the parameters, and each rank adds its changes at its own pace."""

import copy
import errno
import random
import signal
import sys
import time
from unittest import mock

import pytest
import torch

import jobs
from test_ops import fails


def model_of(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)


def gradients(model, seed):
    """A backward of this rank's own data."""
    data = torch.randn(11, 7, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    model.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    return loss


def words(model):
    """The model's parameters, exactly."""
    return [p.detach().reshape(-1).tolist() for p in model.parameters()]


def asynchronous(model, optimizer=None, **options):
    import tally.torch as hvd
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return hvd.AsyncOptimizer(optimizer, model.named_parameters(), **options)


def trained(overlap, every, staleness, pause):
    import tally.torch as hvd
    model = model_of(hvd.rank())
    optimizer = asynchronous(model, overlap=overlap, every=every, staleness=staleness)
    ended = [words(model)]
    for epoch in range(2):  # training goes on behind finish()
        for step in range(7 + 5 * hvd.rank()):
            gradients(model, 100 * hvd.rank() + step)
            optimizer.step()
            time.sleep(pause * hvd.rank())
        optimizer.finish()
        ended.append(words(model))
    optimizer.finish()
    ended.append(words(model))
    return ended


@pytest.mark.parametrize("overlap, every, staleness, pause", [
    (True, 1, None, 0), (False, 1, None, 0.02), (True, 3, None, 0.002), (False, 2, 1, 0), (True, 1, 2, 0.01), (True, 100, 255, 0)])
def test_all_ranks_end_with_the_same_parameters(four, overlap, every, staleness, pause):
    results = four(trained, overlap, every, staleness, pause)
    begun, one, two, again = results[0]
    assert begun == words(model_of(0))
    assert begun != one != two == again
    assert all(result == results[0] for result in results)


def alone(every):
    """A rank's own changes, when no other rank has any."""
    import tally.torch as hvd
    model, plain = model_of(0), model_of(0)
    optimizer = asynchronous(model, every=every, overlap=every == 2)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    if hvd.rank() == 1:
        for step in range(9):
            gradients(model, step)
            optimizer.step()
            gradients(plain, step)
            reference.step()
    optimizer.finish()
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters()))


@pytest.mark.parametrize("every", [1, 2, 4])
def test_alone_it_is_the_optimizer(two, every):
    assert two(alone, every)[1] < 1e-14


# --- optimizers ---------------------------------------------------------------------------------------------------------


def stepped(kind):
    import tally.torch as hvd
    if kind == "Muon":
        model = torch.nn.Linear(7, 5, bias=False)
    elif kind == "SparseAdam":
        model = torch.nn.Embedding(7, 5, sparse=True)
    else:
        model = model_of(hvd.rank(), torch.float32)
    optimizer = asynchronous(model, getattr(torch.optim, kind)(model.parameters(), lr=0.01))
    begun = words(model)

    def closure():
        if kind == "SparseAdam":
            model.zero_grad()
            loss = model(torch.arange(hvd.rank(), 5)).square().mean()
            loss.backward()
            return loss
        return gradients(model, hvd.rank())

    losses = [float(optimizer.step(closure)) for _ in range(4)]
    optimizer.finish()
    return losses[-1] < losses[0], begun != words(model), words(model), isinstance(optimizer, getattr(torch.optim, kind))


KINDS = sorted(name for name, kind in vars(torch.optim).items()
               if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer")


def test_all_optimizers_of_torch(two):
    assert len(KINDS) > 10
    for kind in KINDS:
        (better, changed, ended, of_kind), other = two(stepped, kind)
        assert better and changed and of_kind and ended == other[2], kind


def scheduled(before):
    """Learning rates of a scheduler that is made before or after the AsyncOptimizer."""
    import warnings
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if before else None
    optimizer = asynchronous(model, optimizer)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            gradients(model, step)
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    optimizer.finish()
    return rates


@pytest.mark.parametrize("before", [False, True])
def test_schedulers(two, before):
    assert two(scheduled, before) == [[1.0, 0.5, 0.5, 0.25]] * 2


def state_kept():
    import tally.torch as hvd
    model = model_of(0)
    own = torch.optim.Adam(model.parameters(), lr=0.01)
    gradients(model, hvd.rank())
    own.step()
    kept = copy.deepcopy(own.state_dict())
    optimizer = asynchronous(model, own)
    same = [str(optimizer.state_dict()) == str(kept)]
    gradients(model, 5)
    optimizer.step()
    optimizer.load_state_dict(kept)
    same.append(str(optimizer.state_dict()) == str(kept))
    optimizer.zero_grad()
    same.append(all(p.grad is None for p in model.parameters()))
    gradients(model, 6)
    optimizer.step()
    optimizer.finish()
    same.append(float(optimizer.state[next(model.parameters())]["step"]) == 2)
    return same, words(model)


def test_state_is_the_optimizers_own(two):
    (same, ended), (other, there) = two(state_kept)
    assert same == other == [True] * 4
    assert ended == there


def scaled():
    """A GradScaler skips a step of rank 1 alone, whose gradients overflow."""
    import tally.torch as hvd
    model = model_of(0, torch.float32)
    optimizer = asynchronous(model, overlap=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = words(model)
    for step in range(3):
        loss = model(torch.full((2, 7), float(step))).square().mean()
        if hvd.rank() == 1 and step == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.finish()
    return scaler.get_scale(), words(model), before


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="this PyTorch scales gradients on CUDA alone")
def test_grad_scaler(two):
    (scale, ended, before), (scale_1, ended_1, _) = two(scaled)
    assert (scale, scale_1) == (4.0, 2.0)
    assert before != ended == ended_1
    assert all(abs(value) < 10 for p in ended for value in p)


def several():
    """Two optimizers, of which one has parameters of both dtypes; tied, frozen, empty and non-contiguous parameters; buffers."""
    import tally.torch as hvd
    rank = hvd.rank()
    torch.manual_seed(rank)
    first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double())
    first[2].weight = first[0].weight
    first[0].bias.requires_grad_(False)
    first[2].bias.data = torch.randn(8)[::2]
    first.register_parameter("none", torch.nn.Parameter(torch.empty(0, 3)))
    first.register_parameter("scalar", torch.nn.Parameter(torch.tensor(float(rank))))
    second = model_of(rank)
    one = hvd.AsyncOptimizer(torch.optim.SGD(first.parameters(), lr=0.01), first.named_parameters(remove_duplicate=False), every=2)
    two = asynchronous(second, staleness=3)
    frozen = first[0].bias.tolist()
    for step in range(5 + rank):
        data = torch.randn(6, 4, generator=torch.Generator().manual_seed(step + 10 * rank))
        one.zero_grad()
        (first[3](first[:3](data).double()).square().mean() + first.scalar).backward()
        one.step()
        gradients(second, step)
        two.step()
    one.finish()
    two.finish()
    return words(first), words(second), frozen, first[0].bias.tolist(), first[1].num_batches_tracked.item()


def test_several_optimizers_and_uncommon_parameters(four):
    results = four(several)
    assert all(result[:4] == results[0][:4] and result[2] == result[3] for result in results)
    assert [result[4] for result in results] == [5, 6, 7, 8]


class _Elsewhere(torch.nn.Parameter):
    """Stands for a parameter in a GPU's memory: it must be copied."""

    is_cpu = property(lambda self: False)


def copied(elsewhere):
    import tally.torch as hvd
    model = model_of(hvd.rank())
    if elsewhere:
        model[0].weight = _Elsewhere(model[0].weight.detach().clone())
    with mock.patch("tally.torch.device.of"):
        optimizer = asynchronous(model, overlap=False, staleness=1)
    [share] = optimizer._tally_shares
    assert len(share.copies) == elsewhere
    fetched, fetch = [], share._fetch
    share._fetch = lambda: fetched.append(fetch())
    for step in range(4):
        if hvd.rank() == step % 2:  # one after the other
            gradients(model, step)
            optimizer.step()
        hvd.barrier()
    optimizer.finish()
    return words(model), len(fetched)


def test_parameters_elsewhere_are_copied(two):
    """Once when a change is counted, and once when values land: two steps, finish(), and the read there."""
    elsewhere = two(copied, True)
    assert elsewhere == two(copied, False)
    assert [count for _, count in elsewhere] == [7, 7]


# --- mistakes -----------------------------------------------------------------------------------------------------------


def refused():
    import tally.torch as hvd
    rank = hvd.rank()
    model = model_of(0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    small = model_of(0).to(torch.bfloat16 if rank == 1 else torch.float32)
    bad = torch.nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})
    bad["b"].data = bad["a"].data[2:]
    wide = torch.nn.Linear(3 + rank // 3, 2)
    expanded = torch.nn.Linear(3, 2)
    expanded.weight = torch.nn.Parameter(torch.zeros(2, 1).expand(2, 3))
    optimizer = asynchronous(model)
    said = [
        fails(TypeError if rank == 1 else hvd.Error, lambda: asynchronous(small)),
        fails(ValueError, lambda: asynchronous(bad)),
        fails(hvd.Error, lambda: asynchronous(wide)),
        fails(hvd.Error, lambda: asynchronous(model_of(0), staleness=1 + rank // 2)),
        fails(hvd.Error, lambda: asynchronous(model_of(0), every=1 + (rank == 0))),
        fails(ValueError, lambda: asynchronous(model_of(0), staleness=0)),
        fails(ValueError, lambda: asynchronous(model_of(0), every=0)),
        fails(ValueError, lambda: asynchronous(model_of(0), staleness=True)),
        fails(ValueError, lambda: asynchronous(model_of(0), every=True)),
        fails(ValueError, lambda: asynchronous(expanded)),
        fails(ValueError, lambda: asynchronous(model)),
        fails(ValueError, lambda: hvd.DistributedOptimizer(optimizer, model.named_parameters())),
        fails(ValueError, lambda: asynchronous(model, optimizer)),
        fails(ValueError, lambda: hvd.AsyncOptimizer(sgd, list(model.named_parameters())[:1])),
        fails(ValueError, lambda: hvd.AsyncOptimizer(sgd, model.parameters())),
        fails(ValueError, lambda: hvd.AsyncOptimizer(sgd, [("x", p) for p in model.parameters()])),
        fails(NotImplementedError, lambda: optimizer.add_param_group({"params": [torch.zeros(3)]})),
        fails(TypeError, lambda: copy.deepcopy(optimizer)),
    ]
    gradients(model, rank)
    optimizer.step()  # as if nothing had happened
    optimizer.finish()
    return said


def test_what_cannot_be_shared_is_refused(four):
    for said in four(refused):
        for text, wanted in zip(said, [
                "parameter 0.weight is of torch.bfloat16", "parameters a and b share memory",
                "parameter 'weight' of shape (2, 3), torch.float32 on ranks 0-2, parameter 'weight' of shape (2, 4), torch.float32 on rank 3",
                "staleness=1 on ranks 0-1, staleness=2 on ranks 2-3", "every=2 on rank 0, every=1 on ranks 1-3",
                "staleness must be from 1 to 255, or None for no bound, not 0", "every must be a positive number of steps, not 0",
                "or None for no bound, not True", "every must be a positive number of steps, not True",
                "parameter weight is expanded", "parameter 0.weight is in an AsyncOptimizer already", "the optimizer is an AsyncOptimizer",
                "already", "3 of the optimizer's parameters are not in named_parameters", "(name, parameter) pairs",
                "more than once: x", "takes no more parameters", "cannot be copied"]):
            assert wanted in text


def taken_over(dropped):
    """An AsyncOptimizer takes over the parameters of another one that has been finished, or dropped."""
    model, counting = counted()
    first = asynchronous(model, counting)
    first.step()
    if dropped:
        first._tally_land(wait=True)
        del first
    else:
        first.finish()
        first.step()
        first.finish()
    second = asynchronous(model, _Counting(model.parameters()))
    second.step()
    second.finish()
    said = None if dropped else [fails(RuntimeError, first.step), fails(RuntimeError, first.finish)]
    return said, {value for p in model for value in p.detach().reshape(-1).tolist()}


def test_another_one_takes_over(two):
    for said, values in two(taken_over, False):
        assert values == {6.0} and all("has taken over" in text for text in said)
    (said, values), (_, values_1) = two(taken_over, True)
    assert values == values_1 <= {3.0, 4.0}  # rank 0 may have had rank 1's step of the first one, or not


def mistaken():
    """Rank 1 alone raises whatever it is when an AsyncOptimizer is made."""
    import tally.torch as hvd
    model = model_of(0)

    def named():
        yield from model.named_parameters()
        raise ZeroDivisionError("no more names")

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for kind, optimizer, names in [(TypeError, model, model.named_parameters), (ZeroDivisionError, sgd, named), (TypeError, sgd, int)]:
        if hvd.rank() == 1:
            said.append(fails(kind, lambda: hvd.AsyncOptimizer(optimizer, names())))
        else:
            said.append(fails(hvd.Error, lambda: asynchronous(model)))
    if hvd.rank() == 1:
        with mock.patch("torch.empty", side_effect=MemoryError("no room")):
            said.append(fails(MemoryError, lambda: asynchronous(model)))
    else:
        said.append(fails(hvd.Error, lambda: asynchronous(model)))
    asynchronous(model).finish()
    return said


def test_an_exception_while_it_is_made_is_told_to_all_ranks(two):
    for said in two(mistaken):
        for text, wanted in zip(said, ["optimizer must be one of torch.optim, not Sequential", "no more names", "not iterable", "no room"]):
            assert wanted in text


def diverged():
    """The change of rank 1 is not finite in its third step."""
    import tally.torch as hvd
    model = model_of(0)
    optimizer = asynchronous(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said = None
    for step in range(6):
        gradients(model, step + 10 * hvd.rank())
        before = [p.detach().clone() for p in model.parameters()]
        if hvd.rank() == 1 and step == 2:
            model[2].bias.grad[1] = float("nan")
            said = fails(FloatingPointError, optimizer.step)
            with torch.no_grad():
                for p, value in zip(model.parameters(), before):
                    p.copy_(value)
        else:
            optimizer.step()
    optimizer.finish()
    return said, all(torch.isfinite(p).all() for p in model.parameters()), words(model)


def test_a_rank_that_diverges_keeps_it_to_itself(two):
    (said, finite, ended), (said_1, finite_1, ended_1) = two(diverged)
    assert said is None and "the change of parameter 2.bias is not finite" in said_1
    assert finite and finite_1 and ended == ended_1


def large():
    """Changes whose sum overflows are finite."""
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = asynchronous(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model.weight.grad = torch.full((2, 2), -3e38)
    optimizer.step()
    model.weight.grad = torch.zeros(2, 2)
    return torch.isfinite(model.weight).all().item()


def test_large_changes(two):
    assert two(large) == [True, True]


def overflowed(by_finish):
    """Changes of two ranks are finite, and their sum overflows.  The ranks do what the error says.

    by_finish: rank 1 steps no more, so that it gets the error from finish().
    Returns what the error says, whether the values were finite then, and those of another AsyncOptimizer."""
    import tally.torch as hvd
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = asynchronous(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model.weight.grad = torch.full((2, 2), -3e38)
    optimizer.step()
    model.weight.grad = torch.zeros(2, 2)
    hvd.barrier()
    steps = 0 if by_finish and hvd.rank() == 1 else 3

    def go_on():
        for _ in range(steps):
            optimizer.step()
        optimizer.finish()

    said = fails(FloatingPointError, go_on)
    kept = words(model)
    optimizer.finish()
    optimizer.finish()  # a handler of any rank may call it
    same = kept == words(model) and fails(FloatingPointError, optimizer.step) == said
    another = asynchronous(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.grad = torch.full((2, 2), 1e37)
    another.step()
    another.finish()
    return said, same and torch.isfinite(torch.tensor(kept)).all().item(), words(model)


@pytest.mark.parametrize("by_finish", [False, True])
def test_changes_whose_sum_overflows(two, by_finish):
    (said, finite, values), (said_1, finite_1, values_1) = two(overflowed, by_finish)
    for text in said, said_1:
        assert "values of parameter weight are not finite: the sum of the ranks' changes has overflowed" in text
        assert "call finish(), and make another AsyncOptimizer" in text
    assert finite and finite_1 and values == values_1


def _failed_addition(optimizer):
    """Have the addition under way fail, as one for which a service has no memory."""
    import tally
    [share] = optimizer._tally_shares
    share.operation.wait()
    share.operation._failure = tally.Error("no memory for a part that has moved", errno.ENOMEM)


def failed_here(by_finish):
    """An addition of rank 1 fails, and none of rank 0's.  Returns what both are told, and values of another AsyncOptimizer."""
    import tally.torch as hvd
    model = model_of(0)
    optimizer = asynchronous(model)
    gradients(model, hvd.rank())
    optimizer.step()
    said = []
    if hvd.rank() == 1:
        _failed_addition(optimizer)
        if not by_finish:
            said = [fails(hvd.Error, optimizer.step), fails(hvd.Error, optimizer.step)]
    kept = words(model)
    if said:
        optimizer.finish()
    else:
        said = [fails(hvd.Error, optimizer.finish)]
    same = hvd.rank() == 0 or kept == words(model)
    another = asynchronous(model)
    gradients(model, hvd.rank())
    another.step()
    another.finish()
    return said, same, words(model)


@pytest.mark.parametrize("by_finish", [False, True])
def test_an_addition_that_fails_on_one_rank_ends_the_optimizer_on_all(two, by_finish):
    (said, _, values), (said_1, same, values_1) = two(failed_here, by_finish)
    assert len(said) == 1 and "rank 1 refuses: no memory for a part that has moved" in said[0]
    assert len(said_1) == 2 - by_finish and all(text.startswith("no memory") for text in said_1)
    assert same and values == values_1


def given_up_broken_off():
    """A finish() that gives up is broken off at each line.  Returns how many were, and what was wrong."""
    import tally.torch as hvd
    model, wrong, number, more = model_of(0), [], 0, True
    while more:
        number += 1
        optimizer = asynchronous(model)
        optimizer.step()
        if hvd.rank() == 1:
            _failed_addition(optimizer)
        broken, told = False, 0
        for line in ([number] if hvd.rank() == 1 else []) + [0]:
            try:
                broken = broken_off_at(optimizer.finish, line) or broken
            except hvd.Error:
                told += 1
        if told != 1:
            wrong.append((number, told))
        more = hvd.allreduce(torch.tensor(float(broken)), op=hvd.Sum).item()
    return number, wrong


def test_giving_up_broken_off_at_each_line(two):
    for number, wrong in two(given_up_broken_off):
        assert number > 30 and not wrong


def begun_with(value, rank):
    """An AsyncOptimizer of a parameter that is not finite on one rank."""
    import tally.torch as hvd
    model = model_of(0)
    if hvd.rank() == rank:
        with torch.no_grad():
            model[2].weight[1] = value
    if rank == 0:
        return fails(FloatingPointError, lambda: asynchronous(model))
    asynchronous(model).finish()
    return words(model) == words(model_of(0))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_at_first(two, value):
    assert all("rank 0's value of parameter 2.weight is not finite" in said for said in two(begun_with, value, 0))
    assert two(begun_with, value, 1) == [True, True]


_armed = [False]  # a signal handler may raise


class _Counting(torch.optim.Optimizer):
    """Adds 1 to each element.  No signal handler breaks that off."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.counter = [0]

    @torch.no_grad()
    def step(self, closure=None):
        armed, _armed[0] = _armed[0], False
        for group in self.param_groups:
            for p in group["params"]:
                p += 1
        self.counter[0] += 1
        _armed[0] = armed


class _BrokenOff(Exception):
    pass


def counted():
    """Parameters of both dtypes, and an optimizer that counts them up."""
    model = torch.nn.ParameterList([torch.zeros(300, 100, dtype=torch.float64), torch.zeros(7), torch.zeros(1000, 30)])
    return model, _Counting(model.parameters())


def outcome(optimizer, model, broken):
    """How many steps the optimizer has made, how many were broken off, and what values the parameters have."""
    optimizer.finish()
    return optimizer.counter[0], broken, sorted({value for p in model for value in p.detach().reshape(-1).tolist()})


def check_outcomes(results, least):
    assert sum(one[1] for one in results) > least
    assert [one[2] for one in results] == [[sum(one[0] for one in results)]] * len(results)


def broken_off(overlap, every, staleness):
    """Steps that a signal handler breaks off anywhere."""
    import tally.torch as hvd
    model, counting = counted()
    optimizer = asynchronous(model, counting, overlap=overlap, every=every, staleness=staleness)
    broken, chance = 0, random.Random(hvd.rank())

    def handler(*_):
        if _armed[0]:
            _armed[0] = False
            raise _BrokenOff

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(150):
            try:
                _armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-3))
                optimizer.step()
            except _BrokenOff:
                broken += 1
            finally:
                _armed[0] = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                torch.set_grad_enabled(True)  # torch.no_grad(), broken off as it begins, leaves it off
    finally:
        signal.signal(signal.SIGALRM, previous)
    return outcome(optimizer, model, broken)


@pytest.mark.parametrize("overlap, every, staleness", [(True, 1, None), (False, 1, 2), (True, 3, 1)])
def test_steps_broken_off_anywhere_count_once(four, overlap, every, staleness):
    check_outcomes(four(broken_off, overlap, every, staleness), 20)


def broken_off_at(call, number):
    """Call a function, and break it off at the `number`-th line of async_optimizer.py.  Returns whether it has so many."""
    def of_module(frame, event, _):
        return line if frame.f_code.co_filename.endswith("async_optimizer.py") else None

    def line(frame, event, _):
        nonlocal number
        if event == "line":
            number -= 1
            if not number:
                raise _BrokenOff
        return line

    sys.settrace(of_module)
    try:
        call()
        return False
    except _BrokenOff:
        return True
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # torch.no_grad(), broken off as it ends, leaves it off


def broken_off_at_each_line(overlap):
    model, counting = counted()
    optimizer = asynchronous(model, counting, overlap=overlap, staleness=1)
    optimizer.step()
    number = 1
    while broken_off_at(optimizer.step, number):
        number += 1
    return outcome(optimizer, model, number)


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_broken_off_at_each_line_count_once(two, overlap):
    check_outcomes(two(broken_off_at_each_line, overlap), 60)


class _HalfStep(_Counting):
    """Ctrl-C breaks the optimizer's own step off behind the first parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["params"][0].add_(1)
        raise KeyboardInterrupt


def left_unsent(how):
    """Rank 1 changes its parameters without a whole step, and finish() is the next call."""
    import tally.torch as hvd
    model = model_of(0)
    kind = {"half a step": _HalfStep, "closure": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=5)}.get(how, _Counting)
    optimizer = asynchronous(model, kind(model.parameters()))
    called = 0

    def closure():
        nonlocal called
        called += 1
        if called == 3:
            raise KeyError("data")
        return gradients(model, 1)

    before = words(model)
    if hvd.rank() == 1:
        if how == "half a step":
            fails(KeyboardInterrupt, optimizer.step)
        elif how == "closure":
            fails(KeyError, lambda: optimizer.step(closure))
        else:
            with torch.no_grad():
                model[0].weight += 1
    changed = words(model)
    optimizer.finish()
    ended = words(model)
    optimizer.finish()
    return before, changed, ended, words(model)


@pytest.mark.parametrize("how", ["half a step", "closure", "by hand"])
def test_finish_adds_changes_without_a_whole_step(two, how):
    (before, _, ended, again), (_, changed, ended_1, again_1) = two(left_unsent, how)
    assert before != changed
    assert ended == ended_1 == again == again_1
    assert all(abs(a - b) < 1e-14 for one, other in zip(ended, changed) for a, b in zip(one, other))


def last_step_broken_off(every):
    """A step that is broken off at each line, and finish() is the next call.  Returns what was wrong."""
    import tally.torch as hvd
    wrong, number, more = [], 1, True
    while more:
        model, counting = counted()
        optimizer = asynchronous(model, counting, every=every)
        optimizer.step()
        broken = hvd.rank() == 1 and broken_off_at(optimizer.step, number)
        optimizer.finish()
        steps = hvd.allreduce(torch.tensor(float(counting.counter[0])), op=hvd.Sum).item()
        values = {value for p in model for value in p.detach().reshape(-1).tolist()}
        if values != {steps}:
            wrong.append((number, steps, values))
        more = hvd.allreduce(torch.tensor(float(broken)), op=hvd.Sum).item()
        number += 1
    return number, wrong


@pytest.mark.parametrize("every", [1, 2])
def test_finish_behind_a_step_broken_off_at_each_line(two, every):
    for number, wrong in two(last_step_broken_off, every):
        assert number > 15 and not wrong


def finish_broken_off(again):
    """Rank 1's finish() is broken off at each line, and `again` goes on with it."""
    import tally.torch as hvd
    model, counting = counted()
    optimizer = asynchronous(model, counting)
    number, more = 0, True
    while more:
        number += 1
        optimizer.step()
        broken = broken_off_at(optimizer.finish, number if hvd.rank() == 1 else 0)  # rank 0's is not
        if broken and again == "step" and optimizer._tally_end is not None:
            optimizer.step()
        elif broken and (again != "twice" or broken_off_at(optimizer.finish, 1 + number // 2)):
            optimizer.finish()
        more = hvd.allreduce(torch.tensor(float(broken)), op=hvd.Sum).item()
    return outcome(optimizer, model, number)


@pytest.mark.parametrize("again", ["finish", "twice", "step"])
def test_finish_broken_off_at_each_line_goes_on(two, again):
    check_outcomes(two(finish_broken_off, again, timeout=200), 80)


def finish_interrupted(again):
    """A signal handler breaks rank 1's finish() off while it waits for rank 0, which comes before or behind rank 1's next call."""
    import tally.torch as hvd
    model = model_of(0)
    optimizer = asynchronous(model)
    gradients(model, hvd.rank())
    optimizer.step()
    if hvd.rank() == 0:
        time.sleep(0.6)
        optimizer.finish()
    else:
        def handler(*_):
            raise _BrokenOff

        previous = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        fails(_BrokenOff, optimizer.finish)
        signal.signal(signal.SIGALRM, previous)
        time.sleep(0.6 * (again == "late"))
        gradients(model, 1)
        if again == "step":
            optimizer.step()
        else:
            optimizer.finish()
    optimizer.finish()
    return words(model)


@pytest.mark.parametrize("again", ["soon", "late", "step"])
def test_finish_interrupted_while_it_waits(two, again):
    one, other = two(finish_interrupted, again)
    assert one == other


def raising():
    """A closure that raises: nothing is lost, and the next step goes on."""
    model = model_of(0)
    optimizer = asynchronous(model)

    def closure():
        raise KeyError("data")

    for step in range(4):
        gradients(model, step)
        optimizer.step()
        fails(KeyError, lambda: optimizer.step(closure))
    optimizer.finish()
    return words(model)


def test_a_closure_raises(two):
    one, other = two(raising)
    assert one == other


def begun_anew():
    """An optimizer of a job that has ended is of no use in the next one, and says so."""
    import tally.torch as hvd
    model = model_of(0)
    optimizer = asynchronous(model)
    gradients(model, 0)
    optimizer.step()
    hvd.shutdown()
    said = [fails(hvd.NotInitializedError, optimizer.step)]
    hvd.init()
    said += [fails(RuntimeError, optimizer.step), fails(RuntimeError, optimizer.finish)]
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(hvd.rank() + 1)
    optimizer = asynchronous(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return said, words(model)


def test_a_restart_begins_with_rank_0s_parameters(two):
    for (ended, step, finish), values in two(begun_anew):
        assert "not initialised" in ended and "has ended: make another one" in step == finish
        assert {value for p in values for value in p} == {1.0}


LEAVES = """
import torch, sys, time
import tally.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 3)
optimizer = hvd.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), staleness=int(sys.argv[1]) or None)
for step in range(3 if hvd.rank() == 1 else 20):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
if hvd.rank() == 1:
    hvd.shutdown()
    sys.exit()
print("all steps")
optimizer.finish()
print("not reached")
"""


@pytest.mark.parametrize("staleness, said", [(2, "rank 1 has left the job without tally_join"), (0, "rank 1 has left the job")])
def test_a_rank_that_stops_early_without_finish(tmp_path, staleness, said):
    (tmp_path / "leaves.py").write_text(LEAVES)
    status, output = jobs.run(3, 1, [tmp_path / "leaves.py", staleness])
    assert status not in (0, None)
    assert said in output
    assert "not reached" not in output and ("all steps" in output) == (not staleness)

"""Training without the optimizer's barrier: each case in which a parameter is read while its update is due."""

import contextlib
import copy
import os
import pickle
import re
import signal
import socket
import subprocess
import warnings
from unittest import mock

import pytest

import jobs
import reference
import warm
from test_ops import fails, hvd

WIDTH = 8


# --- on the ranks ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def late():
    """No reduction is found to have landed before it is waited for, so that all is due behind step()."""
    from tally.torch.horovod.cross_barrier import CrossBarrier
    from tally.torch.crossing.deferred import Reduction
    with mock.patch.object(Reduction, "done", lambda self: self.handle is None), \
            mock.patch.object(CrossBarrier, "_tally_has_landed", lambda self: False):
        yield


def make_model(seed=0):
    """Parameters in leaves, of one module that is called twice, tied, and read without a call (MultiheadAttention)."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(WIDTH, WIDTH)
            self.twice = torch.nn.Linear(WIDTH, WIDTH)
            self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.last = torch.nn.Linear(WIDTH, WIDTH)
            self.tied = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.tied.weight = self.first.weight

        def forward(self, x):
            x = self.twice(self.twice(self.first(x)).tanh())
            x = self.attention(x, x, x, need_weights=False)[0]
            return self.tied(self.last(x).tanh())

    torch.manual_seed(seed)
    return Net()


def loss_of(model, step):
    import torch
    import tally
    generator = torch.Generator().manual_seed(1000 * step + tally.rank())
    return model(torch.randn(2, 3, WIDTH, generator=generator)).square().mean()


def values(model):
    import torch
    return [p.detach().clone().numpy() for p in torch.nn.Module.parameters(model)]


def same(a, b):
    assert len(a) == len(b)
    return sum(reference.same(x, y) for x, y in zip(a, b)) == 0


def distributed(model, cross=True, kind=None, lazy=0, **options):
    """lazy: 0, so that each parameter has an update of its own; test_lazy.py has ranges of several."""
    import torch
    t = hvd()
    plain = kind(model.parameters()) if kind else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return t.DistributedOptimizer(plain, model.named_parameters(), cross_barrier=cross, lazy=lazy, **options)


def due():
    from tally.torch.crossing import gates
    return len(gates.due)


def each_gate():
    """A step leaves all due; each way to read a parameter finds it updated, and only what it reads."""
    import torch
    from tally.torch.crossing import gates
    with late():
        model, seen = make_model(), {}
        watch = model.attention.register_forward_pre_hook(lambda *_: seen.update(attention=due()))
        optimizer = distributed(model)
        count = len(set(model.parameters()))

        def step():
            optimizer.synchronize()
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            before = [p.detach().clone() for p in everything]
            optimizer.step()
            assert due() == count, "step() returns with all due"
            return before

        everything = list(model.parameters())
        numbers = {id(p): i for i, p in enumerate(everything)}
        place = {name: numbers[id(p)] for name, p in model.named_parameters()}

        def updated(name, before):
            return not torch.equal(everything[place[name]].detach(), before[place[name]])

        step()
        model.attention(*[torch.ones(1, 1, WIDTH)] * 3)
        watch.remove()
        assert seen["attention"] == count - 2 and due() == count - 4, "the gate is in front of other hooks"
        before = step()
        model.first(torch.ones(1, WIDTH))
        assert updated("first.weight", before) and not updated("last.weight", before)
        assert due() == count - 2 and id(everything[place["first.weight"]]) not in gates.due, "tied: the one state"
        model.twice(torch.ones(1, WIDTH))
        left = due()
        model.twice(torch.ones(1, WIDTH))
        assert due() == left == count - 4, "called twice: nothing is due"
        before = step()
        model.attention.out_proj.weight
        assert due() == count - 1 and updated("attention.out_proj.weight", before), "read without a call"
        for read in (lambda: model.state_dict(), lambda: copy.deepcopy(model), lambda: pickle.dumps(model.first),
                     lambda: model.float(), lambda: model.load_state_dict(model.state_dict()),
                     lambda: list(model.parameters()),
                     lambda: dict(model.last._parameters), lambda: model.last._parameters.copy(),
                     lambda: model.last._parameters.get("weight"), lambda: {**model.last._parameters}):
            before = step()
            read()
            assert updated("last.weight", before) or updated("first.weight", before)
        for read in (optimizer.state_dict, optimizer.synchronize, lambda: optimizer.state,
                     lambda: optimizer.load_state_dict(optimizer.state_dict()),
                     lambda: optimizer.add_param_group({"params": [torch.ones(1)]})):
            step()
            read()
            assert due() == 0, read
        before = step()
        one = next(iter(model.parameters()))
        assert due() == count - 1 and one is everything[0], "parameters() is no drain"
        model.zero_grad()
        assert due() == count - 1, "nor is zero_grad()"
        optimizer.synchronize()
        moved = model.last
        before = step()
        model.add_module("elsewhere", moved)
        del model.last
        moved(torch.ones(1, WIDTH))
        assert updated("last.weight", before), "a module that has moved"
        model.last = moved
        del model.elsewhere
        other = torch.nn.Linear(WIDTH, WIDTH)
        before = step()
        other.weight = everything[place["twice.weight"]]
        other(torch.ones(1, WIDTH))
        assert updated("twice.weight", before), "a module that got the parameter later"
        optimizer.synchronize()


def recurrent():
    """LSTM reads a list of its own."""
    import torch

    def train(cross):
        torch.manual_seed(0)
        model = torch.nn.LSTM(WIDTH, WIDTH)
        optimizer = distributed(model, cross)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 1, WIDTH), float(step)))[0].sum().backward()
            optimizer.step()
        return values(model)

    with late():
        mine = train(True)
    assert same(mine, train(False))
    with late():
        model = torch.nn.LSTM(WIDTH, WIDTH)
        optimizer = distributed(model)
        for use in (lambda x: model.forward(x), lambda x: model(x), lambda x: torch._VF.lstm(
                x, (torch.zeros(1, 1, WIDTH),) * 2, model._flat_weights, True, 1, 0.0, False, False, False)):
            optimizer.zero_grad()
            model(torch.ones(2, 1, WIDTH))[0].sum().backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            assert due() == 4
            use(torch.ones(1, 1, WIDTH))
            assert due() == 0 and not any(map(torch.equal, before, model.parameters()))
        again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert again._flat_weights[0] is again.weight_ih_l0 and torch.equal(again.weight_ih_l0, model.weight_ih_l0)
        fails(AttributeError, lambda: torch.nn.LSTM.__new__(torch.nn.LSTM)._flat_weights, "_flat_weights")


def state():
    """optimizer.state between step() and the next forward is that of the last step."""
    import torch

    def train(cross):
        model = make_model()
        optimizer = distributed(model, cross, lambda p: torch.optim.Adam(p, lr=0.01))
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            seen += [value.clone().numpy() for entry in optimizer.state.values() for value in entry.values()]
        assert optimizer.state is optimizer._tally_original.state
        assert not cross or not hasattr(type(optimizer).__new__(type(optimizer)), "state")
        return seen

    with late():
        mine = train(True)
    assert same(mine, train(False))


def originals():
    """Who holds the optimizer that a DistributedOptimizer was made of reads what the barrier would have left there."""
    import torch

    def readers():
        """{name: original -> list of tensors}"""
        held = {}
        return {
            "state_dict": lambda o: [v for entry in o.state_dict()["state"].values() for v in entry.values()],
            "state": lambda o: [v for entry in o.state.values() for v in entry.values()],
            "a copy": lambda o: [v for entry in copy.deepcopy(o).state.values() for v in entry.values()],
            "a pickle": lambda o: [v for entry in pickle.loads(pickle.dumps(o)).state.values() for v in entry.values()],
            "parameters": lambda o: [p for group in o.param_groups for p in group["params"]],
            "items": lambda o: [p for group in o.param_groups for p in dict(group)["params"]],
            "average": lambda o: [held.setdefault(id(p), p.detach().clone()).lerp_(p.detach(), 0.5)
                                  for p in o.param_groups[0]["params"]]}

    def train(cross, read):
        model = make_model()
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        groups = plain.param_groups[0]
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.9)
        optimizer = hvd().DistributedOptimizer(plain, model.named_parameters(), cross_barrier=cross, lazy=0)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            scheduler.step()
            assert not cross or due() > 0, "a scheduler waits for nothing"
            assert groups["lr"] == plain.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.01
            seen += [value.detach().clone().numpy() for value in read(plain)]
            assert seen and due() == 0
        assert isinstance(plain, torch.optim.Adam) and isinstance(plain.param_groups[0], dict)
        again = pickle.loads(pickle.dumps(plain))
        assert type(again) is torch.optim.Adam and type(again.param_groups[0]) is dict
        plain.load_state_dict(plain.state_dict())
        assert not cross or optimizer.state is plain.state and optimizer.param_groups is plain.param_groups
        del optimizer
        assert isinstance(distributed_of(plain, model), torch.optim.Adam)
        return seen

    def distributed_of(plain, model):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = hvd().DistributedOptimizer(plain, model.named_parameters(), cross_barrier=True)
            loss_of(model, 0).backward()
            optimizer.step()
        return optimizer

    for name in readers():
        with late():
            mine = train(True, readers()[name])
        assert same(mine, train(False, readers()[name])), name


def zeroing():
    """zero_grad() of any kind between step() and the update: the update has its gradient, and then it is gone."""
    import torch

    def train(cross, zero):
        model = make_model()
        optimizer = distributed(model, cross)
        gradients = []
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            zero(model, optimizer)
            if cross:
                assert due() > 0
            gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        return values(model), gradients

    ways = [lambda m, o: o.zero_grad(), lambda m, o: o.zero_grad(set_to_none=False), lambda m, o: m.zero_grad(),
            lambda m, o: m.zero_grad(set_to_none=False)]
    for zero in ways:
        with late():
            mine, gradients = train(True, zero)
        theirs, wanted = train(False, zero)
        assert same(mine, theirs)
        assert all((a is None and b is None) or torch.equal(a, b) for x, y in zip(gradients, wanted) for a, b in zip(x, y))
    with late():  # the gradient stays where it is if nobody asks
        model = make_model()
        optimizer = distributed(model)
        loss_of(model, 0).backward()
        held = model.last.weight.grad
        optimizer.step()
        optimizer.synchronize()
        assert model.last.weight.grad is held


def modes():
    """A gate is passed in forward's modes and updates in step()'s."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            assert "add" not in getattr(function, "__name__", "")[:4] or "addmm" in function.__name__, function
            return function(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "foreach" not in str(function) and "addcdiv" not in str(function), function
            return function(*args, **(kwargs or {}))

    def forward(model, how):
        x = torch.ones(1, 1, WIDTH)
        with {"inference": torch.inference_mode, "no grad": torch.no_grad,
              "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "function": Function, "dispatch": Dispatch}[how]():
            model(x)

    def train(cross, how):
        model = make_model()
        optimizer = distributed(model, cross, lambda p: torch.optim.Adam(p, lr=0.01))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            forward(model, how)
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        assert not any(value.is_inference() or value.requires_grad for value in state)
        return values(model)

    for how in ("inference", "no grad", "autocast", "function", "dispatch"):
        with late():
            mine = train(True, how)
        assert same(mine, train(False, how)), how


def keeps(reason, make, steps=2, kind=None, prepare=lambda optimizer: None, step=lambda o: o.step(), **options):
    """Whether such a step keeps the barrier, says why, once, and gives the same bits."""
    def train(cross):
        model = make()
        optimizer = distributed(model, cross, kind, **options)
        prepare(optimizer)
        for number in range(steps):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            step(optimizer)
            assert not cross or due() == 0
        return values(model)

    with late(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = train(True)
    said = [str(one.message) for one in caught if "cross_barrier" in str(one.message)]
    assert len(said) == 1 and reason in said[0], (reason, said)
    assert same(mine, train(False)), reason


def barriers():
    import torch

    def clip(optimizer):
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()

    class Mine(torch.optim.SGD):
        pass

    keeps("clipping by norm", make_model, step=clip)
    keeps("Mine may look at all gradients", make_model, kind=lambda p: Mine(p, lr=0.1))
    keeps("hooks of step()", make_model, prepare=lambda o: o.register_step_post_hook(lambda *_: None))
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=1.0)

    def scaled(optimizer):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()

    keeps("GradScaler", make_model, step=scaled)
    Mine.tally_cross_barrier = True
    with late():
        model = make_model()
        optimizer = distributed(model, True, lambda p: Mine(p, lr=0.1))
        loss_of(model, 0).backward()
        optimizer.step()
        assert due() > 0, "a class that has opted in"
        optimizer.synchronize()

    class Reading(Mine):
        """Reads the state of an optimizer that it holds."""

        def step(self, closure=None):
            assert self.held.state is self.state
            return super().step(closure)

    with late():
        model = make_model()
        optimizer = distributed(model, True, lambda p: Reading(p, lr=0.1))
        optimizer.held = optimizer
        loss_of(model, 0).backward()
        before = values(model)
        optimizer.step()
        assert due() > 0
        optimizer.synchronize()
        assert due() == 0 and not any(same([a], [b]) for a, b in zip(before, values(model)))
    hvd()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = torch.nn.Linear(2, 2)
        raw = torch.nn.Parameter(torch.ones(2))
        named = [*model.named_parameters(), ("raw", raw)]
        optimizer = hvd().DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named, cross_barrier=True)
        assert any("1 parameters, such as raw, are in no module" in str(one.message) for one in caught)
    with late():
        (model(torch.ones(2)).sum() + raw.sum()).backward()
        optimizer.step()
        assert raw.detach().eq(0).all() and due() == 2, "what has no gate is updated by step()"
        optimizer.synchronize()


def clip_value():
    import torch

    def by_hand(model):
        optimizer = distributed(model, False)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_value_(list(model.parameters()), 1e-3)
            with optimizer.skip_synchronize():
                optimizer.step()
        return values(model)

    def by_gates(model):
        optimizer = distributed(model, True, clip_value=1e-3)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return values(model)

    def scaled(model, cross):
        options = {"clip_value": 1e-3} if cross else {}
        optimizer, scaler = distributed(model, cross, **options), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step % 2:  # as Horovod has it
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            if not cross:
                torch.nn.utils.clip_grad_value_(list(model.parameters()), 1e-3)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return values(model)

    with late():
        assert same(by_hand(make_model()), by_gates(make_model()))
        assert same(scaled(make_model(), False), scaled(make_model(), True)), "unscaled gradients are clipped"
    fails(ValueError, lambda: distributed(make_model(), False, clip_value=1.0), "cross_barrier")
    fails(ValueError, lambda: distributed(make_model(), True, clip_value=-1.0), "positive")


def clipped_without():
    """A rank has no gradient behind a step that was put off, and all look at gradients: zeros count for it."""
    import torch
    import tally

    def train(cross, look):
        model = make_model()
        optimizer = distributed(model, cross)
        for step in range(6):
            optimizer.zero_grad()
            if (step, tally.rank()) not in ((1, 1), (3, 0), (4, 0)):
                loss_of(model, step).backward()
            if step % 2 == 0:
                optimizer.step()
            else:
                look(model, optimizer)
        return values(model)

    def clip(model, optimizer):
        with optimizer.skip_synchronize():
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    def scaled(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    for look in (clip, scaled):
        with late():
            mine = train(True, look)
        assert same(mine, train(False, look)), look

    def outside(model, optimizer):
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()

    model = make_model()
    optimizer = distributed(model)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    if tally.rank() != 0:
        loss_of(model, 1).backward()
    fails(tally.Error, lambda: outside(model, optimizer), "step() in skip_synchronize() on rank 0",
          "call synchronize() inside skip_synchronize(), too")
    for again in (model, make_model()):  # training goes on, here too
        if again is not model:
            optimizer = distributed(again)
        optimizer.zero_grad()
        loss_of(again, 2).backward()
        optimizer.step()
        optimizer.synchronize()
        assert due() == 0


def closures():
    def train(cross):
        model = make_model()
        optimizer = distributed(model, cross)
        calls = []
        for step in range(4):
            def closure():
                calls.append(step)
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss
            loss = optimizer.step(closure)
            assert loss.item() > 0 and (not cross or due() > 0)
        assert calls == [0, 1, 2, 3]
        return values(model)

    with late():
        mine = train(True)
    assert same(mine, train(False))


def unused_and_changing():
    """Ranks reach other parameters in other orders, some none at all, and forward raises in between."""
    import torch
    import tally

    def train(cross):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        optimizer = distributed(model, cross)
        for step in range(8):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            x = torch.full((1, WIDTH), float(step + tally.rank()))
            try:
                model[step % 4](x)
                raise KeyError("in forward")
            except KeyError:
                pass
            order = [(step + i * (1 + 2 * tally.rank())) % 4 for i in range(3)]
            if (step, tally.rank()) != (5, 1):  # there no gradient comes on rank 1
                for i in order:
                    x = model[i](x).tanh()
                x.sum().backward()
            optimizer.step()
        return values(model)

    with late():
        mine = train(True)
    assert same(mine, train(False))


def adversaries():
    """Two optimizers take turns, and one has a second backward before its step: what is reducing is not updated."""
    import torch

    def train(cross):
        one, other = make_model(1), make_model(2)
        first = distributed(one, cross, backward_passes_per_step=2)
        second = distributed(other, cross)
        for step in range(4):
            first.zero_grad()
            loss_of(one, step).backward()
            loss_of(one, step + 100).backward()
            before = [p.detach().clone() for p in one.parameters()]
            one(torch.ones(1, 1, WIDTH))  # reducing, and not due
            assert all(torch.equal(a, b) for a, b in zip(before, one.parameters()))
            first.step()
            second.zero_grad()
            other(one(torch.ones(1, 1, WIDTH))).sum().backward(inputs=list(other.parameters()))
            second.step()
        return values(one) + values(other)

    with late():
        mine = train(True)
    assert same(mine, train(False))


def checkpointed():
    """Recomputation in backward finds nothing due; a graph that is older than the step is refused by name."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def train(cross):
        model = make_model()
        optimizer = distributed(model, cross)
        for step in range(3):
            optimizer.zero_grad()
            checkpoint(lambda x: model(x), torch.ones(1, 1, WIDTH, requires_grad=True) * step,
                       use_reentrant=step == 2).sum().backward()
            optimizer.step()
        return values(model)

    with late():
        mine = train(True)
        model = make_model()
        optimizer = distributed(model)
        old = checkpoint(lambda x: model(x), torch.ones(1, 1, WIDTH, requires_grad=True), use_reentrant=False).sum()
        loss_of(model, 0).backward()
        optimizer.step()
        fails(RuntimeError, old.backward, "is read in backward while its update is due")
        optimizer.synchronize()
    assert same(mine, train(False))


def references():
    """What gates cannot see: found in backward, and in the debug mode, by name; right behind synchronize()."""
    import torch
    t = hvd()

    class Factor(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.register_buffer("factor", factor)

        def forward(self, x):
            return x * self.factor

        @torch.jit.export
        def view(self, size: int):
            return self.factor.view(size)

    def from_script():
        with t.find_stale_reads():
            script(torch.ones(1))

    with late():
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = distributed(model)
        weight, bias = list(model.parameters())
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        alias = weight.detach()
        optimizer.synchronize()
        script = torch.jit.script(Factor(alias))
        optimizer.zero_grad()
        (weight.sum() + bias.sum()).backward()
        optimizer.step()
        with t.find_stale_reads():
            assert weight.shape == (1, WIDTH)
            fails(RuntimeError, lambda: weight.sum(), "sum reads weight while its update is due")
            fails(RuntimeError, lambda: torch.add(alias, 1), "add reads weight while its update is due")
            fails(RuntimeError, from_script, "mul reads weight while its update is due")
            assert script.view(-1).shape == (WIDTH,), "a view reads nothing"
            model(torch.ones(1, WIDTH))
            weight.sum()
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fails(RuntimeError, lambda: weight.sum().backward(), "weight got a gradient while its update was due")
        optimizer.synchronize()


def landed():
    """step() makes the updates if all gradients have landed; synchronize() behind it reduces nothing, as ever."""
    import tally

    def train(cross):
        model = make_model()
        optimizer = distributed(model, cross)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if cross:
                optimizer._tally_frozen[0].wait()
                for handle in optimizer._tally_handles.values():
                    handle.wait()
                assert optimizer._tally_has_landed()
                optimizer._tally_defer = None  # it is not called
            optimizer.step()
            assert due() == 0
            if cross and tally.rank() == 0:
                optimizer.synchronize()
        return values(model)

    assert same(train(True), train(False))


def failing():
    """A gradient is written to on its way, and ranks disagree on one: the error has the name, and nothing stays due."""
    import torch
    import tally
    with late():
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = distributed(model)
        model(torch.ones(1, WIDTH)).sum().backward()
        gradient = model.weight.grad
        optimizer.step()
        gradient.add_(1)
        fails(RuntimeError, lambda: model(torch.ones(1, WIDTH)), "the gradient of weight was changed")
        assert due() == 0
        hvd().broadcast_parameters(model.state_dict(), 0)
        optimizer.zero_grad()
        model.bias.requires_grad_(tally.rank() != 0)
        model(torch.ones(1, WIDTH)).sum().backward()
        # If that has been heard by then step() says it.
        fails(RuntimeError, lambda: (optimizer.step(), model(torch.ones(1, WIDTH))), "bias")
        assert due() == 0


def frozen():
    """A parameter that is frozen with its gradient in place goes on by momentum and decay, as with the barrier."""
    import torch

    def train(cross):
        model = make_model()
        optimizer = distributed(model, cross, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1))
        for step in range(6):
            if step == 2:
                model.last.requires_grad_(False)
            if step == 4:
                model.last.requires_grad_(True)
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            optimizer.step()
        return values(model)

    with late():
        mine = train(True)
    assert same(mine, train(False))


def ordering():
    """Gates tell the order of first use before the first backward, a step earlier than backward can; zero_grad() does not."""
    import tally
    import torch
    from tally.torch.crossing import gates
    torch.manual_seed(0)
    names = ["a", "b", "c", "d"]
    model = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTH, WIDTH) for name in names})
    optimizer = distributed(model)
    seen = []
    for step in range(5):
        model.zero_grad()
        x = torch.ones(1, WIDTH)
        for name in "cadb":
            x = model[name](x).tanh()
        if tally.rank() == 0:
            assert len(optimizer._tally_order._used) == 2 * len(names), "each step is observed"  # noqa: F821 - deleted below
        x.sum().backward()
        slots = sorted(optimizer._tally_slots[::2], key=lambda slot: -slot.priority)  # noqa: F821 - deleted below
        seen.append("".join(slot.name[0] for slot in slots))
        optimizer.step()
    optimizer.synchronize()
    assert seen == ["abcd"] * 2 + ["cadb"] * 3, seen
    order = optimizer._tally_order
    assert any(one is order for one, _ in gates.observed.values()) == (tally.rank() == 0)
    import gc
    gc.disable()
    try:
        del optimizer
        gone = not any(one is order for one, _ in gates.observed.values())
    finally:
        gc.enable()
    assert gone, "no cycle keeps the optimizer"
    assert not any(one is order for one, _ in gates.observed.values()), "nothing is kept of an optimizer that is gone"


def losing(service):
    """Parameters after steps in which, if `service` is a process's number, it dies while updates are due."""
    import tally
    with late():
        model = make_model()
        optimizer = distributed(model)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            assert due() > 0
            if step == 4 and service and tally.rank() == 0:
                os.kill(service, signal.SIGKILL)
        return values(model)


# --- the tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", (each_gate, recurrent, state, originals, zeroing, modes, barriers, clip_value, clipped_without,
                                  closures, unused_and_changing, adversaries, checkpointed, references, landed, failing, frozen,
                                  ordering), ids=lambda case: case.__name__)
def test_case(two, case):
    two(case)


LOSE = """
import hashlib, importlib, sys
import tally
tally.init()
module, service, *arguments = sys.argv[1:]
result = b"".join(value.tobytes() for value in importlib.import_module(module).losing(int(service), *arguments))
print("parameters", hashlib.sha256(result).hexdigest(), flush=True)
"""


def lose(kill, module, *arguments):
    """What two ranks with two tallyd print that call the module's losing(); `kill`: one of these dies.  `tally run` would end
    the job with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = "127.0.0.1:%d" % probe.getsockname()[1]

    def start(name, arguments, **env):
        env = jobs.environment({"TALLY_COORD": where, "TALLY_HOST_ID": name, "TALLY_SERVERS": "2", **env})
        return subprocess.Popen(list(map(str, arguments)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True)

    services = [start("tallyd-%d" % i, [jobs.BUILD / "bin" / "tallyd"]) for i in range(2)]
    program = [*warm.python(), "-c", LOSE, module, services[0].pid if kill else 0, *arguments]
    ranks = [start("rank-%d" % i, program, RANK=str(i), WORLD_SIZE="2") for i in range(2)]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), outputs
        if kill:
            assert services[0].wait(10) == -signal.SIGKILL
        return [re.findall("^parameters (.*)", output, re.MULTILINE) for output in outputs]
    finally:
        for process in services + ranks:
            process.kill()
            process.communicate()


def test_a_tallyd_dies_while_updates_are_due():
    undisturbed = lose(False, "test_cross_barrier")
    assert len(undisturbed[0]) == 1 and undisturbed[0] == undisturbed[1]
    assert lose(True, "test_cross_barrier") == undisturbed

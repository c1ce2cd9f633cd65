"""Training without the optimizer's barrier: ranks that join or fail, and optimizers, models and parameters that end, move or are
made again while updates are due."""

import contextlib
import os

import pytest

from test_cross_barrier import WIDTH, distributed, due, late, loss_of, make_model, same, values
from test_ops import fails, hvd


def joining():
    """Ranks run out of input at different times; join() makes the last updates first."""
    import tally
    t = hvd()

    def train(cross):
        model = make_model()
        optimizer = distributed(model, cross)
        for step in range(2 + tally.rank()):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        last = t.join()
        assert due() == 0
        t.broadcast_parameters(model.state_dict(), last)
        return values(model)

    with late():
        mine = train(True)
    assert same(mine, train(False))


def raising():
    """A compression raises another exception than Tally's Error: one reader hears it, and training goes on."""
    import torch
    t = hvd()
    broken = []

    class Breaking(t.Compression.fp16):
        @staticmethod
        def decompress(tensor, ctx):
            if broken and len(tensor) == 1 and tensor.ndim == 2:
                raise KeyError(broken.pop())
            return t.Compression.fp16.decompress(tensor, ctx)

    def backward():
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()

    with late():
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = distributed(model, compression=Breaking)
        held = dict(model.named_parameters())
        for read in (lambda: model(torch.ones(1, WIDTH)), optimizer.step, optimizer.synchronize):
            backward()
            optimizer.step()
            bias = held["bias"].detach().clone()
            broken.append("no such scale")
            fails(KeyError, read, "no such scale")
            assert due() == 0 and not broken
            assert not torch.equal(bias, held["bias"].detach()), "the others are updated"
        backward()
        broken.append("no such scale")
        fails(KeyError, lambda: (optimizer.synchronize(), optimizer.step()), "no such scale")
        saved = optimizer.state_dict()
        for _ in range(2):
            backward()
            optimizer.step()
        assert due() == 2
        broken.append("no such scale")
        optimizer.load_state_dict(saved)
        assert due() == 0


def taken_out():
    """A group that is taken out of the optimizer is reduced and not updated, as with the barrier."""
    import torch

    def train(cross):
        model = make_model()
        rest = [p for name, p in model.named_parameters() if not name.startswith("last")]
        plain = torch.optim.SGD([{"params": rest}, {"params": list(model.last.parameters())}], lr=0.1)
        optimizer = hvd().DistributedOptimizer(plain, model.named_parameters(), cross_barrier=cross)
        for step in range(5):
            if step == 3:
                del optimizer.param_groups[1]
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return values(model)

    with late():
        mine = train(True)
    assert same(mine, train(False))


def deleted():
    """A module that is deleted while its updates are due gets them, and the others go on, as with the barrier."""
    import gc
    import torch

    def train(cross):
        model = make_model()
        optimizer = distributed(model, cross)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if step == 2:
                assert due() > 0 or not cross
                model.last = torch.nn.Identity()
                gc.collect()
        optimizer.synchronize()
        return [p.detach().clone().numpy() for p in optimizer.param_groups[0]["params"]]

    with late():
        mine = train(True)
    assert same(mine, train(False))


def transformed():
    """Updates are made in a transform of torch.func as outside of it."""
    import torch

    def train(cross):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
        optimizer = distributed(model, cross)
        seen = []
        for transform in (torch.func.grad, torch.func.jacrev, torch.func.vmap):
            optimizer.zero_grad()
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            seen.append(transform(lambda x: model(x).sum())(torch.ones(2, WIDTH)).detach().numpy())
        return values(model) + seen

    with late():
        mine = train(True)
    assert same(mine, train(False))


def forked():
    """A child that has been forked while updates are due is refused what it reads."""
    import torch
    with late():
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = distributed(model)
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                fails(RuntimeError, lambda: model.weight, "forked while updates were due")
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.synchronize()


def made_again():
    """An optimizer that nobody uses any more makes its updates when it ends; another one can have its parameters."""
    import torch
    t = hvd()
    with late():
        model = torch.nn.Linear(WIDTH, 1)
        held = list(model.parameters())
        optimizer = t.DistributedOptimizer(torch.optim.SGD(held, lr=0.1), cross_barrier=True)
        model(torch.ones(1, WIDTH)).sum().backward()
        before = held[0].detach().clone()
        optimizer.step()
        assert due() == 2
        del optimizer
        assert due() == 0 and not torch.equal(before, held[0])
        t.DistributedOptimizer(torch.optim.SGD(held, lr=0.1), cross_barrier=True)


@contextlib.contextmanager
def uncollected():
    """The garbage collector runs when it is called alone: what goes, goes with its last reference."""
    import gc
    gc.collect()
    gc.disable()
    try:
        yield gc
    finally:
        gc.enable()


def released():
    """Updates that are due keep no model, and are made for whoever reads its parameters yet."""
    import time
    import weakref
    import torch
    import tally
    from torch.multiprocessing.reductions import StorageWeakRef

    def step(cross=True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
        optimizer = distributed(model, cross, lambda p: torch.optim.Adam(p, lr=0.1))
        model(torch.full((1, WIDTH), 1.0 + tally.rank())).sum().backward()
        optimizer.step()
        assert not cross or due() == 4
        return model, optimizer

    def watched(*things):
        return [weakref.ref(thing) for thing in things]

    before, _ = step(False)
    wanted = values(before)
    with uncollected() as gc:
        for first in range(2):
            with late():
                pair = list(step())
                weight = torch.nn.Module.parameters(pair[0])
                refs = watched(*pair, next(weight))
                weight.close()
                assert due() >= 3
                del pair[first], pair[0]
                assert [ref() for ref in refs] == [None] * 3 and due() == 0
        for kept in (lambda model: model, lambda model: list(model.parameters()), lambda model: model.state_dict().values(),
                     lambda model: [p.detach() for p in model.parameters()]):
            with late():
                torch.manual_seed(0)
                model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
                reader = kept(model)
                optimizer = distributed(model, True, lambda p: torch.optim.Adam(p, lr=0.1))
                model(torch.full((1, WIDTH), 1.0 + tally.rank())).sum().backward()
                optimizer.step()
                assert due() == 4
                del model, optimizer
            mine = values(reader) if isinstance(reader, torch.nn.Module) else [p.detach().clone().numpy() for p in reader]
            assert same(mine, wanted) and due() == 0, "who reads yet reads what is updated"
        for read in (False, True):  # the collector waits for nothing
            with late():
                model, optimizer = step()
            model.optimizer, optimizer.model = optimizer, model
            held = [dict.get(layer._parameters, name) for layer in model for name in ("weight", "bias")]
            memory = StorageWeakRef(held[0].untyped_storage())
            reader = held if read else None
            del held
            del model, optimizer
            gc.collect()
            end = time.monotonic() + 60
            while (due() or memory.expired() == read) and time.monotonic() < end:
                time.sleep(0.01)
                gc.collect()
            assert due() == 0 and memory.expired() != read
            assert not read or same([p.detach().clone().numpy() for p in reader], wanted)


def lost():
    """An optimizer has ended, and its update fails: the next reader hears why, and nothing is kept."""
    import weakref
    import torch
    with late(), uncollected():
        for read in (True, False):
            model = torch.nn.Linear(WIDTH, 1)
            optimizer = distributed(model)
            model(torch.ones(1, WIDTH)).sum().backward()
            gradient = model.weight.grad
            optimizer.step()
            gradient.add_(1)
            del optimizer, gradient
            assert due() == 2
            if read:
                fails(RuntimeError, lambda model=model: model.weight, "the gradient of weight was changed")
                assert due() == 0
            gone = weakref.ref(dict.get(model._parameters, "bias"))
            del model
            assert due() == 0 and gone() is None


def leaving():
    """What shutdown() has no time to wait for stays due: whoever reads it then waits, or hears why it fails."""
    import torch
    import tally
    from tally.torch.crossing import gates
    t = hvd()
    with late():
        model = torch.nn.Linear(WIDTH, 1)
        optimizer = distributed(model)
        before = model.weight.detach().clone()
        loss = model(torch.ones(1, WIDTH)).sum()
        if tally.rank() == 0:
            loss.backward()
            optimizer.step()
            gates.drain(quietly=True, timeout=0)
            assert due() == 2
        t.allreduce(torch.ones(1), name="rank 0 has given up")
        if tally.rank() != 0:
            loss.backward()
            optimizer.step()
        assert not torch.equal(model.weight, before)
        optimizer.synchronize()
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        gradient = model.weight.grad
        optimizer.step()
        gradient.add_(1)
    gates.drain(quietly=True, timeout=60)
    fails(RuntimeError, lambda: model.weight, "the gradient of weight was changed")
    assert due() == 0


@pytest.mark.parametrize("case", (joining, raising, made_again, leaving, released, lost, taken_out, deleted, transformed, forked),
                         ids=lambda case: case.__name__)
def test_case(two, case):
    two(case)

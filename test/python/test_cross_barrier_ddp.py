"""cross_barrier(): DistributedDataParallel without the optimizer's barrier has the same bits as with it."""

import os
import pickle
import signal

import pytest

from test_cross_barrier import WIDTH, due, late, lose, same, values
from test_ddp import group
from test_ops import fails, hvd

# --- on the ranks ----------------------------------------------------------------------------------------------


def ddp(mode, cross, path, steps=12, service=0):
    """Parameters of a DistributedDataParallel after some steps, and how often something was due behind step().  service: a
    process that dies behind the fifth."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    import tally
    t = hvd()
    options = {"plain": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
    seen = 0
    with group("gloo", path + mode + str(cross)), late():
        torch.manual_seed(0)
        inner = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)])

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = inner

            def forward(self, x, skip):
                for i, layer in enumerate(self.layers):
                    if i != skip:
                        x = layer(x).tanh()
                    if skip == "raise" and i == 2:
                        raise KeyError("in the middle of forward")
                return x

        # A bucket for each layer: what a forward skips, no other layer's gate updates.
        model = DistributedDataParallel(Net(), gradient_as_bucket_view=True, bucket_cap_mb=0.0001,
                                        **options.get(mode, {}))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        half = mode == "half"
        if cross:
            compression = t.Compression.fp16 if half else t.Compression.none
            assert t.cross_barrier(model, optimizer, compression) is optimizer
        else:
            model.register_comm_hook(t.state(), t.ddp_hook_fp16 if half else t.ddp_hook)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            skip = (step + tally.rank()) % 5 if mode == "unused" else -1
            x = torch.full((2, WIDTH), 0.1 * (step + tally.rank()))
            if mode == "raised" and step % 4 == 3:
                fails(KeyError, lambda: model(x, "raise"), "in the middle of forward")
            if mode == "accumulated":
                with model.no_sync():
                    model(x, skip).square().sum().backward()
            if mode == "twice":
                model(x, skip).square().sum().backward()
            model(x, skip).square().sum().backward()
            if mode == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            seen += due() > 0
            if step == 4 and service and tally.rank() == 0:
                assert due() > 0
                os.kill(service, signal.SIGKILL)
        return values(model), seen


def losing(service, path):
    """As test_cross_barrier's."""
    return ddp("plain", True, path, service=service)[0]


def ddp_join(path, cross):
    import torch
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel
    import tally
    t = hvd()
    with group("gloo", path + str(cross)), late():
        torch.manual_seed(0)
        # So large that a rank without input, for which torch averages zeros, has the average of its own last step in flight.
        model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)]),
                                        gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if cross:
            t.cross_barrier(model, optimizer)
        else:
            model.register_comm_hook(t.state(), t.ddp_hook)
        with Join([model]):
            for step in range(4 + 2 * tally.rank()):
                optimizer.zero_grad()
                model(torch.full((1, 1024), 0.1 * step)).square().mean().backward()
                optimizer.step()
        return values(model)


def ddp_looked_at(path, look):
    """Whoever looks at gradients behind backward finds them averaged; a change of one on its way is refused by name."""
    import torch
    import tally
    from torch.nn.parallel import DistributedDataParallel
    t = hvd()
    with group("gloo", path + look), late():
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]),
                                        gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        t.cross_barrier(model, optimizer)
        held = list(model.parameters())

        def backward():
            model(torch.full((1, WIDTH), 0.1 * (1 + tally.rank()))).square().sum().backward()

        for step in range(6):
            optimizer.zero_grad()
            backward()
            optimizer.step()
            if look == "dropped":  # by another model's loss, whose gradients here are not wanted
                assert step < 2 or due() > 0
                backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        backward()
        if look == "attribute":
            gradient = model.module[0].weight.grad
            own = t.allreduce(gradient.clone(), name="own", op=t.Max)
            assert torch.equal(gradient, own), "the same on all ranks"
        elif look == "written":
            held[0].grad.mul_(2)
        elif look == "replaced":
            held[0].grad = held[0].grad * 2
        if look in ("written", "replaced"):
            fails(RuntimeError, optimizer.step, "was changed between backward and the end of its reduction")


def ddp_recurrent(path):
    """So does who reads them by way of a recurrent module's own list."""
    import torch
    import tally
    from torch.nn.parallel import DistributedDataParallel
    t = hvd()
    with group("gloo", path), late():
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.LSTM(WIDTH, WIDTH), gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        t.cross_barrier(model, optimizer)
        weights = model.module._flat_weights
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((2, 1, WIDTH), 0.1 * (1 + step + tally.rank())))[0].square().sum().backward()
            if step < 5:
                optimizer.step()
        gradients = [p.grad.clone() for p in model.module._flat_weights]
        assert all(a is b for a, b in zip(weights, model.module._flat_weights))
        for i, gradient in enumerate(gradients):
            assert torch.equal(gradient, t.allreduce(gradient.clone(), name="own %d" % i, op=t.Max)), "the same on all ranks"


def ddp_released(path):
    """Of a model and an optimizer that are deleted nothing is kept: behind step() or behind backward, in any order."""
    import gc
    import weakref
    import torch
    from tally.torch.crossing import gates
    from torch.nn.parallel import DistributedDataParallel
    t = hvd()
    with group("gloo", path), late():
        gc.collect()
        for first, ends in ((0, "step"), (1, "step"), (0, "backward"), (1, "backward")):
            model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH), gradient_as_bucket_view=True)
            optimizer = t.cross_barrier(model, torch.optim.Adam(model.parameters(), lr=0.01))
            for step in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, WIDTH)).sum().backward()
                if step < 3 or ends == "step":
                    optimizer.step()
            assert len(gates.due if ends == "step" else gates.flying) == 2
            pair = [model, optimizer]
            gone = [weakref.ref(one) for one in (model, optimizer, dict.get(model.module._parameters, "weight"))]
            del model, optimizer
            gc.disable()
            try:
                del pair[first], pair[0]
                assert gone[1]() is None and not gates.due and not gates.flying
            finally:
                gc.enable()
            gc.collect()  # DistributedDataParallel is in a cycle of its own
            assert [one() for one in gone] == [None] * 3


def ddp_clip_value(path):
    """clip_value= clips what a closure computes, too, for optimizers that call it themselves."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    t = hvd()

    def train(cross, kind):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH), gradient_as_bucket_view=True)
        optimizer = kind(model.parameters(), lr=0.1)
        if cross:
            t.cross_barrier(model, optimizer, clip_value=1e-3)
        else:
            model.register_comm_hook(t.state(), t.ddp_hook)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1, WIDTH)).square().sum()
            loss.backward()
            if not cross:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return values(model)

    for kind in (torch.optim.SGD, torch.optim.LBFGS):
        with group("gloo", path + kind.__name__), late():
            assert same(train(True, kind), train(False, kind)), kind


def ddp_refusals(path):
    import torch
    from torch.nn.parallel import DistributedDataParallel
    t = hvd()
    with group("gloo", path):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        fails(TypeError, lambda: t.cross_barrier(module, sgd), "DistributedDataParallel")
        fails(ValueError, lambda: t.cross_barrier(DistributedDataParallel(module), sgd), "gradient_as_bucket_view")
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        part = torch.optim.SGD(module[0].parameters(), lr=0.1)
        fails(ValueError, lambda: t.cross_barrier(model, part), "does not have module.1.weight")
        t.cross_barrier(model, sgd)
        fails(ValueError, lambda: t.cross_barrier(model, sgd), "already")
        again = pickle.loads(pickle.dumps(sgd))
        assert type(again) is torch.optim.SGD and len(again.param_groups[0]["params"]) == 4


# --- the tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("plain", "unused", "static", "accumulated", "twice", "clipped", "half", "raised"))
def test_ddp_has_the_same_bits(three, mode, store):
    crossed, waited = three(ddp, mode, True, store), three(ddp, mode, False, store)
    for (mine, seen), (theirs, _) in zip(crossed, waited):
        assert same(mine, theirs)
        assert seen == 0 if mode == "clipped" else seen >= 9, "how often updates were due behind step()"
    assert all(same(mine, crossed[0][0]) for mine, _ in crossed)


@pytest.mark.parametrize("look", ("attribute", "written", "replaced", "dropped"))
def test_ddp_gradients_that_are_looked_at(two, store, look):
    two(ddp_looked_at, store, look)


def test_ddp_gradients_of_a_recurrent_module(two, store):
    two(ddp_recurrent, store)


def test_ddp_join(three, store):
    mine, theirs = three(ddp_join, store, True), three(ddp_join, store, False)
    assert all(same(a, b) for a, b in zip(mine, theirs))


def test_ddp_released(two, store):
    two(ddp_released, store)


def test_ddp_clip_value(two, store):
    two(ddp_clip_value, store)


def test_a_tallyd_dies_while_updates_are_due(store):
    undisturbed = lose(False, "test_cross_barrier_ddp", store + "0")
    assert len(undisturbed[0]) == 1 and undisturbed[0] == undisturbed[1]
    assert lose(True, "test_cross_barrier_ddp", store + "1") == undisturbed


def test_ddp_refusals(two, store):
    two(ddp_refusals, store)

"""Lazy all-reduce: small gradients share ranges, and a range is one operation with the same bits."""

import copy
import gc
import hashlib
import os
import random
import signal
import weakref

import pytest

import jobs
from test_cross_barrier import lose
from test_ops import fails, hvd


# --- the layout -------------------------------------------------------------------------------------------------


def lists(seed):
    """A list of gradients, as lay_out() takes it."""
    draw = random.Random(seed)
    count = draw.choice([0, 1, 2, 20, 300])
    rooms = [64 * draw.choice([1, 2, 3, 40, 1000]) for _ in range(count)]
    kinds = [draw.choice(["float32", "float32", "bfloat16", None]) for _ in range(count)]
    return rooms, kinds, draw.choice([1, 64, 100, 5000, 10**9])


def block_of(rooms, i):
    """As tly_tensor_plan() in src/comm/op/tensor.c has it."""
    return int(sum(rooms[:i]) / sum(rooms) * 16)


@pytest.mark.parametrize("seed", range(40))
def test_layout(seed):
    from tally.torch.horovod.lazy import lay_out
    rooms, kinds, theta = lists(seed)
    units = lay_out(rooms, kinds, theta)
    assert sorted(i for unit in units for i in unit) == list(range(len(rooms))), "each gradient once"
    assert all(unit == sorted(unit) for unit in units) and units == sorted(units, key=lambda unit: unit[-1])
    alone = [i for i, (room, kind) in enumerate(zip(rooms, kinds)) if kind is None or room >= theta]
    assert all([i] in units for i in alone), "what is large or fits in no range"
    for unit in units:
        if unit[0] in alone:
            continue
        assert len({kinds[i] for i in unit}) == 1, "one type"
        assert len({block_of(rooms, i) for i in unit}) == 1, "one block"
        assert sum(rooms[i] for i in unit[:-1]) < theta, "the range ends once it has θ bytes"
        if sum(rooms[i] for i in unit) < theta:
            later = [i for i in range(unit[-1] + 1, len(rooms)) if i not in alone and kinds[i] == kinds[unit[0]]]
            assert not later or block_of(rooms, later[0]) > block_of(rooms, unit[0]), "and not before, but at a block's end"


def test_places_lie_side_by_side():
    from tally.torch.pool import offsets
    assert offsets([]) == ([], 0)
    assert offsets([4, 64, 65, 1]) == ([0, 64, 128, 256], 320)


# --- the same bits ----------------------------------------------------------------------------------------------


def make_model(dtype):
    """Small layers of two types, a large one, a sparse embedding, one in another memory format, one that is not always used,
    and one that is frozen."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(10, 8, sparse=True)
            self.small = torch.nn.ModuleList(torch.nn.Linear(8, 8, dtype=torch.float32 if i % 3 else dtype) for i in range(24))
            self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
            self.image = torch.nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
            self.branch = torch.nn.Linear(8, 8)
            self.wide = torch.nn.Linear(8, 600)

        def forward(self, rows, branch):
            x = self.frozen(self.table(rows))
            for layer in self.small:
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
            x = self.image(x.float().view(-1, 8, 1, 1).contiguous(memory_format=torch.channels_last)).flatten(1)
            return self.wide(self.branch(x) if branch else x)

    torch.manual_seed(0)
    return Model()


def bits(parameters):
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(p.detach().float().numpy().tobytes())
    return digest.hexdigest()


def sizes(optimizer):
    """How many gradients each range has."""
    return [len(one.slots) for one in optimizer._tally_layout.ranges]


def train(lazy, dtype="float32", cross=False, options=None, kill=0):
    """(the parameters' bits, sizes of ranges).  kill: a process that dies while gradients are on their way."""
    import torch
    t = hvd()
    model, options = make_model(getattr(torch, dtype)), dict(options or {})
    passes = options.get("backward_passes_per_step", 1)
    if options.pop("groups", False):
        options["groups"] = [list(model.small[:4].parameters())]
    if "compression" in options:
        options["compression"] = getattr(t.Compression, options["compression"])
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), cross_barrier=cross,
                                       lazy=lazy, **options)
    draw = torch.Generator().manual_seed(t.rank())
    for step in range(9):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        for _ in range(passes):
            model(torch.randint(10, (4,), generator=draw), (step + t.rank()) % 2 or step < 2).square().sum().backward()
        if step == 5 and kill and t.rank() == 0:
            os.kill(kill, signal.SIGKILL)
        optimizer.step()
    optimizer.synchronize() if cross else None
    return bits(model.parameters()), sizes(optimizer)


def same_on_all(results):
    assert all(result == results[0] for result in results), results
    return results[0]


@pytest.fixture(scope="module")
def teams():
    """Two ranks on each of two machines, and a tallyd."""
    job = jobs.Ranks(4, 1, machines=2)
    yield job
    job.close()


@pytest.mark.parametrize("cluster", ("two", "three", "four", "teams", "machine"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_same_bits(request, cluster, dtype):
    job = request.getfixturevalue(cluster)
    plain, ranges = same_on_all(job(train, 0, dtype))
    assert ranges == []
    for cross in (False, True):
        lazy, ranges = same_on_all(job(train, 2048, dtype, cross))
        assert lazy == plain, cross
        assert sum(ranges) > 40 and max(ranges) > 3, "small gradients share ranges"


SMALL = 51  # gradients below 2048 bytes: of 24 layers, the branch, and the image's bias


@pytest.mark.parametrize("options, count", (
    ({"backward_passes_per_step": 2}, SMALL), ({"sparse_as_dense": True}, SMALL + 1), ({"op": 0}, SMALL),
    ({"op": 2, "sparse_as_dense": True}, SMALL + 1), ({"gradient_predivide_factor": 3.0}, SMALL), ({"groups": True}, SMALL - 8),
    ({"compression": "fp16"}, 0)), ids=str)
def test_same_bits_with_options(three, options, count):
    plain, _ = same_on_all(three(train, 0, "float32", False, options))
    lazy, ranges = same_on_all(three(train, 2048, "float32", False, options))
    assert lazy == plain and sum(ranges) == count


def losing(service, cross):
    """The bits of parameters, as bytes objects; `service`: a process that dies meanwhile."""
    import numpy as np
    digest, ranges = train(2048, cross=cross == "True", kill=service)
    assert ranges
    return [np.frombuffer(bytes.fromhex(digest), dtype=np.uint8)]


@pytest.mark.parametrize("cross", (False, True))
def test_same_bits_when_a_tallyd_dies(cross):
    lived, died = lose(False, "test_lazy", cross), lose(True, "test_lazy", cross)
    assert lived == died and len(lived[0]) == 1 and lived[0] == lived[1]


# --- the default ------------------------------------------------------------------------------------------------


def chosen():
    """θ that rank 0 chooses, and the ranges that all lay out by it."""
    import torch
    from tally.torch.horovod import lazy
    t = hvd()
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(200)])
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return lazy.default_theta(4 * 72 * 200), sizes(optimizer)


def test_the_default_follows_the_card():
    """250 Mbit/s, 20 operations of 48 us: 30,000 bytes, but a 64th of the list at most."""
    job = jobs.Ranks(2, 0, machines=2, env={"TALLY_BANDWIDTH": "250M"})
    try:
        theta, ranges = same_on_all(job(chosen))
        assert theta == 4 * 72 * 200 // 64 and sum(ranges) == 400
        assert job(chosen_of_a_large_list) == [30000] * 2
    finally:
        job.close()


def chosen_of_a_large_list():
    from tally.torch.horovod import lazy
    return lazy.default_theta(1 << 30)


def without_a_report():
    """As chosen(), where rank 0 gets no report."""
    import errno
    from tally import Error, _job
    report = _job.report

    def busy():
        raise Error("another thread asks", errno.EBUSY)

    if hvd().rank() == 0:
        _job.report = busy
    try:
        return chosen()
    finally:
        _job.report = report


def test_the_default_without_a_report(two):
    (theta, ranges), (_, other) = two(without_a_report)
    assert theta == 4 * 72 * 200 // 64 and sum(ranges) == 400 and other == ranges


def failing_twice():
    """What ranks hear of a step whose layout fails, too."""
    from tally import Error
    t = hvd()
    _, optimizer, step, _ = small(1024)

    def make(_):
        raise Error("no layout")

    step()
    step()
    optimizer._tally_layout.make = make

    def change():
        if t.rank() == 1:
            optimizer._tally_slots[18].p.grad.add_(1)

    return said(lambda: step(before=change))


def test_the_first_failure_is_heard(two):
    told = two(failing_twice)
    assert told[0] == "Error: no layout" and "the gradient of 9.weight was changed" in told[1], told


@pytest.mark.parametrize("listed, rate, theta", (
    (64 << 20, None, 1 << 20), (64 << 20, 250e6 / 8, 30000), (64 << 20, 1e9, 960000), (4 << 20, 1e9, 65536), (0, 1e9, 0)))
def test_the_default_is_a_part_of_the_list_and_of_the_rate(listed, rate, theta):
    from tally.torch.horovod import lazy
    assert lazy.theta_of(listed, rate) == theta


def test_ranks_of_one_machine_share_ranges(machine):
    theta, ranges = same_on_all(machine(chosen))
    assert theta == 4 * 72 * 200 // 64 and sum(ranges) == 400


# --- the layout in a job ----------------------------------------------------------------------------------------


def small(lazy, layers=32, **options):
    """(a chain of small layers, its optimizer, a function that makes a step)."""
    import torch
    t = hvd()
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(layers))
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(),
                                       lazy=lazy, **options)
    draw = torch.Generator().manual_seed(t.rank())

    def backward(order=range(layers)):
        x = torch.randn(2, 8, generator=draw)
        for i in order:
            x = torch.tanh(model[i](x))
        x.sum().backward()

    def step(order=range(layers), before=lambda: None):
        optimizer.zero_grad()
        backward(order)
        before()
        optimizer.step()

    return model, optimizer, step, backward


def laid_out_once():
    """Steps until gradients are laid out; whether the layout is that of rank 0's order and stays, and priorities follow."""
    model, optimizer, step, _ = small(1024)
    t = hvd()
    mixed = [(7 * i + 3) % 32 for i in range(32)]
    seen = []
    for number in range(12):
        step(mixed if number < 6 else mixed[::-1])
        seen.append(list(optimizer._tally_layout.ranges))
    made = next(number for number, ranges in enumerate(seen) if ranges)
    flat = [int(slot.name.split(".")[0]) for one in seen[made] for slot in one.slots]
    first = [one.call.priority for one in seen[-1]]
    return made, [i for n, i in enumerate(flat) if n == 0 or flat[n - 1] != i] == mixed[::-1], \
        all(ranges == seen[made] for ranges in seen[made:]), first == sorted(first, reverse=True), t.size()


def test_laid_out_once_in_the_order_of_backward(two):
    """Rank 0 sees its order in the first backward and publishes it with the second; it counts from the fourth on.  Its ranges
    stay when the order is turned round, and the last ones become the least urgent."""
    made, order, stays, turned, _ = same_on_all(two(laid_out_once))
    assert made == 2 and order and stays and turned


def urgent():
    """Priorities of ranges and of their gradients, behind some steps."""
    _, optimizer, step, _ = small(1024)
    for _ in range(5):
        step()
    return [(one.call.priority, max(slot.priority for slot in one.slots)) for one in optimizer._tally_layout.ranges]


def test_a_range_is_as_urgent_as_its_most_urgent_gradient(two):
    pairs = same_on_all(two(urgent))
    assert pairs and all(own == most for own, most in pairs) and len({own for own, _ in pairs}) == len(pairs)


def in_flight():
    """Gradients are on their way before backward has ended, in ranges; each range is one operation."""
    model, optimizer, step, backward = small(1024)
    for _ in range(4):
        step()
    seen = []
    model[0].weight.register_hook(lambda _: seen.append([handle is not None for handle in optimizer._tally_handles.values()]))
    optimizer.zero_grad()
    backward()
    handles = set(optimizer._tally_handles.values())
    optimizer.step()
    return sum(seen[0]) > 40, len(handles), len(optimizer._tally_layout.ranges), all(
        p.grad is one._places.at(p) for one in optimizer._tally_layout.ranges for p in [slot.p for slot in one.slots])


def test_a_range_starts_when_its_last_gradient_is_there(two):
    early, handles, ranges, there = same_on_all(two(in_flight))
    assert early and handles == ranges < 32 and there


def copied():
    """How many gradients each copy to their places has, in a step, and each range."""
    from tally.torch import patches
    _, optimizer, step, _ = small(1024)
    for _ in range(4):
        step()
    counts, copy = [], patches.copy_together
    patches.copy_together = lambda places, gradients: (counts.append(len(places)), copy(places, gradients))
    try:
        step()
    finally:
        patches.copy_together = copy
    return counts, sizes(optimizer)


def test_a_ranges_gradients_are_copied_together(two):
    counts, ranges = same_on_all(two(copied))
    assert ranges and counts == ranges


def without_memory():
    """Whether gradients are what they were behind an exception as their range starts; and whether the step goes on."""
    import torch
    from tally.torch import pool
    t = hvd()
    model, optimizer, step, backward = small(1024)
    for _ in range(4):
        step()
    p = optimizer._tally_layout.ranges[0].slots[1].p
    kept = p.grad  # so that the range moves, to memory that there is not
    optimizer.zero_grad()
    own, real = [torch.full_like(q, t.rank() + 1.0) for q in model.parameters()], pool.mmap.mmap

    def none(*_, **__):
        pool.mmap.mmap = real
        raise KeyboardInterrupt

    pool.mmap.mmap = none
    try:
        sum(q.sum() for q in model.parameters()).mul(t.rank() + 1).backward()
        broken_off = False
    except KeyboardInterrupt:
        broken_off = True
    same = [torch.equal(q.grad, one) for q, one in zip(model.parameters(), own) if q.grad is not None]
    late = [q for q in model.parameters() if q.grad is None]
    for q in late:
        q.grad = torch.full_like(q, t.rank() + 1.0)
    optimizer.synchronize()
    mean = (t.size() + 1) / 2
    return broken_off, len(same) > 1, all(same), all(bool((q.grad == mean).all()) for q in model.parameters()), kept is not p.grad


def test_an_exception_as_a_range_starts(two):
    assert two(without_memory) == [(True,) * 5] * 2


# --- what changes under way -------------------------------------------------------------------------------------


def lives(lazy, what):
    """Bits after steps in which something changes."""
    import torch
    t = hvd()
    model, optimizer, step, backward = small(lazy)
    parameters, kept = list(model.parameters()), []
    what, _, keep = what.partition(", ")
    keep = keep or what == "kept"
    for number in range(10):
        if number == 5 and what == "group":
            more = [torch.nn.Parameter(torch.ones(8)) for _ in range(4)]
            optimizer.add_param_group({"params": more, "lr": 0.3})
            parameters += more
        if number == 5 and what == "state":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number == 5 and what == "job":
            t.shutdown()
            t.init()
        if what == "frozen":
            for p in parameters[::3]:
                p.requires_grad_(not 4 < number < 8)
        # "join at once": the last rank joins before the others lay out gradients, rank 0 as the last one.
        if (what, number) in (("join", 4 + 2 * t.rank()), ("join at once", 1 + 2 * (t.size() - 1 - t.rank()))):
            last = t.join()
            t.broadcast_parameters(model.state_dict(), last)
            t.broadcast_optimizer_state(optimizer, last)
            break
        if what == "frozen":  # what is frozen keeps its gradient, and is updated with it
            for p in filter(lambda p: p.requires_grad, parameters):
                p.grad = None
        else:
            optimizer.zero_grad(set_to_none=what not in ("zeros", "data"))
        if what == "data" and number:
            for p in parameters[::3]:
                p.grad.data = torch.zeros(p.shape)
        if keep:
            kept.append([])
        if what == "graph" and number > 4:
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number + t.rank()))
            for layer in model:
                x = torch.tanh(layer(x))
            x.sum().backward(create_graph=True)
        elif what == "closure":
            optimizer.step(lambda: backward() or 0.0)
            continue
        elif what != "none" or t.rank() or number < 4:
            backward(range(0 if number % 2 else 3, 32))
        if what == "group" and number > 5:
            sum((p * (t.rank() + 1)).sum() for p in more).backward()
        if what == "clip":
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(parameters, 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if keep:
            kept[-1] = [(p.grad, p.grad.clone()) for p in parameters[::3]]
            assert all(torch.equal(a, b) for steps in kept for a, b in steps)
    if what in ("join", "join at once"):
        for _ in range(5):
            step()
    return bits(parameters), sizes(optimizer)


@pytest.mark.parametrize("what", ("nothing", "zeros", "data", "none", "group", "state", "frozen", "join", "join at once", "closure",
                                  "clip", "kept", "frozen, kept", "graph", "graph, kept"))
def test_same_bits_whatever_happens(three, what):
    plain, _ = same_on_all(three(lives, 0, what))
    lazy, ranges = same_on_all(three(lives, 1024, what))
    assert lazy == plain and sum(ranges) == 64 + (4 if what == "group" else 0)


def test_same_bits_in_a_new_communicator():
    job = jobs.Ranks(2, 0, machines=2)
    try:
        plain, _ = same_on_all(job(lives, 0, "job"))
        lazy, ranges = same_on_all(job(lives, 1024, "job"))
        assert lazy == plain and sum(ranges) == 64
    finally:
        job.close()


# --- bad input --------------------------------------------------------------------------------------------------


def refused(what):
    """What ranks hear when rank 1 does something that the others don't."""
    import torch
    t = hvd()
    if what == "unlike":
        return said(lambda: small(1024 + t.rank()))
    model, optimizer, step, backward = small(1024)
    for _ in range(4):
        step()
    assert sizes(optimizer)
    if t.rank() == 1 and what == "frozen":
        model[9].weight.requires_grad_(False)
    if t.rank() == 1 and what == "resized":
        model[9].bias.data = torch.zeros(1)
    if t.rank() == 1 and what == "type":
        model.double()
    if t.rank() == 1 and what == "sparse":
        model[9].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_sparse()))
        optimizer._tally_hooks[18].remove()  # so that Tally's comes behind it
        optimizer._tally_register([optimizer._tally_slots[18]])

    def act():
        optimizer.zero_grad()
        x = torch.ones(2, 8).to(model[0].weight.dtype)
        for layer in model:
            x = torch.tanh(layer(x))
        x.sum().backward()
        if t.rank() == 1 and what == "changed":
            model[9].weight.grad.add_(1)
        optimizer.step()

    told = said(act)
    if optimizer._tally_handles:  # the others wait for what this rank has not begun
        said(optimizer.synchronize)
    t.allreduce(torch.ones(1), name="over " + what)
    return told


def said(call):
    """The exception that it raises, as text."""
    try:
        call()
    except Exception as error:
        return "%s: %s" % (type(error).__name__, error)
    return ""


@pytest.mark.parametrize("what, words", (
    ("unlike", ["lazy=1024 on rank 0", "lazy=1025 on rank 1", "lazy=1026 on rank 2"]),
    ("frozen", ["'9.weight'", "frozen (requires_grad is False) on rank 1"]),
    ("resized", ["9.bias", "float32 [1] now", "float32 [8]", "lazy=0"]),
    ("type", ["float64", "float32", "lazy=0"]),
    ("sparse", ["9.weight", "sparse", "lazy=0"])))
def test_all_ranks_hear_what_one_rank_does(what, words):
    job = jobs.Ranks(3, 1)
    try:
        for told in job(refused, what):
            assert all(word in told for word in words), repr(told)
    finally:
        job.close()


def test_a_gradient_that_is_changed_in_a_range_is_named(three):
    told = three(refused, "changed")
    assert "the gradient of 9.weight was changed" in told[1] and told[0] == told[2] == ""


def late_rank():
    """An operation of a range that one rank refuses, as the others' error names it."""
    t = hvd()
    model, optimizer, step, backward = small(1024)
    for _ in range(4):
        step()
    one = optimizer._tally_layout.ranges[2]
    if t.rank() == 1:
        one.refuse(optimizer, one.slots[0], "no time")
        return said(lambda: None), one.held()
    from tally.torch.calls import reduce
    whole = one._places.whole(one.slots[0].p)
    return said(reduce(one.call, whole, whole).wait), one.held()


def test_errors_name_the_parameters_of_a_range(two):
    (told, held), _ = two(late_rank)
    first, last = held.split(" \u2026 ")
    assert "gradients %s" % held in told and "no time" in told and first != last and "/range" not in told, told


def not_lazy():
    for wrong in (-1, True, 1.5, "1 MB"):
        fails(ValueError, lambda wrong=wrong: small(wrong), "lazy must be a number of bytes", repr(wrong))
    return True


def test_bad_values(two):
    assert two(not_lazy) == [True] * 2


def off():
    """What ranks hear that turn ranges off in different words."""
    return said(lambda: small(False if hvd().rank() else 0))


def test_false_is_zero(two):
    assert two(off) == [""] * 2


def dropped():
    """Whether an optimizer with ranges is gone as soon as nobody has it, without gc."""
    model, optimizer, step, backward = small(1024)
    for _ in range(4):
        step()
    references = [weakref.ref(optimizer), weakref.ref(optimizer._tally_layout.ranges[0]), weakref.ref(model[0])]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, step, backward
        return [one() is None for one in references]
    finally:
        gc.enable()


def test_nothing_keeps_what_is_dropped(two):
    assert two(dropped) == [[True] * 3] * 2

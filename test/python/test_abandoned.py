"""Backward passes that no step() follows, because a state is loaded behind them."""

import copy
import errno
import time

import pytest

import jobs
from test_lazy import bits, same_on_all, sizes
from test_ops import hvd


def branched(options, sparse=False, frozen=None, wide=8):
    """(model of two branches, optimizer, a function that makes a backward pass through one of them).  frozen: a layer's number.
    wide: columns of the last layer of branch 0."""
    import torch
    t = hvd()
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(8, wide if i == 14 else 8) for i in range(16))
    if frozen is not None:
        model[frozen].weight.requires_grad_(False)
    if sparse:
        options = {"sparse": t.SparseChunks(0.3, 0, 64)}
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(),
                                       **options)
    draw = torch.Generator().manual_seed(t.rank())

    def backward(branch):
        x = torch.randn(2, 8, generator=draw)
        for layer in model[branch::2]:
            x = torch.tanh(layer(x))
        x.sum().backward()

    return model, optimizer, backward


def loaded(options, sparse, before):
    """The parameters' bits, and ranges, of a training in which a state is loaded behind the `before`-th backward pass.  Ranks
    take different branches."""
    t = hvd()
    model, optimizer, backward = branched(options, sparse)
    for step in range(8):
        optimizer.zero_grad()
        if step == before:
            state = copy.deepcopy(optimizer.state_dict())
            backward(t.rank() % 2)
            optimizer.load_state_dict(state)
            assert not optimizer._tally_handles
            optimizer.zero_grad()
        backward((step + t.rank()) % 2)
        optimizer.step()
    if options.get("cross_barrier"):
        optimizer.synchronize()
    return bits(model.parameters()), sizes(optimizer)


@pytest.mark.parametrize("options", ({"lazy": 0}, {"lazy": 1024}, {"lazy": 0, "cross_barrier": True},
                                     {"lazy": 1024, "cross_barrier": True}), ids=str)
@pytest.mark.parametrize("before", (1, 2, 6))
def test_a_state_is_loaded_behind_unlike_branches(three, options, before):
    """Before the ranks lay out gradients, in the step in which they do, and behind that."""
    plain, _ = same_on_all(three(loaded, {"lazy": 0}, False, before))
    values, ranges = same_on_all(three(loaded, options, False, before))
    assert values == plain and bool(ranges) == bool(options["lazy"])


@pytest.mark.parametrize("before", (1, 2, 6))
def test_a_state_is_loaded_behind_unlike_branches_of_chunks(three, before):
    _, ranges = same_on_all(three(loaded, {}, True, before))
    assert ranges


def frozen(unlike):
    """A state is loaded where unlike parameters are frozen."""
    t = hvd()
    model, optimizer, backward = branched({"lazy": 0}, frozen=None if unlike else 0)
    odd = model[t.rank()].weight if unlike else model[0].weight
    state = copy.deepcopy(optimizer.state_dict())
    odd.requires_grad_(not unlike and t.rank() == 1)  # frozen here; or needing a gradient that nobody reduces
    backward(t.rank() % 2)
    optimizer.load_state_dict(state)
    odd.requires_grad_(unlike)
    optimizer.zero_grad()
    backward(0)
    optimizer.step()
    return bits(model.parameters())


@pytest.mark.parametrize("unlike", (True, False))
def test_a_state_is_loaded_behind_unlike_frozen_parameters(three, unlike):
    same_on_all(three(frozen, unlike))


def refused():
    """Rank 1's backward makes a gradient that cannot be reduced, and all load a state behind it."""
    import torch
    t = hvd()
    model = torch.nn.Linear(4, 4, bias=False)
    if t.rank() == 1:  # before the optimizer's own hook
        odd = model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_sparse()))
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(),
                                       sparse=t.SparseChunks(0.5, 0, 64))
    state, found = copy.deepcopy(optimizer.state_dict()), []

    def backward(value):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(value))).sum().backward()

    if t.rank() == 1:
        with pytest.raises(TypeError, match="sparse tensor"):
            backward(1)
        odd.remove()
    else:
        backward(1)
    optimizer.load_state_dict(state)
    for value in (10, 20, 30):
        backward(value)
        optimizer.synchronize()
        found.append(model.weight.grad.unique().tolist())
    return found


def test_a_state_is_loaded_behind_a_refused_gradient(three):
    """The other ranks hear of it once, and their next sums are those of one step."""
    assert three(refused) == [[[10], [20], [30]]] * 3


def broadcast(options, before):
    """The parameters' bits, and ranges, behind a broadcast of the state that comes between a backward and its step.  With ranges
    one gradient is long on its way."""
    t = hvd()
    model, optimizer, backward = branched(options, wide=1 << 19 if options["lazy"] else 8)
    for step in range(8):
        optimizer.zero_grad()
        if step == before:
            backward(t.rank() % 2)
            t.broadcast_optimizer_state(optimizer, 1)
            assert not optimizer._tally_handles
            optimizer.zero_grad()
        backward((step + t.rank()) % 2)
        optimizer.step()
    if options.get("cross_barrier"):
        optimizer.synchronize()
    return bits(model.parameters()), sizes(optimizer)


@pytest.mark.parametrize("options", ({"lazy": 0}, {"lazy": 1024}, {"lazy": 0, "cross_barrier": True}), ids=str)
@pytest.mark.parametrize("before", (1, 2, 6))
def test_a_state_is_broadcast_behind_unlike_branches(three, options, before):
    """The root ends that step, too.  The ranks lay out gradients behind it, once these have arrived."""
    _, ranges = same_on_all(three(broadcast, options, before))
    assert bool(ranges) == bool(options["lazy"])


def late(before):
    """A state is broadcast behind a backward, while the last step's updates wait for a rank that is late."""
    t = hvd()
    model, optimizer, backward = branched({"lazy": 0, "cross_barrier": True})
    for step in range(before):
        optimizer.zero_grad()
        backward(0)
        if step == before - 1 and t.rank() == 2:
            time.sleep(1)  # the others' gradients of branch 1 wait for its step()
        optimizer.step()
    optimizer.zero_grad()
    backward(0)
    t.broadcast_optimizer_state(optimizer, 1)
    optimizer.zero_grad()
    backward(1)
    optimizer.step()
    optimizer.synchronize()
    return bits(model.parameters())


def test_a_state_is_broadcast_while_updates_are_due(three):
    same_on_all(three(late, 2))


def failed(root):
    """A state is broadcast behind an update that fails on rank 0."""
    from tally import Error
    t = hvd()
    model, optimizer, backward = branched({"lazy": 0, "cross_barrier": True})
    for step in range(2):
        optimizer.zero_grad()
        if t.rank() == 2:
            time.sleep(0.5)  # the others' updates wait
        backward(0)
        gradient = model[0].weight.grad
        optimizer.step()
    if t.rank() == 0:
        gradient.add_(1)
    sentence = None
    if t.rank() == 0 or root == 0:
        with pytest.raises(Error) as caught:
            t.broadcast_optimizer_state(optimizer, root)
        sentence = str(caught.value)
    else:
        t.broadcast_optimizer_state(optimizer, root)
    return sentence, [value["momentum_buffer"].tolist() for value in optimizer.state_dict()["state"].values()]


def test_a_broadcast_behind_a_failed_update(three):
    """The root's failure is raised on all ranks; another rank's there alone, and it has the root's state all the same."""
    for sentence, _ in three(failed, 0):
        assert "0.weight was changed while it was reduced" in sentence
    sentences, states = zip(*three(failed, 1))
    assert "0.weight was changed while it was reduced" in sentences[0] and sentences[1:] == (None, None)
    same_on_all(states)


def passes():
    """A rank has begun to add up the passes of a step, and another one has not, when they load a state."""
    t = hvd()
    model, optimizer, backward = branched({"lazy": 0, "backward_passes_per_step": 2})
    state = copy.deepcopy(optimizer.state_dict())
    if t.rank() == 1:
        backward(0)
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    backward(0)
    backward(1)
    optimizer.step()
    return bits(model.parameters())


def test_a_state_is_loaded_between_passes(three):
    same_on_all(three(passes))


def unreached(options):
    """The backward in front of a state that is loaded has reached nothing on rank 1: what the steps behind that raise, or None."""
    from tally import Error
    t = hvd()
    model, optimizer, backward = branched(options)
    backward(0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    if t.rank() != 1:
        backward(0)
    optimizer.load_state_dict(state)
    errors = []
    for _ in range(1 + (t.rank() == 1)):  # rank 1's first step has met the others' backward
        optimizer.zero_grad()
        backward(0)
        try:
            optimizer.step()
            optimizer.synchronize() if options.get("cross_barrier") else None
            errors.append(None)
        except Error as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("options", ({"lazy": 0}, {"lazy": 0, "cross_barrier": True}), ids=str)
def test_a_state_is_loaded_behind_a_backward_that_reaches_nothing(options):
    """Ranks that are a step apart hear it."""
    job = jobs.Ranks(3, 1)
    try:
        for rank, errors in enumerate(job(unreached, options)):
            assert errors[:-1] == [None] * (rank == 1)
            assert "1 on rank 0, 0 on rank 1, 1 on rank 2" in errors[-1] or "1 on ranks 0, 2, 0 on rank 1" in errors[-1], errors
    finally:
        job.close()


def restored():
    """elastic.run() behind a failure that comes after unlike branches."""
    from tally import Error
    t = hvd()
    model, optimizer, backward = branched({"lazy": 0})
    state, failures = t.elastic.TorchState(model=model, optimizer=optimizer, step=0), []

    @t.elastic.run
    def train(state):
        while state.step < 6:
            optimizer.zero_grad()
            backward((state.step + t.rank()) % 2)
            if state.step == 3 and not failures:
                failures.append(None)
                raise Error("a rank is gone", errno.ECONNRESET)
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    return bits(model.parameters())


def test_elastic_behind_unlike_branches():
    job = jobs.Ranks(3, 1)
    try:
        same_on_all(job(restored))
    finally:
        job.close()


def one_sided(cross_barrier):
    """elastic.run() where rank 1 fails behind a backward, or behind a step() that puts updates off, while the others wait for
    it elsewhere."""
    import torch
    from tally import Error
    t = hvd()
    model, optimizer, backward = branched({"lazy": 0, "cross_barrier": cross_barrier})
    state, failures = t.elastic.TorchState(model=model, optimizer=optimizer, step=0), []

    @t.elastic.run
    def train(state):
        while state.step < 4:
            optimizer.zero_grad()
            if state.step == 2 and not failures:
                failures.append(None)
                if t.rank() != 1:
                    t.allreduce(torch.ones(1), name="elsewhere")
                backward(0)
                if cross_barrier:
                    optimizer.step()
                raise Error("a rank is gone", errno.ECONNRESET)
            backward((state.step + t.rank()) % 2)
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    return bits(model.parameters())


@pytest.mark.parametrize("cross_barrier", (False, True))
def test_elastic_behind_a_backward_of_one_rank(cross_barrier):
    """That rank leaves the job first: the others' calls fail, in place of waiting for it while it waits for them."""
    job = jobs.Ranks(3, 1)
    try:
        same_on_all(job(one_sided, cross_barrier))
    finally:
        job.close()


def left():
    """A state is loaded once the job has been left behind a backward; the next job goes on."""
    t = hvd()
    model, optimizer, backward = branched({"lazy": 0})
    state = copy.deepcopy(optimizer.state_dict())
    for again in (False, True):
        backward(t.rank() % 2)
        t.shutdown()
        if again:
            t.init()
        optimizer.load_state_dict(state)
        if not again:
            t.init()
        optimizer.zero_grad()
        backward(0)
        optimizer.step()
    return bits(model.parameters())


def test_a_state_is_loaded_behind_the_end_of_a_job():
    job = jobs.Ranks(3, 1)
    try:
        same_on_all(job(left))
    finally:
        job.close()

"""DistributedOptimizer(sparse=SparseChunks(...)) over join(), new communicators and states that are loaded."""

import warnings

import pytest

import jobs
import reference
from sparse_training import OPTIONS, make, shard, train_some
from test_ops import fails, hvd
from test_sparse_jobs import simulate


def joined(momentum):
    """Ranks with fewer batches join; the next step sends everything, and ranks go on alike."""
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make(options={**OPTIONS, "warm_up": 30}, momentum=momentum, decay=0.1)
    for step in range(8 + t.rank()):
        optimizer.zero_grad()
        backward(model, *shard(step, t.rank(), t.size()))
        optimizer.step()
    last = t.join()
    t.broadcast_parameters(model.state_dict(), last)
    sent = []
    if momentum:  # else there is no state that steps depend on
        t.broadcast_optimizer_state(optimizer, last)
    for step in range(30):
        optimizer.zero_grad()
        backward(model, *shard(step, t.rank(), t.size()))
        optimizer.step()
        sent.append(int(optimizer.history.chunks.sent.sum()))
    assert optimizer._tally_layout.ranges
    return last, sent, [p.detach().numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_join(four, momentum):
    results = four(joined, momentum)
    last, sent, values = results[0]
    assert last == 3 and sent[0] == max(sent) and sent[-1] == min(sent) < max(sent) / 3
    for other in results[1:]:
        assert other[:2] == (last, sent)
        assert all(reference.same(p, q) == 0 for p, q in zip(values, other[2]))


def another_communicator():
    """The job is left and joined again: what has not been sent goes in its first step; then the ranks lay out anew."""
    from test_optimizer import backward
    t = hvd()
    size, rank, dense, kept = t.size(), t.rank(), [0, 0], []
    model, optimizer = make()
    for step in range(24):
        if step == 12:
            assert optimizer.history.kept
            t.shutdown()
            t.init()
        optimizer.zero_grad()
        backward(model, *shard(step, rank, size))
        dense[step // 12] += not optimizer._tally_layout.ranges
        optimizer.step()
        kept.append([p.detach().clone() for p in model.parameters()])
    assert optimizer._tally_layout.ranges and optimizer.history.kept
    other, simulation = simulate(optimizer, dense[0])
    results = []
    for step in range(24):
        if step == 12:
            simulation.dense = dense[1]
        simulation.step(lambda r: backward(other, *shard(step, r, size)))
        results.append(sum(reference.same(p.numpy(), q.detach().numpy()) for p, q in zip(kept[step], other.parameters())))
    t.shutdown()
    return results, dense


def test_another_communicator():
    job = jobs.Ranks(3, 1)
    try:
        for results, dense in job(another_communicator):
            assert results == [0] * 24 and min(dense) > 0
    finally:
        job.close()


def joined_in_backward():
    """Lists of a backward that no step follows have ended when join() returns."""
    import torch
    from tally.torch.horovod import sparse_optimizer
    t = hvd()
    saved, sparse_optimizer.LIST_BYTES = sparse_optimizer.LIST_BYTES, 64
    try:
        model, optimizer = make(options={"share": 0.9, "warm_up": 0, "chunk": 64})
        train_some(model, optimizer, 8)
        optimizer.zero_grad()
        if t.rank() != 2:
            x, y = shard(99, t.rank(), t.size())
            torch.nn.functional.cross_entropy(model[2:](model[:2](x).detach()), y).backward()
        operations = optimizer._tally_layout.ranges[0]._exchange.operations
        assert bool(operations) == (t.rank() != 2)
        t.join()
        assert all(one._ended for one in operations)
        t.broadcast_parameters(model.state_dict(), 0)
        train_some(model, optimizer, 3)
    finally:
        sparse_optimizer.LIST_BYTES = saved


def test_join_in_backward(four):
    four(joined_in_backward)


def other_state():
    """A rank that loads rank 0's state begins with an empty history, and says so."""
    import copy
    t = hvd()
    model, optimizer = make()
    train_some(model, optimizer, 12)
    own = copy.deepcopy(optimizer.state_dict())
    states = t.functions.allgather_object(own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(states[0])
    told = [str(w.message) for w in caught if "has loaded the state of rank 0" in str(w.message)]
    assert bool(told) == (t.rank() != 0) and optimizer.history.history.any() == (t.rank() == 0)
    assert not optimizer.history.chunks.chosen.all()
    train_some(model, optimizer, 3)
    t.broadcast_optimizer_state(optimizer, 0)
    train_some(model, optimizer, 3)
    plain = {key: value for key, value in own.items() if key != "sparse_chunks"}
    optimizer.load_state_dict(plain)
    train_some(model, optimizer, 3)
    other = copy.deepcopy(own)
    other["sparse_chunks"]["order"][0] = "nothing"
    other["param_groups"][0]["lr"] = 77.0
    fails(ValueError, lambda: optimizer.load_state_dict(other), "of other parameters", "nothing")
    assert optimizer.param_groups[0]["lr"] == 0.1, "nothing is loaded"
    return [p.detach().numpy().copy() for p in model.parameters()]


def loaded_in_flight():
    """A state that is loaded behind a backward waits for its lists, and drops them."""
    import copy
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make()
    train_some(model, optimizer, 12)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    backward(model, *shard(99, t.rank(), t.size()))
    operations = optimizer._tally_layout.ranges[0]._exchange.operations
    assert operations
    optimizer.load_state_dict(state)
    assert all(one._ended for one in operations) and not optimizer._tally_handles
    assert (optimizer.history.history == state["sparse_chunks"]["history"]).all()
    train_some(model, optimizer, 3)
    return [p.detach().numpy().copy() for p in model.parameters()]


def test_state_that_is_loaded_in_flight(four):
    results = four(loaded_in_flight)
    for values in results[1:]:
        assert all(reference.same(p, q) == 0 for p, q in zip(values, results[0]))


def test_state_of_another_rank(four):
    results = four(other_state)
    for values in results[1:]:
        assert all(reference.same(p, q) == 0 for p, q in zip(values, results[0]))


def dropped(how, dense):
    """What a rank has not sent stays as it is when a backward is dropped.  Returns whether, and the parameters behind it."""
    import torch
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make()
    train_some(model, optimizer, 12)
    if dense:  # the next steps send all
        t.shutdown()
        t.init()
    state = {key: value for key, value in optimizer.state_dict().items() if key != "sparse_chunks"}
    optimizer.zero_grad()
    before = optimizer.history.history.clone()
    backward(model, *shard(99, t.rank(), t.size()))
    if how == "join":
        t.join()
    else:
        optimizer.load_state_dict(state)
    kept = bool(optimizer.history.kept and before.any() and torch.equal(optimizer.history.history, before))
    train_some(model, optimizer, 3)
    return kept, [p.detach().numpy().copy() for p in model.parameters()]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("how", ["join", "state"])
def test_what_is_not_sent_outlives_a_dropped_backward(how, dense):
    job = jobs.Ranks(3, 1)
    try:
        results = job(dropped, how, dense)
    finally:
        job.close()
    for kept, values in results:
        assert kept and all(reference.same(p, q) == 0 for p, q in zip(values, results[0][1]))


def broadcast(fresh):
    """Each rank's history behind broadcast_optimizer_state() in a training: as before, unless rank 0 has a fresh optimizer."""
    import torch
    from tally.torch.horovod import functions
    t = hvd()
    model, optimizer = make()
    train_some(model, optimizer, 12)
    before, other = optimizer.history.history.clone(), make()[1]
    sent, plain = [], functions.broadcast

    def counted(call, tensor, *more):
        sent.append(tensor.numel())
        return plain(call, tensor, *more)

    functions.broadcast = counted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            t.broadcast_optimizer_state(other if fresh and t.rank() == 0 else optimizer, 0)
    finally:
        functions.broadcast = plain
    kept = bool(before.any()) and torch.equal(optimizer.history.history, before)
    zeros = not optimizer.history.kept and not optimizer.history.history.any()
    if not fresh:
        train_some(model, optimizer, 3)
    return kept, zeros, max(sent) < before.numel(), [p.detach().numpy().copy() for p in model.parameters()]


def test_broadcast_leaves_each_ranks_history(three):
    results = three(broadcast, False)
    for kept, _, short, values in results:
        assert kept and short and all(reference.same(p, q) == 0 for p, q in zip(values, results[0][3]))


def test_broadcast_of_a_fresh_optimizer():
    job = jobs.Ranks(2, 1)
    try:
        assert [zeros for _, zeros, _, _ in job(broadcast, True)] == [False, True]
    finally:
        job.close()

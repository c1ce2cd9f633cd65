"""DistributedOptimizer(sparse=SparseChunks(...)) in jobs: the bits of a simulation, clipping, scales, overlap."""

import math
import sys

import pytest

import jobs
import reference
from sparse_training import OPTIONS, make, shard, train_some, wrong
from test_ops import fails, hvd

sys.path.insert(0, str(jobs.ROOT / "bench" / "gradientflow"))


def simulate(optimizer, dense, states=None, begin=None):
    """(model, Simulation) like a job's that has had `dense` steps before its ranks laid out gradients."""
    import torch
    from simulation import Simulation
    from test_optimizer import make_model
    model = make_model(0)
    if begin is not None:
        model.load_state_dict(begin[0])
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    if begin is not None:
        plain.load_state_dict(begin[1])
    return model, Simulation(model, plain, optimizer._tally_sparse, hvd().size(), optimizer.history.chunks.layout.names, dense,
                             states=states)


def like_simulation(passes, to_none):
    """Train, save, and train on with another optimizer.  Returns the elements that differ from a simulation, and the chunks
    that were sent, in each step."""
    import copy
    from test_optimizer import backward
    t = hvd()
    size, rank, results, sent, saved, begin = t.size(), t.rank(), [], [], None, None
    for part in (0, 1):
        model, optimizer = make(options={**OPTIONS, "warm_up": 6}, backward_passes_per_step=passes)
        if saved is not None:
            model.load_state_dict(begin[0])
            optimizer.load_state_dict(saved)
        dense, kept = 0, []
        for step in range(14):
            dense += not optimizer._tally_layout.ranges
            optimizer.zero_grad(set_to_none=to_none)
            for one in range(passes):
                backward(model, *shard(part * 100 + step * passes + one, rank, size))
            optimizer.step()
            kept.append([p.detach().clone() for p in model.parameters()])
            sent.append(int(optimizer.history.chunks.sent.sum()))
        assert 1 < dense < 6, dense
        states = None if begin is None else begin[2]
        other, simulation = simulate(optimizer, dense, states, begin)
        for step in range(14):
            def own(r):
                for one in range(passes):
                    backward(other, *shard(part * 100 + step * passes + one, r, size))
            simulation.step(own)
            results.append(sum(reference.same(p.numpy(), q.detach().numpy()) for p, q in zip(kept[step], other.parameters())))
        saved = copy.deepcopy(optimizer.state_dict())
        begin = copy.deepcopy((model.state_dict(), simulation.optimizer.state_dict(), simulation.state_dicts()))
        for name in ("rank", "order", "chunk", "step"):
            assert saved["sparse_chunks"][name] == begin[2][rank][name]
        assert (saved["sparse_chunks"]["history"] == begin[2][rank]["history"]).all() and begin[2][rank]["history"].any()
    return results, sent


@pytest.mark.parametrize("passes, to_none", [(1, True), (2, False)])
def test_jobs_have_the_simulations_bits(four, passes, to_none):
    for results, sent in four(like_simulation, passes, to_none):
        assert results == [0] * 28
        assert sent[0] == max(sent) > sent[13] and sent[14] == max(sent), sent


def test_jobs_of_three_ranks_have_the_simulations_bits(three):
    for results, _ in three(like_simulation, 1, False):
        assert results == [0] * 28


def test_jobs_on_one_machine_have_the_simulations_bits(machine):
    for results, _ in machine(like_simulation, 1, True):
        assert results == [0] * 28


def test_jobs_of_teams_have_the_simulations_bits():
    job = jobs.Ranks(4, 1, machines=2)
    try:
        for results, _ in job(like_simulation, 1, True):
            assert results == [0] * 28
    finally:
        job.close()


def like_dense():
    """share=1 has the bits of training without sparse=."""
    from test_optimizer import backward
    t = hvd()
    trained = []
    for more in ({}, {"sparse": None}):
        model, optimizer = make(options={"share": 1.0, "chunk": 64}, **more)
        for step in range(10):
            optimizer.zero_grad()
            backward(model, *shard(step, t.rank(), t.size()))
            optimizer.step()
        assert bool(optimizer._tally_layout.ranges) or more
        trained.append(model)
    return wrong(*trained)


def test_full_share_is_dense(four, three):
    assert four(like_dense) == [0] * 4
    assert three(like_dense) == [0] * 3


def like_unscaled():
    """With a GradScaler, whose scale changes, as without one.  Where one rank's gradient is infinite, all skip the step, and keep
    what they have not sent.  Returns the elements that differ from a simulation, in each step, and the scales."""
    import torch
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=3)
    kept, scales, dense = [], [], 0

    def spoiled(model, step, rank, call):
        """A backward pass, with an infinite gradient of rank 1 in some steps."""
        hook = model[2].weight.register_hook(lambda g: torch.full_like(g, math.inf))
        if rank != 1 or step not in (1, 9):
            hook.remove()
        call()
        hook.remove()

    for step in range(14):
        dense += not optimizer._tally_layout.ranges
        optimizer.zero_grad()
        x, y = shard(step, t.rank(), t.size())
        loss = scaler.scale(torch.nn.functional.cross_entropy(model(x), y))
        spoiled(model, step, t.rank(), loss.backward)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        kept.append([p.detach().clone() for p in model.parameters()])

    other, simulation = simulate(optimizer, dense)
    results = []
    for step in range(14):
        def own(r):
            spoiled(other, step, r, lambda: backward(other, *shard(step, r, t.size())))
        (simulation.exchange if step in (1, 9) else simulation.step)(own)
        results.append(sum(reference.same(p.numpy(), q.detach().numpy()) for p, q in zip(kept[step], other.parameters())))
    factor = (optimizer.history.history / simulation.histories[t.rank()].history).nan_to_num(0).unique()
    return results, scales, factor.tolist()


def test_grad_scaler(four):
    for results, scales, factors in four(like_unscaled):
        assert results == [0] * 14
        assert len(set(scales)) > 2 and factors == [0, scales[-1]], (scales, factors)


def clipped():
    """Behind synchronize() all ranks have equal gradients, zeros where nothing was sent; step() takes what clipping has made
    of them."""
    import torch
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make(decay=0.0, momentum=0.0)
    for step in range(12):
        optimizer.zero_grad()
        backward(model, *shard(step, t.rank(), t.size()))
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert t.allreduce(norm, op=t.Max) == t.allreduce(norm, op=t.Min) > 0.01
        before, gradients = [p.detach().clone() for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
        with optimizer.skip_synchronize():
            optimizer.step()
        for p, old, gradient in zip(model.parameters(), before, gradients):
            assert torch.equal(p, old.add(gradient, alpha=-0.1))
    weights = torch.cat([p.grad.view(-1) for p in model.parameters() if p.dim() > 1])
    assert 0.1 < weights.count_nonzero() / weights.numel() < 0.4
    assert all(p.grad.count_nonzero() for p in model.parameters() if p.dim() == 1)


def test_clipping(four):
    four(clipped)


def overlap():
    """When backward reaches the input's layer, chunks of the output's are on their way, with lower priority."""
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make(options={"share": 0.9, "warm_up": 0, "chunk": 64})
    from tally.torch.horovod import sparse_optimizer
    under_way, saved = [], sparse_optimizer.LIST_BYTES
    sparse_optimizer.LIST_BYTES = 64
    try:
        model[0].weight.register_hook(lambda grad: under_way.append(
            [len(one._exchange.operations) for one in optimizer._tally_layout.ranges]))
        for step in range(8):
            optimizer.zero_grad()
            backward(model, *shard(step, t.rank(), t.size()))
            if optimizer._tally_layout.ranges:
                fails(AssertionError, optimizer.zero_grad)
                operations = len(optimizer._tally_layout.ranges[0]._exchange.operations)
                assert operations == 9, "eight lists and the norms"
            optimizer.step()
    finally:
        sparse_optimizer.LIST_BYTES = saved
    assert under_way[0] == [] and 1 < under_way[-1][0] < 9, under_way


def test_overlaps_backward(four):
    four(overlap)


def put_off():
    """What is not sent is put off before any list has been waited for."""
    from tally.torch.horovod.sparse_chunks import History
    model, optimizer = make()
    train_some(model, optimizer, 12)
    ended, saved = [], History.put_off

    def noted(history):
        ended.append([one._ended for one in optimizer._tally_layout.ranges[0]._exchange.operations])
        saved(history)

    History.put_off = noted
    try:
        train_some(model, optimizer, 3)
    finally:
        History.put_off = saved
    return ended


def test_puts_off_while_lists_are_under_way(four):
    for ended in four(put_off):
        assert len(ended) == 3 and all(norms and not any(lists) for *lists, norms in ended), ended

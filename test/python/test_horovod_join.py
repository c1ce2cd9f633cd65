"""join() of Horovod's API: ranks with different numbers of batches."""

import copy
import textwrap

import pytest

import jobs
import reference
from test_ops import fails, hvd


def uneven(steps, passes):
    """Ranks with different numbers of batches; zeros stand for those that have none left."""
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    torch.manual_seed(0)
    # A rank must have seen a sparse gradient once to know that it is one.
    models = [torch.nn.Linear(4, 2), torch.nn.Embedding(8, 4, sparse=min(steps) > 0)]
    singles = copy.deepcopy(models)
    sets = [t.global_process_set, t.add_process_set(list(range(n)))]
    optimizers = [t.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters(),
                                         backward_passes_per_step=passes, process_set=one)
                  for m, one in zip(models, sets)]
    plain = [torch.optim.SGD(m.parameters(), lr=0.1) for m in singles]

    def loss(pair, step, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        picks = torch.randint(0, 8, (3,), generator=generator)
        return (pair[0](pair[1](picks)) - torch.randn(3, 2, generator=generator)).square().mean()

    for step in range(steps[r]):
        for one in optimizers:
            one.zero_grad()
        for part in range(passes):
            loss(models, passes * step + part, r).backward()
        for one in optimizers:
            one.step()
        gone = [rank for rank in range(n) if steps[rank] <= step]
        if gone:
            assert t.allreduce(torch.ones(2), op=t.Sum).tolist() == [n - len(gone)] * 2
            fails(RuntimeError, lambda: t.allgather(torch.ones(2)), "rank", *map(str, gone), "joined")
    last = t.join()
    for step in range(max(steps)):
        for one in plain:
            one.zero_grad()
        for rank in range(n):
            if step < steps[rank]:
                for part in range(passes):
                    (loss(singles, passes * step + part, rank) / n).backward()
        for one in plain:
            one.step()
    for m in models:
        t.broadcast_parameters(m.state_dict(), last)
    for m, s in zip(models, singles):
        for a, b in zip(m.parameters(), s.parameters()):
            assert torch.allclose(a, b, atol=1e-6), (a, b)
    assert t.allreduce(torch.ones(2), op=t.Sum).tolist() == [n] * 2
    # And on: the next epoch is in step.
    for one in optimizers:
        one.zero_grad()
    for part in range(passes):
        loss(models, 77 + part, r).backward()
    for one in optimizers:
        one.step()
    return last, [p.detach().numpy() for m in models for p in m.parameters()]


@pytest.mark.parametrize("steps, passes, last", (([3, 1, 5, 4], 1, {2}), ([2, 2, 2, 2], 1, {0, 1, 2, 3}), ([1, 3, 0, 3], 2, {1, 3})))
def test_join(four, steps, passes, last):
    results = four(uneven, steps, passes)
    assert len({one for one, _ in results}) == 1 and results[0][0] in last
    for _, model in results:
        assert all(reference.same(a, b) == 0 for a, b in zip(model, results[0][1]))


def early(first):
    """What Horovod's own tests expect of join(): rank `first` joins at once, and the others go on."""
    import itertools

    import tally
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    types = [torch.int32, torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8]
    for dtype, dim, again in zip(types, itertools.cycle((1, 2, 3)), itertools.cycle((False, True))):
        torch.manual_seed(1234)
        a, b = (torch.randint(0, 20, (5,) * dim).to(dtype) for _ in range(2))
        if r != first:
            for _ in range(1 + again):
                handles = [t.allreduce_async(one, name=name, op=t.Sum) for one, name in ((a, "a"), (b, "b"))]
                for one, handle in zip((a, b), handles):
                    assert torch.equal(t.synchronize(handle), one * (n - 1))
        last = t.join()
        assert last != first and t.allgather_object(last) == [last] * n
    ones = torch.ones(12)  # for 3 ranks as for 4
    for refused in (lambda: t.allgather(ones), lambda: t.broadcast(ones, (first + 1) % n), lambda: t.alltoall(ones),
                    lambda: t.reducescatter(torch.ones(n, 2)), lambda: t.allgather_object(1),
                    lambda: t.allreduce(ones, process_set=pair)):
        pair = t.add_process_set([first, (first + 1) % n])
        if r != first and (r in pair.ranks or refused.__code__.co_names[0] != "allreduce"):
            fails(tally.Error, refused, "rank %d has joined" % first)
        assert t.join() != first
    # Operations of any kind, name and number.  One that cannot be summed does not stop the others.
    rows = torch.sparse_coo_tensor([[r]], torch.ones(1, 2), (n, 2))
    if r != first:
        assert torch.equal(t.allreduce(ones, op=t.Average), ones * (n - 1) / n)
        assert [one.item() for one in t.grouped_allreduce([torch.ones(1), torch.ones(1)], op=t.Sum)] == [n - 1] * 2
        assert t.allreduce(ones, compression=t.Compression.fp16, op=t.Sum).tolist() == [n - 1] * 12
        assert t.allreduce(torch.empty(0), op=t.Sum).numel() == 0
        assert t.allreduce(-ones, op=t.Max).tolist() == [0] * 12 and t.allreduce(ones, op=t.Product).tolist() == [0] * 12
        dense = t.sparse_allreduce_async(rows, "rows", t.Sum)().to_dense()
        assert dense[first].tolist() == [0, 0] and dense.sum() == 2 * (n - 1)
        big = t.allreduce(torch.full((300_000,), r + 1.0), op=t.Sum)
        assert set(big.tolist()) == {n * (n + 1) / 2 - first - 1}
        t.barrier()
    return t.join(), t.allreduce(torch.ones(1), op=t.Sum).item()


@pytest.mark.parametrize("first", (0, 1))
@pytest.mark.parametrize("ranks", ("four", "machine"))
def test_early_join(request, ranks, first):
    results = request.getfixturevalue(ranks)(early, first, timeout=240)
    assert len(set(results)) == 1 and results[0][0] != first and results[0][1] == len(results)


def halves(last):
    """Sums and exchanges in two steps that a rank has begun when it joins: the second step counts as begun, too."""
    import time

    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    if r == last:
        time.sleep(1)  # the first steps of the others cannot end before they join
    rows = torch.sparse_coo_tensor([[r]], torch.ones(1, 2), (n, 2))
    sums = [t.sparse_allreduce_async(rows, "rows", t.Sum)]
    given = torch.full((n,), float(r))
    exchange = t.alltoall_async(given, name="given")
    if r == last:
        sums[0] = t.synchronize(sums[0])
    t.join()
    if r != last:
        sums[0] = t.synchronize(sums[0])
    received = t.synchronize(exchange)
    received = received[0] if isinstance(received, tuple) else received
    return sums[0].to_dense().tolist(), received.tolist()


@pytest.mark.parametrize("ranks", ("four", "machine"))
def test_join_with_half_an_operation(request, ranks):
    results = request.getfixturevalue(ranks)(halves, 0)
    n = len(results)
    assert results == [([[1, 1]] * n, list(range(n)))] * n


def uneven_normalized(optimizers):
    """A rank in join() takes no part in SyncBatchNorm: the others are told; once all have joined it works again.

    optimizers: how many; the first of two is not stepped, as one that trains something else."""
    import tally
    import torch
    t = hvd()
    n, r = t.size(), t.rank()
    models = [torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 3), t.SyncBatchNorm(3))][-optimizers or -1:]
    made = [t.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters())
            for m in models[:optimizers]]

    def step():
        models[-1].zero_grad()
        models[-1](torch.randn(4, 2)).sum().backward()
        for one in made[-1:]:
            one.step()

    for _ in range(2):
        step()
        if r != n - 1:
            fails(tally.Error, step, "SyncBatchNorm", "rank %d has joined" % (n - 1))
            assert t.allreduce(torch.ones(1), op=t.Sum).item() == n - 1
        assert t.join() < n - 1
        t.broadcast_parameters(models[-1].state_dict(), 0)
    step()
    t.join()


ALL_STEP, ONE_STEPS, NONE_STEPS = "steps = optimizers", "steps = optimizers[:1]", "steps = []; time.sleep(8 * t.rank())"


@pytest.mark.parametrize("services, steps", [
    (0, ALL_STEP), (0, ONE_STEPS), (0, NONE_STEPS), (1, ONE_STEPS),
    pytest.param(1, ALL_STEP, marks=pytest.mark.long), pytest.param(1, NONE_STEPS, marks=pytest.mark.long)])
def test_join_for_longer_than_the_time_out(services, steps):
    """Who has joined stands by while the others step all of their optimizers, or some, or do something else."""
    status, output = jobs.run(2, services, ["-c", textwrap.dedent("""
        import time, torch, tally.torch as t
        t.init()
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        optimizers = [t.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)]) for p in parameters]
        for optimizer, p in zip(optimizers, parameters):
            p.sum().backward()
            if t.rank():
                optimizer.step()  # else join() forgets what backward has begun
        STEPS
        end = time.monotonic() + 8 * t.rank()
        while steps and time.monotonic() < end:
            for optimizer, p in zip(steps, parameters):
                optimizer.zero_grad()
                p.sum().backward()
                optimizer.step()
            time.sleep(0.1)
        assert t.join() == 1
        print("good")
    """).replace("STEPS", steps)], env={"TALLY_TIMEOUT": "6", "TALLY_LATE_WARNING": "3"})
    assert status == 0 and output.count("good") == 2, output
    assert "has waited" not in output and "delay" not in output, output


@pytest.mark.parametrize("optimizers", (0, 1, 2))
def test_join_with_sync_batch_norm(four, optimizers):
    four(uneven_normalized, optimizers)


def outlived(kept):
    """An optimizer of before still lives on rank 0 alone, because it is kept there, or until garbage is collected."""
    import gc

    import torch
    t = hvd()
    for number in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), t.SyncBatchNorm(3))
        optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
        if number == 0:
            optimizer.itself = optimizer
            before = optimizer if kept and t.rank() == 0 else None
            del optimizer
            if t.rank() != 0:
                gc.collect()
    del before
    t.join()


@pytest.mark.parametrize("kept", (False, True))
def test_optimizers_that_live_longer_on_one_rank(four, kept):
    four(outlived, kept)


def join_in_part(everywhere):
    """An optimizer over some ranks: while one of those has joined its steps fail on the others, and all else goes on."""
    import tally
    import torch
    t = hvd()
    some, models = t.add_process_set([0, 1]), [torch.nn.Linear(2, 1) for _ in range(2)]
    sets = [t.global_process_set] * everywhere + [some] * (t.rank() < 2)
    optimizers = [t.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters(), process_set=one)
                  for m, one in zip(models, sets)]

    def step(optimizer, p, factor):
        before = p.item()
        optimizer.zero_grad()
        (p * (factor * (t.rank() + 1))).sum().backward()
        optimizer.step()
        return round((before - p.item()) / 0.1, 3)

    for number in range(2):  # and again, once all have joined
        if everywhere:
            assert step(optimizers[0], models[0].bias, 1.0) == 2
        if t.rank() < 2:
            assert step(optimizers[-1], models[everywhere].bias, 1.0) == 1.5
        t.barrier()
        if t.rank() == 0:
            fails(tally.Error, lambda: step(optimizers[-1], models[everywhere].bias, 1.0), "rank 1 has joined")
        if t.rank() != 1 and everywhere:
            assert step(optimizers[0], models[0].bias, 1.0) == round((1 + 3) / 3, 3)
        t.join()
        for p in models[0].parameters():
            t.broadcast_(p.data, 0)


@pytest.mark.parametrize("everywhere", (False, True))
def test_join_with_an_optimizer_over_some_ranks(everywhere):
    job = jobs.Ranks(3, 0)
    try:
        job(join_in_part, everywhere)
    finally:
        job.close()

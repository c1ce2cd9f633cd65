"""DistributedOptimizer(sparse=SparseChunks(...)): coarse-grained sparse communication."""

import functools
import math
import sys
import warnings

import numpy as np
import pytest

import jobs
import reference
from test_ops import fails, hvd

sys.path.insert(0, str(jobs.ROOT / "bench" / "gradientflow"))

# --- the steps, played by one process, against a plain reference ------------------------------------------------------------

SHAPES = {"a.weight": (7, 50), "a.bias": (7,), "b.weight": (3, 5, 11), "b.scale": (), "c.weight": (10, 10), "c.bias": (40,)}
LR, MOMENTUM, DECAY = 0.25, 0.5, 2.0 ** -4


def model_of(shapes):
    import torch
    model = torch.nn.Module()
    generator = torch.Generator().manual_seed(3)
    for name, shape in shapes.items():
        owner, _, leaf = name.partition(".")
        if not hasattr(model, owner):
            model.add_module(owner, torch.nn.Module())
        value = torch.randint(-64, 64, shape, generator=generator).float() / 16
        getattr(model, owner).register_parameter(leaf, torch.nn.Parameter(value))
    return model


def gradients(seed, rank, step):
    """Small dyadic numbers, of another size for each parameter, so that choices change."""
    random = np.random.default_rng([seed, rank, step])
    return {name: np.array(random.integers(-8, 8, shape) * 2.0 ** random.integers(-3, 1), np.float32)
            for name, shape in SHAPES.items()}


class Plain:
    """All ranks' training, element by element."""

    def __init__(self, values, ranks, share, warm_up, chunk, nesterov=False, keep=1):
        order = [*reversed(SHAPES)]
        order = [n for n in order if len(SHAPES[n]) >= 2] + [n for n in order if len(SHAPES[n]) < 2]
        self.chunk_of, self.at, at = {}, [], 0
        for name in order:
            places = at + np.arange(values[name].size)
            self.chunk_of[name] = places // chunk if len(SHAPES[name]) >= 2 else np.full(places.size, -1)
            if len(SHAPES[name]) >= 2:
                at = (places[-1] // 16 + 1) * 16
        self.count = -(-at // chunk)
        self.w = {name: values[name].reshape(-1).copy() for name in order}
        self.u = {name: np.zeros_like(w) for name, w in self.w.items()}
        self.h = [{name: np.zeros_like(w) for name, w in self.w.items()} for _ in range(ranks)]
        self.behind = {name: np.zeros_like(w) for name, w in self.w.items()}
        self.share, self.warm_up, self.nesterov, self.keep = share, warm_up, nesterov, keep
        self.chosen, self.steps = set(range(-1, self.count)), 0

    def step(self, own, update=True):
        """own: each rank's gradients.  Returns the averages."""
        own = [{name: own[r][name].reshape(-1) + self.h[r][name] for name in self.w} for r in range(len(self.h))]
        norms = [sum(np.abs(g[name][self.chunk_of[name] == k]).sum() for g in own for name in self.w)
                 for k in range(self.count)]
        sent = {name: np.isin(self.chunk_of[name], list(self.chosen)) for name in self.w}
        finite = all(np.isfinite(g[name]).all() for g in own for name in self.w)
        average = {}
        for name in self.w:
            mean = sum(g[name] for g in own) / np.float32(len(own))
            average[name] = np.where(sent[name], mean, 0) if finite else np.full_like(mean, np.nan)
            if finite:
                for h, g in zip(self.h, own):
                    h[name] = np.where(sent[name], 0, g[name] * np.float32(self.keep)).astype(np.float32)
            if update:
                self.behind[name] += 1
                d = average[name] + np.float32(DECAY) * self.behind[name] * self.w[name]
                u = MOMENTUM * self.u[name] + d
                d = d + MOMENTUM * u if self.nesterov else u
                self.u[name] = np.where(sent[name], u, self.u[name]).astype(np.float32)
                self.w[name] = np.where(sent[name], self.w[name] - LR * d, self.w[name]).astype(np.float32)
                self.behind[name][sent[name]] = 0
        self.steps += 1
        now = 1 - (1 - self.share) * min(1, self.steps / self.warm_up) if self.warm_up else self.share
        by_size = sorted(range(self.count), key=lambda k: (not math.isnan(norms[k]), -norms[k], k))
        self.chosen = {-1, *by_size[:max(1, round(now * self.count))]}
        return average


def setter(model, own):
    """A backward pass that finds these gradients: own[rank]."""
    import torch

    def backward(rank):
        for name, p in model.named_parameters():
            p.grad = torch.from_numpy(np.array(own[rank][name]))
    return backward


def begin(ranks, share=0.3, warm_up=4, chunk=64, nesterov=False, keep=1.0, **more):
    """(model, Simulation, Plain) of one training."""
    import torch
    from simulation import Simulation

    from tally.torch.horovod.sparse_chunks import SparseChunks
    model = model_of(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=nesterov)
    values = {name: p.detach().numpy() for name, p in model.named_parameters()}
    plain = Plain(values, ranks, share, warm_up, chunk, nesterov, keep)
    return model, Simulation(model, optimizer, SparseChunks(share, warm_up, chunk), ranks, keep=keep, **more), plain


def compare(model, plain):
    """Parameters, up to rounding; gradients and choices are exact."""
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy().reshape(-1), plain.w[name], 1e-5, 1e-5, err_msg=name)


@pytest.mark.parametrize("chunk", [16, 64, 1 << 20])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps(ranks, nesterov, chunk):
    model, simulation, plain = begin(ranks, chunk=chunk, nesterov=nesterov)
    chosen = set()
    for step in range(8):
        own = [gradients(ranks, rank, step) for rank in range(ranks)]
        chosen.add(tuple(simulation.chunks.chosen.tolist()))
        simulation.step(setter(model, own))
        average = plain.step(own)
        for name, p in model.named_parameters():
            np.testing.assert_array_equal(p.grad.numpy().reshape(-1), average[name], name)
        compare(model, plain)
    assert len(chosen) > 3 or chunk > 64, "the choice changes"


def test_algorithm_1():
    model, simulation, plain = begin(2, warm_up=0, keep=MOMENTUM)
    for step in range(6):
        own = [gradients(5, rank, step) for rank in range(2)]
        simulation.step(setter(model, own))
        plain.step(own)
    compare(model, plain)


def test_not_finite():
    """One rank's NaN makes all gradients NaN, and histories stay; the chunk with it is sent next."""
    for bad in ("a.weight", "c.bias", "b.scale"):
        for value in (math.nan, math.inf):
            model, simulation, plain = begin(2, warm_up=0, share=0.2)
            for step in range(5):
                own = [gradients(6, rank, step) for rank in range(2)]
                if step == 3:
                    own[1][bad].reshape(-1)[-1] = value
                before = [history.history.clone() for history in simulation.histories]
                with np.errstate(all="ignore"):
                    simulation.exchange(setter(model, own))
                    plain.step(own, update=False)
                if step == 3:
                    assert all(p.grad.isnan().all() for p in model.parameters())
                    assert all((h.history == old).all() for h, old in zip(simulation.histories, before))
                    assert before[0].any()
                assert {k for k, one in enumerate(simulation.chunks.chosen[:plain.count].tolist()) if one} | {-1} == plain.chosen
            for rank, history in enumerate(simulation.histories):
                for name, at in history.chunks.layout.begins.items():
                    np.testing.assert_array_equal(history.history[at:at + plain.w[name].size].numpy(), plain.h[rank][name])


def test_every_element_is_looked_at():
    """Wherever a NaN is, the message tells of it; the norms are those of the chunks."""
    import torch
    from tally.torch.horovod.sparse_chunks import Chunks, History, GradientLayout, SparseChunks
    for chunk in (16, 48, 704, 4096):
        layout = GradientLayout({name: torch.empty(shape) for name, shape in SHAPES.items()})
        history = History(Chunks(SparseChunks(chunk=chunk), layout))
        values = {name: torch.from_numpy(value) for name, value in gradients(9, 0, 0).items()}

        def message():
            for name in reversed(SHAPES):
                history.add(name, values[name])
            return history.message(False)

        whole = torch.zeros(layout.length)
        for name, value in values.items():
            whole[layout.begins[name]:][:value.numel()] = value.view(-1)
        norms = [part.abs().sum() for part in whole[:layout.sparse].split(chunk)]
        assert message().tolist() == [*norms, 0, 0]
        for value in values.values():
            for i in range(0, value.numel(), 3):
                old, value.view(-1)[i] = value.view(-1)[i].item(), math.nan
                assert message()[-2] == 1, (chunk, i)
                value.view(-1)[i] = old
        assert message()[-2] == 0
        for name in values:
            history.leave_out(name)
        assert not history.gradients.any() and not history.message(False).any()


def test_choice():
    import torch
    from tally.torch.horovod.sparse_chunks import Chunks, GradientLayout, SparseChunks
    layout = GradientLayout({"a": torch.empty(10, 16), "b": torch.empty(3)})
    chunks = Chunks(SparseChunks(0.3, 0, 16), layout)
    assert chunks.chosen.tolist() == [True] * 11
    for norms, expected in (([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], {7, 8, 9}), ([5] * 10, {0, 1, 2}),
                            ([1, 2, 2, 2, 2, 1, 1, 1, 1, 1], {1, 2, 3}),
                            ([9, math.inf, 9, 9, 9, 9, 9, math.nan, 9, math.nan], {7, 9, 1})):
        chunks.choose(torch.tensor(norms, dtype=torch.float32))
        assert {k for k, one in enumerate(chunks.chosen.tolist()) if one} == {*expected, 10}
    shares = SparseChunks(0.2, 10)
    assert [shares.share_at(step) for step in (0, 5, 10, 99)] == pytest.approx([1, 0.6, 0.2, 0.2])
    assert SparseChunks(0.2, 0).share_at(0) == 0.2
    for share in range(1, 101):
        assert SparseChunks(share / 100, 30).share_at(30) == SparseChunks(share / 100, 30).share_at(31) == share / 100


def test_sent_ranges_are_aligned():
    """What is sent begins at multiples of 64 bytes, whatever the shapes; every element lies in one chunk."""
    import torch
    from tally.torch.horovod.sparse_chunks import Chunks, GradientLayout, SparseChunks
    for shapes in ([(3, 5), (7,)], [(1,)], [(33, 1), (1, 1), (5,), (0, 4), ()], [(64, 64)]):
        layout = GradientLayout({str(i): torch.empty(shape) for i, shape in enumerate(shapes)})
        for chunk in (16, 48, 4096):
            chunks = Chunks(SparseChunks(0.5, 0, chunk), layout)
            chunks.choose(torch.arange(float(chunks.count)))
            runs = [*chunks.runs(chunks.chosen)]
            assert all(begin % 16 == 0 and begin < end for begin, end, _ in runs)
            assert [run[0] for run in runs] == [0, *(run[1] for run in runs[:-1])] and runs[-1][1] == layout.length


def test_full_share_is_the_optimizers_own_step():
    """share=1 sends everything, and has the optimizer's own bits, whatever the gradients."""
    import torch
    model, simulation, _ = begin(1, share=1, warm_up=3)
    other = model_of(SHAPES)
    optimizer = torch.optim.SGD(other.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for step in range(5):
        own = [{name: value * np.float32(1 / 3) for name, value in gradients(7, 0, step).items()}]
        simulation.step(setter(model, own))
        setter(other, own)(0)
        optimizer.step()
    for p, q in zip(model.parameters(), other.parameters()):
        assert reference.same(p.detach().numpy(), q.detach().numpy()) == 0


def test_pieces_have_the_optimizers_own_arithmetic():
    """What the pieces of a step add up to has the bits of the optimizer's step, except where decay is behind."""
    import torch
    for options in ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}):
        models = [model_of(SHAPES) for _ in range(2)]
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1, **options) for model in models)
        from tally.torch.horovod.sparse_chunks import Chunks, GradientLayout, SparseChunks
        parameters = dict(models[0].named_parameters())
        chunks = Chunks(SparseChunks(chunk=16), GradientLayout(parameters))
        for step in range(3):
            for model in models:
                setter(model, [{name: value / np.float32(3) for name, value in gradients(8, 0, step).items()}])(0)
            chunks.update(first.param_groups, first.state, {id(p): name for name, p in parameters.items()})
            second.step()
        for p, q in zip(models[0].parameters(), models[1].parameters()):
            assert reference.same(p.detach().numpy(), q.detach().numpy()) == 0


def test_frozen_parameters_do_not_decay():
    """Decay does not count for steps in which no parameter of a chunk has a gradient."""
    import torch
    from tally.torch.horovod.sparse_chunks import Chunks, GradientLayout, SparseChunks
    frozen, other = (torch.nn.Parameter(torch.ones(1, 16)) for _ in range(2))
    names = {id(frozen): "frozen", id(other): "other"}
    chunks = Chunks(SparseChunks(0.5, 0, 16), GradientLayout({"frozen": frozen, "other": other}))
    optimizer = torch.optim.SGD([frozen, other], lr=0.5, weight_decay=0.25)
    chunks.sent = torch.tensor([False, True])
    other.grad = torch.zeros(1, 16)
    for _ in range(100):
        chunks.update(optimizer.param_groups, optimizer.state, names)
    frozen.grad = torch.zeros(1, 16)
    chunks.update(optimizer.param_groups, optimizer.state, names)
    assert (frozen == 1).all()
    chunks.sent = torch.tensor([True, True])
    chunks.update(optimizer.param_groups, optimizer.state, names)
    assert (frozen == 1 - 0.5 * 0.25 * 2).all(), "the two steps since it has a gradient"


def test_history_joins_any_gradient():
    """What was not sent is added to gradients that are not contiguous, too."""
    import torch
    from tally.torch.horovod.sparse_chunks import Chunks, GradientLayout, History, SparseChunks
    history = History(Chunks(SparseChunks(chunk=16), GradientLayout({"a": torch.empty(3, 5)})))
    history.history[:15], history.kept = torch.arange(15.0), True
    gradient = torch.ones(5, 3).t()
    history.add_dense("a", gradient)
    assert torch.equal(gradient, 1 + torch.arange(15.0).view(3, 5))


def test_bad_options():
    from tally.torch.horovod.sparse_chunks import SparseChunks
    for options, word in (({"share": 0}, "share must"), ({"share": 1.1}, "share must"), ({"share": "x"}, "share must"),
                          ({"share": math.nan}, "share must"), ({"warm_up": -1}, "warm_up must"),
                          ({"warm_up": 0.5}, "warm_up must"), ({"chunk": 0}, "multiple of 16"), ({"chunk": 40}, "multiple of 16"),
                          ({"chunk": 64.0}, "multiple of 16")):
        fails(ValueError, lambda: SparseChunks(**options), word)


# --- jobs -------------------------------------------------------------------------------------------------------------------

OPTIONS = {"share": 0.2, "warm_up": 6, "chunk": 64}


@functools.lru_cache
def data():
    from test_optimizer import digits
    return digits()


def shard(step, rank, size, count=16):
    x, y = data()
    first = (step * size + rank) * count % 1700
    return x[first:first + count], y[first:first + count]


def make(seed=0, model=None, options=OPTIONS, momentum=0.9, decay=1e-2, **more):
    """(model, DistributedOptimizer)."""
    import torch
    from test_optimizer import make_model
    t = hvd()
    model = model or make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    return model, t.DistributedOptimizer(optimizer, model.named_parameters(), **{"sparse": t.SparseChunks(**options), **more})


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
    return model, Simulation(model, plain, optimizer._sparse, hvd().size(), optimizer.history.chunks.layout.names, dense,
                             states=states)


def wrong(one, other):
    return sum(reference.same(p.detach().numpy(), q.detach().numpy()) for p, q in zip(one.parameters(), other.parameters()))


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
            dense += not optimizer._layout.ranges
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
        assert bool(optimizer._layout.ranges) or more
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
        dense += not optimizer._layout.ranges
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
            [len(one._exchange.operations) for one in optimizer._layout.ranges]))
        for step in range(8):
            optimizer.zero_grad()
            backward(model, *shard(step, t.rank(), t.size()))
            if optimizer._layout.ranges:
                fails(AssertionError, optimizer.zero_grad)
                operations = len(optimizer._layout.ranges[0]._exchange.operations)
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
        ended.append([one._ended for one in optimizer._layout.ranges[0]._exchange.operations])
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
    assert optimizer._layout.ranges
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
        dense[step // 12] += not optimizer._layout.ranges
        optimizer.step()
        kept.append([p.detach().clone() for p in model.parameters()])
    assert optimizer._layout.ranges and optimizer.history.kept
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
        operations = optimizer._layout.ranges[0]._exchange.operations
        assert bool(operations) == (t.rank() != 2)
        t.join()
        assert all(one._ended for one in operations)
        t.broadcast_parameters(model.state_dict(), 0)
        train_some(model, optimizer, 3)
    finally:
        sparse_optimizer.LIST_BYTES = saved


def test_join_in_backward(four):
    four(joined_in_backward)


# --- bad input --------------------------------------------------------------------------------------------------------------


def refused():
    import torch
    from test_optimizer import make_model
    t = hvd()
    sparse = t.SparseChunks(0.5, 0, 64)

    def wrap(optimizer, **more):
        return lambda: t.DistributedOptimizer(optimizer, sparse=sparse, **more)

    def sgd(model=None, **more):
        return torch.optim.SGD((model or make_model()).parameters(), lr=0.1, **more)

    fails(TypeError, wrap(torch.optim.Adam(make_model().parameters())), "torch.optim.SGD", "Adam")
    fails(ValueError, wrap(sgd(momentum=0.9, dampening=0.1)), "dampening=0.1")
    fails(ValueError, wrap(sgd(), cross_barrier=True), "cross_barrier=")
    fails(ValueError, wrap(sgd(), compression=t.Compression.bf16), "compression=")
    fails(ValueError, wrap(sgd(), groups=2), "groups=")
    fails(ValueError, wrap(sgd(), op=t.Max), "op=", "Average")
    fails(ValueError, wrap(sgd(), lazy=4096), "lazy=")
    fails(TypeError, lambda: t.DistributedOptimizer(sgd(), sparse=0.15), "SparseChunks", "0.15")
    fails(TypeError, wrap(sgd(make_model().double())), "float32", "float64")
    fails(TypeError, wrap(sgd(make_model().bfloat16())), "float32", "bfloat16")
    convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    fails(TypeError, wrap(sgd(convolution)), "contiguous")
    part = t.add_process_set([0, 1])
    fails(ValueError, wrap(sgd(), process_set=part), "process_set=")
    t.remove_process_set(part)
    # Unlike options: every rank names them.
    options = {"share": 0.5, "chunk": 64} if t.rank() != 2 else {"share": 0.25, "chunk": 64}
    fails(RuntimeError, lambda: make(options=options), "share=0.5", "share=0.25", "rank 2")
    model, optimizer = make()
    more = {"params": torch.nn.Linear(2, 2).parameters(), "dampening": 0.5}
    fails(ValueError, lambda: optimizer.add_param_group(more), "dampening=0.5")
    state = optimizer.state_dict()
    state["param_groups"][0]["dampening"] = 0.5
    fails(ValueError, lambda: optimizer.load_state_dict(state), "dampening=0.5")
    assert optimizer.param_groups[0]["dampening"] == 0
    x, y = shard(0, t.rank(), t.size())
    torch.nn.functional.cross_entropy(model(x), y).backward()
    fails(AssertionError, lambda: optimizer.add_param_group({"params": torch.nn.Linear(2, 2).parameters()}), "on their way")
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def test_refused(four):
    four(refused)


def train_some(model, optimizer, steps, first=0):
    from test_optimizer import backward
    t = hvd()
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, *shard(step, t.rank(), t.size()))
        optimizer.step()


def bad_gradients():
    """One rank's parameter is frozen, or has another shape: all ranks are told, and the next step sends everything."""
    import torch
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make()
    train_some(model, optimizer, 12)
    assert optimizer._layout.ranges

    def step():
        optimizer.zero_grad()
        backward(model, *shard(99, t.rank(), t.size()))
        optimizer.step()

    if t.rank() == 1:
        model[2].bias.requires_grad_(False)
    fails(RuntimeError, step, "2.bias" if t.rank() == 1 else "rank 1", "frozen")
    model[2].bias.requires_grad_(True)
    assert optimizer.history.chunks.chosen.all()
    t.broadcast_parameters(model.state_dict(), 0)
    train_some(model, optimizer, 3)
    assert not optimizer.history.chunks.chosen.all()

    # On all ranks: it keeps its gradient and its values, and the others train on.
    model[2].weight.requires_grad_(False)
    old = model[2].weight.grad.clone()
    backward(model, *shard(99, t.rank(), t.size()))
    optimizer.synchronize()
    assert torch.equal(model[2].weight.grad, old)
    model[2].weight.requires_grad_(False)
    optimizer.zero_grad()
    before = model[2].weight.clone()
    train_some(model, optimizer, 4)
    assert torch.equal(before, model[2].weight)
    model[2].weight.requires_grad_(True)
    train_some(model, optimizer, 4)
    assert not torch.equal(before, model[2].weight)

    # Written to while it is on its way.
    optimizer.zero_grad()
    backward(model, *shard(99, t.rank(), t.size()))
    model[0].weight.grad.mul_(2)
    fails(RuntimeError, optimizer.step, "0.weight", "changed")
    t.broadcast_parameters(model.state_dict(), 0)
    t.broadcast_optimizer_state(optimizer, 0)

    # Unlike choices, as of ranks that have loaded unlike states.
    train_some(model, optimizer, 3)
    if t.rank() == 2:
        optimizer.history.chunks.choose_all()
    before = optimizer.history.history.clone()
    fails(RuntimeError, step, "the chunks of gradients", "the ranks disagree", "rank 2")
    assert optimizer.history.kept and before.any() and not optimizer.history.history.isnan().any()
    assert (optimizer.history.history != 0)[before != 0].float().mean() > 0.9, "what was kept is kept"
    t.broadcast_parameters(model.state_dict(), 0)
    train_some(model, optimizer, 3)

    # Parameters that are added go along once the ranks have laid out gradients anew.
    model.append(torch.nn.Linear(10, 10))
    optimizer.add_param_group({"params": model[-1].parameters()})
    t.broadcast_parameters(model.state_dict(), 0)
    assert not optimizer._layout.ranges
    train_some(model, optimizer, 8)
    assert optimizer._layout.ranges and not optimizer.history.chunks.chosen.all()
    assert {"group.1.0", "group.1.1"} < set(optimizer.history.chunks.layout.names)

    # Another shape.
    optimizer.zero_grad()
    if t.rank() == 2:
        model[4].bias.data = torch.zeros(1)
        fails(TypeError, lambda: backward(model, *shard(99, t.rank(), t.size())), "4.bias", "float32 [1]", "[10]", "once more")
        fails(TypeError, optimizer.step, "4.bias")
    else:
        fails(RuntimeError, step, "rank 2", "4.bias")


def test_bad_gradients(four):
    four(bad_gradients)


def half_passes():
    """A step may have fewer passes than backward_passes_per_step; code that changes a gradient meanwhile is found out."""
    from test_optimizer import backward
    t = hvd()
    model, optimizer = make(backward_passes_per_step=2)
    train_some(model, optimizer, 12)
    assert optimizer._layout.ranges and not optimizer.history.chunks.sent.all()
    backward(model, *shard(99, t.rank(), t.size()))
    model[0].weight.grad.mul_(2)
    fails(RuntimeError, optimizer.step, "0.weight", "changed")


def test_fewer_passes(two):
    two(half_passes)


def long_chunk():
    """A chunk longer than the model is the model."""
    model, optimizer = make(options={"share": 0.1, "warm_up": 0})
    train_some(model, optimizer, 8)
    assert optimizer._layout.ranges and optimizer.history.chunks.count == 1 and optimizer.history.chunks.sent.all()
    other, dense = make(sparse=None)
    train_some(other, dense, 8)
    return wrong(model, other)


def test_chunk_longer_than_the_model(four):
    assert four(long_chunk) == [0] * 4


def embedding():
    import torch
    t = hvd()
    for as_dense in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 4))
        _, optimizer = make(model=model, sparse_as_dense=as_dense)

        def step():
            optimizer.zero_grad()
            model(torch.tensor([t.rank(), 7])).sum().backward()
            optimizer.step()

        if not as_dense:
            fails(TypeError, step, "0.weight", "sparse_as_dense=True")
            continue
        for _ in range(8):
            step()
        assert optimizer._layout.ranges and model[0].weight.grad.layout is torch.strided


def test_sparse_embedding(four):
    four(embedding)


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
    operations = optimizer._layout.ranges[0]._exchange.operations
    assert operations
    optimizer.load_state_dict(state)
    assert all(one._ended for one in operations) and not optimizer._handles
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

"""The steps of coarse-grained sparse communication, played by one process, against a plain reference."""

import math
import sys

import numpy as np
import pytest

import jobs
import reference
from test_ops import fails

sys.path.insert(0, str(jobs.ROOT / "bench" / "gradientflow"))

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
        largest = chunks.largest(torch.tensor(norms, dtype=torch.float32), 0)
        assert {k for k, one in enumerate(largest.tolist()) if one} == {*expected, 10}
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
            runs = [*chunks.runs(chunks.largest(torch.arange(float(chunks.count)), 0))]
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
    history.add_dense("a", gradient, {})
    assert torch.equal(gradient, 1 + torch.arange(15.0).view(3, 5))


def test_bad_options():
    from tally.torch.horovod.sparse_chunks import SparseChunks
    for options, word in (({"share": 0}, "share must"), ({"share": 1.1}, "share must"), ({"share": "x"}, "share must"),
                          ({"share": math.nan}, "share must"), ({"warm_up": -1}, "warm_up must"),
                          ({"warm_up": 0.5}, "warm_up must"), ({"chunk": 0}, "multiple of 16"), ({"chunk": 40}, "multiple of 16"),
                          ({"chunk": 64.0}, "multiple of 16")):
        fails(ValueError, lambda: SparseChunks(**options), word)

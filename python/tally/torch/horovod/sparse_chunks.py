"""Coarse-grained sparse communication (CSC; GradientFlow, Sun et al. 2019): chunks of gradients with large norms are sent.

The gradients G of a model lie side by side (GradientLayout), in the order in which backward makes them, cut into chunks of
equal length.  The history H has the same layout: the gradients that this rank has not sent yet.  A step is:

    add()       for each parameter, G = gradient + H, and the L1 norms of G by chunk, in one pass
    message()   the norms, which the ranks add up
    outcome()   what follows from the sum: the next step sends the chunks with the largest norms
    advance()   takes over the outcome
    put_off()   H = G, then G = 0, for each chunk that is not in `sent`
    (meanwhile the ranks average the chosen chunks, in place in G; nothing here communicates)
    settle()    H = 0 for each chunk that was sent.  So all ranks have equal gradients
    update()    SGD on the chunks that were sent; elsewhere parameters and momentum stay

Parameters of fewer than two dimensions (biases, normalization) lie behind the others, in one chunk that is always sent.

A step in which something fails ends without settle().  If the norms had come by then, H has the gradients of the chunks that are
not sent; of the others it is as it was.  So no gradient counts twice, unless code repeats the backward.

`Chunks` is the same on all ranks, `History` is a rank's own.  sparse_optimizer.py takes these steps in a job, and
bench/gradientflow/simulation.py plays all ranks in one process.  Before ranks agree on a layout, steps send everything:
add_dense(), advance_dense(), settle_dense().

Unlike Algorithm 1 of the paper, H keeps the whole gradient, not its product with the momentum m: a chunk sent in each K-th
step would move only (1 - m^K) / (K (1 - m)) as far as by dense steps.

SPDX-License-Identifier: Apache-2.0
"""

import dataclasses
import functools
import itertools
import math
import typing
import warnings

import torch
from torch.optim.sgd import sgd

from ..._operations import add_norms

_zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")  # whatever PyTorch's defaults are

ALIGNED = 16  # float32 elements in 64 bytes, of which a range that is sent begins at a multiple


@dataclasses.dataclass(frozen=True)
class SparseChunks:
    """How much of the gradients DistributedOptimizer(sparse=...) sends.

    share: of the chunks, sent in each step: above 0, at most 1.
    warm_up: steps over which the share falls linearly from 1.
    chunk: elements of a chunk; a multiple of 16.
    """

    share: float = 0.15
    warm_up: int = 500
    chunk: int = 32768

    def __post_init__(self):
        if not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise ValueError("share must be above 0 and at most 1, not %r" % (self.share,))
        if not isinstance(self.warm_up, int) or not 0 <= self.warm_up <= 1 << 24:  # float32 counts as far
            raise ValueError("warm_up must be a number of steps from 0 to %d, not %r" % (1 << 24, self.warm_up))
        if not isinstance(self.chunk, int) or self.chunk < 1 or self.chunk % ALIGNED:
            raise ValueError("chunk must be a positive multiple of %d elements (64 bytes), not %r" % (ALIGNED, self.chunk))

    def share_at(self, step):
        """The share of the chunks that step `step`, counted from 0, sends."""
        return self.share if step >= self.warm_up else 1 - (1 - self.share) * step / self.warm_up


class GradientLayout:
    """Where parameters' gradients lie.  Owner: the optimizer.

    begins: {name: first element}, each a multiple of 16.  counts: {name: elements}.
    sparse: elements that lie in chunks; behind them lies what is always sent.  length: elements in all.
    """

    def __init__(self, parameters):
        """parameters: {name: tensor}, in the order in which backward makes their gradients."""
        self.names = [*parameters]
        self.begins, self.counts, self.length = {}, {name: p.numel() for name, p in parameters.items()}, 0
        for always in (False, True):
            for name, p in parameters.items():
                if (p.dim() < 2) == always:
                    self.begins[name] = self.length
                    self.length += -(-p.numel() // ALIGNED) * ALIGNED
            if not always:
                self.sparse = self.length

    def common(self, other):
        """(name, begin here, begin there, elements) of each parameter that another layout has, too."""
        return [(name, begin, other.begins[name], self.counts[name]) for name, begin in self.begins.items()
                if name in other.begins]


class Outcome(typing.NamedTuple):
    """The outcome of a step's exchange, the same on all ranks.

    finite: whether all values were.  sent, step, chosen: those of Chunks behind the step."""

    finite: bool
    sent: torch.Tensor
    step: int
    chosen: torch.Tensor


class Chunks:
    """The chunks of a layout: which are sent, and how many steps each one's update is behind.  The same on all ranks.

    count: chunks that can be chosen; chunk number `count`, if there is one, is always sent.  bounds: their limits, in elements.
    chosen: bool for each chunk, sent in the next step.  sent: the same, in the last step.
    behind: steps of the optimizer since the chunk's last update, in which any of its parameters had a gradient.
    step: steps made, which count up to the end of the warm-up.
    """

    def __init__(self, options, layout, step=0):
        self.options, self.layout, self.step = options, layout, step
        self.count = -(-layout.sparse // options.chunk)
        self.bounds = [*range(0, layout.sparse, options.chunk), layout.sparse]
        if layout.length > layout.sparse:
            self.bounds.append(layout.length)
        self.behind = _zeros(len(self.bounds) - 1, dtype=torch.int32)
        self.choose_all()
        self.sent = self.chosen

    def choose_all(self):
        """Have the next step send everything."""
        self.chosen = torch.ones(len(self.bounds) - 1, dtype=torch.bool, device="cpu")

    def largest(self, norms, step):
        """The chunks with the largest norms, as many as step `step` sends, and those that are always sent.  NaN counts as larger
        than all numbers, and of equal ones the first is chosen.

        norms: float32 [count]."""
        number = max(1, round(self.options.share_at(step) * self.count))
        largest = torch.ones_like(self.chosen)
        largest[:self.count] = False
        largest[torch.sort(norms, descending=True, stable=True).indices[:number]] = True
        return largest

    def outcome(self, message):
        """The Outcome of a step's exchange.  Changes nothing.

        message: the sum of all ranks' History.message()."""
        counted = int(message[-1].item())  # by rank 0: another rank may have missed steps while it had joined
        step = self._after(counted - 1 if counted else self.step)
        return Outcome(message[-2].item() == 0, self.chosen, step, self.largest(message[:self.count], step))

    def advance(self, outcome):
        """End a step's exchange."""
        self.sent, self.step, self.chosen = outcome.sent, outcome.step, outcome.chosen

    def advance_dense(self, before=None):
        """End a step that has sent everything, without messages.  before: `step` in front of it; with it, a second call changes
        nothing."""
        self.sent = torch.ones_like(self.chosen)
        self.step = self._after(self.step if before is None else before)

    def _after(self, step):
        return min(step + 1, self.options.warm_up)

    def of(self, name):
        """The numbers of the chunks in which a parameter's gradient lies."""
        begin, count, chunk = self.layout.begins[name], self.layout.counts[name], self.options.chunk
        if not count:
            return range(0)
        if begin < self.layout.sparse:
            return range(begin // chunk, -(-(begin + count) // chunk))
        return range(self.count, self.count + 1)

    def runs(self, *keys):
        """Cut the layout where one of `keys` changes, each with an element for each chunk.  Yields (begin, end, elements)."""
        for values, members in itertools.groupby(zip(*(key.tolist() for key in keys), range(len(self.bounds) - 1)),
                                                 lambda entry: entry[:-1]):
            numbers = [entry[-1] for entry in members]
            yield self.bounds[numbers[0]], self.bounds[numbers[-1] + 1], *values

    def update(self, groups, state, name_of):
        """A step of torch.optim.SGD on what was sent.  Weight decay counts for each step since the chunk's last update.

        groups, state: the optimizer's.  name_of: {id(parameter): name in the layout}; others are updated as a whole."""
        names = [name_of.get(id(p)) for group in groups for p in group["params"] if p.grad is not None]
        due = {number for name in names if name in self.layout.begins for number in self.of(name)}
        self.behind[torch.tensor([*due], dtype=torch.int64, device="cpu")] += 1
        runs = [(begin, end, behind) for begin, end, sent, behind in self.runs(self.sent, self.behind) if sent]
        for group in groups:
            pieces = {}  # steps behind -> (parameters, gradients, momenta), of pieces
            for p in group["params"]:
                if p.grad is None:
                    continue
                begin = self.layout.begins.get(name_of.get(id(p)))
                flat = [p.detach().view(-1), p.grad.reshape(-1)]
                if group["momentum"]:
                    if state[p].get("momentum_buffer") is None:
                        state[p]["momentum_buffer"] = torch.zeros_like(p)
                    flat.append(state[p]["momentum_buffer"].view(-1))
                for low, high, behind in [(0, p.numel(), 1)] if begin is None else _cut(runs, begin, begin + p.numel()):
                    lists = pieces.setdefault(behind, ([], [], []))
                    for one, tensor in zip(lists, flat):
                        one.append(tensor[low:high])
            for behind, (parameters, gradients, momenta) in pieces.items():
                sgd(parameters, gradients, momenta or [None] * len(parameters), has_sparse_grad=False,
                    foreach=group.get("foreach"), weight_decay=group["weight_decay"] * behind, momentum=group["momentum"],
                    lr=group["lr"], dampening=0, nesterov=group["nesterov"], maximize=group["maximize"])
        self.behind[self.sent] = 0

    def take(self, other):
        """Take over another layout's state.  In an equal layout the next step sends the same chunks, else everything, and a
        chunk is as far behind as the furthest of its parts."""
        self.step = other.step
        self.choose_all()
        if (self.bounds, self.layout.begins) == (other.bounds, other.layout.begins):
            self.behind.copy_(other.behind)
            self.chosen.copy_(other.chosen)
            return
        elements = other.behind.repeat_interleave(torch.tensor(other.bounds, device="cpu").diff())
        mine = _zeros(self.layout.length, dtype=torch.int32)
        for name, begin, old, count in self.layout.common(other.layout):
            mine[begin:begin + count] = elements[old:old + count]
        for number, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:])):
            self.behind[number] = mine[begin:end].max()

    def is_dense(self):
        """Whether the optimizer's own step does what update() does."""
        return bool(self.sent.all()) and not self.behind.any()


def _cut(runs, begin, end):
    """The parts of runs (begin, end, value) that lie in begin:end, counted from its begin."""
    return [(max(low, begin) - begin, min(high, end) - begin, value) for low, high, value in runs
            if low < end and high > begin]


class History:
    """A rank's gradients G and history H, in a layout.

    gradients, history: float32 [layout.length].
    keep: the factor of what is put off; 1, or the momentum, as in the paper's Algorithm 1.
    """

    def __init__(self, chunks, keep=1.0):
        self.chunks, layout = chunks, chunks.layout
        self.gradients = _zeros(layout.length)
        self.history = _zeros(layout.length)
        self.kept = False  # H is not all zeros
        self._progress = None, 0  # of put_off(): (Chunks.sent of a step, how many halves of its runs are done)
        self._keep = keep
        # A parameter's pieces: what of it lies in one chunk.  Each has a norm; a chunk's is their sum, in order.
        self._pieces, numbers = {}, []
        for name in layout.begins:
            first = len(numbers)
            numbers += chunks.of(name)
            self._pieces[name] = first, len(numbers)
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._norms = _zeros(len(numbers))

    def begin(self):
        """A step begins, in which a signal handler may break add() off."""
        self._norms.fill_(-1)  # H has been added to no piece

    def add(self, name, gradient=None, again=False):
        """G = gradient + H where that parameter's gradient lies, and the norms of its pieces.

        gradient: float32, of as many elements as the parameter; may be that part of G; None: zeros.
        again: an earlier call of this step was broken off; H is not added twice."""
        layout, chunk = self.chunks.layout, self.chunks.options.chunk
        begin, count, (first, _) = layout.begins[name], layout.counts[name], self._pieces[name]
        place = self.gradients[begin:begin + count]
        gradient = place.zero_() if gradient is None else gradient.detach().reshape(-1)
        head = min(-begin % chunk, count)
        if begin >= layout.sparse:
            head, chunk = 0, max(count, 1)
        for low, high, piece in (0, head, first), (head, count, first + (head > 0)):
            if high > low and (not again or self._norms[piece] < 0):
                add_norms(gradient[low:].data_ptr(), self.history[begin + low:].data_ptr(), place[low:].data_ptr(), high - low,
                          chunk, self._norms[piece:].data_ptr())

    def leave_out(self, name):
        """G = 0 where the gradient of a parameter lies that is frozen."""
        begin = self.chunks.layout.begins[name]
        self.gradients[begin:begin + self.chunks.layout.counts[name]].zero_()
        first, end = self._pieces[name]
        self._norms[first:end].zero_()

    def add_dense(self, name, gradient, sums):
        """gradient += H, for a step that sends everything.  sums: what gradients have become in this step, by name.  If a signal
        handler breaks it off, the next call adds H once nonetheless."""
        begin = self.chunks.layout.begins.get(name)
        if self.kept and begin is not None:
            if name not in sums:
                sums[name] = gradient + self.history[begin:begin + gradient.numel()].view(gradient.shape)
            gradient.copy_(sums[name])

    def message(self, first):
        """float32 [chunks.count + 2]: norms; 1 if one is not finite; 1 + the steps made, if this is the `first` rank."""
        norms = _zeros(self.chunks.count + 1).index_add_(0, self._numbers, self._norms)
        more = [not norms.isfinite().all(), 1 + self.chunks.step if first else 0]
        return torch.cat([norms[:-1], torch.tensor(more, dtype=torch.float32, device="cpu")])

    def put_off(self):
        """H = G, then G = 0, for what this step does not send, behind Chunks.advance().  The other chunks may be in flight.

        If a signal handler breaks it off, the next call does the rest.  Each half of a run may be done twice, before it counts."""
        of = self.chunks.sent
        if self._progress[0] is not of:
            self._progress = of, 0
        for number, (begin, end, sent) in enumerate(self.chunks.runs(of)):
            if not sent:
                history, gradients = self.history[begin:end], self.gradients[begin:end]
                if self._progress[1] <= 2 * number:
                    history.copy_(gradients) if self._keep == 1 else torch.mul(gradients, self._keep, out=history)
                    self.kept = True
                    self._progress = of, 2 * number + 1
                if self._progress[1] <= 2 * number + 1:
                    gradients.zero_()
                    self._progress = of, 2 * number + 2

    def settle(self, finite):
        """End a step, once all that is sent is there.  finite: as in Outcome.  If so, behind put_off(): H = 0 for
        what was sent.  Otherwise H stays and G is NaN, on all ranks."""
        layout = self.chunks.layout
        if not finite:
            for name, begin in layout.begins.items():
                self.gradients[begin:begin + layout.counts[name]].fill_(math.nan)
            return
        for begin, end, sent in self.chunks.runs(self.chunks.sent):
            if sent:
                self.history[begin:end].zero_()
        self.kept = not self.chunks.sent.all()

    def settle_dense(self, finite):
        """End a step that has sent everything, behind Chunks.advance_dense().  finite: whether all gradients are."""
        if finite and self.kept:
            self.history.zero_()
            self.kept = False

    def take(self, other):
        """Take over another layout's history and the state of its chunks."""
        self.take_history(other)
        self.chunks.take(other.chunks)

    def take_history(self, other):
        for name, begin, old, count in self.chunks.layout.common(other.chunks.layout):
            self.history[begin:begin + count] = other.history[old:old + count]
        self.kept = other.kept

    def rescale(self, factor):
        """A GradScaler's scale has changed by this factor."""
        if self.kept and factor != 1:
            self.history.mul_(factor)


def save(history, rank):
    """What state_dict() has of a rank's history, and of the chunks.

    "history": H, or None where it is all zeros."""
    chunks = history.chunks
    return {"rank": rank, "order": chunks.layout.names, "chunk": chunks.options.chunk, "step": chunks.step,
            "behind": chunks.behind.clone(), "chosen": chunks.chosen.clone(),
            "history": history.history if history.kept else None}


def for_broadcast(state):
    """What other ranks need of save()'s result.  In place of a history it says whether they keep their own: not if this rank has
    none, because all have sent everything."""
    return {**{key: value for key, value in state.items() if key != "history"}, "keep_own": state["history"] is not None}


def restore(state, rank, options, parameters, own=None):
    """The History, with its Chunks, of what save() or for_broadcast() has returned.

    parameters: {name: tensor}.  own: this rank's History, for a state that has been broadcast.
    A rank that is given another one's history begins with zeros, and warns."""
    differing = sorted(set(state["order"]) ^ set(parameters))
    if differing:
        raise ValueError("the state of sparse= is that of other parameters; not in both are %s" % ", ".join(differing[:5]))
    layout = GradientLayout({name: parameters[name] for name in state["order"]})
    history = History(Chunks(dataclasses.replace(options, chunk=state["chunk"]), layout, state["step"]))
    chunks = history.chunks
    for mine, loaded in (chunks.behind, state["behind"]), (history.history, state.get("history")):
        if loaded is not None and loaded.shape != mine.shape:
            raise ValueError("the state of sparse= is that of parameters of other shapes")
    chunks.behind.copy_(state["behind"])
    chunks.chosen.copy_(state["chosen"])
    if state.get("keep_own"):
        if own is not None:
            history.take_history(own)
    elif state.get("history") is not None:
        if state["rank"] == rank:
            history.history.copy_(state["history"])
            history.kept = True
        else:
            warnings.warn("rank %d has loaded the state of rank %d: gradients that rank %d has not sent yet are lost. Save the "
                          "optimizer's state on each rank to keep them" % (rank, state["rank"], rank), stacklevel=4)
    return history

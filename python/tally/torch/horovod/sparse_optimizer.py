"""DistributedOptimizer(sparse=SparseChunks(...)): SGD on the chunks of gradients that are sent, see sparse_chunks.py.

Flow: until the ranks have laid out gradients (lazy.py), steps are dense -> then one unit has all gradients side by side, and
each `grad` is a part of its memory.  The hook adds the history to a gradient as it copies it there -> a list of chosen chunks
starts when its last gradient is there, while backward still runs; behind the last list the norms are sent -> once these have
come back, a rank chooses the next step's chunks, and moves what it does not send to its history while it waits for the lists ->
step() updates the chunks that were sent.

How many lists there are follows from the layout, and what is in them from the choice, so all ranks have the same ones.

A step in which anything fails has failed on all ranks.  The next one sends everything, as does that behind join().  In a new
communicator the ranks lay out anew.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import re

import torch

from ... import _calls, _errors, _job, _where
from ..._calls import GRADIENT, Call
from ..._lib import DTYPE_CODES, PUSH_PULL, PUSH_PULLV
from ..._operations import push_pullv, submit_to
from ..calls import Group, reduce
from .lazy import ALONE, Layout
from .optimizer import _Distributed
from .sparse_chunks import Chunks, GradientLayout, History, SparseChunks, for_broadcast, restore, save

LISTS, LIST_BYTES = 8, 256 << 10  # at most so many lists in a step, of at least so many bytes
FLOAT32 = DTYPE_CODES["float32"]


class _Exchange:
    """Handle of all operations of a step."""

    def __init__(self, unit):
        self._unit, self.lists, self.norms, self.reason = unit, {}, None, None  # lists: Call -> operation
        self._outcome = None  # of the step, once the norms have come
        self._ended, self._failure = False, None

    @property
    def operations(self):
        """What is under way, or has ended."""
        return [*self.lists.values(), *filter(None, [self.norms])]

    def wait(self):
        """Wait for all, and settle the step once.  If a signal handler breaks it off, the next call goes on."""
        if not self._ended:
            self._end(self._unit.history)
        if self._failure is not None:
            raise _errors.again(self._failure)

    def drop(self):
        """Wait for what is under way, also where not all gradients are there, and change nothing: no step follows, so H stays."""
        _failure_of(Group(self.operations))
        self._ended = True

    def _end(self, history):
        if self.reason is None:
            self._hear(history)
        failure = _failure_of(Group(self.operations)) or self.reason
        if failure is None:
            history.settle(self._outcome.finite)
        else:
            history.chunks.choose_all()
        self._ended, self._failure = True, failure

    def _hear(self, history):
        """Put off what is not sent, while lists are on their way.  When the norms have come, all ranks have started all lists."""
        if self._outcome is None and _failure_of(self.norms) is None:
            self._outcome = history.chunks.outcome(self.norms.wait())
        if self._outcome is not None:
            history.chunks.advance(self._outcome)
            if self._outcome.finite:
                history.put_off()


def _failure_of(operation):
    """Wait for an operation.  Returns its Error, or None."""
    try:
        operation.wait()
    except _errors.Error as error:
        if _where.is_handlers(error):
            raise
        return error
    return None


class ChunkedGradients:
    """How all gradients of an optimizer start: as lists of chunks.  A unit as in lazy.py.

    slots: all of the layout.  history: this rank's, whose gradients are the parameters' `grad`."""

    def __init__(self, optimizer, slots, history):
        self.slots, self.history = slots, history
        chunks, self._at = history.chunks, {}  # slot -> (its place, the place's address, its shape)
        self._owners = [[] for _ in chunks.chosen]  # chunk -> slots whose gradients are in it
        for slot in slots:
            self._lay(slot, slot.p.shape)
            for number in chunks.of(slot.name):
                self._owners[number].append(slot)
        sent = round(chunks.options.share * chunks.count)
        count = min(LISTS, sent, sent * chunks.options.chunk * 4 // LIST_BYTES)
        like = slots[0].call
        self._calls = [like.but(name="%s/chunks.%d" % (optimizer._tally_prefix, number)) for number in range(max(1, count))]
        self._norms = Call(optimizer._tally_prefix + "/norms", space=GRADIENT)
        self.expect()

    def expect(self):
        """A step begins."""
        self.history.begin()
        self._left = dict.fromkeys(self.slots, False)  # gradients that are not there, in order: whether H is being added
        self._lists = None                             # [(Call, ranges, slots that are not there)]
        self._exchange = _Exchange(self)

    def is_frozen(self):
        """Whether a parameter needs no gradient here now."""
        return not all(slot.p.requires_grad for slot in self.slots)

    def ready(self, optimizer, slot):
        """Backward has made a gradient."""
        optimizer._tally_hold(slot)
        optimizer._tally_forget(slot)
        if slot.p.grad is not None:  # a hook before ours may have taken it
            self._take(optimizer, slot)
        if not self._left:
            self._end(optimizer)

    def start(self, optimizer, slot):
        """Have zeros for gradients that are not there, and submit what has not started."""
        for one in [*self._left]:
            self._take(optimizer, one)
        self._end(optimizer)

    def refuse(self, optimizer, slot, reason):
        """Tell the other ranks, once a step, why this one does not submit the rest of the step."""
        exchange = self._exchange
        if exchange.reason is None and slot not in optimizer._tally_refused:
            optimizer._tally_refused.update(dict.fromkeys(self.slots, reason))
            exchange.reason = reason
            for call, _, _ in self._cut():
                if call not in exchange.lists:
                    _calls.refuse(PUSH_PULLV, call, reason)
            _calls.refuse(PUSH_PULL, self._norms, reason)
            self._began(optimizer)

    def drop(self):
        """End the exchange of a backward that no step follows."""
        self._exchange.drop()

    def _began(self, optimizer):
        optimizer._tally_began([one for one in self.slots if one.p.requires_grad], self._exchange)

    def _end(self, optimizer):
        """All gradients are there: have all lists and the norms under way."""
        if self._exchange.reason is None:
            self._submit()
            if self._exchange.norms is None:  # else a signal handler has broken off what follows
                message = self.history.message(_job.rank() == 0)
                submit_to(functools.partial(setattr, self._exchange, "norms"), reduce, self._norms, message, message)
            self._began(optimizer)

    def _lay(self, slot, shape):
        """Make the tensor of a gradient's place, and return it."""
        # A tensor of its own, not a view: each place counts its versions by itself.
        place = torch.empty(0, dtype=torch.float32, device="cpu")
        place.set_(self.history.gradients.untyped_storage(), self.history.chunks.layout.begins[slot.name], shape)
        self._at[slot] = place, place.data_ptr(), shape
        return place

    def _place(self, slot):
        """A gradient's place.  It is another tensor if code has changed the last one, as `p.grad.data = ...` does."""
        place, address, shape = self._at[slot]
        if (place.data_ptr(), place.dtype, place.shape) != (address, torch.float32, shape) or not place.is_contiguous():
            place = self._lay(slot, shape)
        return place

    def _take(self, optimizer, slot):
        """Put a gradient, or zeros, in its place, and start the lists that it was missing from."""
        p, place = slot.p, self._place(slot)
        if self._exchange.reason is not None:
            return
        if p.requires_grad:
            changed = optimizer._tally_moves(slot)
            optimizer._tally_fill(slot)
            self._check(optimizer, slot, place)
            again, self._left[slot] = self._left[slot], True
            self.history.add(slot.name, p.grad, again)
            p.grad = place
            if not changed:  # else what is there stays, and tells
                optimizer._tally_note(slot)
        else:
            if p.grad is place:
                p.grad = place.clone()  # of an earlier step
            self.history.leave_out(slot.name)
        for _, _, missing in self._cut():
            missing.discard(slot)
        del self._left[slot]
        self._submit()

    def _submit(self):
        """Start the lists whose gradients are there."""
        gradients, lists = self.history.gradients, self._exchange.lists
        for call, ranges, missing in self._cut():
            if not missing and call not in lists:
                address = gradients.data_ptr()
                submit_to(functools.partial(lists.__setitem__, call), push_pullv, call, address, address, ranges, FLOAT32, gradients)

    def _check(self, optimizer, slot, place):
        """Refuse a gradient that cannot lie in its place, or whose parameter's pieces cannot be updated."""
        gradient, error = slot.p.grad, None
        if (gradient.shape != place.shape or gradient.dtype != place.dtype or gradient.layout is not torch.strided
                or not gradient.is_cpu or gradient.requires_grad):
            error = TypeError("the gradient of %s is %s, and was %s when the ranks laid out their gradients: make the "
                              "DistributedOptimizer once more" % (slot.name, _form(gradient), _form(place)))
        elif not slot.p.is_contiguous():
            error = TypeError("parameter %s is not contiguous any more, and sparse= updates pieces of it: give it "
                              "memory_format=torch.contiguous_format" % slot.name)
        if error is not None:
            self.refuse(optimizer, slot, error)
            raise error

    def _cut(self):
        """The lists.  Each has about as many of the chosen chunks; the last one what is always sent."""
        if self._lists is None:
            chunks = self.history.chunks
            chosen = chunks.chosen.nonzero().flatten().tolist()
            self._lists = []
            for number, call in enumerate(self._calls):
                low, high = (len(chosen) * one // len(self._calls) for one in (number, number + 1))
                mine, ranges = chosen[low:high], []
                for k in mine:
                    begin, end = chunks.bounds[k], chunks.bounds[k + 1]
                    if ranges and sum(ranges[-1]) == begin:
                        begin = ranges.pop()[0]
                    ranges.append((begin, end - begin))
                missing = {slot for k in mine for slot in self._owners[k]}
                priority = max(slot.priority for slot in missing)
                self._lists.append((call.but(priority=priority), ranges, missing & self._left.keys()))
        return self._lists


def _explain(sentence):
    """A sentence with the user's words for the operations of a step."""
    return _NAMES.sub("the chunks of gradients that DistributedOptimizer(sparse=...) sends", sentence)


_NAMES = re.compile(r"'(?:\d+:)?/(?:chunks\.\d+|norms)'")
_errors.explainers.append(_explain)


def _form(tensor):
    return "%s %s, %s, on %s%s" % (str(tensor.dtype).removeprefix("torch."), list(tensor.shape),
                                   str(tensor.layout).removeprefix("torch."), tensor.device,
                                   ", part of a graph (create_graph=True)" if tensor.requires_grad else "")


class ChunkLayout(Layout):
    """All gradients side by side, in one unit, once the ranks have agreed on their order."""

    def _lay(self, optimizer, slots, theta, kinds):
        layout = GradientLayout({slot.name: slot.p for slot in slots})
        if not layout.length:
            return []
        history = History(Chunks(optimizer._tally_sparse, layout))
        history.take(optimizer.history)
        history.chunks.choose_all()
        optimizer.history = history
        return [ChunkedGradients(optimizer, slots, history)]


def check(sparse, kind, others):
    """Refuse options that do not go together.  kind: the optimizer's class.  others: {name of an option: whether it is used}."""
    if not isinstance(sparse, SparseChunks):
        raise TypeError("sparse must be a tally.torch.SparseChunks(...), not %r" % (sparse,))
    if kind is not torch.optim.SGD:
        raise TypeError("sparse= goes with torch.optim.SGD, not %s: chunks that are not sent keep parameters and momentum, which "
                        "other optimizers do not know of" % kind.__name__)
    for name, used in others.items():
        if used:
            raise ValueError("%s= does not go with sparse=%s" % (name, {"op": "; only op=Average and op=Sum do"}.get(name, "")))


class SparseOptimizer(_Distributed):
    """The class that DistributedOptimizer(sparse=...) puts before the optimizer's own class."""

    # What a dense step keeps: its _tally_handles, the Chunks.step before it, and what add_dense() has made of its gradients.
    _tally_dense = None, 0, {}

    def _tally_distribute(self, *arguments):
        for group in self.param_groups:
            self._tally_check_group(group)
        super()._tally_distribute(*arguments)

    def _tally_make_layout(self, _):
        # Of no use before a state is loaded or the ranks lay out gradients.
        layout = GradientLayout({slot.name: slot.p for slot in reversed(self._tally_update)})
        self.history = History(Chunks(self._tally_sparse, layout))
        return ChunkLayout(1 if self._tally_of_all and not self._tally_alone else 0)

    @staticmethod
    def _tally_check_group(group):
        for term in ("dampening", "differentiable"):
            if group.get(term):
                raise ValueError("sparse= does not go with SGD's %s=%r" % (term, group[term]))
        for p in group["params"]:
            if p.requires_grad and not (p.is_cpu and p.dtype == torch.float32 and p.is_contiguous()):
                raise TypeError("sparse= takes contiguous float32 parameters in host memory, and one of shape %s is %s"
                                % (list(p.shape), _form(p.detach())))

    def add_param_group(self, param_group):
        """As DistributedOptimizer's.  The next steps send everything, until the ranks have laid out gradients anew."""
        if self._tally_handles:
            raise AssertionError("optimizer.add_param_group() between loss.backward() and optimizer.step() or "
                                 "optimizer.synchronize() would lose the gradients on their way")
        several = param_group["params"]
        several = [several] if isinstance(several, torch.Tensor) else list(several)
        self._tally_check_group({**self.defaults, **param_group, "params": [p[1] if isinstance(p, tuple) else p for p in several]})
        super().add_param_group({**param_group, "params": several})

    def _tally_start(self, slot, gradient):
        if gradient.is_sparse:
            error = TypeError("the gradient of %s is a sparse tensor, which sparse=SparseChunks() cannot cut into chunks: "
                              "sparse_as_dense=True makes it dense" % slot.name)
            ALONE.refuse(self, slot, error)
            raise error
        self.history.add_dense(slot.name, gradient, self._tally_dense_step()[1])
        super()._tally_start(slot, gradient)

    def _tally_dense_step(self):
        """(Chunks.step in front of this step, sums of add_dense() in it), also where a signal handler has broken it off."""
        if self._tally_dense[0] is not self._tally_handles:
            self._tally_dense = self._tally_handles, self.history.chunks.step, {}
        return self._tally_dense[1:]

    def _tally_reduced(self, failure):
        before, sums = self._tally_dense_step()
        if self._tally_alone and self.history.kept:  # no hook has added what a job of several ranks had not sent
            for slot in self._tally_update:
                if slot.p.requires_grad:
                    self._tally_fill(slot)
                    self.history.add_dense(slot.name, slot.p.grad.data, sums)
        if not self._tally_layout.ranges and failure is None:
            gradients = [slot.p.grad for slot in self._tally_update if slot.p.grad is not None]
            self.history.chunks.advance_dense(before)
            self.history.settle_dense(not self.history.kept or all(one.isfinite().all() for one in gradients))

    def _tally_forget_step(self, dropped=0):
        super()._tally_forget_step(dropped)
        self._tally_dense = None, 0, {}  # it keeps gradients

    def _tally_await_handles(self):
        for unit in self._tally_layout.ranges:
            unit.drop()
        super()._tally_await_handles()

    def _tally_begin_anew(self):
        super()._tally_begin_anew()
        self.history.chunks.choose_all()
        self.history.chunks.behind.zero_()  # ranks have made unlike numbers of steps

    def _tally_rescale(self, factor):
        """A GradScaler's scale has changed by this factor."""
        self.history.rescale(factor)

    def state_dict(self):
        """As the optimizer's own, with "sparse_chunks": this rank's history."""
        return {**super().state_dict(), "sparse_chunks": save(self.history, _job.rank())}

    def _tally_state_for_broadcast(self):
        """state_dict() without what concerns this rank alone."""
        return {**super().state_dict(), "sparse_chunks": for_broadcast(save(self.history, _job.rank()))}

    def load_state_dict(self, state_dict):
        """Like the optimizer's own.  A rank that loads another one's state begins with an empty history, and warns."""
        for own, loaded in zip(self.param_groups, state_dict["param_groups"]):
            self._tally_check_group({**loaded, "params": own["params"]})
        saved, parameters = state_dict.get("sparse_chunks"), {slot.name: slot.p for slot in self._tally_update}
        # An error leaves everything as it was.
        loaded = None if saved is None else restore(saved, _job.rank(), self._tally_sparse, parameters, self.history)
        super().load_state_dict(state_dict)
        if loaded is None:  # of another optimizer
            self.history.chunks.choose_all()
        elif self._tally_layout.ranges:
            self.history.take(loaded)
        else:
            self.history = loaded


class SparseStep:
    """The step() that stands between DistributedOptimizer's and SGD's own."""

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.history.chunks.is_dense():
            super().step()
        else:
            self._tally_step_chunks()
        return loss

    step.hooked = True  # SGD's own step runs hooks, and that below

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def _tally_step_chunks(self):
        names = {id(slot.p): slot.name for slot in self._tally_update}
        self.history.chunks.update(self.param_groups, self.state, names)

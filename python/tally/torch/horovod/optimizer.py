"""DistributedOptimizer: any torch optimizer, with gradients reduced over the ranks while backward still runs.

Flow: a hook fires when a parameter's gradient is complete -> its reduction is submitted, in place, in the background ->
step() waits for all and steps.  Gradients nearest the input go first, because the next forward needs them first.

SPDX-License-Identifier: Apache-2.0
"""

import errno
import functools
import gc
import re
import warnings
import weakref
import zlib
from contextlib import contextmanager

import torch

from ... import _calls, _errors, _job, _where
from ..._calls import GRADIENT, Call, Reduction
from ..._lib import PUSH_PULL
from ..._operations import submit_to
from .. import device, patches
from ..calls import reduce, reduction as reduction_of
from ..crossing import gates
from ..pool import Places
from ..process_sets import global_process_set
from ..crossing.deferred import kind_of
from ..crossing.groups import Shared
from . import uneven
from .compression import Compression
from .functions import compare
from .lazy import ALONE, Layout, Together
from .ops import Average, Sum
from .order import Order
from .sparse import SparseReduction

# id(parameter) -> (weak reference to it, to the optimizer that reduces its gradient).  Two would sum it twice.
_owners = {}

_numbered = {}  # process set's number -> (generation of the communicator, optimizers made in it)


_DROPPED = 1 << 24  # in a rank's word of each step (_tally_begin_comparison): the unit of dropped steps, above what is frozen


def _take_number(process_set):
    """0 for a process set's first optimizer in a communicator, then 1, and so on.  It is the same on all its ranks,
    because making an optimizer is collective.  It keeps the names of several optimizers apart."""
    generation, count = _numbered.get(process_set.process_set_id, (0, 0))
    if generation != _job.generation():
        count = 0
    _numbered[process_set.process_set_id] = (_job.generation(), count + 1)
    return count


class _Slot:
    """A parameter of an optimizer.  What happens once for each gradient looks here: a tensor as a key takes 1 us to find."""

    __slots__ = ("p", "name", "number", "priority", "reduced", "delay", "call", "seen", "empty")

    def __init__(self, p, name, number, passes):
        self.p, self.name = p, name
        self.number = number            # in order of the model, input first
        self.priority = -number         # until ranks know in what order forward uses them
        self.reduced = p.requires_grad  # it has a hook
        self.delay = passes             # backward passes until its gradient is reduced
        self.call = None                # the Call that reduces it
        self.seen = False               # backward has made a gradient
        self.empty = None               # an empty gradient like its sparse ones


def _version(gradient):
    """A number that changes when code writes to a gradient.  None for a part of a larger tensor, whose number counts
    for all parts."""
    whole = gradient._base
    return gradient._version if whole is None or whole.numel() == gradient.numel() else None


def _hook(optimizer, number, p):
    """optimizer: weak, for p keeps this."""
    self = optimizer()
    if self is not None:
        self._tally_gradient_ready(self._tally_slots[number])


def _differs(p, gradient, version):
    """Whether p's gradient is another tensor than this, or was written to since that version."""
    return p.grad is not gradient or _version(gradient) != version


def _explain(sentence):
    """A sentence with the users' words for what ranks agree on in a step."""
    return _STEP.sub(lambda match: "%s of DistributedOptimizer%s" % (
        {"frozen": "the step", "layout": "the layout of gradients"}[match[2]], " " + match[1] if match[1] else ""), sentence)


_STEP = re.compile(r"'(?:(\d+):)?/(frozen|layout)'")
_errors.explainers.append(_explain)


class _Distributed(Shared):
    """The class that DistributedOptimizer() puts before the optimizer's own class."""

    _tally_sparse = None  # SparseChunks: chunks of gradients are sent, see sparse_optimizer.py

    def _tally_distribute(self, named_parameters, compression, backward_passes_per_step, op, predivide, groups,
                          sparse_as_dense, process_set, lazy):
        parameters = [(p, "group.%d.%d" % (g, i)) for g, group in enumerate(self.param_groups)
                      for i, p in enumerate(group["params"])]
        if named_parameters is not None:
            named = list(named_parameters)
            if any(not isinstance(entry, tuple) for entry in named):
                raise ValueError("named_parameters must be (name, parameter) pairs, such as model.named_parameters()")
            seen = set()
            doubles = {name for name, _ in named if name in seen or seen.add(name)}
            if doubles:
                raise ValueError("names in named_parameters must differ; more than once: %s"
                                 % ", ".join(sorted(doubles)))
            names = {id(p): name for name, p in named}
            nameless = [default for p, default in parameters if id(p) not in names]
            if nameless:
                raise ValueError("%d of the optimizer's parameters are not in named_parameters: %s"
                                 % (len(nameless), ", ".join(nameless)))
            own = {id(p) for p, _ in parameters}
            parameters = [(p, name) for name, p in named if id(p) in own]
        for p, name in parameters:
            if hasattr(p, "device_mesh"):
                raise TypeError("parameter %s is a DTensor; for models of fully_shard() there is tally.torch.hsdp()"
                                % name)

        self._tally_compression = compression
        self._tally_op = op
        self._tally_predivide = predivide
        self._tally_sparse_as_dense = sparse_as_dense
        self.backward_passes_per_step = backward_passes_per_step
        self._tally_slots = [_Slot(p, name, number, backward_passes_per_step)
                             for number, (p, name) in enumerate(dict(parameters).items())]
        self._tally_update = [slot for slot in self._tally_slots if slot.reduced]
        self._tally_places = None                        # of gradients that start alone
        self._tally_process_set = process_set
        self._tally_alone = not process_set.included() or process_set.size() == 1  # as Horovod has it for a rank outside
        self._tally_of_all = process_set.included() and process_set.group() is None
        self._tally_lazy = lazy
        self._tally_late = ()                            # slots in ranges that start once frozen ones are compared
        ranges = self._tally_of_all and not self._tally_alone and compression is Compression.none
        self._tally_layout = self._tally_make_layout(lazy if ranges else 0)
        self._tally_frozen = None                        # comparison of this step, and the generation it belongs to
        self._tally_order = Order(len(self._tally_slots), self._tally_observes())
        self._tally_handles = {}                         # slot -> its reduction; None: not submitted yet
        self._tally_sent = {}                            # slot -> its gradient after backward, its version
        self._tally_refused = {}                         # slot -> why the other ranks hear that it does not start in this step
        self._tally_hooks = []
        self._tally_synchronized = False
        self._tally_unscaled = False                     # a GradScaler has, behind the reduction
        self._tally_should_synchronize = True
        self._tally_agreed = 0                           # generation whose plan this optimizer is in
        self._tally_dropped = 0                          # steps that a loaded state has dropped since; see _DROPPED
        self._tally_prefix = ""                          # of names, that keeps several optimizers apart
        self._tally_units = [ALONE] * len(self._tally_slots)  # how each slot, by its number, starts: see lazy.py
        for group in self._tally_split(groups):
            together = Together(group)
            for slot in group:
                self._tally_units[slot.number] = together
        if not self._tally_alone:
            of_complex = [name for p, name in parameters if p.is_complex()]
            if of_complex:
                raise TypeError("parameter %s is of complex numbers; tally.torch.ddp_hook and the backend average them"
                                % of_complex[0])
            self._tally_register(self._tally_update)
            self._tally_agree()
            uneven.register(self)

    def __deepcopy__(self, memo):
        raise TypeError("a DistributedOptimizer cannot be copied; make another one, of the copied model's optimizer")

    def _tally_split(self, groups):
        """Lists of parameters that are submitted together."""
        if groups is None:
            return []
        if isinstance(groups, int):
            length, more = divmod(len(self._tally_update), groups)
            cuts = [i * length + min(i, more) for i in range(groups + 1)]
            return [self._tally_update[a:b] for a, b in zip(cuts, cuts[1:]) if b > a]
        members = [p for group in groups for p in group]
        slots = {id(slot.p): slot for slot in self._tally_slots}
        if len({id(p) for p in members}) != len(members) or any(id(p) not in slots for p in members):
            raise ValueError("groups must be lists of this optimizer's parameters, each in one list at most")
        return [[slots[id(p)] for p in group if slots[id(p)].reduced] for group in groups]

    def _tally_make_layout(self, theta):
        return Layout(theta)

    def _tally_register(self, slots):
        optimizer = weakref.ref(self)
        for slot in slots:
            p = slot.p
            for attempt in range(2):
                entry = _owners.get(id(p))
                if entry is None or entry[0]() is not p or entry[1]() is None or entry[1]() is self:
                    break
                if attempt:
                    raise ValueError("parameter %s already belongs to a DistributedOptimizer; its gradient would be "
                                     "reduced twice" % slot.name)
                gates.drain()  # one that nobody uses is kept by updates that are due
                gc.collect()   # or may still hang in a cycle
            _owners[id(p)] = (weakref.ref(p), optimizer)
        for slot in slots:
            handle = slot.p.register_post_accumulate_grad_hook(functools.partial(_hook, optimizer, slot.number))
            self._tally_hooks.append(handle)
            weakref.finalize(self, handle.remove).atexit = False

    def _tally_agree(self):
        """Agree with the ranks on the treatment of gradients, and on the parameters, in the order in which backward
        makes their gradients: output first."""
        number = _take_number(self._tally_process_set)
        self._tally_places = Places([slot.p] for slot in reversed(self._tally_update))
        self._tally_order.begin_anew(self._tally_observes(), len(self._tally_slots))
        self._tally_layout.begin_anew(self._tally_units)
        self._tally_prefix = "" if number == 0 else "%d:" % number
        self._tally_agreed, group = _job.generation(), self._tally_process_set.group()
        self._tally_dropped = 0
        for slot in self._tally_slots:
            slot.call = Call(self._tally_prefix + slot.name, self._tally_op, group, 0, 1.0 / self._tally_predivide,
                             self._tally_predivide, GRADIENT)
        compare("DistributedOptimizer %d" % number,
                ["op=" + Reduction(self._tally_op).name, "gradient_predivide_factor=%r" % self._tally_predivide,
                 "compression=" + getattr(self._tally_compression, "__name__", type(self._tally_compression).__name__),
                 "backward_passes_per_step=%d" % self.backward_passes_per_step,
                 "sparse_as_dense=%s" % bool(self._tally_sparse_as_dense), "lazy=%s" % self._tally_lazy,
                 "sparse=%s" % (self._tally_sparse,),
                 *("parameter %r of shape %s, %s" % (slot.name, tuple(slot.p.shape), slot.p.dtype) for slot in self._tally_update)],
                self._tally_process_set)
        plan = self._tally_plan(reversed(self._tally_update))
        if plan is not None:
            plan.wait()

    def _tally_plan(self, units):
        """Begin to agree on the list of what is submitted in a step: gradients (slots) and ranges, in order.  Returns the Plan, or
        None if there is nothing to agree on."""
        names, sizes = [], []
        for unit in units:
            for name, size in self._tally_parts(unit) if isinstance(unit, _Slot) else [(unit.call.name, unit.length)]:
                names.append(name)
                sizes.append(size)
        return _job.Plan(names, sizes, GRADIENT) if names and self._tally_of_all else None

    def _tally_parts(self, slot):
        """The operations of a gradient: their names and bytes."""
        p, name = slot.p, slot.call.name
        element = self._tally_compression.compress(p.detach().new_empty(0))[0].element_size()
        on = device.of(p)
        return [(part, (high - low) * element) for part, low, high in
                ([(name, 0, p.numel())] if on is None else device.chunks(name, p.numel(), element, on))]

    def add_param_group(self, param_group):
        """Like the optimizer's own; gradients of the new parameters are reduced too.  Collective."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        taken = {slot.name for slot in self._tally_slots}
        number = len(self.param_groups) - 1
        added = []
        for i, p in enumerate(group["params"]):
            name = "group.%d.%d" % (number, i)
            while name in taken:
                name += "+"
            added.append(_Slot(p, name, len(self._tally_slots) + i, self.backward_passes_per_step))
        self._tally_slots += added
        self._tally_units += [ALONE] * len(added)
        self._tally_update += [slot for slot in added if slot.reduced]
        if not self._tally_alone:
            self._tally_register([slot for slot in added if slot.reduced])
            self._tally_agree()

    def load_state_dict(self, state_dict):
        """Like the optimizer's own.  Behind a backward, which must have reached a parameter on every rank, all ranks call it: that
        step's reductions end first, and are forgotten."""
        self._tally_begin_over()
        super().load_state_dict(state_dict)

    def _tally_begin_over(self):
        """End the step of a backward, and forget it, because a state is about to be loaded.  Returns why the last step's updates
        have failed, or None."""
        self._tally_abandon()
        self._tally_synchronized = self._tally_unscaled = False
        self._tally_should_synchronize = True

    def set_backward_passes_per_step(self, passes):
        """Set the number of backward passes that add to a gradient before it is reduced."""
        self.backward_passes_per_step = passes
        self._tally_expect_all()

    def _tally_expect_all(self):
        """Each parameter's next gradient is the first of a step."""
        for slot in self._tally_update:
            slot.delay = self.backward_passes_per_step
        self._tally_layout.expect()

    def _tally_gradient_ready(self, slot):
        """Body of the hook: a parameter's gradient of one backward pass is complete."""
        if slot.delay <= 0 or id(slot.p) in gates.due:
            raise self._tally_unexpected(slot)
        self._tally_compare_frozen()
        self._tally_order.made(slot.number)
        self._tally_synchronized = False
        slot.seen = True
        slot.delay -= 1
        if slot.delay:
            self._tally_hold(slot)
            self._tally_note(slot)
        else:
            self._tally_units[slot.number].ready(self, slot)

    def _tally_unexpected(self, slot):
        return AssertionError("parameter %s got a gradient more than backward_passes_per_step (%d) times before step() or "
                              "synchronize(); raise it to accumulate gradients over more passes"
                              % (slot.name, self.backward_passes_per_step))

    def _tally_observes(self):
        """Whether the order in which forward uses parameters here becomes all ranks' priorities."""
        return self._tally_of_all and not self._tally_alone and _job.rank() == 0

    def _tally_compare_frozen(self):
        """Begin this step's comparison, if it has not begun."""
        if self._tally_frozen is None or self._tally_frozen[1] != _job.generation():
            self._tally_begin_comparison()

    def _tally_begin_comparison(self):
        """Say which parameters need no gradient here.  On rank 0 also say the order in which forward uses them, if it has
        changed.  A rank that has joined says nothing."""
        if self._tally_agreed != _job.generation():
            self._tally_agree()  # the job was left and joined again
        if self._tally_of_all:
            changed, places = self._tally_order.begin()
            if changed:
                for place, number in enumerate(self._tally_order.order):
                    self._tally_slots[number].priority = -place
            words = torch.tensor([0] * _job.size() + places, dtype=torch.int32, device="cpu")
            frozen = zlib.crc32(bytes(slot.p.requires_grad for slot in self._tally_update)) % _DROPPED
            words[_job.rank()] = 1 + frozen + self._tally_dropped % 64 * _DROPPED
            generation = _job.generation()

            def store(handle):
                self._tally_frozen = handle, generation

            submit_to(store, reduce, Call(self._tally_prefix + "/frozen", space=GRADIENT), words, words)

    def _tally_hold(self, slot):
        """A gradient is to start later in this step."""
        self._tally_handles.setdefault(slot, None)

    def _tally_note(self, slot):
        """A gradient is on its way from now on: code that changes it is found out."""
        gradient = slot.p.grad
        if gradient is not None:  # a hook before ours may have taken it
            self._tally_sent[slot] = gradient, _version(gradient)

    def _tally_forget(self, slot):
        """It is not any more."""
        self._tally_sent.pop(slot, None)

    def _tally_fill(self, slot):
        """Have a gradient that can be reduced."""
        p = slot.p
        if p.grad is None:
            # Not reached in this pass here, perhaps on another rank.
            p.grad = torch.zeros_like(p, memory_format=torch.preserve_format) if slot.empty is None else slot.empty.clone()
        if p.grad.is_sparse and self._tally_sparse_as_dense:
            p.grad = p.grad.to_dense()

    def _tally_began(self, slots, handle):
        """Gradients are being reduced."""
        self._tally_handles.update(dict.fromkeys(slots, handle))

    def _tally_submit(self, slot):
        """Submit a gradient, or zeros."""
        p, changed = slot.p, self._tally_moves(slot)
        self._tally_fill(slot)
        if self._tally_compression is Compression.none and self._tally_of_all:
            self._tally_places.place(p)
        if not changed:  # else what is there stays, and tells
            self._tally_note(slot)
        gradient = p.grad
        # What we write into it ourselves, through .data, its version does not count.
        self._tally_start(slot, gradient if gradient.is_sparse else gradient.data)

    def _tally_start(self, slot, gradient):
        call, group, priority = slot.call, self._tally_process_set.group(), slot.priority  # a removed set raises
        if (call.group, call.priority) != (group, priority):
            call = slot.call = call.but(group=group, priority=priority)
        if gradient.is_sparse:
            if slot.empty is None:
                # A rank that has had none of this parameter sends zeros in its place, and would wait for ours.
                _calls.refuse(PUSH_PULL, call, TypeError(
                    "its gradient is sparse, and another rank's first one is not, or missing: sparse_as_dense=True makes "
                    "them alike"))
                slot.empty = torch.sparse_coo_tensor(
                    torch.empty(gradient.sparse_dim(), 0, dtype=torch.int64, device="cpu"),
                    gradient.detach()._values().new_empty(0, *gradient.shape[gradient.sparse_dim():]), gradient.shape,
                    device=gradient.device, check_invariants=False)
            self._tally_hand_over([slot], SparseReduction, call.but(prescale=1.0, postscale=1.0), gradient)
            return
        sent, ctx = self._tally_compression.compress(gradient)
        if sent is not gradient:
            decompress = self._tally_compression.decompress

            def finish(result):
                with torch.no_grad():
                    gradient.copy_(decompress(result, ctx))

            call = call.but(finish=finish)
        self._tally_hand_over([slot], reduce, call, sent, sent)

    def _tally_hand_over(self, slots, submit, *arguments):
        """submit(*arguments), of these gradients.  It tells the other ranks if it raises, unless a signal handler does: then the
        step goes on with what is under way."""
        try:
            submit_to(functools.partial(self._tally_began, slots), submit, *arguments)
        except Exception as error:
            if not _where.is_handlers(error):
                self._tally_refused.update(dict.fromkeys(slots, error))
            raise

    def _tally_refuse(self, slots, kind, call, reason):
        """Tell the other ranks, once in a step, why this one does not submit the call of these gradients.  A refusal counts as
        this rank's call, so a second one would count as that of the next step."""
        if not any(slot in self._tally_refused for slot in slots):
            _calls.refuse(kind, call, reason)
            self._tally_refused.update(dict.fromkeys(slots, reason))

    def _tally_begin_anew(self):
        """Forget the reductions of a backward without a step: all ranks have joined, and that backward has ended."""
        if self._tally_frozen is not None:
            self._tally_handles[None] = self._tally_frozen[0]
        self._tally_drop()
        self._tally_dropped = 0
        self._tally_order.begin_anew(self._tally_observes())
        self._tally_synchronized = self._tally_unscaled = False

    def _tally_abandon(self):
        """End the step of a backward that no step() follows.  The other ranks may have reached parameters that this one has not:
        zeros stand for these gradients, as at the end of each step."""
        begun = any(slot.delay <= 0 for slot in self._tally_update) or any(self._tally_handles.values())
        if not begun or not _job.is_initialized() or self._tally_agreed != _job.generation():
            self._tally_drop(self._tally_frozen)
            return
        self._tally_submit_rest()
        self._tally_hear_frozen()
        self._tally_await_handles()  # what lies in ranges must not be under way when they are made
        try:
            if self._tally_layout.is_due(self._tally_order):
                self._tally_layout.make(self)
        except Exception as error:  # what is loaded counts nonetheless
            if _where.is_handlers(error):
                raise
        self._tally_drop(counts=True)

    def _tally_forget_step(self, dropped=0):
        """No reductions are left."""
        # At once, for signal handlers.
        dropped += self._tally_dropped
        self._tally_handles, self._tally_sent, self._tally_refused, self._tally_frozen, self._tally_dropped = {}, {}, {}, None, dropped

    def _tally_await_handles(self):
        """Failures count for nothing."""
        for handle in filter(None, self._tally_handles.values()):
            try:
                handle.wait()
            except Exception as error:
                if _where.is_handlers(error):
                    raise

    def _tally_drop(self, comparison=None, counts=False):
        """Wait for the reductions of a backward that no step follows, and forget them.  comparison: of frozen parameters, for the
        next step.  counts: it is a step that all ranks drop."""
        self._tally_await_handles()
        self._tally_expect_all()  # first, for a signal handler that breaks this off
        self._tally_forget_step(int(counts))
        self._tally_frozen = comparison

    def synchronize(self):
        """Wait until all gradients are reduced.  Gradients that this pass has not reached count as zeros.

        For code that must see reduced gradients before the step, such as clipping; call step() in skip_synchronize()
        then.
        Raises Error, after all have ended, if a reduction failed, or if a gradient was changed in flight (unless
        through .data).  If a signal handler breaks it off while it waits, the next call goes on.
        """
        failure = self._tally_submit_missing()
        frozen_failure = self._tally_hear_frozen()
        due = self._tally_layout.is_due(self._tally_order)
        for slot, handle in list(self._tally_handles.items()):
            if handle is not None:
                if self._tally_is_changed(slot):
                    failure = failure or _errors.Error(
                        "the gradient of %s was changed between backward and the end of its reduction; call "
                        "optimizer.synchronize() before what changes gradients, such as clipping, and step() in "
                        "optimizer.skip_synchronize()" % slot.name, errno.EINVAL)
                try:
                    result = handle.wait()
                    if isinstance(handle, SparseReduction):
                        self._tally_forget(slot)
                        slot.p.grad = result
                except Exception as error:  # also of a user's compression
                    if _where.is_handlers(error):
                        raise
                    failure = failure or error
        failure = failure or frozen_failure
        self._tally_reduced(failure)
        try:
            if due:
                self._tally_layout.make(self)
        except Exception as error:
            if _where.is_handlers(error):
                raise
            failure = failure or error
        self._tally_expect_all()
        self._tally_forget_step()
        self._tally_synchronized, self._tally_unscaled = True, False
        if failure is not None:
            raise failure

    def _tally_reduced(self, failure):
        """All reductions of a step have ended.  failure: the first, or None."""

    def _tally_submit_missing(self):
        """Submit the gradients that this pass has not reached, as zeros.  Returns the first failure, or None."""
        if self._tally_alone:
            return None
        thawed = [slot.name for slot in self._tally_slots if not slot.reduced and slot.p.requires_grad]
        if thawed:
            raise ValueError("%s needs a gradient now and did not when the DistributedOptimizer was made, so nobody "
                             "reduces it: make the optimizer once more" % ", ".join(thawed[:5]))
        return self._tally_submit_rest()

    def _tally_submit_rest(self):
        """As _tally_submit_missing(), with gradients that no hook reduces."""
        self._tally_compare_frozen()
        self._tally_late = self._tally_layout.frozen()  # they wait for the comparison
        return self._tally_start_all([slot for slot in self._tally_update if slot not in self._tally_late])

    def _tally_start_all(self, slots):
        """Start what has not started, unless the other ranks have heard that it does not.  Returns the first failure, or None."""
        failure = None
        for slot in slots:
            if slot in self._tally_refused:
                failure = failure or self._tally_refused[slot]
            elif self._tally_handles.get(slot) is None and slot.p.requires_grad:
                try:
                    self._tally_units[slot.number].start(self, slot)
                except (TypeError, ValueError, NotImplementedError, _errors.Error) as error:
                    if _where.is_handlers(error):
                        raise
                    failure = failure or error
        return failure

    def _tally_hear_frozen(self):
        """Learn whether ranks have frozen other parameters.  Returns the Error, or None."""
        return None if self._tally_frozen is None else self._tally_compared(self._tally_frozen[0])

    def _tally_compared(self, handle):
        """As _tally_hear_frozen(), from this comparison's handle.

        The other ranks may wait for a parameter that is frozen here.  So if ranks differ, all are told, for each
        parameter by its name.  All ranks hear if they have dropped unlike numbers of steps: they are a step apart.
        """
        try:
            words = handle.wait().tolist()
        except _errors.Error as error:
            if _where.is_handlers(error):
                raise
            return error
        finally:
            self._tally_order.end()
        size = _job.size()
        self._tally_order.heard(words[size:])
        known = {rank: word - 1 for rank, word in enumerate(words[:size]) if word}
        dropped, failure = {rank: "%d" % (word // _DROPPED) for rank, word in known.items()}, None
        if len(set(dropped.values())) > 1:
            failure = _errors.disagreement("steps dropped because a state was loaded between backward, which must reach a "
                                           "parameter on each rank, and step()", dropped)
        if len({word % _DROPPED for word in known.values()}) < 2:
            late = self._tally_start_all(self._tally_late)
            return failure or late
        for slot in self._tally_update:
            if self._tally_handles.get(slot) is None and not slot.p.requires_grad:
                error = _errors.disagreement("%r" % slot.name, {_job.rank(): "frozen (requires_grad is False)"})
                self._tally_units[slot.number].refuse(self, slot, error)
                failure = failure or error
        return failure

    def _tally_is_changed(self, slot):
        """Whether other code has written to the gradient since backward, or put another one in its place."""
        return slot in self._tally_sent and _differs(slot.p, *self._tally_sent[slot])

    def _tally_moves(self, slot):
        """The gradient may become another tensor.  Returns whether other code has changed it by now; only that stays noted, so
        that a second call, behind a signal handler, returns the same."""
        changed = self._tally_is_changed(slot)
        if not changed:
            self._tally_forget(slot)
        return changed

    def _tally_any_changed(self):
        return any(_differs(slot.p, *sent) for slot, sent in self._tally_sent.items())

    def _tally_before_unscaling(self):
        """Have reduced gradients for a GradScaler, whose step() then calls ours without another reduction."""
        if self._tally_should_synchronize:
            if not self._tally_synchronized:
                self.synchronize()
            self._tally_unscaled = True

    def _tally_after_unscaling(self):
        """Forget that state, if the step has been skipped."""
        self._tally_unscaled = False

    @contextmanager
    def skip_synchronize(self):
        """Within it, step() does not synchronize:

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._tally_should_synchronize = False
        try:
            yield
        finally:
            self._tally_should_synchronize = True

    def step(self, closure=None):
        """Wait until all gradients are reduced, then step as the optimizer does.

        closure: as the optimizer's.  The gradients that it computes are reduced each time it is called, so all ranks
            must call it equally often.  Those of LBFGS's line search need not.
        """
        # A scheduler made before looks there whether there was a step: PyTorch's name, and that of its older ones.
        self._tally_original._opt_called, self._tally_original._step_count = True, 1
        if closure is not None:
            def reduced():
                loss = closure()
                self.synchronize()
                self._tally_clip()
                return loss

            try:
                return super().step(reduced)
            finally:
                self._tally_synchronized = self._tally_unscaled = False
        if self._tally_should_synchronize and not self._tally_unscaled:
            if self._tally_synchronized:
                warnings.warn("optimizer.step() called without optimizer.skip_synchronize() after "
                              "optimizer.synchronize() reduces the gradients once more; call it in "
                              "`with optimizer.skip_synchronize():`", stacklevel=2)
            self.synchronize()
        elif self._tally_handles:
            raise AssertionError("optimizer.step() without a reduction while gradients are on their way, such as that of "
                                 "%s: there was a backward after optimizer.synchronize() or unscale_()"
                                 % next(iter(self._tally_handles)).name)
        self._tally_synchronized = self._tally_unscaled = False
        self._tally_clip()
        return super().step(closure)

    def _tally_clip(self):
        """Change reduced gradients, which a GradScaler has unscaled by now, before the optimizer's own step."""

    # torch wraps the step of each new optimizer class to run its hooks; that of the class below already is.
    step.hooked = True

    def zero_grad(self, *args, **kwargs):
        """Like the optimizer's own; not while reductions are in flight."""
        if self._tally_handles:
            raise AssertionError("optimizer.zero_grad() between loss.backward() and optimizer.step() or "
                                 "optimizer.synchronize() would race with the gradients on their way")
        self._tally_synchronized = self._tally_unscaled = False
        return super().zero_grad(*args, **kwargs)

    def _tally_rescale(self, factor):
        """A GradScaler's scale has changed by this factor."""


_unscaled = weakref.WeakKeyDictionary()  # GradScaler -> optimizers since its last update()
_scaled = weakref.WeakKeyDictionary()    # GradScaler -> optimizers that keep scaled gradients from step to step


def _reducing(unscale):
    """A GradScaler's unscale_(), which its step() calls, that finds reduced gradients."""
    def unscale_(self, optimizer):
        if isinstance(optimizer, _Distributed):  # of a disabled one, too: clipping may follow
            optimizer._tally_before_unscaling()
            _unscaled.setdefault(self, weakref.WeakSet()).add(optimizer)
            if optimizer._tally_sparse is not None:
                _scaled.setdefault(self, weakref.WeakSet()).add(optimizer)
        return unscale(self, optimizer)

    return unscale_


def _ending(update):
    """Its update(), which ends that state, because the scaler may have skipped the optimizer's step."""
    def update_(self, *args, **kwargs):
        for optimizer in _unscaled.pop(self, ()):
            optimizer._tally_after_unscaling()
        scaled = _scaled.get(self)
        before = scaled and self.get_scale()
        update(self, *args, **kwargs)
        for optimizer in scaled or ():
            optimizer._tally_rescale(self.get_scale() / before)

    return update_


patches.grad_scaler(_reducing, _ending)


def DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1,
                         op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None,
                         sparse_as_dense=False, process_set=global_process_set, *, cross_barrier=False, clip_value=None,
                         lazy=None, sparse=None):
    """An optimizer that reduces gradients over all ranks before each step; `optimizer` must not be used any more.

    optimizer: any torch optimizer, over the same parameters on all ranks.  The result is an instance of its class too,
        and has its state.
    named_parameters: (name, parameter) pairs, such as model.named_parameters(); must name all parameters of the
        optimizer.  Their order, input first, is their priority at first.  Later it is the order in which forward uses
        them on rank 0. Default: numbered by group and place.
    compression: Compression.none, fp16 or bf16.
    backward_passes_per_step: passes that add to a gradient before it is reduced.
    op: Average, Sum, Min, Max or Product.
    gradient_predivide_factor: for Average, gradients are divided by it before the sum, and the sum multiplied after.
    num_groups, groups: gradients that start together: a number of groups, or lists of parameters.
    sparse_as_dense: turn sparse gradients into dense ones first.  Otherwise the rows that any rank has are summed, and
        a parameter's first gradient must be sparse on every rank or on none.
    process_set: the ranks whose gradients are reduced together; a rank outside of it keeps its gradients as they are.
    cross_barrier: step() returns at once.  Each parameter is updated when its gradient has been reduced or its module
        is called, with the same bits.  docs/cross_barrier.md lists the steps that wait nonetheless.  synchronize()
        after step() makes all updates, for code that holds references to parameters of its own.
    clip_value: for cross_barrier, clip each reduced gradient to between -clip_value and it, as
        torch.nn.utils.clip_grad_value_() does.
    lazy: bytes; smaller gradients share ranges of memory, and a range of as many bytes or more is one operation, with the same
        bits.  0: each gradient is one.  None: rank 0 decides by the speed of network cards or memory.  docs/horovod.md says which
        gradients stay alone.
    sparse: a SparseChunks: only the chunks of gradients with the largest norms are sent, and updated.  For torch.optim.SGD
        without dampening, and float32 parameters in host memory.  docs/sparse.md says what changes.

    Collective: every rank must create it over the same names, in the same order, with the same options (except groups).
    If they differ, Error is raised on all its ranks.  A deep copy of it raises TypeError.
    With one rank, gradients stay as they are.
    """
    reduction = reduction_of(op, None)
    if gradient_predivide_factor != 1.0 and reduction != Average:
        raise ValueError("gradient_predivide_factor goes with op=Average only")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be a positive number, not %r" % (backward_passes_per_step,))
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if hasattr(optimizer, "_tally_successor"):
        raise ValueError("the optimizer is an AsyncOptimizer, which shares its changes already: pass one of torch.optim")
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if groups is not None and not isinstance(groups, (list, tuple)) and (not isinstance(groups, int) or groups < 1):
        raise ValueError("groups must be a positive number or a list of lists of parameters, not %r" % (groups,))
    if clip_value is not None and (not cross_barrier or not clip_value > 0):
        raise ValueError("clip_value must be a positive number, and goes with cross_barrier=True; otherwise use "
                         "torch.nn.utils.clip_grad_value_() behind optimizer.synchronize()")
    if lazy is not None and (not isinstance(lazy, int) or lazy is True or lazy < 0):
        raise ValueError("lazy must be a number of bytes, 0 for an operation each gradient, or None, not %r" % (lazy,))
    lazy = None if lazy is None else int(lazy)  # ranks compare it, and False means 0
    own = kind_of(optimizer)
    if sparse is not None:
        from . import sparse_optimizer
        sparse_optimizer.check(sparse, own, {
            "compression": compression is not Compression.none, "op": reduction not in (Average, Sum),
            "groups": groups is not None, "process_set": process_set is not global_process_set,
            "cross_barrier": cross_barrier, "lazy": lazy is not None})
        bases = sparse_optimizer.SparseOptimizer, sparse_optimizer.SparseStep
    elif cross_barrier:
        from .cross_barrier import CrossBarrier
        bases = CrossBarrier,
    else:
        bases = _Distributed,
    kind = type(own.__name__, (*bases, own), {})
    wrapped = kind.__new__(kind)
    # Parameters, groups and state are shared with `optimizer`, so that a scheduler made before goes on working, and stay
    # so (__setstate__); its wrapping of the instance's step is not ours.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items()
                             if key not in ("step", "_tally_barrier", "_tally_kind")})
    wrapped._tally_original = optimizer
    wrapped._tally_sparse = sparse
    wrapped._step_supports_amp_scaling = False  # a fused one unscales by itself, and unscale_() is to
    wrapped._tally_distribute(named_parameters, compression, backward_passes_per_step, reduction,
                              gradient_predivide_factor, groups, sparse_as_dense, process_set, lazy)
    if cross_barrier:
        wrapped._tally_cross(own, clip_value)
    return wrapped

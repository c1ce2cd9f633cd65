"""Lazy all-reduce: small gradients share ranges of memory, and a range is one operation.

Structure: lay_out() cuts the list of gradients, in the order in which backward makes them, into units: one gradient, or a
range of several.  Cuts follow from sizes, types and θ alone, never from what arrives when, so all ranks have the same ones.  A
Range keeps its gradients side by side in Places (pool.py) and submits the whole of it.

How: a range ends once it has θ bytes, and where a block of the list ends (BLOCKS), because a block's gradients have one
urgency.  A gradient of θ bytes or more stays where it is, and so does what cannot lie in a range (`kind` None).  The last one of
a range copies all to their places, and starts it; step() starts those that backward has not filled, with zeros.

When: gradients go one by one until rank 0's first order of use counts (order.py).  At the end of the step before that one all
ranks sum one word (Layout.make): what θ is, by rank 0; and which gradients each of them has seen that fit.  Then they agree on
the plan of the new list.  A rank that is in join() then has no part in the word, so the ranks lay out after that.  From then on
the layout stays: later orders change priorities alone.  A new communicator lays out anew.

A gradient that is frozen for a while has zeros in its range.  A rank with such a range sends it once the ranks have compared
what is frozen, so that a difference is heard before anything is summed.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import re
import weakref

import torch

from ... import _errors, _job, _where
from ..._calls import GRADIENT, Call
from ..._lib import ALLGATHER, PUSH_PULL
from ..._operations import submit_to
from ..calls import reduce
from ..pool import Places, bytes_of, fits, offsets

BLOCKS = 16  # of a list: those of src/comm/op/tensor.c

# The default θ: as many bytes as cross the slowest card while a rank's processor handles this many operations.
OPERATIONS, OPERATION_S = 20, 48e-6
# Assumed all-reduce rate within one machine, bytes/s, where no card's rate is known.
MEMORY_BYTES_PER_S = 1e9
# It is at most this part of the list, so that a block has several ranges.
LEAST_RANGES = 64


def lay_out(rooms, kinds, theta):
    """Cut a list of gradients into units.

    rooms: their bytes, in the order of the list.  kinds: the type of each one that may share a range, else None.
    theta: bytes at which a range ends; gradients of as many stay alone.
    Returns lists of places in the list, in the order in which their last gradients come.
    """
    total, before, block, waiting, units = sum(rooms), 0, 0, {}, []
    for i, (room, kind) in enumerate(zip(rooms, kinds)):
        if total and before * BLOCKS // total != block:
            block = before * BLOCKS // total
            units += waiting.values()
            waiting = {}
        before += room
        if kind is None or room >= theta:
            units.append([i])
            continue
        members = waiting.setdefault(kind, [])
        members.append(i)
        if sum(rooms[member] for member in members) >= theta:
            units.append(waiting.pop(kind))
    return sorted([*units, *waiting.values()], key=lambda unit: unit[-1])


def theta_of(listed, bytes_per_s):
    """θ for a list of so many bytes, which crosses the narrowest place at this rate; None: unknown."""
    most = listed // LEAST_RANGES
    return most if bytes_per_s is None else min(most, int(OPERATIONS * OPERATION_S * bytes_per_s))


def default_theta(listed):
    """θ for a list of so many bytes, from what this rank knows of the machine and the network."""
    if _job.machine_count() == 1 and _job.service_count() == 1:
        return theta_of(listed, MEMORY_BYTES_PER_S)
    try:
        services = _job.report()["services"]
    except _errors.Error as error:  # the other ranks wait for this one's word
        if _where.is_handlers(error):
            raise
        services = []
    known = [service.get("bandwidth_bits_per_s") for service in services]
    slowest = min((rate for rate in known if rate), default=None)
    return theta_of(listed, None if slowest is None else slowest / 8)


class Alone:
    """How a gradient starts: as an operation of its own, as soon as backward has made it."""

    def ready(self, optimizer, slot):
        """Backward has made a gradient."""
        optimizer._tally_forget(slot)  # this pass has added to it
        optimizer._tally_submit(slot)

    def start(self, optimizer, slot):
        """Submit a gradient that has not started by the end of backward."""
        optimizer._tally_submit(slot)

    def refuse(self, optimizer, slot, reason):
        """Tell the other ranks, once a step, why this one does not submit a gradient."""
        kind, end = (PUSH_PULL, "") if slot.empty is None else (ALLGATHER, ".rows")
        optimizer._tally_refuse([slot], kind, slot.call.but(name=slot.call.name + end), reason)


ALONE = Alone()


class Together(Alone):
    """Gradients that start together, each as an operation of its own."""

    def __init__(self, slots):
        self._slots = slots

    def ready(self, optimizer, slot):
        optimizer._tally_hold(slot)
        optimizer._tally_note(slot)
        if not any(one.delay for one in self._slots):
            for one in reversed(self._slots):  # as backward comes by
                optimizer._tally_submit(one)


class Range:
    """Gradients side by side that start together, as one operation."""

    def __init__(self, slots, places, call):
        self.slots, self._places, self.call = slots, places, call
        self.length = offsets(bytes_of(slot.p) for slot in slots)[1]
        _ranges[call.name] = self
        self.expect()

    def expect(self):
        """A step begins."""
        self._left = len(self.slots)  # gradients that backward has not made

    def is_frozen(self):
        """Whether a parameter needs no gradient here now."""
        return not all(slot.p.requires_grad for slot in self.slots)

    def held(self):
        """Its parameters, for errors."""
        return "%s \u2026 %s" % (self.slots[0].name, self.slots[-1].name)

    def ready(self, optimizer, slot):
        """Backward has made one of the gradients: start with the last one."""
        optimizer._tally_hold(slot)
        optimizer._tally_forget(slot)
        self._left -= 1
        if not self._left:
            self.start(optimizer, slot)

    def start(self, optimizer, slot):
        """Submit the range.  Zeros stand for gradients that are not there."""
        live = [one for one in self.slots if one.p.requires_grad]
        changed = {one for one in self.slots if one in optimizer._tally_sent and optimizer._tally_moves(one)}
        places, late = self._places, []
        odd = [one for one in self.slots if one.p.grad is None or not one.p.requires_grad or not places.place(one.p, late)]
        places.copy(late)
        aside = [one for one in odd if not self._fill(optimizer, one)]
        for one in aside:
            places.free(one.p)
        pairs = [(one.p.grad.data, places.at(one.p)) for one in aside]
        for gradient, place in pairs:
            place.copy_(gradient)
        priority, whole = max(one.priority for one in live), places.whole(slot.p)
        if self.call.priority != priority:
            self.call = self.call.but(priority=priority)
        call = self.call.but(finish=_put_back(pairs)) if pairs else self.call
        optimizer._tally_hand_over(live, reduce, call, whole, whole)
        for one in live:
            if one not in changed:
                optimizer._tally_note(one)

    def _fill(self, optimizer, slot):
        """Have a gradient in its place, or zeros.  False: it must stay elsewhere, and be copied."""
        p, place = slot.p, self._places.at(slot.p)
        if place is not None and not p.requires_grad:
            if p.grad is place:
                p.grad = place.clone()  # of an earlier step
            del place
            self._places.free(p).zero_()
            return True
        optimizer._tally_fill(slot)
        now, before = _form(p.grad), "other memory" if place is None else _form(place)
        if now != before:
            error = TypeError("the gradient of %s is %s now, and was %s when the ranks laid out their gradients: make the "
                              "DistributedOptimizer once more, or give it lazy=0" % (slot.name, now, before))
            self.refuse(optimizer, slot, error)
            raise error
        return self._places.place(p)

    def refuse(self, optimizer, slot, reason):
        """Tell the other ranks, once a step, why this one does not submit the range."""
        optimizer._tally_refuse(self.slots, PUSH_PULL, self.call, reason)


def _put_back(pairs):
    """Copies results to the gradients that stay elsewhere."""
    def finish(result):
        for gradient, place in pairs:
            gradient.copy_(place)
        return result

    return finish


def _form(tensor):
    dtype, layout = (str(term).removeprefix("torch.") for term in (tensor.dtype, tensor.layout))
    return "%s %s%s" % (dtype, list(tensor.shape), "" if tensor.layout is torch.strided else ", " + layout)


class Layout:
    """The ranges of one optimizer, once its ranks have laid them out.  Owner: the optimizer's thread."""

    def __init__(self, theta):
        """theta: bytes at which a range ends; 0: there are no ranges; None: as rank 0 decides."""
        self.theta = theta
        self.ranges = []
        self._open = theta != 0  # the ranks have not laid out gradients
        self._word = self._plan = None  # what they agree on meanwhile: the sum of their words, the plan of the new list

    def begin_anew(self, units):
        """Forget the ranges: there is another communicator, or there are other parameters."""
        for one in self.ranges:
            for slot in one.slots:
                units[slot.number] = ALONE
        self.ranges, self._open = [], self.theta != 0
        self._word = self._plan = None

    def expect(self):
        """A step begins."""
        for one in self.ranges:
            one.expect()

    def frozen(self):
        """The gradients in ranges of which a parameter needs no gradient here now."""
        return {slot for one in self.ranges if one.is_frozen() for slot in one.slots}

    def is_due(self, order):
        """Whether the ranks lay out gradients at the end of this step."""
        return self._open and order.next() is not None

    def make(self, optimizer):
        """Lay out gradients for the order that counts from the next step on.  All ranks but those in join() call it.  If a signal
        handler breaks it off, the next call goes on."""
        slots = [optimizer._tally_slots[number] for number in reversed(optimizer._tally_order.next())]
        slots = [slot for slot in slots if slot.reduced]
        try:
            if self._word is None:
                self._submit(optimizer, slots)
            ranks, theta, *rest = self._word.wait().tolist()
            if ranks == _job.size():  # else a rank is in join()
                kinds = [slot.p.dtype if seen and not other else None for slot, seen, other in zip(slots, rest[::2], rest[1::2])]
                ranges = self._lay(optimizer, slots, theta, kinds)
                for one in ranges:
                    for slot in one.slots:
                        optimizer._tally_units[slot.number] = one
                self.ranges, self._open = ranges, False
                if set(slots) == {slot for one in ranges for slot in one.slots}:
                    optimizer._tally_places = Places(())  # none starts alone any more: the memory is free
        except Exception as error:
            if not _where.is_handlers(error):
                self._open = self._plan is None  # else the lists differ, and would the next time
                self._word = self._plan = None
            raise
        self._word = self._plan = None

    def _lay(self, optimizer, slots, theta, kinds):
        """The ranges of a list of gradients, on whose plan the ranks have agreed.  kinds: as for lay_out()."""
        rooms = [offsets([bytes_of(slot.p)])[1] for slot in slots]
        units = [[slots[i] for i in unit] for unit in lay_out(rooms, kinds, theta)]
        several = [unit for unit in units if len(unit) > 1]
        if not several:
            return []
        places = Places(([slot.p for slot in unit] for unit in several), ordinary=True)
        ranges = {id(unit): Range(unit, places, unit[0].call.but(name="%s/range.%d" % (optimizer._tally_prefix, number)))
                  for number, unit in enumerate(several)}
        if self._plan is None:
            self._plan = optimizer._tally_plan([ranges.get(id(unit), unit[0]) for unit in units])
        self._plan.wait()
        return list(ranges.values())

    def _submit(self, optimizer, slots):
        """Submit this rank's word: 1, so that the sum is the number of ranks; from rank 0, θ; and for each gradient, whether
        backward has made one that fits in a range, and whether one does not fit."""
        words = torch.zeros(2 + 2 * len(slots), dtype=torch.int64, device="cpu")
        words[0] = 1
        if _job.rank() == 0:
            words[1] = default_theta(sum(bytes_of(slot.p) for slot in slots)) if self.theta is None else self.theta
        fitting = [optimizer._tally_units[slot.number] is ALONE and _fits(slot) for slot in slots]
        words[2::2] = torch.tensor([fit and slot.seen for fit, slot in zip(fitting, slots)])
        words[3::2] = torch.tensor([not fit for fit in fitting])
        call = Call(optimizer._tally_prefix + "/layout", space=GRADIENT)
        submit_to(functools.partial(setattr, self, "_word"), reduce, call, words, words)


def _fits(slot):
    """Whether a parameter's gradient may lie in a range, as far as this rank has seen."""
    p, gradient = slot.p, slot.p.grad
    return (slot.empty is None and p.requires_grad and fits(p) and gradient is not None and fits(gradient)
            and (gradient.dtype, gradient.shape) == (p.dtype, p.shape) and not gradient.requires_grad)


_ranges = weakref.WeakValueDictionary()  # name of its operation -> Range


def _explain(sentence):
    """A sentence with the parameters of the ranges that it names."""
    def described(match):
        found = _ranges.get(match[1])
        return match[0] if found is None else "gradients %s" % found.held()

    return _RANGE.sub(described, sentence) if "/range." in sentence else sentence


_RANGE = re.compile(r"'((?:\d+:)?/range\.\d+)'")
_errors.explainers.append(_explain)

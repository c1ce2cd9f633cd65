"""DistributedOptimizer(cross_barrier=True): step() puts the updates off, see crossing/deferred.py.

Flow: step() submits what backward has not reached.  If all is reduced it updates at once, as with the barrier.  Else it
hands all reductions to the Barrier and returns -> a gate in the next forward, or whatever reads parameters otherwise, updates
what it needs -> the next step() finishes what nobody has needed, before those names are submitted again.

SPDX-License-Identifier: Apache-2.0
"""

import errno
import functools
import weakref

import torch

from ... import _errors, _job
from ..crossing import gates
from ..crossing.deferred import Barrier, Deferring, Reduction, let_read
from .optimizer import _Distributed


class _Frozen:
    """The comparison of frozen parameters, which the ranks' updates wait for."""

    def __init__(self, barrier, handle):
        self._barrier, self.handle, self._failure = barrier, handle, None

    def done(self):
        return self.handle is None or self.handle.done()

    def wait(self):
        if self.handle is not None:
            self._failure = self._barrier.optimizer()._compared(self.handle)
            self.handle = None
        if self._failure is not None:
            raise self._failure


def _name_of(slots, p):
    return next(slot.name for slot in slots if slot.p is p)


class CrossBarrier(Deferring, _Distributed):
    """Mixin that DistributedOptimizer(cross_barrier=True) puts before the optimizer's own class."""

    _observed = {}  # id(parameter) -> (Order, the parameter's number in it), on the rank whose order counts

    def cross(self, kind, clip_value):
        """Put a Barrier in: the last part of making one.  kind: the optimizer's own class."""
        self._kind, self._clip_value = kind, clip_value
        self._deferred = False  # the last step() has made its updates, or put them off, without synchronize()
        self._barrier = Barrier(self, kind, functools.partial(_name_of, self._slots), clip_value, gated=not self._alone)
        if not self._alone:
            let_read(self._original, kind, self._barrier)
        weakref.finalize(self, gates.ignore, self._order).atexit = False

    def _agree(self):
        super()._agree()
        gates.ignore(self._order)
        self._observed = {id(slot.p): (self._order, slot.number) for slot in self._slots} if self._observes() else {}
        gates.observe(self._observed)

    def _unexpected(self, slot):
        if id(slot.p) not in gates.due:
            return super()._unexpected(slot)
        return _errors.Error("%s got a gradient while its update was due: it was read through a reference from before step(), or "
                           "its graph is older; call synchronize() after step()" % slot.name, errno.EINVAL)

    def _begin_comparison(self):
        self._barrier.hear()  # the last step's, where no gate has since
        super()._begin_comparison()

    def _compared(self, handle):
        try:
            return super()._compared(handle)
        finally:
            if self._order.looks:
                gates.observe(self._observed)  # the next forward

    def _why_not(self):
        """Why this step keeps the barrier, or None; "" where nothing is to be said of it."""
        if self._alone:
            return ""
        if self._unscaled:
            return "a GradScaler looks at all gradients before step()"
        if self._synchronized or not self._should_synchronize:
            return "all gradients were waited for before step(), such as for clipping by norm"
        if self._layout.frozen():
            return "parameters are frozen that share a range with others (lazy=)"
        self._compare_frozen()  # which hears the last step's
        if self._layout.is_due(self._order):
            return ""
        return self._barrier.reason(self)

    def step(self, closure=None):
        """Put the optimizer's step off until gradients are reduced and parameters are read, and return at once; step now if
        they are reduced.

        closure: called once, here; gradients that it computes are those of this step."""
        self._original._opt_called, self._original._step_count = True, 1
        loss = None
        fixed = self._barrier.fixed_reason()
        if closure is not None and fixed is None:
            self._synchronized = self._unscaled = False
            loss, closure = self._run_closure(closure), None
        reason = self._why_not()
        if reason is None and not self._has_landed() and not self._any_changed():
            self._defer()
            return loss
        if reason:
            self._barrier.warn(reason)
        if self._deferred and not self._should_synchronize and not self._synchronized:
            raise self._unreduced()
        self._deferred = reason is None
        self._barrier.finish()
        result = super().step(closure)
        return result if closure is not None else loss

    step.hooked = True

    def _unreduced(self):
        """The Error of a step() in skip_synchronize() behind a synchronize() that only made updates.  The other ranks may
        wait for gradients of this one, and hear it too."""
        error = _errors.Error(
            "step() in skip_synchronize() on rank %d, which had no gradient since the last step(): synchronize() only made the "
            "updates of that step. Where a rank may have no gradient, call synchronize() inside skip_synchronize(), too: there "
            "it reduces gradients, and zeros for those that are missing" % _job.rank(), errno.EINVAL)
        self._barrier.finish()
        self._compare_frozen()
        for slot in self._update:
            if slot.p.requires_grad:
                self._units[slot.number].refuse(slot, error)
        self._hear_frozen()
        self._expect_all()
        self._forget_step()
        return error

    def _has_landed(self):
        """Whether all gradients are reduced, so that there is nothing to put off."""
        return (len(self._handles) == len(self._update) > 0 and (self._frozen is None or self._frozen[0].done())
                and all(handle is not None and handle.done() for handle in reversed(self._handles.values())))

    def before_unscaling(self):
        if self._should_synchronize and not self._synchronized:
            self._barrier.finish()
            self._deferred = False  # gradients of this step are asked for, even if there is none here
        super().before_unscaling()

    def _defer(self):
        self._barrier.finish()
        failure = self._submit_missing()
        if failure is not None:
            super().synchronize()  # waits for the others, and raises
            raise failure
        of, there = {}, []
        for number in self._order.order:
            slot = self._slots[number]
            p, handle = slot.p, self._handles.get(slot)
            if handle is not None:
                of.setdefault(handle, []).append((p, *(self._sent.get(slot) or (p.grad, None))))
            elif p.grad is not None:  # of what is frozen the optimizer takes the gradients that are there
                there.append((p, p.grad))
        reductions = [Reduction(handle, [(p, gradient) for p, gradient, _ in held],
                                [(gradient, version) for _, gradient, version in held]) for handle, held in of.items()]
        if there:
            reductions.insert(0, Reduction(None, there))
        frozen, self._frozen = self._frozen, None
        first = None if frozen is None else _Frozen(self._barrier, frozen[0])
        self._handles.clear()
        self._sent.clear()
        self._expect_all()
        self._synchronized, self._deferred = False, True
        self._barrier.defer(self, reductions, first)

    def synchronize(self):
        """Behind step(): make all updates that it has put off.  Behind backward: as DistributedOptimizer's, and step(),
        in skip_synchronize(), keeps the barrier.  In skip_synchronize(): always as behind backward."""
        self._barrier.finish()
        if self._deferred and not self._handles and self._should_synchronize:
            return
        super().synchronize()

    def _clip(self):
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], self._clip_value)

    def begin_anew(self):
        self._barrier.finish()
        super().begin_anew()
        gates.observe(self._observed)

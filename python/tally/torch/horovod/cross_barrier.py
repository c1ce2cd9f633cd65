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

from ... import _errors, _job, _where
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
            optimizer = self._barrier.optimizer()
            self._failure = optimizer._tally_compared(self.handle)
            self.handle, optimizer._tally_refused = None, {}  # that step's; the next one has not begun
        if self._failure is not None:
            raise self._failure


def _name_of(slots, p):
    return next(slot.name for slot in slots if slot.p is p)


class CrossBarrier(Deferring, _Distributed):
    """Mixin that DistributedOptimizer(cross_barrier=True) puts before the optimizer's own class."""

    _tally_observed = {}  # id(parameter) -> (Order, the parameter's number in it), on the rank whose order counts

    def _tally_cross(self, kind, clip_value):
        """Put a Barrier in: the last part of making one.  kind: the optimizer's own class."""
        self._tally_kind, self._tally_clip_value = kind, clip_value
        self._tally_deferred = False  # the last step() has made its updates, or put them off, without synchronize()
        self._tally_barrier = Barrier(self, kind, functools.partial(_name_of, self._tally_slots), clip_value,
                                      gated=not self._tally_alone)
        if not self._tally_alone:
            let_read(self._tally_original, kind, self._tally_barrier)
        weakref.finalize(self, gates.ignore, self._tally_order).atexit = False

    def _tally_agree(self):
        super()._tally_agree()
        gates.ignore(self._tally_order)
        observed = self._tally_slots if self._tally_observes() else ()
        self._tally_observed = {id(slot.p): (self._tally_order, slot.number) for slot in observed}
        gates.observe(self._tally_observed)

    def _tally_unexpected(self, slot):
        if id(slot.p) not in gates.due:
            return super()._tally_unexpected(slot)
        return _errors.Error("%s got a gradient while its update was due: it was read through a reference from before step(), or "
                             "its graph is older; call synchronize() after step()" % slot.name, errno.EINVAL)

    def _tally_begin_comparison(self):
        self._tally_barrier.hear()  # the last step's, where no gate has since
        super()._tally_begin_comparison()

    def _tally_compared(self, handle):
        try:
            return super()._tally_compared(handle)
        finally:
            if self._tally_order.looks:
                gates.observe(self._tally_observed)  # the next forward

    def _tally_why_not(self):
        """Why this step keeps the barrier, or None; "" where nothing is to be said of it."""
        if self._tally_alone:
            return ""
        if self._tally_unscaled:
            return "a GradScaler looks at all gradients before step()"
        if self._tally_synchronized or not self._tally_should_synchronize:
            return "all gradients were waited for before step(), such as for clipping by norm"
        if self._tally_layout.frozen():
            return "parameters are frozen that share a range with others (lazy=)"
        self._tally_compare_frozen()  # which hears the last step's
        if self._tally_layout.is_due(self._tally_order):
            return ""
        return self._tally_barrier.reason(self)

    def step(self, closure=None):
        """Put the optimizer's step off until gradients are reduced and parameters are read, and return at once; step now if
        they are reduced.

        closure: called once, here; gradients that it computes are those of this step."""
        self._tally_original._opt_called, self._tally_original._step_count = True, 1
        loss = None
        fixed = self._tally_barrier.fixed_reason()
        if closure is not None and fixed is None:
            self._tally_synchronized = self._tally_unscaled = False
            loss, closure = self._tally_run_closure(closure), None
        reason = self._tally_why_not()
        if reason is None and not self._tally_has_landed() and not self._tally_any_changed():
            self._tally_defer()
            return loss
        if reason:
            self._tally_barrier.warn(reason)
        if self._tally_deferred and not self._tally_should_synchronize and not self._tally_synchronized:
            raise self._tally_unreduced()
        self._tally_deferred = reason is None
        self._tally_barrier.finish()
        result = super().step(closure)
        return result if closure is not None else loss

    step.hooked = True

    def _tally_unreduced(self):
        """The Error of a step() in skip_synchronize() behind a synchronize() that only made updates.  The other ranks may
        wait for gradients of this one, and hear it too."""
        error = _errors.Error(
            "step() in skip_synchronize() on rank %d, which had no gradient since the last step(): synchronize() only made the "
            "updates of that step. Where a rank may have no gradient, call synchronize() inside skip_synchronize(), too: there "
            "it reduces gradients, and zeros for those that are missing" % _job.rank(), errno.EINVAL)
        self._tally_barrier.finish()
        self._tally_compare_frozen()
        for slot in self._tally_update:
            if slot.p.requires_grad:
                self._tally_units[slot.number].refuse(self, slot, error)
        self._tally_hear_frozen()
        self._tally_expect_all()
        self._tally_forget_step()
        return error

    def _tally_has_landed(self):
        """Whether all gradients are reduced, so that there is nothing to put off."""
        return (len(self._tally_handles) == len(self._tally_update) > 0
                and (self._tally_frozen is None or self._tally_frozen[0].done())
                and all(handle is not None and handle.done() for handle in reversed(self._tally_handles.values())))

    def _tally_before_unscaling(self):
        if self._tally_should_synchronize and not self._tally_synchronized:
            self._tally_barrier.finish()
            self._tally_deferred = False  # gradients of this step are asked for, even if there is none here
        super()._tally_before_unscaling()

    def _tally_defer(self):
        self._tally_barrier.finish()
        failure = self._tally_submit_missing()
        if failure is not None:
            super().synchronize()  # waits for the others, and raises
            raise failure
        of, there = {}, []
        for number in self._tally_order.order:
            slot = self._tally_slots[number]
            p, handle = slot.p, self._tally_handles.get(slot)
            if handle is not None:
                of.setdefault(handle, []).append((p, *(self._tally_sent.get(slot) or (p.grad, None))))
            elif p.grad is not None:  # of what is frozen the optimizer takes the gradients that are there
                there.append((p, p.grad))
        reductions = [Reduction(handle, [(p, gradient) for p, gradient, _ in held],
                                [(gradient, version) for _, gradient, version in held]) for handle, held in of.items()]
        if there:
            reductions.insert(0, Reduction(None, there))
        frozen, self._tally_frozen = self._tally_frozen, None
        first = None if frozen is None else _Frozen(self._tally_barrier, frozen[0])
        self._tally_handles, self._tally_sent = {}, {}
        self._tally_expect_all()
        self._tally_synchronized, self._tally_deferred = False, True
        self._tally_barrier.defer(self, reductions, first)

    def synchronize(self):
        """Behind step(): make all updates that it has put off.  Behind backward: as DistributedOptimizer's, and step(),
        in skip_synchronize(), keeps the barrier.  In skip_synchronize(): always as behind backward."""
        self._tally_barrier.finish()
        if self._tally_deferred and not self._tally_handles and self._tally_should_synchronize:
            return
        super().synchronize()

    def _tally_clip(self):
        if self._tally_clip_value is not None:
            torch.nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], self._tally_clip_value)

    def _tally_begin_over(self):
        failure = None
        try:
            self._tally_barrier.finish()  # its gradients may be on their way, and zeros of the same names would be refused
        except Exception as error:
            if _where.is_handlers(error):
                raise
            failure = error
        super()._tally_begin_over()
        return failure

    def _tally_begin_anew(self):
        self._tally_barrier.finish()
        super()._tally_begin_anew()
        gates.observe(self._tally_observed)

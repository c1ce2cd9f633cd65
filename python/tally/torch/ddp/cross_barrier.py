"""cross_barrier(): torch's DistributedDataParallel and an optimizer of torch's whose step() puts updates off.

    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    tally.torch.cross_barrier(model, optimizer)

Flow: backward fills a bucket -> the hook submits its average and tells backward that it has ended -> step() hands the
buckets to the Barrier (crossing/deferred.py) and returns -> a gate in the next forward waits for its bucket and updates the bucket's
parameters -> at the end of forward, before torch prepares for backward, which writes to buckets, all the rest.

Until buckets are rebuilt, which copies gradients in the second forward, the hook is ddp_hook, and step() the optimizer's.

SPDX-License-Identifier: Apache-2.0
"""

import errno
import functools
import weakref

import torch
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ... import _errors, _where
from .. import device, patches
from ..crossing import gates, groups
from ..crossing.deferred import Barrier, Deferring, Reduction
from ..horovod.compression import Compression
from . import hooks

_DTYPES = {Compression.none: None, Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}
_crossed = weakref.WeakKeyDictionary()  # DistributedDataParallel -> (weak reference to its optimizer, its flights)
_NOT_CROSSED = (lambda: None), ()


class _Flight:
    """A bucket whose average is on its way.

    zeros: its memory is not the reducer's, and no gradient lies in it: this rank has joined."""

    __slots__ = ("operation", "buffer", "version", "parameters", "zeros")

    def __init__(self, operation, bucket):
        self.operation, self.buffer, self.parameters = operation, bucket.buffer(), bucket.parameters()
        self.version = self.buffer._version
        self.zeros = not any(p.grad is not None and _shares(p.grad, self.buffer) for p in self.parameters)


class _BackgroundHook:
    """The communication hook."""

    def __init__(self, parallel, optimizer, dtype):
        functools.update_wrapper(self, hooks.ddp_hook)  # torch asks for a name
        self._parallel, self._optimizer, self._dtype = weakref.ref(parallel), weakref.ref(optimizer), dtype

    def __call__(self, state, bucket):
        parallel, optimizer = self._parallel(), self._optimizer()
        if optimizer is not None and bucket.index() == 0:
            # Operations on their way have this bucket's name: another backward's since step(), or, if this rank has no
            # more input, its last step's or those of zeros.
            optimizer._tally_before_backward()
        if optimizer is None or bucket.buffer().is_sparse or not _is_settled(parallel) or optimizer._tally_fixed_reason():
            return hooks._average(state, bucket, self._dtype)
        model = state.enter(bucket)
        with optimizer._tally_barrier.lock:
            operation = hooks.start(model, bucket, self._dtype)
            if model.limit is not None:
                late = hooks._Late(model.limit, hooks._nothing)
                late.watch(operation)
                operation.watch(late.end)
            optimizer._tally_fly(_Flight(operation, bucket))
        return _ended(bucket.buffer())


def _ended(tensor):
    on = device.of(tensor)
    future = Future() if on is None else on.runtime.future()
    future.set_result(tensor)
    return future


def _is_settled(parallel):
    """Whether the buckets stay where they are: torch rebuilds them in the second forward."""
    return parallel is not None and (getattr(parallel, "_has_rebuilt_buckets", False)
                                     or parallel.find_unused_parameters and not parallel.static_graph)


class CrossBarrier(Deferring):
    """Mixin that cross_barrier() puts before the class of the user's optimizer."""

    def _tally_cross(self, kind, name_of, clip_value):
        self._tally_kind = kind
        self._tally_flights = []          # since the last step(); always this list
        self._tally_reference = weakref.ref(self)  # stands in gates.flying
        self._tally_waited = False        # somebody has waited for them, perhaps to look at gradients
        self._tally_clip_value = clip_value
        self._tally_barrier = Barrier(self, kind, name_of, clip_value)

    def _tally_fixed_reason(self):
        return self._tally_barrier.fixed_reason()

    def zero_grad(self, set_to_none=True):
        """As Deferring's, once the gradients that are on their way are reduced."""
        if self._tally_flights:
            self._tally_land()
        super().zero_grad(set_to_none)

    def _tally_fly(self, flight):
        """A bucket is on its way.  What was looked at before is not the gradient of this step."""
        self._tally_flights.append(flight)
        self._tally_waited = False
        for p in flight.parameters:
            gates.flying[id(p)] = self._tally_reference, flight.operation

    def __del__(self):
        flights = self.__dict__.get("_tally_flights")
        if flights and self._tally_reference() in (None, self):
            for number in (id(p) for flight in flights for p in flight.parameters):
                gates.flying.pop(number, None)
            if not gates.is_collecting():
                _await(flights)
        super().__del__()

    def _tally_land(self):
        """Somebody is about to look at gradients: have them reduced.  The step keeps the barrier."""
        with self._tally_barrier.lock:
            self._tally_waited = True
            self._tally_wait_for_buckets()

    def _tally_wait_for_buckets(self):
        """Have all buckets reduced; raise the first failure."""
        with self._tally_barrier.lock:
            failure = None
            while self._tally_flights:
                flight = self._tally_flights[0]
                try:
                    self._tally_check(flight)
                    flight.operation.wait()
                except Exception as error:
                    if _where.is_handlers(error):
                        raise
                    failure = failure or error
                del self._tally_flights[0]
                for p in flight.parameters:
                    gates.flying.pop(id(p), None)
            if failure is not None:
                raise failure

    def _tally_check(self, flight):
        changed = None
        if flight.buffer._version != flight.version:
            changed = flight.parameters[0]
        elif not flight.zeros:
            changed = next((p for p in flight.parameters if p.grad is not None and not _shares(p.grad, flight.buffer)), None)
        if changed is not None:
            raise _errors.Error("the gradient of %s was changed between backward and the end of its reduction; call "
                                "optimizer.synchronize() before what changes gradients" % self._tally_barrier.name_of(changed),
                                errno.EINVAL)

    def _tally_before_backward(self):
        """No update may be due, and no bucket under way, once backward writes to buckets, or averages are of the next step."""
        self._tally_barrier.finish()
        self._tally_wait_for_buckets()

    def synchronize(self):
        """Behind step(): make all updates that it has put off.  Behind backward: have all gradients reduced, for what
        looks at them; the step keeps the barrier then."""
        self._tally_barrier.finish()
        if self._tally_flights:
            self._tally_land()

    def step(self, closure=None):
        """Put the optimizer's step off until gradients are reduced and parameters are read; return at once.

        closure: called once, here."""
        self._opt_called, self._step_count = True, getattr(self, "_step_count", 0) + 1
        loss = None
        if closure is not None and self._tally_fixed_reason() is None:
            loss, closure = self._tally_run_closure(closure), None
        reason = self._tally_barrier.reason(self)
        if reason is None and self._tally_waited:
            reason = "all gradients were waited for before step(), such as for clipping by norm"
        self._tally_waited = False
        if reason is None:
            self._tally_defer()
            return loss
        self._tally_barrier.warn(reason)
        self._tally_barrier.finish()
        self._tally_wait_for_buckets()
        if closure is None:
            self._tally_clip()
            super().step()
            return loss

        def clipped():
            loss = closure()
            self._tally_clip()
            return loss

        return super().step(clipped)

    def _tally_clip(self):
        if self._tally_clip_value is not None:
            torch.nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], self._tally_clip_value)

    step.hooked = True
    step._wrapped_by_lr_sched = step._with_counter = True  # a scheduler need not wrap it to see that it was called

    def _tally_defer(self):
        with self._tally_barrier.lock:
            self._tally_barrier.finish()
            for flight in self._tally_flights:
                self._tally_check(flight)
            flights = _take(self._tally_flights)
            of = {id(p): flight for flight in flights for p in flight.parameters}
            pairs, landed = {flight: [] for flight in flights}, []
            for group in groups.plain(self):
                for p in group["params"]:
                    if p.grad is not None:
                        flight = of.get(id(p))
                        inside = flight is not None and _shares(p.grad, flight.buffer)
                        (pairs[flight] if inside else landed).append((p, p.grad))
            for number in of:
                gates.flying.pop(number, None)
            # Buckets of the first layers, which the next forward needs first, are the last ones.
            reductions = [Reduction(flight.operation, pairs[flight], [(flight.buffer, flight.version)])
                          for flight in reversed(flights)]
            self._tally_barrier.defer(self, [Reduction(None, landed)] * bool(landed) + reductions)


def _take(flights):
    taken = flights[:]
    flights.clear()
    return taken


def _await(flights):
    """Have the buckets of an optimizer that has ended reduced, before somebody else writes to them."""
    while flights:
        try:
            flights[0].operation.wait()
        except Exception as error:  # nobody is left who asked for it
            if _where.is_handlers(error):
                raise
        flights.pop(0)


def _shares(a, b):
    return a.layout is torch.strided and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@functools.lru_cache(None)
def _prepare():
    """Once: have DistributedDataParallel make updates before it prepares for backward."""
    def updating(post):
        def _post_forward(self, output):
            if torch.is_grad_enabled() and not patches.is_compiling():
                reference, flights = _crossed.get(self, _NOT_CROSSED)
                optimizer = reference()
                if optimizer is not None:
                    optimizer._tally_before_backward()
                elif flights:
                    _await(flights)
            return post(self, output)

        return _post_forward

    patches.end_forward(updating)


def _check_model(model, optimizer):
    if not isinstance(model, DistributedDataParallel):
        raise TypeError("the model must be a torch.nn.parallel.DistributedDataParallel, not %s; for others there is "
                        "DistributedOptimizer(cross_barrier=True)" % type(model).__name__)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError("the optimizer must be one of torch.optim's kind, not %s" % type(optimizer).__name__)
    if not model.gradient_as_bucket_view:
        raise ValueError("cross_barrier() needs DistributedDataParallel(gradient_as_bucket_view=True): without it torch "
                         "copies gradients out of the buckets at the end of backward, when they are not reduced yet")
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError("cross_barrier() does not go with DistributedDataParallel(mixed_precision=...)")
    if _crossed.get(model, _NOT_CROSSED)[0]() is not None or isinstance(optimizer, CrossBarrier):
        raise ValueError("the model or the optimizer has been given to cross_barrier() already")
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own]
    if others:
        raise ValueError("the optimizer does not have %s: all parameters of the model that need gradients must be its own, or "
                         "another one would read gradients that are on their way" % ", ".join(others[:5]))


def _register(model, hook):
    """Have torch call `hook`, also where one of Tally's is registered."""
    known = next((hooks._models[p].hook for p in model.module.parameters() if p in hooks._models), None)
    if known is not None and known.hook in (hooks.ddp_hook, hooks.ddp_hook_fp16, hooks.ddp_hook_bf16):
        known.hook = hook
    else:
        model.register_comm_hook(hooks.state(), hook)


def cross_barrier(model, optimizer, compression=Compression.none, clip_value=None):
    """Have optimizer.step() return at once: each parameter is updated when its gradient has been averaged, or its module is
    called.  The same bits; docs/cross_barrier.md says which steps wait nonetheless.

    model: a DistributedDataParallel with gradient_as_bucket_view=True; its gradients go through Tally from here on, as with
        register_comm_hook(), which need not be called.
    optimizer: of all its parameters; it gets a class of its own, with synchronize(), and stays the same object.
        Accelerate's and Lightning's wrappers are seen through.
    compression: Compression.none, fp16 or bf16; clip_value: clip each average to between -clip_value and it.

    synchronize() behind step() makes all updates, for code that reads parameters through references of its own; between
    backward and step() it has all gradients averaged.  Returns the optimizer.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's, Lightning's
    _check_model(model, optimizer)
    if compression not in _DTYPES:
        raise ValueError("compression must be Compression.none, fp16 or bf16, not %r" % (compression,))
    if clip_value is not None and not clip_value > 0:
        raise ValueError("clip_value must be a positive number, not %r" % (clip_value,))
    _prepare()
    kind = type(optimizer)
    _register(model, _BackgroundHook(model, optimizer, _DTYPES[compression]))
    optimizer.__class__ = type(kind.__name__, (CrossBarrier, kind), {})
    optimizer.__dict__.pop("step", None)  # a scheduler's wrapping of the other step()
    names = WeakTensorKeyDictionary()
    for name, p in model.module.named_parameters():
        names[p] = name
    optimizer._tally_cross(kind, lambda p: names.get(p, "a parameter of shape %s" % (tuple(p.shape),)), clip_value)
    _crossed[model] = weakref.ref(optimizer), optimizer._tally_flights
    return optimizer

"""The optimizer's barrier, taken away: step() puts updates off, and each is made as soon as its gradient is reduced.

Structure: a Barrier keeps, for one optimizer, the updates of its last step(), as Reductions in the order in which their
parameters are needed, and a snapshot of the groups.  A parameter is idle, reducing (its gradient is on its way) or due
(step() has been called, the update is not made).  Only what is due is ever updated.

How: a gate (gates.py) calls finish() with what is about to be read.  It waits for those gradients, takes along what has
landed before them, and calls the optimizer's own step once, with `param_groups` swapped for the snapshot's groups of
just these parameters.  Until then the reduction owns the gradient: zero_grad() lets go of `p.grad` alone.

Life: a pending update lives as long as its optimizer; no global table keeps it.  An optimizer that ends makes its updates
first, because its parameters may have other readers, and waits as step() with the barrier does.  The garbage collector may not wait:
a thread does, and holds the optimizer's contents until then.  An update that fails there leaves its reason for the next reader.

Lock: the Barrier's own, for all of this.  It is held while a reduction is waited for: that needs nothing of this rank any more.

A gradient has one owner: backward until its hook; the reduction until it has landed; after step() the pending update,
until it is made; then the user.  The owner holds the tensor, not `p.grad`: zero_grad() may drop the name, and the place
in the pool or the bucket stays with the owner.  Nobody else writes meanwhile.  Versions tell if somebody does, and the
error names the parameter.  A pool that exchanges a gradient's memory does so while it is the user's: between its update
and the next backward's hook.  Evidence: `zeroing` and `failing` in test/python/test_cross_barrier.py (commit 68c1a03).
Rejected: a copy for each reduction (memory, and the copy's time); a lock on `p.grad`, which torch does not ask.

SPDX-License-Identifier: Apache-2.0
"""

import _thread
import contextlib
import errno
import os
import sys
import threading
import time
import warnings
import weakref

import torch
from torch.overrides import TorchFunctionMode

from ... import _errors, _where
from .. import device, patches, steps
from . import gates, groups

# Optimizers of torch.optim that update each parameter by its own gradient, state and options alone.
ALLOWED = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
                 "Rprop", "SGD", "SparseAdam")
    if hasattr(torch.optim, name))


class Reduction:
    """The reduction of some gradients, and the updates that wait for it.

    handle: done() and wait(), whose result is the gradient if it is sparse; None: they are reduced.
    pairs: parameters and their gradients, which nobody else may write to.
    versions: (tensor, the version that it had; None if that tells nothing), which tell if somebody has: a pair's gradients, or
        the tensor that they are all in."""

    __slots__ = ("handle", "pairs", "_versions")

    def __init__(self, handle, pairs, versions=()):
        self.handle, self.pairs, self._versions = handle, pairs, versions

    def written(self):
        """The places, in `versions`, of tensors that somebody has written to."""
        return [i for i, (tensor, version) in enumerate(self._versions) if version is not None and tensor._version != version]

    def done(self):
        return self.handle is None or self.handle.done()

    def wait(self, end):
        """end: when to raise TimeoutError, on time.monotonic(); None: never."""
        if self.handle is None:
            return
        if end is not None:
            _await(self, end)
        result = self.handle.wait()
        if len(self.pairs) == 1:
            p, gradient = self.pairs[0]
            if gradient.is_sparse:
                self.pairs = [(p, result)]
                if p.grad is gradient:
                    p.grad = result
        self.handle = None


def _await(reduction, end):
    while not reduction.done():
        if time.monotonic() >= end:
            raise TimeoutError("a reduction has not ended")
        time.sleep(0.001)


class _Lost:
    """The owner of parameters whose updates have failed behind the end of their optimizer.  The next reader hears why."""

    def __init__(self, failure, numbers):
        """numbers: the parameters' ids."""
        self._failure, self.numbers = failure, numbers

    def name_of(self, p):
        return "a parameter of shape %s" % (tuple(p.shape),)

    def finish(self, wanted=None, timeout=None):
        for number in self.numbers:
            gates.due.pop(number, None)
        numbers, self.numbers = self.numbers, ()
        if numbers:
            raise _errors.again(self._failure)

    def waiting(self):
        return ()

    def zero_later(self, p):
        return False


class Barrier:
    """Puts off the updates of one optimizer."""

    def __init__(self, optimizer, kind, name_of, clip_value=None, gated=True):
        """kind: the optimizer's own class, of the user's; name_of: parameter -> name; clip_value: as
        torch.nn.utils.clip_grad_value_()'s, applied before each update; gated: False if no update is ever put off."""
        step = kind.step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without the hooks
        self._kind, self.name_of, self._clip = kind, name_of, clip_value
        self._waiting = {}     # Reduction -> None, those whose parameters are needed first in front
        self._of = {}          # id(parameter) -> its Reduction in that
        self._zero = set()     # ids of parameters whose gradients are zeroed behind their update
        self._groups = []      # of the last step(): options; all but their parameters
        self._place = {}       # id(parameter) -> its group's place in that
        self._first = None     # what has to be heard before any update
        self.optimizer = weakref.ref(optimizer)  # the owner of this; of one that has ended with updates due, what stands in for it
        self._reference = weakref.ref(self)  # stands in gates.due
        self._stream = None    # (device, its kind, its stream that step() was called on)
        self._updating = False  # the thread that has the lock makes updates
        self._pid = os.getpid()
        self.lock = threading.RLock()
        self._warned = set()
        self._ungated, self._compiled, self.gated = [], False, gated
        self._changes = gates.changes  # as they were when the gates were put in place
        self.guard(optimizer)

    def guard(self, optimizer):
        """Gate the optimizer's parameters as they lie in modules now."""
        if not self.gated:
            return
        groups.gate(optimizer)
        self._changes = gates.changes
        parameters = [p for group in groups.plain(optimizer) for p in group["params"]]
        self._ungated, self._compiled = gates.guard(parameters)
        if self._ungated:
            self.warn("%d parameters, such as %s, are in %s"
                      % (len(self._ungated), self.name_of(self._ungated[0]), gates.why_ungated(self._ungated[0])))

    def warn(self, reason):
        """Say once why updates are waited for."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn("cross_barrier: " + reason, stacklevel=4)

    def fixed_reason(self):
        """Why no step of this optimizer can be put off, or None."""
        if self._kind not in ALLOWED and not getattr(self._kind, "tally_cross_barrier", False):
            return ("%s may look at all gradients at once; a class of yours that updates each parameter by itself says so "
                    "with tally_cross_barrier = True" % self._kind.__name__)
        return None

    def reason(self, optimizer):
        """Why this step keeps the barrier, or None."""
        if gates.changes != self._changes:
            self.guard(optimizer)
        if self._compiled:
            return "the model is compiled as a whole, so that all its parameters are read at once; compile its blocks"
        if any(hook is not steps._stepped for hook in patches.hooks_of_step(optimizer)):
            return "hooks of step() look at all parameters, before or after"
        if any(group.get("differentiable") for group in optimizer.__dict__["param_groups"]):
            return "differentiable=True keeps a graph of the updates"
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return "a GradScaler decides by all gradients whether there is a step"
        return self.fixed_reason()

    # --- what is due -----------------------------------------------------------------------------------------

    def defer(self, optimizer, reductions, first=None):
        """Have the updates of these reductions, in the order in which they are needed, made later, with the options as
        they are now.  first: what to wait for before any update, by its `handle`; its wait() raises the failure."""
        with self.lock:
            plain = groups.plain(optimizer)
            self._groups = [{key: value.clone() if isinstance(value, torch.Tensor) else value
                             for key, value in group.items() if key != "params"} for group in plain]
            self._place = {id(p): i for i, group in enumerate(plain) for p in group["params"]}
            self._pid = os.getpid()
            self._first, self._waiting = first, dict.fromkeys(reductions)
            for reduction in reductions:
                entry = self._reference, (first and first.handle, reduction.handle)
                for p, _ in reduction.pairs:
                    self._of[id(p)] = reduction
                    gates.due[id(p)] = entry
                    if not p.is_cpu and self._stream is None:
                        self._stream = _stream_of(p)
            steps._stepped(optimizer, (), {})
            if self._ungated:
                self.finish(self._ungated)
            elif first is None or first.done():
                self.finish(())

    def finish(self, wanted=None, timeout=None):
        """Make the updates of `wanted` (None: of all), and of what has landed in front of the rest.

        timeout: seconds to wait, in all, for a caller that goes on without: what has failed or is late stays due then, and
        the next gate raises it.  After the first failure all others are made, and then it is raised."""
        if self._pid != os.getpid():  # before the lock, which a thread that is not there may hold
            if self._waiting or self._first is not None:
                raise _errors.Error("this process was forked while updates were due; call synchronize() before",
                                    errno.EINVAL)
            return
        optimizer = self.optimizer()  # it may not end in here
        with self.lock:
            if not self._waiting and self._first is None:
                return
            if self._updating and wanted is None:  # the step of an update reads the optimizer that it is part of
                return
            needed = self._waiting if wanted is None else {self._of[id(p)]: None for p in wanted if id(p) in self._of}
            end, first = None if timeout is None else time.monotonic() + timeout, self._first
            ready, failure = self._gather(needed, end)
            if failure is not None:
                ready += self._gather({one: None for one in self._waiting if one not in ready}, end)[0]
            try:
                if ready:
                    self._update(ready, optimizer.__dict__)
            finally:
                self._forget(ready if failure is None or timeout is not None else list(self._waiting))
            if failure is not None:
                self._first = first if timeout is not None else None
                try:
                    raise failure
                finally:
                    del failure, optimizer  # an exception keeps this frame: no cycle, and no optimizer

    def hear(self, end=None):
        """Hear what has to be heard before any update, if there is something.  end: as Reduction.wait()'s."""
        if self._first is None:  # without the lock, which a forked process may never get
            return
        with self.lock:
            if self._first is not None:
                if end is not None:
                    _await(self._first, end)
                try:
                    self._first.wait()
                finally:
                    if self._first.done():  # else a signal handler has broken it off
                        self._first = None

    def _gather(self, needed, end):
        """(those that have landed: the needed ones and what is in front of the first that has not; the first failure)."""
        ready, failure, front, left = [], None, True, len(needed)
        try:
            self.hear(end)
        except Exception as error:
            if _where.is_handlers(error):
                raise
            failure = error
        for reduction in list(self._waiting):
            if reduction in needed:
                left -= 1
            else:
                front = front and reduction.done()
                if not front and not left:
                    break
                if not front:
                    continue
            try:
                reduction.wait(end)
                written = reduction.written()
                if written:
                    raise self._written(reduction, written[0])
                ready.append(reduction)
            except Exception as error:  # also of a user's compression, or of a sparse gradient
                if _where.is_handlers(error):
                    raise
                failure = failure or error
        try:
            return ready, failure
        finally:
            del failure  # an exception keeps this frame: no cycle

    def _written(self, reduction, place):
        return _errors.Error("the gradient of %s was changed while it was reduced, after step(); call synchronize() before "
                             "what changes gradients"
                             % (self.name_of(reduction.pairs[place][0]) if reduction.pairs else "a bucket"), errno.EINVAL)

    def _forget(self, reductions):
        for reduction in reductions:
            self._waiting.pop(reduction, None)
            for p, _ in reduction.pairs:
                if self._of.pop(id(p), None) is not None:
                    gates.due.pop(id(p), None)
        if not self._waiting:
            self._stream = None
            self._zero.clear()

    def outlive(self, optimizer):
        """The optimizer ends: make its updates, because its parameters may have other readers."""
        if (self.optimizer() not in (None, optimizer) or not self._waiting or self._pid != os.getpid()
                or sys.is_finalizing()):
            return
        with self.lock:  # weak references may be dead in the garbage collector
            rest = object.__new__(type(optimizer))
            object.__setattr__(rest, "__dict__", dict(optimizer.__dict__))
            self.optimizer = lambda: rest
            gates.due.update({id(p): ((lambda: self), reduction.handle) for reduction in self._waiting for p, _ in reduction.pairs})
        if gates.is_collecting():
            _thread.start_new_thread(self._end_later, ())
        else:
            self._end()

    def _end_later(self):
        threading.current_thread().name = "tally-update"
        # Without the lock, so that whoever waits with a time-out gets it.
        for handle in filter(None, (self._first, *self._waiting)):
            while not handle.done():
                time.sleep(0.001)
        self._end()

    def _end(self):
        numbers = set(self._of)
        try:
            self.finish()
        except Exception as failure:
            if _where.is_handlers(failure):
                raise
            lost = _Lost(_errors.again(failure), gates.living(numbers))
            gates.due.update(dict.fromkeys(lost.numbers, ((lambda: lost), None)))
        self.optimizer = lambda: None  # till here it has kept the parameters, so that no other gets the number of one

    def _update(self, reductions, own):
        """Step with these alone, as step() would have.  own: the optimizer's attributes."""
        pairs = [pair for reduction in reductions for pair in reduction.pairs]
        optimizer = object.__new__(self._kind)  # the same one, past what Deferring puts in front of its methods and state
        object.__setattr__(optimizer, "__dict__", own)
        subsets = [[] for _ in self._groups]
        for p, _ in pairs:
            if id(p) in self._place:  # else its group has been taken out of the optimizer
                subsets[self._place[id(p)]].append(p)
        with _modes_of_step(self._stream):
            kept = []
            for p, gradient in pairs:
                current = p.grad
                if current is not gradient:
                    kept.append((p, current))
                    p.grad = gradient
            before, nested, self._updating = own["param_groups"], self._updating, True
            own["param_groups"] = [{**options, "params": subset} for options, subset in zip(self._groups, subsets) if subset]
            try:
                if self._clip is not None:
                    torch.nn.utils.clip_grad_value_([p for p, _ in pairs], self._clip)
                self._step(optimizer)
            finally:
                own["param_groups"], self._updating = before, nested
                for p, gradient in pairs if self._zero else ():
                    if id(p) in self._zero:
                        gradient.zero_()
                for p, current in kept:
                    p.grad = current

    def waiting(self):
        """Parameters whose updates are due."""
        with self.lock:
            return [p for reduction in self._waiting for p, _ in reduction.pairs]

    def zero_later(self, p):
        """Have p's gradient zeroed behind its update.  False if it is not what that waits for."""
        with self.lock:
            reduction = self._of.get(id(p))
            if reduction is None or not any(p is one and p.grad is gradient for one, gradient in reduction.pairs):
                return False
            self._zero.add(id(p))
            return True

    def is_due(self, p):
        return id(p) in self._of


def _stream_of(p):
    """(device, its kind, the current stream) of a parameter that is on one."""
    on = device.of(p)
    return on, p.device.type, on.runtime.current()


@contextlib.contextmanager
def _on(stream):
    """On step()'s stream; the caller's waits for what is done there."""
    on, _, own = stream
    here = on.runtime.current()
    if own == here:
        yield
        return
    on.runtime.let_wait(own, on.runtime.record(here))
    with on.runtime.on(own):
        yield
        after = on.runtime.record(own)
    on.runtime.let_wait(here, after)


@contextlib.contextmanager
def _modes_of_step(stream):
    """The modes in which step() is called: a gate is passed in those of forward."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        patches.leave_modes(stack, {"cpu", stream[1] if stream else "cuda"})
        if stream is not None:
            stack.enter_context(_on(stream))
        yield


class Reading:
    """Mixin before the class of an optimizer, `_tally_kind`, that reads what a Barrier, `_tally_barrier`, updates.  Each method but
    step() first makes the updates that are due, or leaves them what they need."""

    @property
    def state(self):
        """The optimizer's, once all updates are made."""
        barrier = self.__dict__.get("_tally_barrier")
        if barrier is not None and barrier._waiting:
            barrier.finish()
        try:
            return self.__dict__["state"]
        except KeyError:
            raise AttributeError("%r object has no attribute 'state'" % type(self).__name__) from None

    @state.setter
    def state(self, state):
        self.__dict__["state"] = state

    def _tally_run_closure(self, closure):
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none=True):
        """As the optimizer's own.  A gradient that waits for its update stays with that, and is zeroed behind it."""
        with self._tally_barrier.lock, gates.through():
            if set_to_none or not self._tally_barrier._waiting:
                return super().zero_grad(set_to_none)
            before = self.__dict__["param_groups"]
            self.__dict__["param_groups"] = [{**group, "params": [p for p in group["params"] if not self._tally_barrier.is_due(p)]}
                                             for group in groups.plain(self)]
            try:
                super().zero_grad(set_to_none)
            finally:
                self.__dict__["param_groups"] = before
            for p in self._tally_barrier.waiting():
                if not self._tally_barrier.zero_later(p) and p.grad is not None:
                    p.grad.zero_()

    def state_dict(self):
        """As the optimizer's own, once all updates are made."""
        self._tally_barrier.finish()
        return super().state_dict()

    def load_state_dict(self, state_dict):
        """As the optimizer's own; an update that is due and fails counts for nothing then."""
        try:
            self._tally_barrier.finish()
        except Exception as error:
            if _where.is_handlers(error):
                raise
        super().load_state_dict(state_dict)
        if self._tally_barrier.gated:
            groups.gate(self)

    def add_param_group(self, param_group):
        """As the optimizer's own, once all updates are made."""
        barrier = self.__dict__.get("_tally_barrier")
        if barrier is not None:
            barrier.finish()
        super().add_param_group(param_group)
        if barrier is not None:
            barrier.guard(self)

    def __getstate__(self):
        self._tally_barrier.finish()
        return super().__getstate__()

    def __reduce_ex__(self, protocol):
        return _remake, (self._tally_kind, dict(self.__getstate__()))


def _remake(kind, state):
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


class Original(Reading, groups.Shared):
    """The same of the optimizer that a DistributedOptimizer was made of."""


class Deferring(Reading):
    """The same of the optimizer that owns the Barrier."""

    def __del__(self):
        barrier = self.__dict__.get("_tally_barrier")
        if barrier is not None:
            barrier.outlive(self)
        getattr(super(), "__del__", lambda: None)()


def let_read(optimizer, kind, barrier):
    """Let another optimizer of this kind, which shares groups and state with the Barrier's, make updates before it reads."""
    optimizer.__class__ = type(kind.__name__, (Original, kind), {})
    optimizer._tally_kind, optimizer._tally_barrier = kind, barrier


def kind_of(optimizer):
    """The class that the user gave an optimizer."""
    return optimizer._tally_kind if isinstance(optimizer, Original) else type(optimizer)


class find_stale_reads(TorchFunctionMode):
    """A context in which reading a parameter past its gate raises Error, with the name of the parameter:

        with tally.torch.find_stale_reads():
            loss = model(x)

    For finding what reads parameters through references that it has held since before step(); such code calls the
    optimizer's synchronize() first.  Also memory that is shared with a parameter counts.  It sees functions of torch, called
    from Python or C++ on this thread.  It does not see other threads and processes, kernels of torch.compile, CUDA graphs,
    and code that reads memory by its address, such as through an array made before.  Slow: each function of torch
    compares its tensors with all that is due."""

    _FREE = frozenset(("__get__", "__set__", "__delete__", "size", "dim", "numel", "stride", "is_floating_point",
                       "is_complex", "element_size", "untyped_storage", "register_hook", "requires_grad_"))

    def __init__(self):
        super().__init__()
        self._operators = _StaleOperators()

    def __enter__(self):
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        self._operators.__exit__(kind, error, trace)
        found, self._operators.found = self._operators.found, None
        if error is not None and found is not None and found is not error:  # TorchScript raises one without the reason
            raise found from error

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if gates.due and getattr(function, "__name__", "") not in self._FREE:
            with patches.without_functions_of_classes():
                _look(function, args, kwargs)
        return function(*args, **kwargs)


class _StaleOperators(patches.DispatchMode):
    """The same for operators, which C++ calls, too.  A view reads nothing yet."""

    found = None  # the last Error

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        if gates.due and not views:
            try:
                _look(function.overloadpacket, args, kwargs)
            except _errors.Error as error:
                self.found = error
                raise
        with patches.without_functions():
            return function(*args, **kwargs)


def _look(function, args, kwargs):
    """Raise Error if one of the arguments shares memory with a parameter whose update is due."""
    places = {p.untyped_storage().data_ptr(): (p, owner) for owner in gates.all_owners() for p in owner.waiting()}
    for value in patches.leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            p, owner = places.get(value.untyped_storage().data_ptr(), (None, None))
            if p is not None:
                raise _errors.Error("%s reads %s while its update is due: through a reference from before step(); call "
                                    "the optimizer's synchronize() first"
                                    % (getattr(function, "__name__", function), owner.name_of(p)), errno.EINVAL)

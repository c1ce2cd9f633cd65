"""AsyncOptimizer: asynchronous training.  Services keep the parameters, and each rank adds its changes at its own pace.

Parameters of one dtype are one shared tensor, because an operation costs the same whatever its size: a _Share.  Its memory here is
`change`, the difference on its way, and `base`, the values from which the next difference counts.

Flow: step() runs the user's optimizer -> prepare(): the newest values have come, and change = parameters - base -> send():
parameters become the newest values plus change, so does base, and change goes to the services.  Between additions, land()
takes values that have come: parameters become these plus change, and base these alone.

An exception of a signal handler can break off any of this.  Each stage can be repeated, and the next step begins with the stage that
was broken off (_tally_settle).

An operation that fails, or brings values that are not finite, leaves its _Share's `failure`.  From then on stages do nothing, step()
raises that error, and finish() gives the optimizer up on all ranks.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import functools
import sys
import weakref

import torch

from .. import _calls, _job, _operations, _where
from .._calls import STATE, Call
from .._errors import Error, again
from .._lib import ALLGATHER, BARRIER
from . import calls
from .crossing.groups import Shared
from .horovod.functions import compare

_DTYPES = (torch.float32, torch.float64)
_MOST = 255  # the largest staleness
_DIVERGED = "the change of parameter %s is not finite, and no other rank has got it: this rank's optimizer has diverged"
_OVERFLOWED = ("the newest values of parameter %s are not finite: the sum of the ranks' changes has overflowed. The parameters here are "
               "the last finite ones: call finish(), and make another AsyncOptimizer of them with a lower learning rate, on all ranks")

_owners = weakref.WeakValueDictionary()  # id of a parameter -> the AsyncOptimizer that has it
_numbered = (0, 0)  # generation of the communicator, optimizers made in it


def _take_number():
    """0 for the first optimizer in a communicator, then 1, and so on.  It is the same on all ranks, because making one is
    collective."""
    global _numbered
    generation, count = _numbered
    if generation != _job.generation():
        count = 0
    _numbered = _job.generation(), count + 1
    return count


class _Share:
    """The parameters of one dtype, which are one shared tensor."""

    def __init__(self, call, parameters):
        """parameters: list of (name, parameter)."""
        self.call = call
        self.parameters = parameters
        sizes = [p.numel() for _, p in parameters]
        dtype, self.count = parameters[0][1].dtype, sum(sizes)

        def memory():
            flat = torch.empty(self.count, dtype=dtype, device="cpu")
            return flat, self._shaped(flat)

        self.change, self.changes = memory()
        self.base, self.bases = memory()
        # Of parameters on devices, a copy in the host's memory.
        self.copies = {i: torch.empty(p.shape, dtype=dtype, device="cpu") for i, (_, p) in enumerate(parameters) if not p.is_cpu}
        self.operation = None  # the last one, until its values have landed
        self.landing = False   # `change` is complete, and the values are on their way into the parameters
        self.failure = None    # why the operation has failed for good
        self._fetch()
        self._rebase()

    def _shaped(self, flat):
        """Views of a flat tensor, one for each parameter."""
        pieces = flat.split([p.numel() for _, p in self.parameters])
        return [piece.view(p.shape) for piece, (_, p) in zip(pieces, self.parameters)]

    def _fetch(self):
        """Copy parameters from devices."""
        for i, copy in self.copies.items():
            copy.copy_(self.parameters[i][1].detach())

    def _here(self):
        """The parameters in the host's memory, as _fetch() or _take() has left them."""
        return [self.copies.get(i, p.detach()) for i, (_, p) in enumerate(self.parameters)]

    def _rebase(self):
        for p, base in zip(self._here(), self.bases):
            base.copy_(p)

    def _count_changes(self):
        """`change` = parameters - base."""
        self._fetch()
        for p, base, change in zip(self._here(), self.bases, self.changes):
            torch.sub(p, base, out=change)

    def newest(self):
        """The values that the last operation has brought.  They are the communicator's, so hold it in use."""
        length = self.count * self.base.element_size()
        return torch.frombuffer((ctypes.c_char * length).from_address(self.operation.values()), dtype=self.base.dtype)

    def _begin(self, submit, *arguments, begun=lambda: None):
        def store(operation):
            begun()
            self.operation = operation

        _operations.submit_to(store, submit, self.call, *arguments)

    def _take(self, newest):
        """Parameters = newest values + `change`."""
        for i, (value, change) in enumerate(zip(self._shaped(newest), self.changes)):
            p = self.parameters[i][1].detach()
            if i in self.copies:
                p.copy_(torch.add(value, change, out=self.copies[i]))
            else:
                torch.add(value, change, out=p)

    def create(self, staleness):
        """Have services keep rank 0's parameters, and take these."""
        self._begin(_operations.shared_create, self.base.data_ptr(), self.count, calls.DTYPES[self.base.dtype], staleness,
                    (self.count,))
        self.change.zero_()  # whatever the values here were
        self.landing = True
        self.land("rank 0's value of parameter %s is not finite")
        if self.failure is not None:
            raise again(self.failure)

    def arrive(self, sentence=_OVERFLOWED):
        """Wait for the operation under way, if there is one.  Returns whether it has brought finite values, or `failure` says why
        not: the sentence, of a parameter."""
        if self.operation is not None and self.failure is None:
            try:
                self.operation.wait()
                with _job.own.in_use():
                    self._check(self.newest(), sentence)
            except (Error, FloatingPointError) as failure:
                if _where.is_handlers(failure):
                    raise
                self.failure = again(failure)
        return self.failure is None

    def land(self, sentence=_OVERFLOWED):
        """arrive(), and parameters become the operation's values plus what has changed since."""
        if not self.arrive(sentence) or self.operation is None:
            return
        if not self.landing:
            self._count_changes()
            self.landing = True
        with _job.own.in_use():
            newest = self.newest()
            self._take(newest)
            self.base.copy_(newest)
        self.operation, self.landing = None, False

    def prepare(self):
        """Behind arrive(): count what has changed since base.  Raises FloatingPointError if that is not finite."""
        self._count_changes()
        self._check(self.change, _DIVERGED)  # it would spoil all ranks' parameters

    def send(self, begun):
        """Behind prepare(): take the newest values, and submit the change.  begun(), perhaps twice: it is under way."""
        if self.operation is not None:
            with _job.own.in_use():
                self._take(self.newest())
        self._rebase()
        _operations.exchange(self.count)
        self._begin(_operations.shared_add, self.change.data_ptr(), self.change, begun=begun)

    def _check(self, flat, sentence):
        """Raise FloatingPointError with the sentence, of a parameter, if a flat tensor is not finite."""
        if torch.isfinite(flat.sum()):  # the sum of finite numbers may overflow
            return
        for (name, _), piece in zip(self.parameters, self._shaped(flat)):
            if not torch.isfinite(piece).all():
                raise FloatingPointError(sentence % name)

    def pull(self):
        """Take the newest values, when no addition is under way."""
        if self.operation is None and self.failure is None:
            self._begin(_operations.shared_read)
        self.land()


class _End:
    """A finish() under way: operations that it has submitted."""

    def __init__(self):
        self.join = self.barrier = None

    def joining(self, operation):
        self.join = operation

    def passing(self, operation):
        self.barrier = operation


class _Async(Shared):
    """The class that AsyncOptimizer() puts before the optimizer's own class."""

    def _tally_set_up(self, name, named, every, overlap):
        """All that needs no other rank."""
        self._tally_generation = _job.generation()
        self._tally_name, self._tally_every, self._tally_overlap = name, every, overlap
        self._tally_unsent = 0        # steps since the last addition
        self._tally_sending = set()   # shares whose changes are counted, and not yet submitted
        self._tally_idle = False      # nothing has been stepped since a finish(), so another AsyncOptimizer may take over
        self._tally_successor = None  # name of the one that has
        self._tally_end = None        # the _End of a finish() that has begun and not ended
        self._tally_refused = None    # the error of a finish() in which another rank has given up
        self._tally_given_up = False  # an operation had failed for good, and a finish() has ended since
        self._tally_told = False      # step() or finish() has raised the failure
        of_dtypes = [[(one, p) for one, p in named if p.dtype is dtype and p.numel()] for dtype in _DTYPES]
        with torch.no_grad():
            self._tally_shares = [
                _Share(Call("%s %s" % (name, str(of[0][1].dtype).partition(".")[2]), space=STATE), of) for of in of_dtypes if of]

    def _tally_share(self, named, staleness):
        """Have services keep the parameters, if all ranks agree on them."""
        compare(self._tally_name, ["staleness=%s" % staleness, "every=%d" % self._tally_every, *(
            "parameter %r of shape %s, %s" % (one, tuple(p.shape), p.dtype) for one, p in named)], name=self._tally_name)
        with torch.no_grad():
            for share in self._tally_shares:
                share.create(staleness or 0)
        for _, p in named:
            owner = _owners.get(id(p))
            if owner is not None:
                owner._tally_successor = self._tally_name
            _owners[id(p)] = self

    @torch.no_grad()
    def _tally_settle(self):
        """Go on with what an exception has broken off."""
        if _job.own.comm is None:
            raise _job.unusable()
        if self._tally_generation != _job.generation():
            raise RuntimeError("this AsyncOptimizer is of a job that has ended: make another one, on all ranks")
        if self._tally_successor is not None:
            raise RuntimeError("%s has taken over parameters of this AsyncOptimizer: use that one" % self._tally_successor)
        if self._tally_sending:
            self._tally_send()
        for share in self._tally_shares:
            if share.landing:
                share.land()
        if self._tally_end is not None:
            self._tally_go_on()

    def _tally_failure(self):
        """Why an operation has failed for good; None: none has."""
        return next((share.failure for share in self._tally_shares if share.failure is not None), self._tally_refused)

    def _tally_check(self):
        """Raise the failure, if there is one."""
        failure = self._tally_failure()
        if failure is None:
            return
        try:
            raise again(failure)
        finally:  # a signal handler may have raised something else before
            self._tally_told = isinstance(sys.exc_info()[1], type(failure))

    def _tally_go_on(self):
        """Go on with finish(), from the stage that it has reached."""
        if not self._tally_given_up:
            self._tally_meet(self._tally_end)
        if self._tally_given_up and not self._tally_told:
            self._tally_check()
        self._tally_end = None

    def _tally_meet(self, end):
        """All ranks' finish(), from the stage that it has reached."""
        if end.join is None:
            self._tally_send()  # parameters may have changed without a whole step
            self._tally_land(wait=True)
            _operations.submit_to(end.joining, _operations.join_async)
        end.join.wait()
        if end.barrier is None:
            for share in self._tally_shares:
                share.pull()
            failure, call = self._tally_failure(), Call(self._tally_name, space=STATE)
            if failure is None:
                _operations.submit_to(end.passing, _operations.barrier_async, call)
            else:
                _calls.refuse(BARRIER, call, failure)
        if end.barrier is not None:
            try:
                end.barrier.wait()  # no rank adds before all have read
            except Error as failure:
                self._tally_refused = again(failure)
        self._tally_idle = True
        self._tally_given_up = self._tally_failure() is not None

    @torch.no_grad()
    def _tally_land(self, wait):
        for share in self._tally_shares:
            if wait or (share.operation is not None and share.operation.done()):
                share.land()

    @torch.no_grad()
    def _tally_send(self):
        """Take the newest values, and add what has changed.  All shares get as many additions, or ranks could wait for each other."""
        if not self._tally_sending:
            if not all([share.arrive() for share in self._tally_shares]):
                return
            for share in self._tally_shares:
                share.prepare()
            self._tally_sending = set(self._tally_shares)
        for share in self._tally_shares:
            if share in self._tally_sending:
                share.send(functools.partial(self._tally_sending.discard, share))
        self._tally_unsent = 0

    def step(self, closure=None):
        """Step as the optimizer does.  Every so many steps, add what this rank has changed and take the newest parameters.

        Raises FloatingPointError, with the parameter's name, if the change is not finite.  Nothing of it is added then.  Raises it,
        too, if the sum of the ranks' changes has overflowed, and Error if an addition has failed.  After either of these no later
        step() changes anything: it raises the same, until finish() gives the optimizer up."""
        # A scheduler made before looks there whether there was a step: PyTorch's name, and that of its older ones.
        self._tally_original._opt_called, self._tally_original._step_count = True, 1
        self._tally_settle()
        self._tally_check()
        self._tally_idle = False
        result = super().step(closure)
        self._tally_unsent += 1
        if self._tally_unsent >= self._tally_every:
            self._tally_send()
            if not self._tally_overlap:
                self._tally_land(wait=True)
        else:
            self._tally_land(wait=False)
        self._tally_check()
        return result

    # torch wraps the step of each new optimizer class to run its hooks; that of the class below already is.
    step.hooked = True

    def finish(self):
        """Add what is left, wait until all ranks are here, and take the newest parameters, which are the same on all ranks.

        No rank waits in step() for one that is here.  Training may go on afterwards.  Collective: all ranks call it equally
        often.  If an exception breaks it off, the next finish() or step() goes on with it, and both calls count as one.

        If an addition has failed on any rank, or the sum has overflowed, finish() gives the optimizer up on all ranks.  Parameters and
        state stay as they are on each rank, and another AsyncOptimizer may take over the parameters.  A rank that has not got the
        error from step() gets it from finish().  Another finish() does nothing."""
        self._tally_end = self._tally_end or _End()
        self._tally_settle()

    def add_param_group(self, param_group):
        """Not possible: services keep the parameters that the optimizer had when it was made."""
        raise NotImplementedError("an AsyncOptimizer takes no more parameters: make another one, on all ranks, of an optimizer "
                                  "that has all of them")

    def __deepcopy__(self, memo):
        raise TypeError("an AsyncOptimizer cannot be copied; make another one, of the copied model's optimizer")


def _span(p):
    """The device of a parameter's memory, its first address and the one behind its end."""
    begin = p.data_ptr()
    return str(p.device), begin, begin + p.element_size() * (1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride())))


def _check(optimizer, staleness, every):
    """Raise TypeError or ValueError for arguments that make no sense."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError("optimizer must be one of torch.optim, not %s" % type(optimizer).__name__)
    if isinstance(optimizer, Shared):
        raise ValueError("the optimizer is a DistributedOptimizer or an AsyncOptimizer already: pass one of torch.optim")
    if staleness is not None and (not isinstance(staleness, int) or staleness is True or not 1 <= staleness <= _MOST):
        raise ValueError("staleness must be from 1 to %d, or None for no bound, not %r" % (_MOST, staleness))
    if not isinstance(every, int) or every is True or every < 1:
        raise ValueError("every must be a positive number of steps, not %r" % (every,))


def _check_parameters(groups, named_parameters):
    """The (name, parameter) pairs of the optimizer, in the order of named_parameters.  Raises for what cannot be shared."""
    entries = list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in entries):
        raise ValueError("named_parameters must be (name, parameter) pairs, such as model.named_parameters()")
    own = {id(p) for group in groups for p in group["params"]}
    first = {}  # names of tied parameters; the first counts
    for name, p in entries:
        if id(p) in own:
            first.setdefault(id(p), (name, p))
    if len(first) < len(own):
        raise ValueError("%d of the optimizer's parameters are not in named_parameters" % (len(own) - len(first)))
    named = list(first.values())
    names = [name for name, _ in named]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError("names in named_parameters must differ; more than once: %s" % ", ".join(doubles))
    for name, p in named:
        try:
            calls.check(p)
        except (TypeError, NotImplementedError) as reason:
            raise type(reason)("parameter %s: %s" % (name, reason)) from None
        if p.dtype not in _DTYPES:
            raise TypeError("parameter %s is of %s, which loses small changes: keep parameters in float32 or float64, and compute "
                            "with less in torch.autocast" % (name, p.dtype))
        if any(size > 1 and not stride for size, stride in zip(p.shape, p.stride())):
            raise ValueError("parameter %s is expanded: its elements share memory, so their changes would count more than once; "
                             "make it contiguous()" % name)
        owner = _owners.get(id(p))
        if owner is not None and owner._tally_generation == _job.generation() and not owner._tally_idle:
            raise ValueError("parameter %s is in an AsyncOptimizer already, and its changes would count twice: call the finish() of "
                             "that one first" % name)
    spans = sorted((*_span(p), name) for name, p in named if p.numel())
    for (device, _, end, name), (next_device, begin, _, next_name) in zip(spans, spans[1:]):
        if device == next_device and begin < end:
            raise ValueError("parameters %s and %s share memory, so their changes would count twice: make them one Parameter"
                             % (name, next_name))
    return named


def AsyncOptimizer(optimizer, named_parameters, staleness=None, every=1, overlap=True):
    """An optimizer for asynchronous training: services keep the parameters, and each rank steps at its own pace.  No rank waits for
    another unless there is a bound.  `optimizer` must not be used any more.

    optimizer: any torch optimizer, over the same parameters on all ranks.  The result is an instance of its class too, and has its
        state.  State is each rank's own: momentum is not exchanged.
    named_parameters: (name, parameter) pairs, such as model.named_parameters(); must name all parameters of the optimizer, which
        are of float32 or float64.
    staleness: how many additions a rank may be ahead of the slowest, 1 to 255.  None: no bound.
    every: steps between additions.
    overlap: the next step begins at once.  At the end of a later step(), parameters become the newest values plus what this rank
        has changed since.  False: step() waits for the newest values.

    Parameters become rank 0's.  Buffers stay each rank's.  All ranks call finish() at the end of training.  A rank needs four times
    the parameters' memory beside them, and for those on a GPU five times.

    Collective: every rank must create it over the same names, in the same order, with the same staleness and every.  If they differ,
    Error is raised on all ranks.  A deep copy of it raises TypeError.  docs/async.md says when it pays.
    """
    name = "AsyncOptimizer %d" % _take_number()
    try:
        _check(optimizer, staleness, every)
        named = _check_parameters(optimizer.param_groups, named_parameters)
        kind = type(type(optimizer).__name__, (_Async, type(optimizer)), {})
        wrapped = kind.__new__(kind)
        # Groups and state are shared with `optimizer`, so that a scheduler made before goes on working, and stay so (Shared); its
        # wrapping of the instance's step is not ours.
        wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
        wrapped._tally_original = optimizer
        wrapped._tally_set_up(name, named, every, overlap)
    except Exception as reason:
        _calls.refuse(ALLGATHER, Call(name, space=STATE), reason)  # of compare()
        raise
    wrapped._tally_share(named, staleness)
    return wrapped

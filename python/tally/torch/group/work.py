"""The result of a process group's call: its operations, and the steps at their end.

Flow: Group adds operations and finishing touches to a GroupWork -> at the end of the last one, the first thread that sees
it (on the completion queue, or in wait()) runs the touches, once -> the future, if one was asked for, is completed.  A
thread "tally-timer" ends calls past their deadline if a thread waits for their future.

C++ gets a work made from the call's future (_create_work_from_future) wherever it takes a work from Python: in
Reducer._set_forward_pass_work_handle and _register_work, both wrapped at import, and in Work.boxed.  From a Python work
torch keeps only the C++ half there, whose wait() never returns.  Where C++ itself calls the group, torch keeps both
halves since 2.7.  These are all functions of PyTorch 2.13 that take a work from Python, by their signatures.
test_calls_that_only_cpp_keeps hangs without this, and counts that no call is left with it (commit 67dc640).  Rejected:
works that keep themselves until C++ has waited (where the reducer divides by the ranks at the start it never waits, so
each step would leave one); PythonCallbackWork as base (older PyTorch has none, and a bucket costs one more object).

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import datetime
import errno
import math
import os
import threading
import time
import weakref

import torch

from ... import _where
from ..._errors import Error, again
from .. import device, patches
from ..patches import Future, Work
from . import outcome
from .earlier import Earlier

_LOOK_S = 0.5  # between looks whether another thread has ended the call

# Where C++ has called (DDP's reducer, functional collectives), a PyTorch before 2.7 keeps only what C++ sees of a work,
# and once the rest has been collected waits for ever.
KEEPS_HALF = torch.__version__ < (2, 7)

_HERE = contextlib.nullcontext()  # where results arrive that are on no device

_ended = threading.local()  # call: the one whose end this thread is telling to those who wait for its future


class UnderWay:
    """Calls in flight, as long as other objects keep them; also other objects that know whether they have ended."""

    def __init__(self):
        self._lock = threading.Lock()
        self._references = []
        self._many = 64  # of them: time to let go of those that have ended

    def add(self, work):
        with self._lock:
            if len(self._references) >= self._many:
                self._references = [one for one in self._references if not getattr(one(), "has_ended", True)]
                self._many = 64 + 2 * len(self._references)
            self._references.append(weakref.ref(work))

    def all(self):
        """A list of them, including some that have ended."""
        works = [reference() for reference in self._references]
        return [work for work in works if work is not None]


def just_ended():
    """The call whose future's callbacks this thread runs; None: no call's."""
    return getattr(_ended, "call", None)


class _Work(Work):
    """A work whose own C++ half knows nothing of its end.

    torch keeps the Python half, too, where C++ has called the group (since 2.7).  Where Python hands a work to C++, torch
    keeps the C++ half alone; that one never ends once Python has dropped the rest.  So C++ gets lasting() there."""

    def lasting(self):
        """A work of C++ alone that ends as this one does."""
        return patches.work_of(self.get_future())

    def boxed(self):
        return self.lasting().boxed()


class GroupWork(_Work):
    """One call of a group in flight.  It is filled in within `with`: with one operation if it is `numbered`, so that
    the ranks' n-th calls meet whatever they are, or with messages.

    options: c10d's of the call, or its time-out.
    """

    # What is so until it becomes otherwise: to set it for each call took some of the 50 us that a bucket may.
    has_ended = False
    _operations = _touches = ()
    _earlier = ()  # calls of which it waits for the end
    _unseen = ()  # of the operations those whose end nobody sees until somebody asks for a future
    _left = 1     # operations whose end has not been seen, and one for the filling in
    prescale = 1.0  # factor of each input of a reduction
    _waits = False  # nobody sees it but who waits
    _view = None    # makes what result() and the future give, where that is not the list of the outputs
    _failure = _late = None  # why it has failed; why it was taken back
    _told = False  # its caller hears of its failure, by wait() or by a future
    number = 0     # the group's of this call, if it is numbered
    _begun = _future = None
    _place = _device = _event = None  # where the tensors are, and when the results are there

    def __init__(self, group, what, numbered, outputs, options):
        Work.__init__(self)
        self.group, self.what, self._outputs, self._options = group, what, outputs, options
        self._given = options if isinstance(options, datetime.timedelta) else getattr(options, "timeout", None)
        self.blocks = not getattr(options, "asyncOp", True)  # its caller waits for it (PyTorch 2.8 and later say so)
        self._start, self._patience = time.monotonic(), group.limit
        self._lock = threading.RLock()  # guards what follows, and the above
        self.numbered = self._missing = numbered
        # The group's number of this call, or of the last one that was begun before its future was asked for, or that the
        # future's callbacks have begun.
        self.latest = group.begun
        if KEEPS_HALF:
            self._itself = self  # so that only the collector frees us: C++ may ask for the end once more for each tensor

    @property
    def _limit(self):
        """Seconds until the time-out ends the call."""
        limit = self._given.total_seconds() if self._given is not None else 0
        return limit if limit > 0 else self._patience

    @property
    def end(self):
        """The time at which the time-out ends the call, on the monotonic clock."""
        return self._start + self._limit

    def sender(self):
        """After the end of a recv: the rank that sent."""
        return -1

    # --- filled in by Group

    def __enter__(self):
        group = self.group
        if group.failure is not None:
            raise group.gone()
        group.enter(self)
        self._lock.acquire()  # who ends the group meanwhile takes back what is there after it
        if group.failure is not None:
            self._filled_in()
            raise group.gone()
        return self

    def _filled_in(self):
        self._lock.release()
        if self.numbered:
            self.group.leave()

    def give_up(self, error):
        """Raise instead of being filled in.  The other ranks' operations fail with it, and the group is unusable."""
        self.group.refuse(error)
        self.group.fail(error)
        raise again(error)

    def look_at(self, tensors):
        """Note tensors of the call, which must be in one place."""
        for tensor in tensors:
            if self._place is None:
                self._place, self._device = tensor.device, device.of(tensor)
            elif self._place != tensor.device:
                raise ValueError("tensors on %s and on %s in one call; move them to one device"
                                 % (self._place, tensor.device))
        if self._device is not None:
            self._device.keep(tensors)

    def add(self, submit, *arguments, reduction=0, note=None, in_place=False):
        """Call submit(Call, *arguments), which returns an operation, and return that.

        note: properties that the library does not see.
        in_place: nothing follows the operation, so its end is noticed only if it is asked for.
        """
        unseen, then = in_place and self._device is None, None
        if not unseen:
            # Who waits at once needs nobody else to see the end.
            self._waits = self.blocks
            then = None if self._waits else self._one_ended
        self._left += 1
        self._missing = False  # what cannot be submitted is refused by who was to submit it
        operation = submit(self.group.call(reduction, note, then, self.prescale), *arguments)
        self._operations += (operation,)
        if unseen:
            self._unseen += (operation,)
        return operation

    def end_after(self, calls):
        """End no sooner than these calls."""
        self._earlier, several = calls, tuple([Earlier(call) for call in calls])
        self._left += len(several)
        self._operations += several
        self._unseen += several

    def _see(self):
        with self._lock:
            unseen, self._unseen = self._unseen, ()
        for operation in unseen:
            operation.watch(self._one_ended)

    def show(self, view):
        """Have result() and the future give view()."""
        self._view = view

    def follow(self, touch):
        """Call touch() after the end of all operations, if they succeeded; in order of calls."""
        self._touches += (touch,)

    def __exit__(self, kind, error, trace):
        if error is None:
            self._left -= 1
            ended = not self._left
            self._filled_in()
            if KEEPS_HALF:
                self.group.hold(self)
            if ended:
                self._settle()
            return
        try:
            if self._missing and not isinstance(error, Error):
                # The other ranks' operations must fail, and later calls still meet.
                self.group.refuse("%s: %s" % (self.what, error))
        finally:
            self._filled_in()
            self.group.in_flight.discard(self)
        if _where.is_handlers(error):
            return
        if isinstance(error, Error):
            raise self._explained(error) from None
        if type(error) in (NotImplementedError, ValueError):  # what Gloo refuses is a RuntimeError
            again_as = RuntimeError if type(error) is ValueError else NotImplementedError
            raise again_as("%s: %s" % (self.what, error)) from None

    # --- the end

    def _one_ended(self, _):
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._settle()

    def _settle(self):
        """All operations have ended: finish, and complete the future."""
        self.finish()
        self._complete()

    def finish(self):
        """Run the touches, once, when all operations have ended.  Calls no function of the user's."""
        with self._lock:
            if not self.has_ended:
                try:
                    with self._device.arrived() if self._device else _HERE:
                        for operation in self._operations:
                            operation.wait()
                        if self._touches:
                            with torch.no_grad():
                                for touch in self._touches:
                                    touch()
                        if self._device:
                            self._event = self._device.mark()
                except Exception as error:
                    if _where.is_handlers(error):  # the next who waits finishes it: touches only copy results
                        raise
                    self._failure = error
                if isinstance(self._failure, Error):
                    # Taken back by us, or by another rank, whose group is no more.
                    taken_back = self._failure.errno == errno.ECANCELED
                    self._failure = self._late if self._late and taken_back else self._explained(self._failure)
                    if self._late or taken_back:
                        self.group.fail(self._failure, self)
                self._close()

    def fail(self, failure):
        """End the call with `failure`, soon: operations in flight are taken back on all ranks, unless all have begun
        them."""
        with self._lock:
            if self.has_ended or self._late is not None:
                return
            self._late = failure
            operations = self._operations
        for operation in operations:
            operation.cancel(str(failure))

    def _close(self):
        self.group.in_flight.ended(self, None if self._told else self._failure)  # before others see the end
        self.has_ended = True
        self._operations = self._touches = self._unseen = ()
        if self._earlier:
            self._earlier = [call for call in self._earlier if call.is_on_device]  # join() asks for these alone

    def await_device(self):
        """Wait until the results of the call and of those before it are on their device."""
        if self._event is not None:
            self._event.synchronize()
        for call in self._earlier:
            call.await_device()

    def _complete(self):
        """Complete the future, if there is one that is not complete."""
        with self._lock:
            begun, self._begun = self._begun, None
        if begun is not None:
            before, _ended.call = just_ended(), self
            try:
                if self._device is None:
                    begun.end(self._value)
                else:
                    begun.set_result(None)  # runs the callbacks
            finally:
                _ended.call = before

    def _explained(self, error):
        text, group = str(error), str(self.group)
        if text.startswith(group):  # an earlier call's
            return error
        if " no. " not in text.partition(":")[0]:  # the library has not named the call
            text = "%s: %s" % (self.what, text)
        return Error(text if group == "process group default_pg" else "%s: %s" % (group, text), error.errno)

    def tell(self):
        """Note that the caller hears of a failure: no barrier raises it."""
        with self._lock:
            self._told = True
            if self._failure is not None:
                self.group.in_flight.discard(self)

    def _check(self):
        if self._failure is not None:
            raise again(self._failure)

    def _value(self, _=None):
        # Raised in then()'s callback, an error is one for C++ too.
        self._check()
        if self._device is None:  # no stream waits for such a future
            self.await_device()
        else:
            self.join()
        return self.result()

    def join(self):
        """Make the current stream wait for results on a device."""
        if self._event is not None:
            self._device.join(self._event)
        for call in self._earlier:
            call.join()

    @property
    def deadline(self):
        """The time at which the group's time-out ends the call; None once it has, or the call has ended."""
        return None if self.has_ended or self._late is not None else self.end

    def expire(self):
        """End the call by the group's time-out, and with it the group: its ranks are out of step."""
        self.fail(Error("%s of %s: Timed out after %g s, %s time-out: a rank is late, or has not called it"
                        % (self.what, self.group, self._limit,
                           "the group's" if self._limit == self._patience else "its own"), errno.ETIMEDOUT))

    # --- called by torch

    def wait(self, timeout=None):
        """Wait for the end.  Raises tally.Error with the reason if the call has failed, or has not ended in time.

        timeout: a timedelta; after it the call goes on.  The group's time-out ends call and group.
        An exception of a signal handler comes out at once; the call goes on, and may be waited for again.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0
        if not self.ends(seconds if seconds > 0 else None):
            raise Error("%s of %s: Timed out after %g s; the call goes on" % (self.what, self.group, seconds), errno.ETIMEDOUT)
        if self._failure is not None:
            self.tell()
        self._check()
        self.join()
        return True

    def ends(self, timeout=None):
        """As Operation's."""
        end = self.end
        deadline = end if timeout is None else min(end, time.monotonic() + timeout)
        for operation in self._operations:
            while not self.has_ended:  # another thread may abort the group
                left = deadline - time.monotonic() if self._late is None else math.inf  # it ends soon
                if operation.ends(max(0.0, min(left, _LOOK_S))):
                    break
                if left <= _LOOK_S:
                    if deadline < end:
                        return False
                    self.expire()
        self._settle()
        if KEEPS_HALF:
            self.group.let_go(self)
        return True

    @property
    def is_on_device(self):
        return self._device is not None

    def ended(self):
        """See whether the call has ended, if no thread has noticed yet."""
        if not self.has_ended:
            for operation in self._operations:
                if not operation.done():
                    return False
            self._settle()
        return True

    def ended_unseen(self):
        """Whether the call has ended, and nothing is left to do but to see it."""
        return self.has_ended or (bool(self._unseen) and all([operation.done() for operation in self._operations]))

    def is_completed(self):
        if not self.ended() and time.monotonic() >= self.end:
            self.expire()
        return self.has_ended

    def is_success(self):
        return self.is_completed() and self._failure is None

    def exception(self):
        if not self.is_completed():
            return None
        if self._failure is not None:
            self.tell()
        return self._failure

    def result(self):
        return self._outputs if self._view is None else self._view()

    def _source_rank(self):
        return self.sender()

    source_rank = _source_rank

    def synchronize(self):
        self.wait()

    def get_future(self):
        """A future of the outputs."""
        self.latest = self.group.begun
        return self.future(True)

    def future(self, tells=False):
        """tells: whether the caller hears of a failure by it."""
        if KEEPS_HALF:
            self.group.let_go(self)
        if not self.ended() and self._waits:  # nobody else will see the end
            self.ends()
        if self.has_ended and self._device is None:
            self.await_device()
        with self._lock:
            if tells:
                self.tell()
            if self._future is not None:
                return self._future
            if self.has_ended and self._failure is None and self._event is None:
                self._future = Future([])
                self._future.set_result(self.result())
                return self._future
            if self._device is None:
                self._begun = outcome.Begun()
                self._future = self._begun.then_outcome()
            else:
                self._begun = self._device.runtime.future()
                self._future = self._begun.then(self._value)
        self._see()
        deadlines.watch(self)
        if self.has_ended:
            self._complete()
        return self._future


class Together(_Work):
    """Calls that are waited for together."""

    def __init__(self, works):
        Work.__init__(self)
        self._works = works

    def wait(self, timeout=None):
        try:
            return all([work.wait(timeout) for work in self._works])
        except Error:  # one failure stands for all
            for work in self._works:
                work.tell()
            raise

    def is_completed(self):
        return all([work.is_completed() for work in self._works])

    def get_future(self):
        """A future of the outputs of all calls, in their order."""
        ended = torch.futures.collect_all([work.get_future() for work in self._works])
        return ended.then(lambda _: [output for one in ended.value() for output in one.value()])


patches.take_works(lambda one: one.lasting() if isinstance(one, _Work) else one)


class _Deadlines:
    """Ends calls past their deadline if a thread waits for their future.  A thread that waits for the call itself looks
    at the time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = UnderWay()
        self._runs = False  # a thread
        self._until = None  # when the thread wakes up; None: when told to

    def watch(self, work):
        deadline = work.deadline
        if deadline is None:  # it has ended
            return
        with self._lock:
            self._waiting.add(work)
            if not self._runs:
                threading.Thread(target=self._run, name="tally-timer", daemon=True).start()
                self._runs = True
            elif self._until is None or deadline < self._until:
                self._changed.notify()

    def _sweep(self):
        """(calls that are late, when the next one will be)."""
        now, late, next_one = time.monotonic(), [], None
        for work in self._waiting.all():
            deadline = work.deadline
            if deadline is not None and deadline <= now:
                late.append(work)
            elif deadline is not None and (next_one is None or deadline < next_one):
                next_one = deadline
        return late, next_one

    def _run(self):
        try:
            while True:
                with self._lock:
                    late, self._until = self._sweep()
                    if not late:
                        self._changed.wait(None if self._until is None else max(0.0, self._until - time.monotonic()))
                        continue
                while late:
                    late.pop(0).expire()
        finally:
            self._runs = False  # where expire() has raised: the next call begins another


deadlines = _Deadlines()
os.register_at_fork(after_in_child=deadlines.__init__)  # its thread is the parent's

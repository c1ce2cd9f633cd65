"""What a process group's call returns: its operations, and what is to be done at their end.

Flow: Group adds operations and finishing touches to a GroupWork -> at the end of the last one, whoever sees it first
(a thread on the completion queue, or who waits) runs the touches, once -> the future, if somebody has asked for one,
is completed.  A thread "tally-timer" ends calls past their deadline for those who wait for a future.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import contextlib
import datetime
import errno
import math
import threading
import time
import weakref

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from .._core import Error, again
from . import device

_LOOK_S = 0.5  # between looks whether another thread has ended the call

# Where C++ has called (DDP's reducer, functional collectives), a PyTorch before 2.7 keeps only what C++ sees of a work,
# and once the rest has been collected waits for ever.
KEEPS_HALF = torch.__version__ < (2, 7)

_ended = threading.local()  # call: the one whose end this thread is telling to those who wait for its future


def just_ended():
    """The call in whose future's callbacks this thread is; None: in no call's."""
    return getattr(_ended, "call", None)


def _nothing(_):
    """What a call that has ended does at the end of an operation."""


class GroupWork(Work):
    """One call of a group under way.  To be filled in `with` it: with one operation if it is `numbered`, so that the
    ranks' n-th calls meet whatever they are, or with messages.

    options: c10d's of the call, or its time-out."""

    def __init__(self, group, what, numbered, outputs, options):
        super().__init__()
        self.group, self.what, self._outputs = group, what, outputs
        limit = options if isinstance(options, datetime.timedelta) else getattr(options, "timeout", None)
        limit = limit.total_seconds() if limit is not None else 0
        self._limit = limit if limit > 0 else group.limit
        self._deadline = time.monotonic() + self._limit
        # Who waits at once needs nobody else to see the end; who waits later, for a sum in place, neither.
        self._then = self._one_ended if getattr(options, "asyncOp", True) else None
        self._lock = threading.RLock()  # guards the rest
        self._operations, self._touches = [], []
        self._unseen = []  # of the operations those whose end nobody sees until somebody asks for a future
        self._numbered = self._missing = numbered
        self._left = 1  # operations that have not ended, and one for the filling in
        self._settled = False
        self._failure = self._late = None  # why it has failed; why it was taken back
        self._begun = self._future = None
        self._place = self._device = self._event = None  # where the tensors are, and when the results are there
        self.sender = lambda: -1  # after the end of a recv: from which rank
        # The group's number of this call, or of the last one that was begun before its future was asked for, or that the
        # future's callbacks have begun.
        self.latest = group.begun

    # --- filled in by Group

    def __enter__(self):
        self.group.check()
        if self._numbered:
            self.group.enter(self)
        self._lock.acquire()  # who ends the group meanwhile takes back what is there after it
        try:
            self.group.check()
        except Error:
            self._filled_in()
            raise
        return self

    def _filled_in(self):
        self._lock.release()
        if self._numbered:
            self.group.leave()

    def give_up(self, error):
        """Raise instead of being filled in; the other ranks' operations fail with it, and the group is no more."""
        self.group.refuse(error)
        self.group.fail(error)
        raise again(error)

    def look_at(self, tensors):
        """Tensors of the call, which must be in one place."""
        for tensor in tensors:
            if self._place is None:
                self._place, self._device = tensor.device, device.of(tensor)
            elif self._place != tensor.device:
                raise ValueError("tensors on %s and on %s in one call; move them to one device"
                                 % (self._place, tensor.device))
        if self._device is not None:
            self._device.keep(tensors)

    def add(self, submit, *arguments, note=None, in_place=False):
        """Call submit(*arguments, then, note), which returns an operation, and return that.

        note: what the library does not see of it.
        in_place: nothing is to be done after it, so that its end is seen only if somebody asks for it."""
        then = None if in_place and self._device is None else self._then
        with self._lock:
            self._left += 1
            self._missing = False  # what cannot be submitted is refused by who was to submit it
        operation = submit(*arguments, then, note)
        self._operations.append(operation)
        if then is not self._then:
            self._unseen.append(operation)
        return operation

    def _see(self):
        with self._lock:
            unseen, self._unseen = self._unseen, []
        for operation in unseen:
            operation.watch(self._one_ended)

    def follow(self, touch):
        """Call touch() after the end of all operations, if they have ended well; in order of calls."""
        self._touches.append(touch)

    def __exit__(self, kind, error, trace):
        try:
            if error is not None and not isinstance(error, Error):
                # The other ranks' operations must fail, and later calls still meet.
                if self._missing:
                    self.group.refuse("%s: %s" % (self.what, error))
        finally:
            self._filled_in()
        if isinstance(error, Error):
            raise self._explained(error) from None
        if error is not None:
            if type(error) in (NotImplementedError, ValueError):
                raise type(error)("%s: %s" % (self.what, error)) from None
        if error is None:
            self.group.hold(self)
            if self._touches:
                self._see()
            if self._then is not None:
                self._one_ended(None)

    # --- the end

    def _one_ended(self, _):
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._settle()

    def _settle(self):
        """All operations have ended: finish, once."""
        with self._lock:
            if not self._settled:
                try:
                    with self._device.arrived() if self._device else contextlib.nullcontext():
                        for operation in self._operations:
                            operation.wait()
                        if self._touches:
                            with torch.no_grad():
                                for touch in self._touches:
                                    touch()
                        if self._device:
                            self._event = self._device.mark()
                except Error as error:
                    taken_back = error.errno == errno.ECANCELED  # by us, or by another rank, whose group is no more
                    self._failure = self._late if self._late and taken_back else self._explained(error)
                    if self._late or taken_back:
                        self.group.fail(self._failure, self)
                except Exception as error:
                    self._failure = error
                self._close()
        self._complete()

    def fail(self, failure):
        """Have it end with `failure`, soon: what is under way is taken back, on all ranks, unless all have begun it."""
        with self._lock:
            if self._settled or self._late is not None:
                return
            self._late = failure
            operations = list(self._operations)
        for operation in operations:
            operation.cancel(str(failure))

    def _close(self):
        self._settled = True
        self._operations, self._touches, self._unseen = [], [], []
        if self._then is not None and not KEEPS_HALF:
            # A method of our own keeps us, and the tensors, until garbage is collected; as it should where C++ may ask for
            # the end once more, for each of the tensors.
            self._then = _nothing

    def _complete(self):
        """Complete the future, if there is one and nobody has."""
        with self._lock:
            begun, self._begun = self._begun, None
        if begun is not None:
            before, _ended.call = just_ended(), self
            try:
                begun.set_result(None)  # runs the callbacks
            finally:
                _ended.call = before

    def _explained(self, error):
        return Error("%s of %s: %s" % (self.what, self.group, error), error.errno)

    def _check(self):
        if self._failure is not None:
            raise again(self._failure)

    def _value(self, _):
        # Raised here, in then()'s callback, an error is one for C++ too.
        self._check()
        self._join()
        return self._outputs

    def _join(self):
        """The current stream waits for results on a device."""
        if self._event is not None:
            self._device.join(self._event)

    @property
    def deadline(self):
        """When the group's time-out ends the call; None once it has, or the call has ended."""
        return None if self._settled or self._late is not None else self._deadline

    def expire(self):
        """The group's time-out ends the call, and with it the group: its ranks are out of step."""
        self.fail(Error("%s of %s has not ended within %g s, %s time-out: a rank is late, or has not called it"
                        % (self.what, self.group, self._limit,
                           "the group's" if self._limit == self.group.limit else "its own"), errno.ETIMEDOUT))

    # --- called by torch

    def wait(self, timeout=None):
        """Wait for the end; raises tally.Error with the reason if the call has failed, or has not ended in time.

        timeout: a timedelta; past it the call goes on.  The group's time-out ends call and group."""
        seconds = timeout.total_seconds() if timeout is not None else 0
        deadline = self._deadline if seconds <= 0 else min(self._deadline, time.monotonic() + seconds)
        for operation in list(self._operations):
            ended = False
            while not ended and not self._settled:  # another thread may abort the group
                left = deadline - time.monotonic() if self._late is None else math.inf  # it ends soon
                try:
                    operation.wait(max(0.0, min(left, _LOOK_S)))
                    ended = True
                except TimeoutError:
                    if left > _LOOK_S:
                        continue
                    if deadline < self._deadline:
                        raise Error("%s of %s has not ended within %g s" % (self.what, self.group, seconds),
                                    errno.ETIMEDOUT) from None
                    self.expire()
                except Error:
                    ended = True  # _settle() will meet it again
        self._settle()
        self.group.let_go(self)
        self._check()
        self._join()
        return True

    def is_completed(self):
        if not self._settled:
            if all(operation.done() for operation in list(self._operations)):
                self._settle()
            elif time.monotonic() >= self._deadline:
                self.expire()
        return self._settled

    def is_success(self):
        return self.is_completed() and self._failure is None

    def exception(self):
        return self._failure if self.is_completed() else None

    def result(self):
        return self._outputs

    def _source_rank(self):
        return self.sender()

    source_rank = _source_rank

    def synchronize(self):
        self.wait()

    def get_future(self):
        """A future of the outputs."""
        self.group.let_go(self)
        self.latest = self.group.begun
        if self._then is None:  # begun by who waits at once: nobody else will see the end
            try:
                self.wait()
            except RuntimeError:
                pass  # it is the future's too
        with self._lock:
            first = self._future is None
            if first:
                self._begun = self._device.runtime.future() if self._device else Future()
                self._future = self._begun.then(self._value)
        if first:
            self._see()
            deadlines.watch(self)
        if self._settled:
            self._complete()
        return self._future


class Together(Work):
    """Calls that are waited for as one."""

    def __init__(self, works):
        super().__init__()
        self._works = works

    def wait(self, timeout=None):
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self):
        return all([work.is_completed() for work in self._works])


class _Deadlines:
    """Ends calls past their deadline whose future somebody waits for.  Who waits for a call looks at the time."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting = collections.deque()  # weak references
        self._thread = None
        self._until = None  # when the thread wakes up; None: when told to

    def watch(self, work):
        deadline = work.deadline
        if deadline is None:  # it has ended
            return
        with self._changed:
            while self._waiting and self._has_ended(self._waiting[0]()):
                self._waiting.popleft()
            self._waiting.append(weakref.ref(work))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="tally-timer", daemon=True)
                self._thread.start()
            elif self._until is None or deadline < self._until:
                self._changed.notify()

    @staticmethod
    def _has_ended(work):
        return work is None or work.deadline is None

    def _sweep(self):
        """(calls that are late, when the next one will be)."""
        now, late, next_one = time.monotonic(), [], None
        for work in [reference() for reference in self._waiting]:
            deadline = None if work is None else work.deadline
            if deadline is not None and deadline <= now:
                late.append(work)
            elif deadline is not None and (next_one is None or deadline < next_one):
                next_one = deadline
        return late, next_one

    def _run(self):
        while True:
            with self._changed:
                late, self._until = self._sweep()
                if not late:
                    self._changed.wait(None if self._until is None else max(0.0, self._until - time.monotonic()))
                    continue
            for work in late:
                work.expire()


deadlines = _Deadlines()

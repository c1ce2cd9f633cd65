"""Ranks that operate among themselves on vectors: one of the library's groups, as the backend needs it.

Flow: Group puts tensors into vectors of types that the library has -> an operation of `_operations` in the group's ordered
name space.  A message from any rank is looked for first (probe) and then received from its sender.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import ctypes
import errno
import functools
import threading
import time

import torch

from ... import _calls, _errors, _job, _operations, _where
from ..._calls import Call
from ..._lib import PUSH_PULL
from .. import device
from ..calls import DTYPES, reduce

_SPACE = 128        # an ordered name space (TALLY_SPACE_ORDERED in tally.h)
_NOTES = _SPACE + 1  # that of messages which are the backend's own


class Ranks:
    """Ranks of the job that operate among themselves; all vectors have types of the library.

    name: identifies these ranks on all of them.  ranks: their numbers in the job, in order.  job: as Call.job.
    """

    def __init__(self, name, ranks, job=None):
        self.size, self.rank = len(ranks), ranks.index(_job.rank() if job is None else job.rank)
        self.name, self.job = name, job
        self._group = _job.make_group(name, ranks, job)
        self._line = device.Line()
        self._lock = threading.RLock()  # guards the next
        self._waiting = {}              # tag -> what is to be received once the first of them has found a sender
        self._looking = False           # a search is being begun
        self._search = None             # it, if it has ended already

    def call(self, reduction=0, note=None, then=None, prescale=1.0, space=_SPACE):
        """The Call of one of these ranks' operations."""
        return Call(None, reduction, self._group, 0, prescale, space=space, note=note, then=then, line=self._line,
                    job=self.job)

    def _start(self, call, submit, *spans, numbered=True, ready=None):
        """Call submit(call, vectors) -> operation with vectors in host memory.  For vectors on a device, and after
        such, it is called later.

        spans: (vector that is read or None, vector that is written or None) for each.  ready: as in begin().
        """
        on = next((device.of(one) for span in spans for one in span if one is not None), None)
        self._line.calls += numbered
        if on is None and not self._line.waiting:
            return submit(call, [target if source is None else source for source, target in spans])
        return device.begin(call, on, [(call, PUSH_PULL if numbered else None, spans, submit)], ready=ready)

    def reduce_plain(self, call, tensor):
        """Reduce in place a contiguous tensor in host memory, of a type that the library has."""
        if self._line.waiting:
            return self.reduce(call, tensor)
        self._line.calls += 1
        address, count = tensor.data_ptr(), tensor.numel()
        return _operations.push_pull(call, address, address, count, DTYPES[tensor.dtype], (count,), tensor)

    def reduce(self, call, tensor):
        """Reduce a contiguous tensor in place."""
        vector = tensor.view(-1)
        if vector.is_cpu and self._line.waiting:
            return self._start(call, lambda call, _: reduce(call, vector, vector))
        self._line.calls += 1
        return reduce(call, vector, vector)

    def reduce_to(self, call, source, root):
        """Reduce the contiguous `source` in place at the root."""
        def submit(call, vectors):
            vector, = vectors
            address = vector.data_ptr()
            return _operations.reduce(call, address, address, vector.numel(), DTYPES[vector.dtype], root, vector)
        return self._start(call, submit, (source, source if self.rank == root else None))

    def reduce_scatter(self, call, source, target, counts):
        """Reduce the contiguous `source`; this rank's piece goes to `target`."""
        def submit(call, vectors):
            source, target = vectors
            return _operations.reduce_scatter(call, source.data_ptr(), target.data_ptr(), counts, DTYPES[source.dtype], vectors)
        return self._start(call, submit, (source, None), (None, target))

    def broadcast(self, call, buffer, root):
        """Overwrite the vector `buffer` with the root's."""
        if self.rank == root:  # it may have trained for all
            _operations.exchange(buffer.numel())

        def submit(call, vectors):
            vector, = vectors
            count = vector.numel()
            return _operations.broadcast(call, vector.data_ptr(), count, DTYPES[vector.dtype], root, (count,), vector)
        return self._start(call, submit, (buffer, None) if self.rank == root else (None, buffer))

    def gather(self, call, vector):
        """Gather vectors, whose lengths may differ; the operation has pieces()."""
        def submit(call, vectors):
            vector, = vectors
            count = vector.numel()
            return _operations.allgather(call, vector.data_ptr(), count, DTYPES[vector.dtype], (count,), vector)
        return Gathering(self._start(call, submit, (vector, None)), vector.new_empty(0))

    def gather_into(self, call, source, target):
        """Gather vectors of one length into `target`. `source` may be this rank's own place in it."""
        def submit(call, vectors):
            source, target = vectors
            count = source.numel()
            return _operations.allgather_into(call, source.data_ptr(), target.data_ptr(), count, DTYPES[source.dtype], (count,),
                                              vectors)
        return self._start(call, submit, (source, None), (None, target))

    def gather_to(self, call, vector, target, counts, root):
        """Gather vectors at the root, which has `target` and `counts`; None on other ranks."""
        def submit(call, vectors):
            vector = vectors[0]
            return _operations.gather(call, vector.data_ptr(), vector.numel(), vectors[1].data_ptr() if counts else None, counts,
                                      DTYPES[vector.dtype], root, vectors)
        return self._start(call, submit, (vector, None), *([(None, target)] if counts else []))

    def scatter(self, call, source, counts, vector, root):
        """The opposite of gather_to()."""
        def submit(call, vectors):
            vector = vectors[0]
            return _operations.scatter(call, vectors[1].data_ptr() if counts else None, counts, vector.data_ptr(), vector.numel(),
                                       DTYPES[vector.dtype], root, vectors)
        return self._start(call, submit, (None, vector), *([(source, None)] if counts else []))

    def exchange(self, call, source, give, target, take):
        """Send elements of `source` to each rank, and receive elements of `target` from each."""
        def submit(call, vectors):
            source, target = vectors
            return _operations.alltoall(call, source.data_ptr(), give, target.data_ptr(), take, DTYPES[source.dtype], vectors)
        return self._start(call, submit, (source, None), (None, target))

    def barrier(self, call):
        return self._start(call, lambda call, _: _operations.barrier_async(call))

    def meet(self, limit, what):
        """Wait until all ranks are here, for at most so many seconds.  It is no numbered call.

        what: what these ranks make, for the error.

        Raises:
            Error: Time is up.  Ranks that come later get the same error.
        """
        meeting = _operations.barrier_async(Call("making of the " + what, group=self._group, job=self.job))
        if not meeting.ends(limit):
            meeting.cancel("%s: Timed out after %g s, the store's time-out: a rank is late, or has not made this group"
                           % (what, limit))
        meeting.wait()

    def refuse(self, reason):
        def submit(call, _):
            _calls.refuse(PUSH_PULL, call, reason)
            raise RuntimeError(reason)  # the end of it

        self._line.calls += 1
        if self._line.waiting:
            device.begin(self.call(), None, [(self.call(), None, (), submit)])
        else:
            _calls.refuse(PUSH_PULL, self.call(), reason)

    def send(self, call, vector, to, tag):
        _operations.exchange(_operations.MANY)

        def submit(call, vectors):
            vector, = vectors
            return _operations.send(call, vector.data_ptr(), vector.numel(), DTYPES[vector.dtype], to, tag, vector)
        return self._start(call, submit, (vector, None), numbered=False)

    def receive(self, call, vector, sender, tag):
        """Receive into `vector` from a rank, or from any (None). The operation then knows its sender."""
        with self._lock:
            waiting = self._waiting.setdefault(tag, collections.deque())
            if sender is not None and not waiting:
                return self.receive_from(call, vector, sender, tag)
            one = Receiving(self, call, vector, sender, tag)
            waiting.append(one)
            begun = self._begin(waiting) if len(waiting) == 1 else []
        for other in begun:
            other.tell()
        return one

    def receive_from(self, call, vector, sender, tag, ready=None):
        _operations.exchange(_operations.MANY)

        def submit(call, vectors):
            vector, = vectors
            return _operations.recv(call, vector.data_ptr(), vector.numel(), DTYPES[vector.dtype], sender, tag, vector)
        return self._start(call, submit, (None, vector), numbered=False, ready=ready)

    def send_note(self, vector, to, tag):
        """Send a vector in host memory as a message apart from those of send()."""
        return _operations.send(self.call(space=_NOTES), vector.data_ptr(), vector.numel(), DTYPES[vector.dtype], to, tag, vector)

    def receive_note(self, vector, sender, tag):
        return _operations.recv(self.call(space=_NOTES), vector.data_ptr(), vector.numel(), DTYPES[vector.dtype], sender, tag,
                                vector)

    def _begin(self, waiting, search=None):
        """Begin the receives that can begin: each one after a search waits for it, or it might take the search's
        message.

        search: has ended, for the first that waits.  Returns the receives that have begun or failed.  The caller tells
            them so once the lock is free, because code after an end may receive again, or wait for another thread that
            does.
        """
        begun = []
        while waiting:
            one = waiting[0]
            if one.done():  # cancelled; what was found for it is there for the next
                waiting.popleft()
                search = None
                continue
            try:
                if one.sender is None and search is None:
                    search = self._look(waiting)
                    if search is None:
                        break
                if search is not None:
                    search.wait()
                    one.sender = search.source()
                one.begin()
            except Exception as error:  # the job has failed, or has ended
                one.fail(error)
                if _where.is_handlers(error):
                    waiting.popleft()
                    raise
            search = None
            begun.append(waiting.popleft())
        return begun

    def _look(self, waiting):
        """Look for the sender of the first receive that waits.  Returns the search if it has ended before this function
        returns."""
        self._looking = True
        try:
            _operations.probe(self.call(then=functools.partial(self._found, waiting)), waiting[0].tag)
        finally:
            self._looking = False
            search, self._search = self._search, None
        return search

    def _found(self, waiting, search):
        """Handle the end of a search."""
        with self._lock:
            if self._looking:  # in _look(): no other thread has the lock then
                self._search = search
                return
            begun = self._begin(waiting, search)
        for one in begun:
            one.tell()


class Receiving:
    """An operation that cannot begin yet: it, or one before it, looks for a sender."""

    def __init__(self, ranks, call, vector, sender, tag):
        self.sender, self.tag = sender, tag
        self._ranks, self._call, self._vector, self._then = ranks, call, vector, call.then
        on = device.of(vector)
        self._ready = on and on.mark()  # another thread, with a current stream of its own, may begin it
        self._begun = threading.Event()
        self._operation = self._failure = None
        self._lock = threading.Lock()  # guards the next
        self._left = 2                 # until `then` is called: the operation's end and tell(), in either order

    def begin(self):
        call = self._call.but(then=self._then and self._one_ended)
        self._operation = self._ranks.receive_from(call, self._vector, self.sender, self.tag, self._ready)
        self._begun.set()

    def fail(self, failure):
        self._failure = failure
        self._left -= 1  # there is no operation
        self._begun.set()

    def tell(self):
        """Call once after begin() or fail(), without locks."""
        if self._then is not None:
            self._one_ended(self)

    def _one_ended(self, _):
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._then(self)

    def cancel(self, reason):
        """As Operation.cancel()."""
        with self._ranks._lock:
            begun = self._begun.is_set()
            if not begun:
                self.fail(_errors.Error(reason, errno.ECANCELED))
        if not begun:
            self.tell()
        elif self._operation is not None:
            self._operation.cancel(reason)

    def done(self):
        return self._begun.is_set() and (self._failure is not None or self._operation.done())

    def ends(self, timeout=None):
        start = time.monotonic()
        if not self._begun.wait(timeout):
            return False
        return self._failure is not None or self._operation.ends(
            None if timeout is None else max(0.0, timeout - (time.monotonic() - start)))

    def wait(self):
        self.ends()
        if self._failure is not None:
            raise _errors.again(self._failure)
        self._operation.wait()


class Gathering:
    def __init__(self, operation, like):
        self._operation, self._like = operation, like
        self.done, self.ends, self.wait, self.cancel = operation.done, operation.ends, operation.wait, operation.cancel

    def pieces(self):
        """After the end: the ranks' vectors, in memory that lives as long as this object; on a device, for the current
        stream."""
        address, length, counts = self._operation.gathered()
        on = device.of(self._like)
        if not length:
            return [self._like for _ in counts]
        if on is not None:
            return on.upload(address, length, self._like, sum(counts)).split(counts)
        return torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=self._like.dtype).split(counts)

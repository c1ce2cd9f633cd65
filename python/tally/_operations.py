"""Operations in flight, on addresses.  `_array` and `tally.torch` build on it.

Flow: a caller describes memory by address, count and dtype, and the rest by a Call -> push_pull() or another hands them
to the C library -> an Operation keeps the memory alive and waits, or `_events` calls Call.then at its end.  Any thread may
call.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import ctypes
import errno
import itertools
import os
import threading
import time

from . import _leaving, _lib, _where
from ._calls import USER, Call, encode, options_of, refuse
from ._errors import Error, NotInitializedError, again, explain, failed
from ._job import after_shutdown, group_ranks, own, unusable
from ._lib import (ALLGATHER, ALLTOALL, BARRIER, BROADCAST, GATHER, PUSH_PULL, PUSH_PULLV, REDUCE, REDUCE_SCATTER, SCATTER,
                   SHARED_CREATE, Range, blocking, lib)
from ._waits import SLICE_MS, longer

_orphans = set()  # _Orphan of each handle dropped in flight
_calling = _leaving.calling
exchanged = 0    # elements of this rank in reductions and gathers; steps.py compares it with gradients
MANY = 1 << 62   # added to it for what says nothing about gradients: messages and all-to-alls


def exchange(elements):
    """Count elements of this rank in an operation that the submission does not count."""
    global exchanged
    exchanged += elements


def forget_exchanged():
    """Begin to count anew."""
    global exchanged
    exchanged = 0


class _Orphan:
    """An operation whose handle was dropped in flight, and the memory that it uses.  Both are freed with the last reference, so
    that several threads may poll it."""

    __slots__ = ("op", "_keep", "_result")

    def __init__(self, op, keep, result):
        self.op, self._keep, self._result = op, keep, result

    def __del__(self, _free=lib.tally_op_free):
        _free(self.op)


class Operation:
    """An operation in flight.  Poll it with done(), end it with wait().

    It holds the memory that the operation reads and writes.  If the handle is dropped in flight, the module holds that
    memory until the operation has ended.
    """

    __slots__ = ("_op", "_keep", "_result", "_finish", "_lock", "_ended", "_failure", "_group", "_job", "told",
                 "__weakref__")

    def __init__(self, call, keep=None, result=None, _pointer=ctypes.c_void_p):
        """Made before the submission, so that no signal handler's exception behind it loses the operation."""
        _calling.here = True
        self._ended = False
        self._keep = keep      # memory in use until the end, beside the result
        self._op = _pointer()  # address; owned; NULL: not submitted
        self._result = result  # what wait() returns, or passes to finish
        self._finish = finish = call.finish
        if finish is not None:
            self._lock = threading.RLock()  # held while finish runs
        self._group = call.group
        self._job = call.job
        self._failure = None
        self.told = False      # its call has been taken from the completion queue; owner: Events

    def done(self):
        """Whether the operation has ended, successfully or not."""
        return self._ended or lib.tally_op_poll(self._op) != 0

    def wait(self, timeout=None):
        """Wait for the end and return the result.  Every later call returns it again.

        timeout: seconds, None for ever.  After it TimeoutError is raised, and the operation continues.
        Raises Error with the reason if the operation failed.  Other Python threads run, and signals get through.
        """
        if not self._ended and not self.ends(timeout):
            raise TimeoutError("the operation has not ended within %g s" % timeout)
        if self._failure is not None:
            raise again(self._failure)
        return self._result

    def ends(self, timeout=None):
        """Wait for the end.  Returns whether it has come within `timeout` seconds (None: for ever); wait() then tells how.

        An exception that leaves this is not the operation's: a signal handler has raised it.  The operation goes on."""
        if self._ended:
            return True
        op = self._op
        if lib.tally_op_poll(op):
            status = lib.tally_op_wait(op, 0)
        else:
            deadline = None if timeout is None else time.monotonic() + timeout
            slice_ms = SLICE_MS
            while True:
                limit = slice_ms
                if deadline is not None:
                    limit = min(limit, max(0, int((deadline - time.monotonic()) * 1000)))
                status = blocking.tally_op_wait(op, limit)
                if status != -errno.ETIMEDOUT:
                    break
                if lib.tally_op_poll(op):  # just after the slice's end, or with a status that is called the same
                    status = lib.tally_op_wait(op, 0)
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                slice_ms = longer(slice_ms)
        if status == 0 and self._finish is not None:
            self._complete()
            return True
        if status < 0:
            sentence = lib.tally_op_error(op).decode(errors="replace")
            self._failure = Error(explain(sentence or os.strerror(-status)) + _where.of_caller(), -status)
            self._result = None
        self._finish = self._keep = None
        self._ended = True
        return True

    def _complete(self):
        """Call finish.  Two threads may wait for one handle, and a signal handler may wait while its thread is in finish."""
        with self._lock:
            if self._ended:
                return
            failure = result = None
            try:
                result = self._finish(self._result)
            except BaseException as error:
                if not isinstance(error, Exception) or _where.is_handlers(error):
                    raise  # the next waiter finishes it
                failure = error
            if not self._ended:
                self._failure, self._result = failure, result
                self._finish = self._keep = None
                self._ended = True

    def cancel(self, reason):
        """Cancel the operation.  It soon fails with an Error (ECANCELED) and `reason` on all ranks, unless all have submitted it."""
        if not self._ended:
            with contextlib.suppress(NotInitializedError), (self._job or own).in_use():
                lib.tally_op_cancel(self._op, reason.encode())

    def watch(self, then):
        """Call then(self) once the operation has ended: in a thread of the completion queue, or at once if it has ended.
        Only once, and only for an operation that was submitted without `then`."""
        events = (self._job or own).events  # still there, while operations may be under way
        status = lib.tally_op_watch(self._op)
        if status == 0:
            events.expect(self._op.value, then, self)
        elif status == -errno.EINVAL:
            raise failed(status, "watch")
        else:
            then(self)

    def gathered(self):
        """Return (address, bytes, list of the ranks' first dimensions) of a finished allgather.

        The memory belongs to the operation and lives as long as this object."""
        data, length, dims = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.POINTER(ctypes.c_int64)()
        status = lib.tally_op_gathered(self._op, ctypes.byref(data), ctypes.byref(length), ctypes.byref(dims))
        if status < 0:
            raise failed(status, "allgather")
        return data.value, length.value, dims[:len(group_ranks(self._group))]

    def values(self):
        """The address of the values that a finished operation of a shared tensor has brought.  They stay as they are until the next
        operation but one of that tensor is submitted.  Closing the communicator frees them."""
        data = ctypes.c_void_p()
        status = lib.tally_shared_values(self._op, ctypes.byref(data))
        if status < 0:
            raise failed(status, "shared tensor")
        return data.value

    def source(self):
        """The sender of the message that a finished probe has found, as a place in the group.  For a finished join: the rank that
        joined last."""
        status = lib.tally_op_source(self._op)
        if status < 0:
            raise failed(status, "probe")
        return status

    # Bound at definition: module globals may be gone when the interpreter ends.
    def __del__(self, _poll=lib.tally_op_poll, _free=lib.tally_op_free, _orphans=_orphans, _orphan=_Orphan, _own=own):
        if _own.forked or not getattr(self, "_op", None):  # torch.compile makes objects without __init__
            return
        if self._ended or _poll(self._op):
            _free(self._op)
        else:
            _orphans.add(_orphan(self._op, self._keep, self._result))


def _sweep():
    """Free dropped operations that have ended since."""
    for orphan in _orphans.copy():
        if lib.tally_op_poll(orphan.op):
            _orphans.discard(orphan)


after_shutdown(_sweep)


# --- submissions ------------------------------------------------------------------------------------------


def _rejected(status, kind, call, comm):
    """The exception for a submission that the library refused.  Tells the other ranks the reason."""
    if not comm:  # another thread has closed it since
        return unusable()
    sentence = explain(_lib.error() or os.strerror(-status))
    if status == -errno.EBUSY:
        return ValueError(sentence)
    if status != -errno.EEXIST:
        refuse(kind, call, sentence)
    return ValueError(sentence) if status in (-errno.EINVAL, -errno.ENOTSUP) else Error(sentence, -status)


def _broken_off(error, operation, kind, call):
    """Handle an exception in a submission: an argument cannot be passed to the library, or a signal handler has raised it.
    The other ranks are told, unless the operation is under way; then it is the exception's `tally_operation`, for submit_to()."""
    op = operation._op.value
    if op:
        error.tally_operation = operation
        if call.then is not None:
            (call.job or own).events.expect(op, lambda _: None, operation)  # or a later one's call would run in place of this one's
    elif isinstance(error, ctypes.ArgumentError):
        error = TypeError("an argument is of the wrong type: %s" % error)
        refuse(kind, call, error)
        raise error from None
    else:
        refuse(kind, call, error if isinstance(error, (TypeError, ValueError, OverflowError)) else
               _leaving.reason(type(error), error))


def submit_to(store, submit, *arguments):
    """Submit an operation, and pass it to store().  If a signal handler breaks this off, store() gets what is under way
    nonetheless, perhaps for the second time."""
    operation = None
    try:
        # Python looks for signals behind a call, before it assigns the result.  A loop assigns first.
        for operation in itertools.starmap(submit, [arguments]):
            store(operation)
    except BaseException as error:
        operation = error.__dict__.pop("tally_operation", operation)
        if operation is not None:
            store(operation)
        raise


# Below, `keep` is memory in use until the end, beside `result`, which wait() returns.


def _submit(kind, function, call, shape, keep, result, *arguments, elements=0):
    """Call the library's function(comm, *arguments, options, op).  kind: None for a message.  elements: for `exchanged`.
    Returns the Operation."""
    job = call.job or own
    comm, events = job.comm, job.events
    if comm is None:
        raise unusable()
    global exchanged
    exchanged += elements
    if _orphans:
        _sweep()
    operation = Operation(call, keep, result)
    op = operation._op
    try:
        options = options_of(call, shape)
        status = function(comm, *arguments, options[0], ctypes.byref(op))
        if status == 0 and call.then is not None:
            events.expect(op.value, call.then, operation)
    except BaseException as error:
        _broken_off(error, operation, kind, call)
        raise
    if status < 0:
        raise _rejected(status, kind, call, comm)
    return operation


def push_pull(call, source, target, count, dtype, shape, keep=None, result=None, stream=None,
              _function=lib.tally_push_pull, _byref=ctypes.byref):
    """Submit a reduction of `count` elements at address `source` into `target` (the same: in place).

    stream: as in options_of(); then both addresses are a GPU's."""
    job = call.job or own
    comm, events = job.comm, job.events
    if comm is None:
        raise unusable()
    global exchanged
    exchanged += count
    if _orphans:
        _sweep()
    operation = Operation(call, keep, result)
    op, encoded, then, known = operation._op, call.encoded, call.then, call.options
    if encoded is None and call.name is not None:
        encoded = call.encoded = encode(call.name)
    try:
        options = (known[1] if known is not None and known[0] == shape and stream is None
                   else options_of(call, shape, stream))
        status = _function(comm, encoded, source, target, count, dtype, call.reduction, options[0], _byref(op))
        if status == 0 and then is not None:
            events.expect(op.value, then, operation)
    except BaseException as error:
        _broken_off(error, operation, PUSH_PULL, call)
        raise
    if status < 0:
        raise _rejected(status, PUSH_PULL, call, comm)
    return operation


def push_pullv(call, source, target, ranges, dtype, keep=None, result=None):
    """Submit one reduction of several ranges of a buffer.  Element 0 is at address `source`, and of the result at `target` (the
    same: in place).  ranges: (first element, count) pairs in ascending order; each begins at a multiple of 64 bytes."""
    array = (Range * len(ranges))(*ranges)  # the library copies it
    return _submit(PUSH_PULLV, lib.tally_push_pullv, call, (), keep, result, encode(call.name), source, target, array,
                   len(array), dtype, call.reduction, elements=sum(r.count for r in array))


def shared_create(call, values, count, dtype, staleness, shape):
    """Submit the creation of a shared tensor of `count` elements, which services keep.  values: an address; rank 0's count."""
    return _submit(SHARED_CREATE, lib.tally_shared_create, call, shape, None, None, encode(call.name), values, count, dtype,
                   staleness)


def shared_add(call, difference, keep=None):
    """Submit an addition to a shared tensor, at address `difference`; None: it only counts as one.  Operation.values() returns
    the newest values."""
    return _submit(None, lib.tally_shared_add, call, (), keep, None, encode(call.name), difference)


def shared_read(call):
    """Submit a read of a shared tensor.  Operation.values() returns them."""
    return _submit(None, lib.tally_shared_read, call, (), None, None, encode(call.name))


def add_norms(a, b, sum, count, chunk, norms):
    """Add `count` float32 elements at addresses `a` and `b` into `sum`, which may be either of them.  At `norms` comes the L1
    norm of each `chunk` elements of the sum.  In this thread, while other Python threads run."""
    status = blocking.tally_add_norms(a, b, sum, count, chunk, norms)
    if status < 0:
        raise ValueError(_lib.error())


def broadcast(call, buffer, count, dtype, root, shape, keep=None, result=None):
    """Submit a broadcast of `count` elements at address `buffer` from rank `root`, in place."""
    return _submit(BROADCAST, lib.tally_broadcast, call, shape, keep, result, encode(call.name), buffer, count, dtype, root)


def allgather(call, source, count, dtype, shape, keep=None):
    """Submit an allgather of `count` elements at address `source`.  Operation.gathered() returns the result."""
    return _submit(ALLGATHER, lib.tally_allgather, call, shape, keep, None, encode(call.name), source, count, dtype,
                   elements=count)


def allgather_into(call, source, target, count, dtype, shape, keep=None):
    """Submit an allgather of `count` elements at address `source` on each rank, concatenated at `target`."""
    return _submit(ALLGATHER, lib.tally_allgather_into, call, shape, keep, None, encode(call.name), source, target, count,
                   dtype, elements=count)


def _sizes(counts):
    return (ctypes.c_size_t * len(counts))(*counts)


def reduce_scatter(call, source, target, counts, dtype, keep=None, result=None):
    """Submit a reduce-scatter.  `source` holds counts[i] elements for rank i, in order of ranks; `target` gets this rank's."""
    return _submit(REDUCE_SCATTER, lib.tally_reduce_scatter, call, (), keep, result, encode(call.name), source, target,
                   _sizes(counts), dtype, call.reduction, elements=sum(counts))


def alltoall(call, source, give, target, take, dtype, keep=None, result=None):
    """Submit an all-to-all: give[i] elements at address `source` for rank i, take[i] elements from it at `target`."""
    return _submit(ALLTOALL, lib.tally_alltoall, call, (), keep, result, encode(call.name), source, _sizes(give), target,
                   _sizes(take), dtype, elements=MANY)


def reduce(call, source, target, count, dtype, root, keep=None):
    """Submit a reduction.  Only the root gets the result, at `target`."""
    return _submit(REDUCE, lib.tally_reduce, call, (count,), keep, None, encode(call.name), source, target, count, dtype,
                   call.reduction, root, elements=count)


def gather(call, source, count, target, counts, dtype, root, keep=None):
    """Submit a gather: counts[i] elements of rank i, in order of ranks, at the root's `target`.

    target, counts: only on the root, elsewhere None."""
    return _submit(GATHER, lib.tally_gather, call, (), keep, None, encode(call.name), source, count, target,
                   counts and _sizes(counts), dtype, root, elements=count)


def scatter(call, source, counts, target, count, dtype, root, keep=None):
    """Submit a scatter: counts[i] elements of the root's `source` for rank i."""
    return _submit(SCATTER, lib.tally_scatter, call, (), keep, None, encode(call.name), source, counts and _sizes(counts),
                   target, count, dtype, root)


def send(call, source, count, dtype, to, tag, keep=None):
    """Submit a message of `count` elements at address `source` to a rank of the group."""
    return _submit(None, lib.tally_send, call, (), keep, None, source, count, dtype, to, tag)


def recv(call, target, count, dtype, sender, tag, keep=None):
    """Submit a receive from a rank of the group."""
    return _submit(None, lib.tally_recv, call, (), keep, None, target, count, dtype, sender, tag)


def probe(call, tag):
    """Submit a search for a message that this rank has not begun to receive.  Operation.source() returns its sender."""
    return _submit(None, lib.tally_probe, call, (), None, None, tag)


def barrier_async(call):
    """Submit a barrier, which ends when all ranks have called it."""
    return _submit(BARRIER, lib.tally_barrier, call, (0,), None, None, encode(call.name))


def barrier(name=None, group=None):
    """Wait until all ranks, or those of a group, have called it."""
    barrier_async(Call(name, group=group, space=USER)).wait()


def join_async():
    """Declare that this rank has no more input.  The operation ends when all ranks have; wait() returns the rank that joined last.

    Until then this rank takes no part in what the others submit."""
    period = own.joins + 1

    def finish(_):
        own.joins = period
        return operation.source()

    call = Call(finish=finish)
    operation = Operation(call)
    try:
        with own.in_use() as comm:
            status = lib.tally_join(comm, options_of(call, ())[0], ctypes.byref(operation._op))
    except BaseException as error:
        if operation._op.value:
            error.tally_operation = operation  # for submit_to()
        raise
    if status < 0:
        raise failed(status, "join")
    return operation


def join():
    """join_async(), and wait for it.  Other Python threads run, and signals get through."""
    return join_async().wait()

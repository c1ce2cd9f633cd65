"""Tensors on a device.  Reductions to all ranks are handed to Tally's library as they are; tensors of other operations go
through pinned host memory here.

Flow: begin() records an event on the current stream -> the thread "tally-device" takes calls in their order.

  A reduction is submitted at once, in chunks, with a side stream that waits for the event.  The library copies, and ends the
  operation when the result is in the tensor.

  For other operations a side stream waits for the event and copies to pinned memory -> when that copy has ended (an event), the
  operation is submitted -> at its end a thread on the completion queue makes a second side stream copy the result to the
  device, and records an event -> wait() makes the current stream wait for that event.

Nothing waits for the whole device: the thread waits for its own copies, and a caller of wait() for the sums, as with Gloo.

An operation holds its tensors until its end, and the caching allocator does not get their memory back while side streams use
it.  The library may still copy from the tensors of a reduction that has failed; it makes the side stream wait for that.  Pinned
memory passes from one copy to the next in the streams' own order.

Later calls of the same group keep their place (Line).  If a chunk fails, the call's other chunks are taken back
(Transfer.landed), and all ranks see the first chunk's failure.  After that the other chunks have new names (_attempt), because
a rank may have submitted fewer of them.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import ctypes
import errno
import itertools
import math
import threading
import time

import torch
from torch.futures import Future

from .. import _calls, _errors, _job, _operations, _waits, _where
from .._lib import PUSH_PULL

# A reduction is cut into operations of this size, the same on all ranks, so that copies and network overlap.
CHUNK_BYTES = 8 << 20

# Pinned memory of a device.  A call that finds none waits until some comes back.  Ranks that began different tensors first
# would wait for each other.  So after PATIENCE_S without any, the pool may exceed its limit by one piece.
POOL_BYTES = 32 * CHUNK_BYTES
PATIENCE_S = 1.0

_SMALLEST = 1 << 16  # piece of pinned memory
_LINE = 64           # alignment of tensors within one


class Cuda:
    """All that this module asks of a CUDA device.  A fake in the tests has the same methods."""

    def __init__(self, place):
        self._place = place

    def stream(self):
        return torch.cuda.Stream(self._place)

    def current(self):
        """The calling thread's current stream."""
        return torch.cuda.current_stream(self._place)

    def is_capturing(self):
        """Whether the current stream is being captured into a graph."""
        with torch.cuda.device(self._place):  # torch asks for the current device's stream
            return torch.cuda.is_current_stream_capturing()

    def handle(self, stream):
        """The driver's CUstream, as a number."""
        return stream.cuda_stream

    def on(self, stream):
        """A context in which `stream` is the current one."""
        return torch.cuda.stream(stream)

    def record(self, stream):
        """An event with query() and synchronize(), after the work of `stream` so far."""
        event = torch.cuda.Event(blocking=True)  # a thread that synchronizes with it sleeps
        event.record(stream)
        return event

    def let_wait(self, stream, event):
        stream.wait_event(event)

    def keep(self, tensor, stream):
        """Keep the tensor's memory from being reused before `stream` has done its work so far."""
        tensor.record_stream(stream)

    def pinned(self, length):
        with torch.cuda.device(self._place):
            return torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)

    def future(self):
        """A future whose value may be on the device."""
        return Future(devices=[self._place])


_RUNTIMES = {"cuda": Cuda}  # by type of device
_devices = {}               # torch.device -> Device
_devices_lock = threading.Lock()


def supported(place):
    """Whether tensors on this torch.device are supported."""
    return place.type == "cpu" or place.type in _RUNTIMES


def of(tensor):
    """The Device of a tensor; None for a tensor in host memory.

    Raises NotImplementedError for other kinds of devices, and while the current stream is captured into a graph."""
    if tensor.is_cpu:
        return None
    place = tensor.device
    if not supported(place):
        raise NotImplementedError("tensors on %s are not supported; move them to the CPU" % place)
    device = _devices.get(place)
    if device is None:
        with _devices_lock:
            device = _devices.get(place)
            if device is None:
                device = _devices[place] = Device(_RUNTIMES[place.type](place))
    if device.runtime.is_capturing():
        raise NotImplementedError("the current stream is being captured into a graph; communicate outside of it")
    return device


# --- pinned memory -------------------------------------------------------------------------------------------------


class _Piece:
    """A piece of pinned memory, and the event after which the device no longer uses it."""

    __slots__ = ("size", "memory", "event")

    def __init__(self, size):
        self.size, self.memory, self.event = size, None, None


class _Pool:
    """A device's pinned memory, of limited size, in pieces of powers of two.  Guarded by the carrier's lock."""

    def __init__(self, limit):
        self._limit = limit
        self._free = collections.defaultdict(list)  # by size
        self._size = 0                              # of all pieces
        self.out = 0                                # pieces in use

    def take(self, length, beyond=False):
        """A piece of at least `length` bytes; None if there is none now.  Its memory may not be allocated yet."""
        size = max(_SMALLEST, 1 << (length - 1).bit_length()) if length else _SMALLEST
        pieces = self._free[size]
        if not pieces:
            self._make_room(size)
            if self._size + size > self._limit and self.out and not beyond:
                return None
            self._size += size
            pieces.append(_Piece(size))
        self.out += 1
        return pieces.pop()

    def _make_room(self, size):
        """Free unused pieces of other sizes as far as needed.  (PyTorch keeps them until copies have ended.)"""
        for pieces in self._free.values():
            while pieces and self._size + size > self._limit:
                self._size -= pieces.pop().size

    def give(self, piece):
        self.out -= 1
        if self._size > self._limit:
            self._size -= piece.size
        else:
            self._free[piece.size].append(piece)


# --- a device ------------------------------------------------------------------------------------------------------


class Device:
    """One device: its side streams and its pool."""

    def __init__(self, runtime, chunk_bytes=CHUNK_BYTES, pool_bytes=POOL_BYTES):
        self.runtime, self.chunk_bytes = runtime, chunk_bytes
        self.pool = _Pool(pool_bytes)
        self.leaving, self.arriving = runtime.stream(), runtime.stream()

    def arrived(self):
        """A context for work after the arrival of results, on the stream on which they arrive."""
        return self.runtime.on(self.arriving)

    def mark(self):
        """An event on the current stream."""
        return self.runtime.record(self.runtime.current())

    def join(self, event):
        """Make the current stream wait for an event."""
        self.runtime.let_wait(self.runtime.current(), event)

    def hold(self, tensors):
        """Keep tensors of reductions that have failed, until the library has read them: the leaving stream waits for that."""
        for tensor in tensors:
            self.runtime.keep(tensor, self.leaving)

    def keep(self, tensors):
        """Keep tensors that the arriving stream or the current stream is about to use."""
        current = self.runtime.current()
        for tensor in tensors:
            self.runtime.keep(tensor, self.arriving)
            self.runtime.keep(tensor, current)

    def upload(self, address, length, like, shape):
        """Copy host memory to a new tensor of like's type on the current stream.  The host memory is free afterwards."""
        result = like.new_empty(shape)
        if length:
            piece = _carrier.take(self, length)
            try:
                if piece.event is not None:
                    piece.event.synchronize()  # the last copy from it
                host = piece.memory[:length]
                ctypes.memmove(host.data_ptr(), address, length)
                result.copy_(host.view(result.dtype).view(shape), non_blocking=True)
                piece.event = self.mark()
            finally:
                _carrier.give(self, piece)
        return result


class Line:
    """Calls of a group that must be submitted in order.  A call behind a tensor that is still being copied from the device
    waits too."""

    __slots__ = ("calls", "waiting")

    def __init__(self):
        self.calls = 0    # that have a number
        self.waiting = 0  # not yet submitted; guarded by the carrier's lock


class _Load:
    """One operation in flight, with its copies before and after.

    call: the Call of this operation; its `then` and `finish` are the transfer's.
    kind: of the operation, for telling the other ranks if it cannot be started; None: do not tell them.
    spans: (source or None, target or None), contiguous, of one type and length, sharing host memory.
    submit(call, host vectors): starts the operation.
    first: whether it is the first of its transfer."""

    __slots__ = ("_generation", "_device", "_ready", "_call", "_kind", "_spans", "_submit", "_transfer", "_first",
                 "_piece", "_hosts", "_copied", "_failure")

    def __init__(self, transfer, first, device, ready, call, kind, spans, submit):
        self._generation = _job.generation(call.job)
        self._transfer, self._first, self._device, self._ready = transfer, first, device, ready
        self._call, self._kind, self._spans, self._submit = call, kind, spans, submit
        self._piece = self._copied = self._failure = None
        self._hosts = [target if source is None else source for source, target in spans]

    # --- in the carrier's thread, in this order

    def take(self, beyond):
        """Take host memory.  Returns false if there is none."""
        if self._device is not None:
            self._piece = self._device.pool.take(self._cut()[-1], beyond)
            return self._piece is not None
        return True

    def _cut(self):
        """The beginning of each span's host memory, and the end of the last."""
        ends = (-(-one.numel() * one.element_size() // _LINE) * _LINE for one in self._hosts)
        return list(itertools.accumulate(ends, initial=0))

    def copy_out(self):
        """Start the copies from the device."""
        device, piece = self._device, self._piece
        if device is None:
            return
        try:
            runtime, out = device.runtime, device.leaving
            if piece.memory is None:
                piece.memory = runtime.pinned(piece.size)
            hosts = [piece.memory[begin:begin + one.numel() * one.element_size()].view(one.dtype)
                     for begin, one in zip(self._cut(), self._hosts)]
            if piece.event is not None:
                runtime.let_wait(out, piece.event)  # results that still go from it to the device
            runtime.let_wait(out, self._ready)
            with runtime.on(out):
                for host, (source, _) in zip(hosts, self._spans):
                    if source is not None:
                        host.copy_(source, non_blocking=True)
            self._copied = runtime.record(out)
            self._hosts = hosts
        except Exception as error:
            self._failure = error

    def copied(self):
        """Whether hand_over() would return without waiting."""
        try:
            return self._copied is None or self._copied.query()
        except Exception:
            return True  # hand_over() will meet it again

    def hand_over(self):
        """Submit the operation after the copies have ended."""
        line, lost = self._call.line, self._transfer.lost
        if lost is None:
            self._start()
        else:
            self._landed(lost)
        if line is not None:
            with _carrier.changed:
                line.waiting -= 1

    def _start(self):
        try:
            if self._failure is None and self._copied is not None:
                self._copied.synchronize()
        except Exception as error:
            self._failure = error
        try:
            if self._generation != _job.generation(self._call.job):  # nothing of it shall meet the next job's
                raise _errors.Error("this rank has left the job", errno.ESHUTDOWN)
            if self._failure is None and self._kind is not None:
                self._failure = self._transfer.broken()  # submitted and then cancelled, it might end before that
            if self._failure is not None:
                _calls.refuse(self._kind, self._call, self._failure)
                raise self._failure
            self._transfer.begun(self._submit(self._call.but(then=self._ended, finish=None), self._hosts))
        except Exception as error:
            self._landed(error)

    # --- at the operation's end, in a thread on the completion queue, or in submit()

    def _ended(self, operation):
        self._transfer.operation = operation
        alone = False  # whether the operation has not failed on the other ranks
        try:
            operation.wait()
            alone = True
            if self._device is not None and not self._transfer.failed():
                with self._device.arrived():
                    for host, (_, target) in zip(self._hosts, self._spans):
                        if target is not None:
                            target.copy_(host, non_blocking=True)
                    self._piece.event = self._device.mark()
        except Exception as error:
            alone = alone or getattr(error, "errno", None) == errno.EIO
            if self._first and not alone and self._kind is not None:
                _failures[_calls.meeting(self._kind, self._call)] += 1
            self._landed(error, alone)
        else:
            self._landed(None)

    def _landed(self, failure, alone=False):
        transfer, device, piece = self._transfer, self._device, self._piece
        self._hosts = self._spans = self._submit = self._piece = None
        try:
            if failure is not None:  # before the memory is free: a load that gets it must find itself cancelled
                transfer.landed(failure, self._first, alone)
        finally:
            if piece is not None:
                _carrier.give(device, piece)
        if failure is None:
            transfer.landed(None, self._first, alone)


class _Carrier:
    """The thread "tally-device": brings loads to their operations, in the order in which they were begun."""

    def __init__(self):
        self.changed = threading.Condition()  # guards the rest, and the pools
        self._pending = collections.deque()
        self._under_way = 0  # loads that were pending and are not handed over
        self._thread = None

    def add(self, loads, line):
        with self.changed:
            if line is not None:
                line.waiting += len(loads)
            self._pending.extend(loads)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="tally-device", daemon=True)
                self._thread.start()
            self.changed.notify_all()

    def give(self, device, piece):
        with self.changed:
            device.pool.give(piece)
            self.changed.notify_all()

    def settle(self):
        """Wait until every added load has been handed over, or has failed."""
        with self.changed:
            while self._pending or self._under_way:
                self.changed.wait(_waits.SLICE_MS / 1000)  # signals get through

    def take(self, device, length):
        """A piece with memory, for any thread but the carrier's."""
        with self.changed:
            piece = self._wait_for(lambda beyond: device.pool.take(length, beyond))
        if piece.memory is None:
            piece.memory = device.runtime.pinned(piece.size)
        return piece

    def _wait_for(self, take):
        end = time.monotonic() + PATIENCE_S
        while True:
            left = end - time.monotonic()
            taken = take(left <= 0)
            if taken:
                return taken
            self.changed.wait(left)

    def _next(self, busy):
        """The next load, with its memory; None if none can go on now and this thread is `busy`."""
        with self.changed:
            while not self._pending:
                if busy:
                    return None
                self.changed.wait()
            load = self._pending[0]
            if not load.take(False):
                if busy:
                    return None
                self._wait_for(load.take)
            self._under_way += 1
            return self._pending.popleft()

    def _run(self):
        copying = collections.deque()
        while True:
            load = None
            if not copying or not copying[0].copied():
                load = self._next(bool(copying))
            if load is None:
                copying.popleft().hand_over()
                with self.changed:
                    self._under_way -= 1
                    self.changed.notify_all()
            else:
                load.copy_out()
                copying.append(load)
            load = None


_carrier = _Carrier()


def settle():
    """Wait until everything that was begun is submitted."""
    _carrier.settle()


class Transfer:
    """Handle of operations on a device's tensors; done() and wait() are as in Operation.  The stream that is current in
    wait() sees the result.

    If one of several operations fails, the others are cancelled, and the transfer ends when all have ended.  So none is
    in flight when the next call comes.  If the first one fails, operations that have not begun never begin, on any rank
    (see _attempt()).  This does not apply if only the first one's copy has failed."""

    def __init__(self, call, device, count, tensors, result, arriving=None):
        """arriving: the stream on which results arrive; None: they are there when the operations end."""
        self._device, self._left, self._tensors, self._arriving = device, count, tensors, arriving
        self._result, self._finish, self._then = result, call.finish, call.then
        self._lock = threading.RLock()  # guards the rest; a signal handler may wait while its thread is in finish
        self._arrived = threading.Event()
        self._event = self._failure = None
        self._operations, self._reason = [], None  # those begun; why they are taken back
        self.lost = None  # why the first has failed, on all ranks
        self.operation = None  # the last that has ended

    def failed(self):
        return self._failure is not None

    def broken(self):
        """Why operations that have not begun need not begin: another one's failure.  None: there is none."""
        failure = self._failure
        return failure and _errors.Error("another part of it has failed: %s" % failure, errno.ECANCELED)

    def begun(self, operation):
        """One of the operations has begun."""
        with self._lock:
            reason = self._reason
            if not self._arrived.is_set():
                self._operations.append(operation)
        if reason is not None:
            operation.cancel(reason)

    def cancel(self, reason):
        """As in Operation, also for operations that have not begun."""
        with self._lock:
            self._reason, operations = reason, list(self._operations)
        for operation in operations:
            operation.cancel(reason)

    def landed(self, failure, first, alone=False):
        """One of the operations has ended, and its results' copies have been given to the device.

        alone: only the copies have failed, on this rank."""
        with self._lock:
            self._left -= 1
            last = not self._left
            if first and not alone:
                self.lost = failure
            if failure is not None and (first or self._failure is None):
                self._failure = failure  # the first's says best why
            if last:
                try:
                    if self._failure is None and self._arriving is not None:
                        self._event = self._device.runtime.record(self._arriving)
                    elif self._failure is not None and self._arriving is None and self._device is not None:
                        self._device.hold(self._tensors)
                except Exception as error:
                    self._failure = self._failure or error
                then, self._then = self._then, None
                self._operations = []
                self._arrived.set()
            elif failure is None or self._reason is not None:
                return
        if not last:
            self.cancel("another part of it has failed: %s" % failure)
        elif then is not None:
            then(self)

    def watch(self, then):
        """As Operation's."""
        with self._lock:
            if not self._arrived.is_set():
                self._then = then
                return
        then(self)

    def done(self):
        return self._arrived.is_set()

    def ends(self, timeout=None):
        """As Operation's."""
        return _waits.await_event(self._arrived, math.inf if timeout is None else timeout)

    def wait(self, timeout=None):
        if not self.ends(timeout):
            raise TimeoutError("the operation has not ended within %g s" % timeout)
        with self._lock:
            if self._failure is None:
                if self._event is not None:
                    self._device.join(self._event)
                try:
                    if self._finish is not None:
                        if self._device is not None:
                            self._device.keep(self._tensors)
                        result = self._finish(self._result)
                        if self._finish is not None:  # nor has a handler finished it meanwhile
                            self._finish, self._result = None, result
                        if self._device is not None:
                            self._event = self._device.mark()
                except Exception as error:
                    if _where.is_handlers(error):
                        raise  # the next waiter finishes it
                    self._failure = error
            self._tensors = None
            if self._failure is not None:
                raise _errors.again(self._failure)
            return self._result

    def gathered(self):
        return self.operation.gathered()


def begin(call, device, loads, result=None, ready=None, staged=True):
    """Start operations on tensors of one device (None: of the host, behind others of call.line).  Returns their Transfer.

    loads: (call, kind, spans, submit) for each operation, as in _Load.
    result: wait() returns it, or call.finish(result).
    ready: an event after which tensors may be read; default: the current stream's work so far.
    staged: whether submit() takes vectors in host memory; else nothing is copied here."""
    tensors = [one for *_, spans, _ in loads for span in spans for one in span if one is not None]
    if device is not None:
        runtime = device.runtime
        for tensor in tensors if staged else ():
            runtime.keep(tensor, device.leaving)
            runtime.keep(tensor, device.arriving)
        ready = ready or device.mark()
        loads = [(part, kind, [tuple(one if one is None else one.detach().view(-1) for one in span) for span in spans],
                  submit) for part, kind, spans, submit in loads]
    transfer = Transfer(call, device, len(loads), tensors, result, device.arriving if device and staged else None)
    _carrier.add([_Load(transfer, i == 0, device if staged else None, ready, *load) for i, load in enumerate(loads)], call.line)
    return transfer


# --- reductions, in chunks -----------------------------------------------------------------------------------------


_failures = collections.Counter()


def _attempt(call):
    """How often the first operation of a call in chunks has failed; it fails on all ranks.  The names of the other chunks
    contain this number, because ranks may have submitted different numbers of them."""
    return _failures[_calls.meeting(PUSH_PULL, call)] + _calls.refusals(PUSH_PULL, call)


def chunks(name, length, size, device, attempt=0):
    """[(name, first element, end)] of the operations that reduce `length` elements of `size` bytes on a Device.

    The first is shorter by the number of operations.  So ranks with different numbers of them disagree on its shape and
    get an error, instead of waiting for each other.  attempt: from _attempt()."""
    each = max(1, device.chunk_bytes // size)
    if length <= each:
        return [(name, 0, length)]
    count = -(-length // each)
    first = max(1, each - count)
    if first + (count - 1) * each < length:
        count += 1
        first = max(1, each - count)
    ends = [first, *range(first + each, length, each), length]
    after = ".%d" % attempt if attempt else ""
    return [(name if i == 0 else "%s[%d]%s" % (name, i, after), low, high)
            for i, (low, high) in enumerate(zip([0, *ends], ends))]


_nameless = collections.Counter()


def named(kind, call):
    """Name a call that has no name by its number among such calls of the same kind on devices.  The library's own numbers
    would follow the order in which copies end."""
    if call.name is not None:
        return call
    key = _calls.meeting(kind, call)
    _nameless[key] += 1
    return call.but(name="device.noname.%d" % _nameless[key])


def reduce(call, source, target, dtype, result):
    """Submit the reduction of the contiguous `source` into `target`, both on one device, as _operations.push_pull() does.
    The library itself copies from and to the device; the result is there at the operation's end.

    In an ordered name space the first operation has no name, and the others are named by the call's number."""
    device, shape, ordered = of(source), source.shape, call.line is not None
    call = call.but(name="all_reduce no. %d" % call.line.calls) if ordered else named(PUSH_PULL, call)
    source, target = source.detach().view(-1), target.detach().view(-1)
    attempt = _attempt(call)
    pieces = chunks(call.name, source.numel(), source.element_size(), device, attempt)
    if attempt and len(pieces) > 1:
        call = call.but(note="%s; attempt %d" % (call.note or "", attempt))
    whole = call.note
    if len(pieces) > 1:  # ranks of other lengths fail with the first one, and hear the lengths
        whole = "%sthe first of %d elements" % (whole + "; " if whole else "", source.numel())
    runtime, ready = device.runtime, device.mark()

    def load(name, low, high):
        one, other = source[low:high], target[low:high]
        dims = shape if len(pieces) == 1 else (high - low,)

        def submit(part, _):
            runtime.let_wait(device.leaving, ready)
            return _operations.push_pull(part, one.data_ptr(), other.data_ptr(), high - low, dtype, dims, (one, other),
                                         stream=runtime.handle(device.leaving))

        part = call.but(name=None if ordered and low == 0 else name, note=call.note if low else whole)
        return part, PUSH_PULL, [(one, other)], submit

    return begin(call, device, [load(*piece) for piece in pieces], result, ready, staged=False)

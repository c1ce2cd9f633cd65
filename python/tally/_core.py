"""The process's communicator, jobs beside it, and their operations, on addresses.  `_array` and `tally.torch` build on it.

Flow: a caller describes memory by address, count and dtype, and the rest by a Call -> push_pull() or another hands them
to the C library -> an Operation keeps the memory alive and waits, or `_events` calls Call.then at its end.  Any thread may
call; `_lock` is held while the communicator is opened or closed, but not while a job beside it is.  The library's own threads never enter Python.

SPDX-License-Identifier: Apache-2.0
"""

import atexit
import collections
import copy
import ctypes
import enum
import errno
import json
import math
import os
import threading
import time
import weakref

from . import _lib, _leaving, _where
from ._events import PATIENCE_S, Events
from ._lib import (ALLGATHER, ALLTOALL, BARRIER, BROADCAST, GATHER, PUSH_PULL, REDUCE, REDUCE_SCATTER, SCATTER, blocking,
                   lib)

# A wait is cut into slices of this length so that signals (KeyboardInterrupt) get through.
SLICE_MS = 50


def await_event(event, timeout=math.inf):
    """Wait for a threading.Event, at most `timeout` seconds.  Signals get through."""
    end = time.monotonic() + timeout
    while not event.wait(SLICE_MS / 1000) and time.monotonic() < end:
        pass


# Name spaces: of arrays; of what the package makes up, which a user's names never meet; of Horovod's API.
USER, GRADIENT, STATE, BUCKET, HOROVOD = range(5)


class Reduction(enum.IntEnum):
    """The reduction of the ranks' elements."""

    Sum = 0
    Average = 1
    Min = 2
    Max = 3
    Product = 4


class Error(RuntimeError):
    """An operation or the communicator failed.  `errno` is the C library's error number (positive)."""

    __module__ = "tally"  # the public name, for tracebacks

    def __init__(self, sentence="", number=0):
        super().__init__(sentence)
        self.errno = number

    def __reduce__(self):
        return type(self), (str(self), self.errno)


def again(failure):
    """Return a copy of a stored failure, to raise.  The failure itself would keep each frame that it leaves, with its
    contents.  Returns the failure itself if a user's class cannot be copied."""
    try:
        return copy.copy(failure)
    except Exception:
        return failure


class NotInitializedError(RuntimeError, ValueError):
    """A call before init(), after shutdown(), or in a forked child of the process that called init()."""

    __module__ = "tally"


_lock = threading.RLock()  # guards opening and closing
_use_lock = threading.RLock()  # held while the library may use a communicator, so that none is closed meanwhile
_waits = set()             # ends of calls that wait in threads of their own and use the communicator, each an Event
_beside_lock = threading.Lock()  # guards the next, and Job.comm's end; nobody waits while holding it
_beside = set()            # open jobs beside the one below, each a Job
_comm = None               # the open tally_comm as a c_void_p, or None.  shutdown() makes the c_void_p NULL, which the library
                           # refuses: a call may have taken it before, and calls run with the GIL
_facts = None              # (rank, size, local rank, local size, machine, machine count, service count)
_generation = 0            # counts init(); what was agreed with an earlier communicator is void
_joins = 0                 # how often all ranks have joined, in this communicator
_opener = os.getpid()      # the process that called init()
_forked = False            # true in a child that was forked while the communicator was open
_events = None             # its completion queue
_orphans = []              # (operation, *what it uses) of handles dropped in flight
_before_shutdown = []      # called while the job is still there


# --- the communicator ------------------------------------------------------------------------------------


_calls = []  # arrays that the library may have a pointer to


def name_calls(spaces, *names):
    """Have messages call operations in these name spaces by these names, in the order of the kinds' numbers."""
    _calls.append((ctypes.c_char_p * (1 + len(names)))(None, *[name.encode() for name in names]))
    for space in spaces:
        lib.tally_name_calls(space, _calls[-1])


name_calls([USER], "push_pull", "broadcast", "allgather", "barrier", "reduce", "reduce_scatter", "alltoall", "gather", "scatter")


def explain(sentence):
    """A sentence of the library's in words of the model: which parameters its buckets hold, as the explainers say."""
    for explainer in explainers:
        try:
            sentence = explainer(sentence)
        except Exception as error:  # the sentence itself matters more
            if _where.is_handlers(error):
                raise
    return sentence


explainers = []  # sentence -> sentence


def disagreement(what, meant):
    """The exception for ranks that disagree about `what`, worded as the library does.  meant: rank -> its side in words."""
    sides = {}
    for rank, words in sorted(meant.items()):
        runs = sides.setdefault(words, [])
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = ["%s on %s %s" % (words, "rank" if runs[0][0] == runs[-1][1] else "ranks",
                             ", ".join("%d" % a if a == b else "%d-%d" % (a, b) for a, b in runs))
            for words, runs in sides.items()]
    return Error(explain("%s: the ranks disagree: %s" % (what, ", ".join(said))), errno.EINVAL)


def _failed(status, what):
    """The exception for a call that returned `status`, with the calling thread's tally_error()."""
    return Error(_lib.error() or "%s: %s" % (what, os.strerror(-status)), -status)


def _aside(function, *arguments, abandoned=None):
    """Call a C function that may wait for long in a thread of its own, so that signals get through.

    Returns (status, sentence).  If the wait is interrupted, the call continues, and `abandoned(status)` runs at its end.
    """
    outcome = []
    ended = threading.Event()
    left = threading.Event()

    def run():
        status = function(*arguments)
        outcome.append((status, _lib.error() if status < 0 else ""))
        ended.set()
        if left.is_set() and abandoned is not None:
            abandoned(status)

    threading.Thread(target=run, name="tally-call", daemon=True).start()
    try:
        await_event(ended)
    except BaseException:
        left.set()
        raise
    return outcome[0]


def _wait_aside(function, *arguments):
    """As _aside(), for a function of the communicator.  shutdown() waits for its end."""
    with _use_lock:
        if _comm is None:
            raise _unusable()
        comm = _comm.value
        ended = threading.Event()
        _waits.add(ended)

    def run():
        try:
            return function(comm, *arguments)
        finally:
            _waits.discard(ended)
            ended.set()

    return _aside(run)


def _open(settings):
    """A new communicator."""
    lines = [("%s=%s" % pair).encode() for pair in (settings or {}).items()]
    array = (ctypes.c_char_p * (len(lines) + 1))(*lines, None)
    comm = ctypes.c_void_p()

    def close_late(status):
        if status == 0:
            blocking.tally_comm_close(comm)

    status, sentence = _aside(blocking.tally_comm_open, array, ctypes.byref(comm), abandoned=close_late)
    if status < 0:
        raise Error(sentence or "init: %s" % os.strerror(-status), -status)
    return comm


def _take_address(comm):
    """Make a communicator's c_void_p NULL, and return the address that it had."""
    address, comm.value = comm.value, None
    return address


def init(settings=None):
    """Join the job, and wait until all ranks and summation services have joined.  Does nothing if this process has joined.

    settings: maps settings to values, such as {"TALLY_PART_BYTES": "4M"}; these override the environment and the
        configuration file.

    Raises Error with the reason, such as a missing rank, a wrong secret or an unknown setting.
    """
    global _comm, _facts, _generation, _joins, _opener, _events
    with _lock:
        if _forked:
            raise _unusable()
        if _comm is not None:
            return
        comm = _open(settings)
        _facts = tuple(getattr(lib, "tally_comm_" + name)(comm) for name in (
            "rank", "size", "local_rank", "local_size", "machine", "machine_count", "service_count"))
        _opener = os.getpid()
        _generation += 1
        _joins = 0
        _events = Events(comm.value, explain)
        _comm = comm
        _leaving.watch(_abort)


class Job:
    """A job beside the one that init() joins, for calls that name it (Call.job).  It has ranks and a communicator of its own."""

    __slots__ = ("comm", "events", "rank")

    def __init__(self, settings):
        """Join it.  settings, exceptions: as init().  Other threads may join other jobs meanwhile, in an order of their own."""
        if _forked:
            raise _unusable()
        comm = _open(settings)
        self.rank = lib.tally_comm_rank(comm)
        self.events, self.comm = Events(comm.value, explain), comm
        with _beside_lock:
            _beside.add(self)
            _leaving.watch(_abort)

    def close(self):
        """As shutdown()."""
        with _use_lock, _beside_lock:
            comm, self.comm = self.comm, None
            _beside.discard(self)
            address = comm and _take_address(comm)
        if address is not None:
            self.events.stop()
            blocking.tally_comm_close(address)
            self.events.finish()


def listen(port, settings=None):
    """Listen for the job of which this process is rank 0, before init().  init() takes the socket over.

    port: the port, or 0 for any free one.  Returns the port.  Raises Error, which names the process that holds it."""
    lines = [("%s=%s" % pair).encode() for pair in (settings or {}).items()]
    taken = ctypes.c_int(port)
    status = blocking.tally_comm_listen((ctypes.c_char_p * (len(lines) + 1))(*lines, None), ctypes.byref(taken))
    if status < 0:
        raise _failed(status, "listen")
    return taken.value


def shutdown():
    """Leave the job.  Operations in flight get 10 s to end, then they fail.  init() may be called again afterwards.

    Runs by itself when the interpreter ends.  Does nothing if this process is in no job.
    """
    global _comm, _facts, _events
    if _comm is not None:
        for settle in _before_shutdown:
            settle()
    with _lock:
        if _comm is None:
            return
        comm, events = _comm, _events
        if events.is_mine(threading.current_thread()):
            raise RuntimeError("shutdown() must not be called by a handler of log lines or at an operation's end")
        with _use_lock:
            _comm = _facts = None
            address = _take_address(comm)
        for ended in list(_waits):
            await_event(ended, PATIENCE_S)
        events.stop()
        blocking.tally_comm_close(address)
        events.finish()
        _events = None
        _sweep()


def before_shutdown(settle):
    """Have settle() called at each shutdown(), while operations can still end.  It must not wait for ever."""
    _before_shutdown.append(settle)


def _abort(reason):
    """Tell the other ranks why this one leaves.  Does nothing without a job, or in a forked child."""
    with _use_lock:
        for comm in (_comm, *[job.comm for job in list(_beside)]):
            if comm is not None:
                blocking.tally_comm_abort(comm, reason.encode(errors="replace"))


def is_initialized():
    """Whether this process is in a job."""
    return _comm is not None


def _forget():
    """In a forked child, forget the parent's communicator, which the child must not touch."""
    global _comm, _facts, _events, _forked, _lock, _use_lock, _beside_lock
    _lock = threading.RLock()
    _use_lock = threading.RLock()
    _waits.clear()
    _beside_lock = threading.Lock()
    _forked = _forked or _comm is not None or bool(_beside)
    _comm = _facts = _events = None
    for job in _beside:
        job.comm = None
    _beside.clear()


def _leave_all():
    for job in list(_beside):
        job.close()
    shutdown()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget)


def _unusable():
    if _forked:
        return NotInitializedError(
            "tally was initialised by process %d; process %d is a fork of it and cannot use it (start processes "
            "that need tally with the method 'spawn', or fork before init())" % (_opener, os.getpid()))
    return NotInitializedError("tally is not initialised in this process; call init() first")


def _fact(index):
    facts = _facts
    if facts is None:
        raise _unusable()
    return facts[index]


def rank():
    """This process's rank, from 0."""
    return _fact(0)


def size():
    """Number of ranks."""
    return _fact(1)


def local_rank():
    """This process's place among the ranks of this machine, from 0."""
    return _fact(2)


def local_size():
    """Number of ranks on this machine."""
    return _fact(3)


def machine():
    """This machine's number, from 0."""
    return _fact(4)


def machine_count():
    """Number of machines with ranks."""
    return _fact(5)


def service_count():
    """Number of summation services: one for each machine with ranks, and each tallyd."""
    return _fact(6)


def generation(job=None):
    """How often init() has succeeded in this process.  A job beside is joined once."""
    return _generation if job is None else 1


def period():
    """How often init() has succeeded in this process, and how often all ranks have joined since.  Counts that must be equal
    on all ranks begin anew with each."""
    return _generation, _joins


def join():
    """Declare that this rank has no more input, and wait until all ranks have.  Returns the rank that joined last.

    Until then this rank takes no part in what the others submit.  Other Python threads run, and signals get through."""
    global _joins
    op, call = ctypes.c_void_p(), Call()
    with _use_lock:
        if _comm is None:
            raise _unusable()
        status = lib.tally_join(_comm, _options_of(call, ())[0], ctypes.byref(op))
    if status < 0:
        raise _failed(status, "join")
    operation = Operation(op.value, call)
    operation.wait()
    _joins += 1
    return operation.source()


def report(timeout=10.0):
    """Describe the communicator and its services as a dict: part size, and for each service its kind, address, planned share,
    bytes summed, memory in use and its maximum.

    timeout: seconds; Error (ETIMEDOUT) after it."""
    text = ctypes.c_void_p()
    status, sentence = _wait_aside(blocking.tally_comm_report, int(timeout * 1000), ctypes.byref(text))
    if status < 0:
        raise Error(sentence or "report: %s" % os.strerror(-status), -status)
    try:
        return json.loads(ctypes.string_at(text.value))
    finally:
        _lib.free(text)


def plan(names, sizes, space):
    """Agree with all ranks on a list of tensors, `names` of `sizes` bytes in order of submission.  Tally then splits the whole
    list over the services exactly.  Collective.  Raises Error on all ranks if lists differ."""
    count = len(names)
    status, sentence = _wait_aside(blocking.tally_plan, space, count,
                                   (ctypes.c_char_p * count)(*[name.encode() for name in names]),
                                   (ctypes.c_uint64 * count)(*sizes))
    if status < 0:
        kind = ValueError if status == -errno.EBUSY else None
        sentence = sentence or "plan: %s" % os.strerror(-status)
        raise kind(sentence) if kind else Error(sentence, -status)


def make_group(name, ranks, job=None):
    """Return the handle of the group `name` of these ranks, for `group=`.  It lives as long as the communicator.  Raises
    ValueError for invalid ranks, or if the name has another list."""
    group = ctypes.c_void_p()
    with _use_lock:
        comm = _comm if job is None else job.comm
        if comm is None:
            raise _unusable()
        status = lib.tally_group_create(comm, name.encode(), (ctypes.c_int * len(ranks))(*ranks), len(ranks),
                                        ctypes.byref(group))
    if status < 0:
        raise ValueError(_lib.error() or os.strerror(-status))
    _group_ranks[group.value] = tuple(ranks)
    return group.value


_group_ranks = {}  # handle -> ranks


def group_ranks(group):
    """The ranks of the job in a group, in its order.  None: all."""
    return _group_ranks[group] if group else range(size())


# --- memory ----------------------------------------------------------------------------------------------


def has_pool():
    """Whether alloc() returns memory that the ranks share."""
    return _comm is not None and bool(lib.tally_comm_has_pool(_comm))


def alloc(length):
    """Return `length` bytes of zeros as a ctypes array, which frees its memory with its last reference.  The memory is from
    the pool that the ranks of a machine share, or ordinary memory if they share none.  A forked child does not have it."""
    memory = ctypes.c_void_p()
    with _use_lock:
        if _comm is None:
            raise _unusable()
        status = lib.tally_alloc(_comm, length, ctypes.byref(memory))
    if status < 0:
        raise MemoryError(_lib.error() or os.strerror(-status))
    array = (ctypes.c_uint8 * max(length, 1)).from_address(memory.value)
    weakref.finalize(array, lib.tally_free, memory.value).atexit = False
    return array


# --- operations ------------------------------------------------------------------------------------------


class Call:
    """A call that the ranks make on some memory.  It does not change, so it may be submitted again.

    name: the ranks' calls meet by it; None: by their number among the calls of their kind.
    reduction: a Reduction or its number.  prescale, postscale: factors of inputs and of the result; not 0.
    group: from make_group(); None: all ranks.
    priority: higher goes first.
    space: of names; equal names in different spaces do not meet.
    note: text that must be equal on all ranks.
    partial: an allgather does not fail if a rank has joined, which contributes nothing.
    then: called with the operation at its end, in another thread or before the submission returns.
    finish: result -> what wait() returns; the first waiter calls it, after success.  If a signal handler's exception breaks
        it off, the next waiter calls it again.
    line: in an ordered name space, the calls before this one; see tally.torch.device.
    job: the Job that it is made in; None: the one that init() has joined.
    """

    _TERMS = ("name", "reduction", "group", "priority", "prescale", "postscale", "space", "note", "partial", "then", "finish",
              "line", "job")
    # Made once for all submissions.  options: (shape, the library's options) of the last one; encoded: the name as bytes.
    __slots__ = (*_TERMS, "options", "encoded")

    def __init__(self, name=None, reduction=0, group=None, priority=0, prescale=1.0, postscale=1.0, space=HOROVOD, note=None,
                 partial=False, then=None, finish=None, line=None, job=None):
        self.name = name
        self.reduction = reduction
        self.group = group
        self.priority = priority
        self.prescale = prescale
        self.postscale = postscale
        self.space = space
        self.note = note
        self.partial = partial
        self.then = then
        self.finish = finish
        self.line = line
        self.job = job
        self.options = self.encoded = None

    def but(self, **changes):
        """A copy with other values."""
        return Call(**{**{name: getattr(self, name) for name in self._TERMS}, **changes})


_known = {}


def reducing(name, reduction, group, priority, prescale, postscale, space=HOROVOD):
    """The Call of a reduction: the one of last time, where all is the same."""
    key = name, reduction, group, priority, prescale, postscale, space
    try:
        call = _known.get(key)
    except TypeError:  # of a type that makes no key: submitting it says what is wrong
        return Call(*key)
    if call is None:
        if len(_known) >= 8192:  # names without end
            _known.clear()
        call = _known[key] = Call(*key)
    return call


_calling = _leaving.calling
exchanged = 0    # elements of this rank in reductions and gathers; steps.py sets it to 0, and compares it with gradients
MANY = 1 << 62   # added to it for what says nothing about gradients: messages and all-to-alls


class Operation:
    """An operation in flight.  Poll it with done(), end it with wait().

    It holds the memory that the operation reads and writes.  If the handle is dropped in flight, the module holds that
    memory until the operation has ended.
    """

    __slots__ = ("_op", "_keep", "_result", "_finish", "_lock", "_ended", "_failure", "_group", "_job", "__weakref__")

    def __init__(self, op, call, keep=None, result=None):
        _calling.here = True
        self._ended = False
        self._keep = keep      # memory in use until the end, beside the result
        self._op = op          # address; owned
        self._result = result  # what wait() returns, or passes to finish
        self._finish = finish = call.finish
        if finish is not None:
            self._lock = threading.RLock()  # held while finish runs
        self._group = call.group
        self._job = call.job
        self._failure = None

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
            while True:
                limit = SLICE_MS
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
        with _use_lock:
            if not self._ended and (_comm if self._job is None else self._job.comm) is not None:
                lib.tally_op_cancel(self._op, reason.encode())

    def watch(self, then):
        """Call then(self) once the operation has ended: in a thread of the completion queue, or at once if it has ended.
        Only once, and only for an operation that was submitted without `then`."""
        events = _events if self._job is None else self._job.events  # still there, while operations may be under way
        status = lib.tally_op_watch(self._op)
        if status == 0:
            events.expect(self._op, then, self)
        elif status == -errno.EINVAL:
            raise _failed(status, "watch")
        else:
            then(self)

    def gathered(self):
        """Return (address, bytes, list of the ranks' first dimensions) of a finished allgather.

        The memory belongs to the operation and lives as long as this object."""
        data, length, dims = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.POINTER(ctypes.c_int64)()
        status = lib.tally_op_gathered(self._op, ctypes.byref(data), ctypes.byref(length), ctypes.byref(dims))
        if status < 0:
            raise _failed(status, "allgather")
        return data.value, length.value, dims[:len(group_ranks(self._group))]

    def source(self):
        """The sender of the message that a finished probe has found, as a place in the group.  For a finished join: the rank that
        joined last."""
        status = lib.tally_op_source(self._op)
        if status < 0:
            raise _failed(status, "probe")
        return status

    # Bound at definition: module globals may be gone when the interpreter ends.
    def __del__(self, _poll=lib.tally_op_poll, _free=lib.tally_op_free, _orphans=_orphans):
        if _forked or not hasattr(self, "_op"):  # torch.compile makes objects without __init__
            return
        if self._ended or _poll(self._op):
            _free(self._op)
        else:
            _orphans.append((self._op, self._keep, self._result))


def _sweep():
    """Free dropped operations that have ended since."""
    for _ in range(len(_orphans)):
        try:
            orphan = _orphans.pop(0)
        except IndexError:  # another thread sweeps too
            return
        if lib.tally_op_poll(orphan[0]):
            lib.tally_op_free(orphan[0])
        else:
            _orphans.append(orphan)


# Options are pure functions of these few values and the library only reads them: made once each, then shared.
_options = {}
_OPTIONS_SIZE = ctypes.sizeof(_lib.Options)


def _options_of(call, shape):
    """(address, what must live as long as it is used) of a call's options."""
    known = call.options
    if known is None or known[0] != shape:
        key = (shape, call.priority, call.prescale, call.postscale, call.space, call.then is not None, call.group, call.note,
               call.partial)
        known = call.options = shape, _options.get(key) or _make_options(*key)
    return known[1]


def _make_options(*key):
    shape, priority, prescale, postscale, space, queued, group, note, partial = key
    if prescale == 0 or postscale == 0:
        raise ValueError("prescale_factor and postscale_factor must not be 0")
    dims = (ctypes.c_int64 * len(shape))(*shape)
    options = _lib.Options(size=_OPTIONS_SIZE, priority=max(-2**31, min(2**31 - 1, priority)), ndim=len(shape),
                           shape=dims, prescale=prescale, postscale=postscale, space=space,
                           queued=queued, group=group, note=note and note.encode(), partial=partial)
    if len(_options) >= 8192:  # shapes without end, say of variable batches
        _options.clear()
    entry = _options[key] = (ctypes.addressof(options), options, dims)
    return entry


def _encode(name):
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError("name must be a string, not %s" % type(name).__name__)
    if not name or "\0" in name:
        raise ValueError("name %r: must not be empty or hold a NUL" % name)
    return name.encode()


def _rejected(status, kind, call, comm):
    """The exception for a submission that the library refused.  Tells the other ranks the reason."""
    if not comm:  # another thread has closed it since
        return _unusable()
    sentence = explain(_lib.error() or os.strerror(-status))
    if status == -errno.EBUSY:
        return ValueError(sentence)
    if status in (-errno.EINVAL, -errno.ENOTSUP):
        refuse(kind, call, sentence)
        return ValueError(sentence)
    return Error(sentence, -status)


def meeting(kind, call):
    """Where the ranks' calls meet, as a key."""
    return period(), kind, call.name, call.space, call.group, call.job


_refusals = collections.Counter()


def refusals(kind, call):
    """How often this rank has refused such a call in this job."""
    return _refusals[meeting(kind, call)]


def refuse(kind, call, reason):
    """Tell the ranks that submit this call (without a name: the next one) why this rank cannot.  Their calls fail with the
    reason.  Nobody is told about a message (kind None)."""
    comm = _comm if call.job is None else call.job.comm
    if comm is None or kind is None:
        return
    if call.name is not None:
        _refusals[meeting(kind, call)] += 1
    options, where = _options_of(Call(space=call.space, group=call.group), ()), _where.of_caller()
    text = str(reason)
    lib.tally_refuse(comm, _encode(call.name), kind, options[0], (text if text.endswith(where) else text + where).encode())


def _broken_off(error, op, kind, call, keep, result):
    """Handle an exception in a submission: an argument cannot be passed to the library, or a signal handler has raised it.
    The other ranks are told, unless the operation is under way."""
    if op.value:
        operation = Operation(op.value, call, keep, result)  # its memory is held until it has ended
        if call.then is not None:
            events = _events if call.job is None else call.job.events
            events.expect(op.value, lambda _: None, operation)  # or a later one's call would run in place of this one's
    elif isinstance(error, ctypes.ArgumentError):
        error = TypeError("an argument is of the wrong type: %s" % error)
        refuse(kind, call, error)
        raise error from None
    else:
        refuse(kind, call, error if isinstance(error, (TypeError, ValueError, OverflowError)) else
               _leaving.reason(type(error), error))


# Below, `keep` is memory in use until the end, beside `result`, which wait() returns.


def _submit(kind, function, call, shape, keep, result, *arguments, elements=0):
    """Call the library's function(comm, *arguments, options, op).  kind: None for a message.  elements: for `exchanged`.
    Returns the Operation."""
    job = call.job
    comm, events = (_comm, _events) if job is None else (job.comm, job.events)
    if comm is None:
        raise _unusable()
    global exchanged
    exchanged += elements
    op = ctypes.c_void_p()
    try:
        options = _options_of(call, shape)
        status = function(comm, *arguments, options[0], ctypes.byref(op))
    except BaseException as error:
        _broken_off(error, op, kind, call, keep, result)
        raise
    if status < 0:
        raise _rejected(status, kind, call, comm)
    if _orphans:
        _sweep()
    operation = Operation(op.value, call, keep, result)
    if call.then is not None:
        events.expect(op.value, call.then, operation)
    return operation


def push_pull(call, source, target, count, dtype, shape, keep=None, result=None, _function=lib.tally_push_pull,
              _pointer=ctypes.c_void_p, _byref=ctypes.byref):
    """Submit a reduction of `count` elements at address `source` into `target` (the same: in place)."""
    job = call.job
    comm, events = (_comm, _events) if job is None else (job.comm, job.events)
    if comm is None:
        raise _unusable()
    global exchanged
    exchanged += count
    op, encoded, then, known = _pointer(), call.encoded, call.then, call.options
    if encoded is None and call.name is not None:
        encoded = call.encoded = _encode(call.name)
    try:
        options = known[1] if known is not None and known[0] == shape else _options_of(call, shape)
        status = _function(comm, encoded, source, target, count, dtype, call.reduction, options[0], _byref(op))
    except BaseException as error:
        _broken_off(error, op, PUSH_PULL, call, keep, result)
        raise
    if status < 0:
        raise _rejected(status, PUSH_PULL, call, comm)
    if _orphans:
        _sweep()
    operation = Operation(op.value, call, keep, result)
    if then is not None:
        events.expect(op.value, then, operation)
    return operation


def broadcast(call, buffer, count, dtype, root, shape, keep=None, result=None):
    """Submit a broadcast of `count` elements at address `buffer` from rank `root`, in place."""
    return _submit(BROADCAST, lib.tally_broadcast, call, shape, keep, result, _encode(call.name), buffer, count, dtype, root)


def allgather(call, source, count, dtype, shape, keep=None):
    """Submit an allgather of `count` elements at address `source`.  Operation.gathered() returns the result."""
    return _submit(ALLGATHER, lib.tally_allgather, call, shape, keep, None, _encode(call.name), source, count, dtype,
                   elements=count)


def allgather_into(call, source, target, count, dtype, shape, keep=None):
    """Submit an allgather of `count` elements at address `source` on each rank, concatenated at `target`."""
    return _submit(ALLGATHER, lib.tally_allgather_into, call, shape, keep, None, _encode(call.name), source, target, count,
                   dtype, elements=count)


def _sizes(counts):
    return (ctypes.c_size_t * len(counts))(*counts)


def reduce_scatter(call, source, target, counts, dtype, keep=None, result=None):
    """Submit a reduce-scatter.  `source` holds counts[i] elements for rank i, in order of ranks; `target` gets this rank's."""
    return _submit(REDUCE_SCATTER, lib.tally_reduce_scatter, call, (), keep, result, _encode(call.name), source, target,
                   _sizes(counts), dtype, call.reduction, elements=sum(counts))


def alltoall(call, source, give, target, take, dtype, keep=None, result=None):
    """Submit an all-to-all: give[i] elements at address `source` for rank i, take[i] elements from it at `target`."""
    return _submit(ALLTOALL, lib.tally_alltoall, call, (), keep, result, _encode(call.name), source, _sizes(give), target,
                   _sizes(take), dtype, elements=MANY)


def reduce(call, source, target, count, dtype, root, keep=None):
    """Submit a reduction.  Only the root gets the result, at `target`."""
    return _submit(REDUCE, lib.tally_reduce, call, (count,), keep, None, _encode(call.name), source, target, count, dtype,
                   call.reduction, root, elements=count)


def gather(call, source, count, target, counts, dtype, root, keep=None):
    """Submit a gather: counts[i] elements of rank i, in order of ranks, at the root's `target`.

    target, counts: only on the root, elsewhere None."""
    return _submit(GATHER, lib.tally_gather, call, (), keep, None, _encode(call.name), source, count, target,
                   counts and _sizes(counts), dtype, root, elements=count)


def scatter(call, source, counts, target, count, dtype, root, keep=None):
    """Submit a scatter: counts[i] elements of the root's `source` for rank i."""
    return _submit(SCATTER, lib.tally_scatter, call, (), keep, None, _encode(call.name), source, counts and _sizes(counts),
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
    return _submit(BARRIER, lib.tally_barrier, call, (0,), None, None, _encode(call.name))


def barrier(name=None, group=None):
    """Wait until all ranks, or those of a group, have called it."""
    barrier_async(Call(name, group=group, space=USER)).wait()

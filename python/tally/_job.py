"""The jobs that this process is in: the one that init() joins, and others beside it.

A Job owns a communicator and its completion queue, from its opening to its closing.  Any thread may call.  A call that
waits for the library holds no lock.  The library's own threads never enter Python.

SPDX-License-Identifier: Apache-2.0
"""

import atexit
import contextlib
import ctypes
import errno
import json
import os
import threading

from . import _leaving, _lib
from ._errors import NotInitializedError, explain, failed
from ._events import PATIENCE_S, Events
from ._lib import blocking, lib
from ._waits import Aside, await_event, call_aside

_lock = threading.RLock()      # guards the opening and closing of the process's own job
_use_lock = threading.RLock()  # held while the library uses a communicator, so that none is closed meanwhile
_jobs = set()                  # those that are open
_opener = os.getpid()          # the process that called init()
_before_shutdown = []          # called while the job is still there
_after_shutdown = []           # called once its operations have ended


class Job:
    """A job: ranks and a communicator.  Other threads may join other jobs meanwhile, in an order of their own."""

    __slots__ = ("comm", "events", "facts", "generation", "joins", "forked", "_waits")

    def __init__(self):
        # The open tally_comm as a c_void_p, or None.  close() makes the c_void_p NULL, which the library refuses: a call
        # that keeps the GIL may have taken it before.
        self.comm = None
        self.events = None   # its completion queue
        self.facts = None    # (rank, size, local rank, local size, machine, machine count, service count)
        self.generation = 0  # counts open(); what was agreed with an earlier communicator is void
        self.joins = 0       # how often all ranks have joined, in this communicator
        self.forked = False  # true in a child that was forked while the communicator was open
        self._waits = set()  # ends of calls that use the communicator in threads of their own, each an Event

    @property
    def rank(self):
        """This process's rank in it, while it is open."""
        return self.facts[0]

    def open(self, settings):
        """Join the job.  settings, exceptions: as init()."""
        comm = ctypes.c_void_p()
        lines = _lines(settings)

        def close_late(status):
            if status == 0:
                blocking.tally_comm_close(comm)

        status, sentence = call_aside(_with_context(blocking.tally_comm_open), lines, ctypes.byref(comm),
                                      abandoned=close_late)
        if status < 0:
            raise failed(status, "init", sentence)
        self.facts = tuple(getattr(lib, "tally_comm_" + name)(comm) for name in (
            "rank", "size", "local_rank", "local_size", "machine", "machine_count", "service_count"))
        self.generation += 1
        self.joins = 0
        self.events = Events(comm.value, explain)
        self.comm = comm
        _jobs.add(self)
        _leaving.watch(_abort)

    def close(self):
        """Leave the job.  Operations in flight get 10 s to end, then they fail."""
        with _use_lock:
            comm, self.comm, self.facts = self.comm, None, None
            _jobs.discard(self)
            if not comm:
                return
            address, comm.value = comm.value, None
        for ended in list(self._waits):
            await_event(ended, PATIENCE_S)
        self.events.stop()
        blocking.tally_comm_close(address)
        self.events.finish()

    @contextlib.contextmanager
    def in_use(self):
        """The communicator, which is not closed meanwhile.  Raises NotInitializedError without one."""
        with _use_lock:
            if self.comm is None:
                raise unusable()
            yield self.comm

    def aside(self, function, *arguments):
        """An Aside of a function of the communicator.  close() waits for its end, if it has begun."""
        ended = threading.Event()
        with self.in_use() as comm:
            pass

        def run():
            self._waits.add(ended)  # before it looks for the communicator, which close() takes away before it looks here
            try:
                return function(comm.value, *arguments)  # None, if it begins after close()
            finally:
                self._waits.discard(ended)
                ended.set()

        return Aside(run)

    def forget(self):
        """In a forked child, forget the parent's communicator, which the child must not touch."""
        self.comm = self.events = self.facts = None
        self._waits.clear()


own = Job()  # the one that init() joins


def _with_context(function):
    """The function with this thread's CUDA context, for a call in another thread: the library takes the GPU from it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)  # without the driver there is no context
    except OSError:
        return function
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) != 0:
        return function

    def call(*arguments):
        driver.cuCtxSetCurrent(context)
        return function(*arguments)
    return call


def _lines(settings):
    lines = [("%s=%s" % pair).encode() for pair in (settings or {}).items()]
    return (ctypes.c_char_p * (len(lines) + 1))(*lines, None)


# --- joining and leaving ----------------------------------------------------------------------------------


def init(settings=None):
    """Join the job, and wait until all ranks and summation services have joined.  Does nothing if this process has joined.

    settings: maps settings to values, such as {"TALLY_PART_BYTES": "4M"}; these override the environment and the
        configuration file.

    Raises Error with the reason, such as a missing rank, a wrong secret or an unknown setting.
    """
    global _opener
    with _lock:
        if own.forked:
            raise unusable()
        if own.comm is None:
            own.open(settings)
            _opener = os.getpid()


def open_beside(settings):
    """Join a job beside the one that init() joins, for calls that name it (Call.job).  Returns the Job."""
    if own.forked:
        raise unusable()
    job = Job()
    job.open(settings)
    return job


def listen(port, settings=None):
    """Listen for the job of which this process is rank 0, before init().  init() takes the socket over.

    port: the port, or 0 for any free one.  Returns the port.  Raises Error, which names the process that holds it."""
    taken = ctypes.c_int(port)
    status = blocking.tally_comm_listen(_lines(settings), ctypes.byref(taken))
    if status < 0:
        raise failed(status, "listen")
    return taken.value


def shutdown():
    """Leave the job.  Operations in flight get 10 s to end, then they fail.  init() may be called again afterwards.

    Runs by itself when the interpreter ends.  Does nothing if this process is in no job.
    """
    if own.comm is not None:
        for settle in _before_shutdown:
            settle()
    with _lock:
        if own.comm is None:
            return
        if own.events.is_mine(threading.current_thread()):
            raise RuntimeError("shutdown() must not be called by a handler of log lines or at an operation's end")
        own.close()
        for sweep in _after_shutdown:
            sweep()


def before_shutdown(settle):
    """Have settle() called at each shutdown(), while operations can still end.  It must not wait for ever."""
    _before_shutdown.append(settle)


def after_shutdown(sweep):
    """Have sweep() called at each shutdown(), once all operations have ended."""
    _after_shutdown.append(sweep)


def _abort(reason):
    """Tell the other ranks why this one leaves.  Does nothing without a job, or in a forked child."""
    with _use_lock:
        for job in list(_jobs):
            blocking.tally_comm_abort(job.comm, reason.encode(errors="replace"))


def _forget():
    global _lock, _use_lock
    _lock = threading.RLock()
    _use_lock = threading.RLock()
    own.forked = own.forked or bool(_jobs)
    for job in _jobs:
        job.forget()
    _jobs.clear()


def _leave_all():
    for job in list(_jobs - {own}):
        job.close()
    shutdown()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget)


# --- what is known of the job -----------------------------------------------------------------------------


def is_initialized():
    """Whether this process is in a job."""
    return own.comm is not None


def unusable():
    """The exception for a call without a job."""
    if own.forked:
        return NotInitializedError(
            "tally was initialised by process %d; process %d is a fork of it and cannot use it (start processes "
            "that need tally with the method 'spawn', or fork before init())" % (_opener, os.getpid()))
    return NotInitializedError("tally is not initialised in this process; call init() first")


def _fact(index):
    facts = own.facts
    if facts is None:
        raise unusable()
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
    return (job or own).generation


def period():
    """How often init() has succeeded in this process, and how often all ranks have joined since.  Counts that must be equal
    on all ranks begin anew with each."""
    return own.generation, own.joins


def report(timeout=10.0):
    """Describe the communicator and its services as a dict: part size, and for each service its kind, address, planned share,
    bytes summed, memory in use and its maximum.

    timeout: seconds; Error (ETIMEDOUT) after it."""
    text = ctypes.c_void_p()
    status, sentence = own.aside(blocking.tally_comm_report, int(timeout * 1000), ctypes.byref(text)).wait()
    if status < 0:
        raise failed(status, "report", sentence)
    try:
        return json.loads(ctypes.string_at(text.value))
    finally:
        _lib.free(text)


class Plan:
    """An agreement of all ranks on a list of tensors, `names` of `sizes` bytes in order of submission.  Tally then splits the
    whole list over the services exactly.  Collective."""

    def __init__(self, names, sizes, space):
        count = len(names)
        self._aside = own.aside(blocking.tally_plan, space, count, (ctypes.c_char_p * count)(*[name.encode() for name in names]),
                                (ctypes.c_uint64 * count)(*sizes))

    def wait(self):
        """Wait for it.  If a signal handler breaks that off, the next call goes on.  Raises Error on all ranks if lists differ."""
        status, sentence = self._aside.wait()
        if status == -errno.EBUSY:
            raise ValueError(sentence)
        if status < 0:
            raise failed(status, "plan", sentence)


def plan(names, sizes, space):
    """Agree on a Plan."""
    Plan(names, sizes, space).wait()


# --- groups -----------------------------------------------------------------------------------------------

_group_ranks = {}  # handle -> ranks


def make_group(name, ranks, job=None):
    """Return the handle of the group `name` of these ranks, for `group=`.  It lives as long as the communicator.  Raises
    ValueError for invalid ranks, or if the name has another list."""
    group = ctypes.c_void_p()
    with (job or own).in_use() as comm:
        status = lib.tally_group_create(comm, name.encode(), (ctypes.c_int * len(ranks))(*ranks), len(ranks),
                                        ctypes.byref(group))
    if status < 0:
        raise ValueError(_lib.error() or os.strerror(-status))
    _group_ranks[group.value] = tuple(ranks)
    return group.value


def group_ranks(group):
    """The ranks of the job in a group, in its order.  None: all."""
    return _group_ranks[group] if group else range(size())

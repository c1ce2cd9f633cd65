"""Joins the job as the rank that torch.distributed gives, whatever made it: torchrun, a launcher, mp.spawn.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import datetime
import errno
import functools
import logging
import os
import socket
import time

import torch.distributed as dist

from .. import _address, _errors, _events, _job, _where
from . import patches

# Who sets one of these says where the coordinator is, or has tallyd look for it there; that of a job of all ranks.
_SAID = ("TALLY_COORD", "TALLY_PORT", "TALLY_SERVERS", "TALLY_CONFIG")

_turns = collections.Counter()  # how often this process has joined a job of such ranks: a store may outlive a job
_last = (0, ())                  # generation of the job that join() has joined, and torch's numbers of its ranks

_USUAL_PORT = 29777  # TALLY_PORT's default
_JOIN_TIMEOUT = 600  # TALLY_JOIN_TIMEOUT's
_WARN_EVERY_S = 10   # who does not come is named as often as by the coordinator
_HEARD_S = 2         # for which rank 0 keeps the store for the others to hear why there will be no job
_LOCAL = ("127.0.0.1", "localhost", "::1")


def _as_rank(rank, size, of_all):
    """Settings of a rank of the job.  They replace the launcher's variables, and leave the environment alone: other threads
    of this process may be in it, or join jobs of their own."""
    return {"TALLY_RANK": "%d/%d" % (rank, size), **({} if of_all else {"TALLY_BESIDE": "1"})}


def _listen(settings, host, *wanted):
    """The port at which this process listens for the job from now on: the first of the wanted ones that is free, 0 for any,
    -1 for the settings'.  The C library takes the socket over when it opens the communicator, so no other job takes the
    port in between.

    If it cannot listen yet, init() says why or waits, and the ranks need a port to look for it.  Raises _errors.Error if
    another program holds the port, or there can be no job.
    """
    for port in wanted:
        try:
            return _job.listen(port, {**settings, "TALLY_COORD": host} if host else settings)
        except _errors.Error as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAGAIN):
                break
            if error.errno != errno.EADDRINUSE or port == wanted[-1]:
                raise
    return wanted[0] if wanted[0] > 0 else _USUAL_PORT


def _host_of(store):
    """The host of torch.distributed's store; None if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _own_address(store):
    """The address of this machine by which the store's host sees it."""
    host = _host_of(store)
    if host is None:
        return "127.0.0.1"
    try:
        family, kind, _, _, to = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(to)  # sends nothing
            return probe.getsockname()[0]
    except OSError:
        return host


def _choose_place(store, of_all, settings):
    """Rank 0's word for the meeting place, HOST:PORT or :PORT; "" if the settings name it."""
    if of_all and any(name in os.environ for name in _SAID):
        _listen(settings, "", -1)
        return ""
    master = os.environ.get("MASTER_ADDR")
    if not of_all and dist.get_rank() != 0:
        # Not the launcher's rank 0, perhaps not on its machine.
        host = master if master in _LOCAL else socket.gethostname()
    elif master is not None:
        host = "" if of_all else master
    else:
        host = _host_of(store) or "127.0.0.1"
    port = _listen(settings, host, *((_USUAL_PORT, 0) if of_all else (0,)))
    return _address.join(host, port) if host else ":%d" % port


def _place(store, key, first, rank):
    """The word of rank `first`, by torch's numbers, which is the new job's rank 0. It may never come; meanwhile all
    ranks log that they wait for it."""
    limit = store.timeout.total_seconds()
    end = time.monotonic() + limit
    while True:
        begun = time.monotonic()
        until = min(begun + _WARN_EVERY_S, end)
        try:
            store.wait([key], datetime.timedelta(seconds=max(until - begun, 0.001)))
            return store.get(key).decode()
        except RuntimeError as error:
            if _where.is_handlers(error):
                raise
            if time.monotonic() < until - 0.1:  # it is not the time
                raise _errors.Error("rank %d has not said where to meet, and torch.distributed's store has gone, perhaps with "
                                    "rank 0: look at its output (%s)" % (first, str(error).partition("\n")[0]),
                                    errno.ECONNRESET) from None
        if until == end:
            raise _errors.Error("joining the job: Timed out after %g s: rank %d has not joined: has its model the hook of "
                                "tally.torch, or its process group the backend tally?" % (limit, first), errno.ETIMEDOUT)
        _events.log(logging.WARNING, "rank %d join: waiting for rank %d, which says where to meet" % (rank, first))


def _origin(store, host):
    """What a host in rank 0's word comes from, for errors."""
    if host == os.environ.get("MASTER_ADDR"):
        return "MASTER_ADDR"
    return "the host of init_method, or of the store" if host == _host_of(store) else "rank 0's address"


def _meet(store, key, numbers, rank, choose, of_all):
    """Settings that lead this process, as `rank`, to the job whose ranks meet at `key` of `store`.

    numbers: torch's, of its ranks.  choose(settings): rank 0's word for the place.
    """
    settings = _as_rank(rank, len(numbers), of_all)
    if rank == 0:
        try:
            store.set(key, choose(settings))
        except _errors.Error as error:
            _events.log(logging.ERROR, "rank %d join: %s" % (numbers[0], error))
            _refuse(store, key, len(numbers), error.errno, str(error))
            raise
    place = _place(store, key, numbers[0], numbers[rank])
    if place.startswith("!"):
        store.set("%s/heard/%d" % (key, rank), "")
        number, _, reason = place[1:].partition(" ")
        reason = "rank %d cannot open the job: %s" % (numbers[0], reason)
        raise _errors.Error(reason, int(number)) if int(number) else ValueError(reason)
    if not of_all:
        settings["TALLY_SERVERS"] = "0"  # tallyd look for the job of all ranks
    if place.startswith(":"):
        settings["TALLY_PORT"] = place[1:]
    elif place:
        settings["TALLY_COORD"] = place
        settings["TALLY_COORD_FROM"] = _origin(store, _address.split(place)[0])
    limit = store.timeout.total_seconds()
    if limit < _JOIN_TIMEOUT and not _is_set("TALLY_JOIN_TIMEOUT"):
        settings["TALLY_JOIN_TIMEOUT"] = "%g" % max(limit, 1)  # those who do not come have given up by then
    return settings


def _refuse(store, key, size, number, reason):
    """As rank 0, tell the others why there will be no job, and wait until they have heard: the store may end with this
    process."""
    store.set(key, "!%d %s" % (number, reason))
    try:
        store.wait(["%s/heard/%d" % (key, rank) for rank in range(1, size)], datetime.timedelta(seconds=_HEARD_S))
    except RuntimeError as error:
        if _where.is_handlers(error):
            raise


def _is_set(name):
    """Whether the user has set a parameter, in the environment or in the file that the environment names."""
    if name in os.environ:
        return True
    try:
        with open(os.environ["TALLY_CONFIG"], "rb") as file:
            return any(line.partition(b"=")[0].strip() == name.encode() for line in file)
    except (KeyError, OSError):
        return False


def job_members(world):
    """The ranks of this process's job, by torch's numbers, from 0 to world - 1. All of them if code other than join()
    made the job."""
    generation, members = _last
    return members if generation == _job.generation() else tuple(range(world))


def join(store, members, rank, patience=None):
    """Become rank `rank` in a job whose ranks meet through `store`. Does nothing if this process has that rank already.

    members: torch's numbers of its ranks.
    patience: seconds after which a waiting operation fails the job, unless the user has set it; 0: never.  The
        library's own limit is made no shorter.
    Raises ValueError if this process is another rank of its job, or if the job has other ranks.  Raises Error if a rank
    has not come within the time-out of `store`, or TALLY_JOIN_TIMEOUT.
    """
    global _last
    size = len(members)
    world = dist.get_world_size() if dist.is_initialized() else size
    if not _job.is_initialized():
        of_all = world == size
        settings = _meet(store, "tally/%d" % _turns[members], members, rank,
                         functools.partial(_choose_place, store, of_all), of_all)
        if patience is not None and not 0 < patience <= 1800 and not _is_set("TALLY_TIMEOUT"):
            settings["TALLY_TIMEOUT"] = "%d" % patience
        _job.init(settings)
        _turns[members] += 1
        _last = (_job.generation(), members)
    here, reason = job_members(world), None
    if len(here) == _job.size() and here != members:
        reason = ("this process's job is that of ranks %s, and it can have no second one, of ranks %s"
                  % (list(here), list(members)))
    elif (_job.rank(), _job.size()) != (rank, size):
        reason = ("this process is rank %d of %d for Tally and rank %d of %d for torch.distributed; start both with the "
                  "same launcher" % (_job.rank(), _job.size(), rank, size))
    if reason is not None:
        if rank == 0:
            decline(store, members, reason)
        raise ValueError(reason)


def is_beside(options):
    """Whether a group has a store and ranks of its own, as frameworks make one between a trainer and another program's
    processes (_new_process_group_helper() without torch's ranks).  Torch names the default group, which is made in the same
    way, by a number."""
    return not options.global_ranks_in_group and (dist.is_initialized() or not options.group_id.isdigit())


def join_beside(store, name, rank, size):
    """Become rank `rank` of `size` in a job beside this process's, whose ranks meet through `store`: torch's numbers of
    them mean nothing.  Returns the _job.Job.  Exceptions: as of join().

    name: of the job.  The ranks' launchers need not be the same, so nothing that these say counts.
    """
    # The n-th time that each of them does so, in whatever process.
    key = "tally/%d" % store.add("tally/joined/%d" % rank, 1)

    def choose(settings):
        host = _own_address(store)
        return _address.join(host, _listen(settings, host, 0))

    settings = _meet(store, key, range(size), rank, choose, False)
    settings["TALLY_JOB"] = name
    if not _is_set("TALLY_TIMEOUT"):
        settings["TALLY_TIMEOUT"] = "0"  # each call has its group's
    return _job.open_beside(settings)


def decline(store, members, reason):
    """As rank 0, tell the ranks that may wait for the meeting place why there will be none."""
    store.set("tally/%d" % _turns[members], "!0 " + reason)


def join_default():
    """Join as the rank that this process has in torch's default process group, or that the launcher gives it."""
    if dist.is_available() and dist.is_initialized():
        join(dist.PrefixStore("tally", patches.default_store()), tuple(range(dist.get_world_size())), dist.get_rank(),
             patches.time_out(dist.group.WORLD))
    else:
        _job.init()


_launched = None  # the launcher's store; it must live as long as others may look into it


def join_launched(settings=None):
    """Join like join_default(), with one exception.  Under torchrun, and if no setting names a meeting place, join
    through torchrun's store, so that several jobs on one machine find ports of their own."""
    global _launched
    said = any(name in os.environ or name in (settings or {}) for name in _SAID)
    ready = dist.is_available() and all(
        os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    if settings or said or not ready or _job.is_initialized():
        _job.init(settings)
    elif dist.is_initialized():
        join_default()
    else:
        if _launched is None:
            _launched = next(dist.rendezvous("env://"))[0]
        join(dist.PrefixStore("tally/launched", _launched), tuple(range(int(os.environ["WORLD_SIZE"]))),
             int(os.environ["RANK"]))

"""Joining the job as the rank that torch.distributed says, wherever that came from: torchrun, a launcher, mp.spawn.

SPDX-License-Identifier: Apache-2.0
"""

import os
import socket
from contextlib import contextmanager

import torch.distributed as dist

from .. import _core

# Who sets one of these says where the coordinator is, or has tallyd look for it there; that of a job of all ranks.
_SAID = ("TALLY_COORD", "TALLY_PORT", "TALLY_SERVERS", "TALLY_CONFIG")

_USUAL_PORT = 29777  # TALLY_PORT's default
_LOCAL = ("127.0.0.1", "localhost", "::1")


@contextmanager
def _variables(values):
    """Environment variables set for a while: the C library reads the launcher's."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port(wanted):
    """`wanted` if it is free, else a port that is."""
    for port in (wanted, 0):
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                free.bind(("", port))
            except OSError:
                continue
            return free.getsockname()[1]
    raise OSError("no port is free")


def _choose_place(store, of_all):
    """Rank 0's word for where all meet, HOST:PORT or :PORT; "" where the settings say it."""
    if of_all and any(name in os.environ for name in _SAID):
        return ""
    port = _free_port(_USUAL_PORT if of_all else 0)
    master = os.environ.get("MASTER_ADDR")
    if not of_all and dist.get_rank() != 0:
        # Not the launcher's rank 0, perhaps not on its machine.
        return "%s:%d" % (master if master in _LOCAL else socket.gethostname(), port)
    if master is not None:
        return "%s:%d" % ("" if of_all else master, port)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return "%s:%d" % (getattr(store, "host", "127.0.0.1"), port)


def join(store, rank, size, timeout=None):
    """Be rank `rank` of `size` in a job, whose ranks meet through `store`; nothing to do for one that is already.

    timeout: seconds after which groups give up waiting; the library's own patience is made no shorter.
    Raises ValueError where this process is another rank of its job, or the job is of another size.
    """
    if not _core.is_initialized():
        key = "tally/%d" % _core.generation()  # a store may outlive a job
        if rank == 0:
            of_all = not dist.is_initialized() or dist.get_world_size() == size
            store.set(key, _choose_place(store, of_all))
        host, _, port = store.get(key).decode().rpartition(":")
        settings = {}
        if host:
            settings["TALLY_COORD"] = "%s:%s" % (host, port)
        elif port:
            settings["TALLY_PORT"] = port
        if timeout is not None and timeout > 1800 and "TALLY_TIMEOUT" not in os.environ:
            settings["TALLY_TIMEOUT"] = "%d" % (timeout + 1)
        with _variables({"RANK": str(rank), "WORLD_SIZE": str(size)}):
            _core.init(settings)
    if (_core.rank(), _core.size()) != (rank, size):
        raise ValueError("this process is rank %d of %d for Tally and rank %d of %d for torch.distributed; start both "
                         "with the same launcher" % (_core.rank(), _core.size(), rank, size))


def join_default():
    """Join as the rank that this process has in torch's default process group, or as the launcher says."""
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        join(dist.PrefixStore("tally", store), dist.get_rank(), dist.get_world_size())
    else:
        _core.init()

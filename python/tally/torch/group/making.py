"""How process groups are made, and leave: torch.distributed calls create() for the backend "tally".

The first group joins the job; the last one leaves it, unless tally.init() has joined.  A group with a store of its own is
a job beside that.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import threading
import weakref

import torch.distributed as dist

from ... import _job
from .. import patches, steps
from ..meeting import decline, is_beside, job_members, join, join_beside
from .group import Group
from .ranks import Ranks

_groups = weakref.WeakSet()    # that stand on the engine
_joined = 0                    # generation of the job that a group has joined, and the last of them leaves
_made = collections.Counter()  # how often a name was used for a group of certain ranks in a job


def _leave(group):
    """A group ends."""
    global _joined
    _groups.discard(group)
    if not _groups and group.size() > 1:
        steps.warn_alone(group.rank())
    if group.job is not None:
        # Not waited for: the others may keep theirs, as with other backends.
        threading.Thread(target=group.job.close, name="tally-close").start()
    elif not any(one.job is None for one in _groups) and _joined == _job.generation():
        _joined = 0
        _job.shutdown()


def _telling(destroy):
    """destroy_process_group(), which tells our groups of their end."""
    def destroy_process_group(group=None):
        groups = list(_groups)  # torch may hold the only reference
        destroy(group)
        for one in groups:
            if one not in patches.groups():
                one.shutdown()

    return destroy_process_group


def _create_beside(options):
    """A group whose ranks are a job of their own, beside the one that this process may be in."""
    rank, size, name = options.group_rank, options.group_size, options.group_id
    job = join_beside(options.store, name, rank, size)
    group = Group(options.store, rank, size, options.timeout.total_seconds(), name,
                  Ranks("c10d %s" % name, range(size), job), _leave)
    group.meet("group %s of %d processes" % (name, size))
    _groups.add(group)
    return group


def create(options, _=None):
    """The function that torch.distributed calls to make a group.

    options: its DistributedBackendOptions.  The first group's ranks are those of the job, as torch numbers them, unless
        tally.init() has joined all.  Raises NotImplementedError for later groups with other ranks of it.
    """
    if is_beside(options):
        return _create_beside(options)
    global _joined
    rank, size, limit = options.group_rank, options.group_size, options.timeout.total_seconds()
    world = size if not dist.is_initialized() else dist.get_world_size()
    ranks = tuple(range(size)) if size == world else tuple(options.global_ranks_in_group)
    members = job_members(world) if _job.is_initialized() else ranks
    if not set(ranks) <= set(members):
        reason = ("group of ranks %s: the first group of the backend tally has ranks %s, and this process can be in one "
                  "job; make one of all ranks first" % (list(ranks), list(members)))
        if rank == 0:
            decline(options.store, ranks, reason)
        raise NotImplementedError(reason)
    joined = not _job.is_initialized()
    # Each call has the time-out of its group, and a later group may have a longer one than this.
    join(options.store, members, members.index(ranks[rank]), 0)
    if joined:
        _joined = _job.generation()
    places = [members.index(one) for one in ranks]
    # Names of groups come again after destroy_process_group(), and then mean a new one, maybe of other ranks: a group's
    # ranks have the same count only of groups that all of them were in.
    name = (_job.generation(), options.group_id, ranks)
    _made[name] += 1
    group = Group(options.store, rank, size, limit, options.group_id,
                  Ranks("c10d %s.%d of %s" % (options.group_id, _made[name], ",".join(map(str, ranks))), places), _leave)
    group.meet("group of ranks %s" % list(ranks))
    _groups.add(group)
    return group


if not hasattr(dist.Backend, "TALLY"):
    dist.Backend.register_backend("tally", create, extended_api=True, devices=["cpu"])

patches.destroy_process_group(_telling)

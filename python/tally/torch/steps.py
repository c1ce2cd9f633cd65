"""The number of steps that this process's optimizers have made; the other ranks hear it when an exception ends the process.

All of torch's optimizers call a hook at the end of step().  With several, such as a GAN's, the one that is ahead counts.

SPDX-License-Identifier: Apache-2.0
"""

import logging
import weakref

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _core, _events, _leaving

_compiling = getattr(torch.compiler, "is_compiling", lambda: False)  # PyTorch 2.1 has none
_counts = weakref.WeakKeyDictionary()


def _is_tallys():
    """Whether gradients can go through Tally alone: all process groups are its backend's."""
    return dist.is_available() and all(
        backend == "tally" for backend, _ in dist.distributed_c10d._world.pg_map.values())


def _stepped(optimizer, args, kwargs):
    if not _compiling():
        if not _counts:
            _core.moved = not _is_tallys()
        _counts[optimizer] = _counts.get(optimizer, 0) + 1
        _leaving.calling.here = True  # backward may have called Tally from threads of its own


_leaving.steps = lambda: max(_counts.values(), default=None)
register_optimizer_step_post_hook(_stepped)


def warn_alone(rank):
    """Warn if this process has made several steps, and nothing has gone to another rank since the first."""
    count = _leaving.steps() or 0
    if count > 1 and not _core.moved:
        _events.log(logging.WARNING, "rank %d torch: %d optimizer steps, and nothing was reduced since the first: is the model in "
                    "DistributedDataParallel? A framework may leave it bare on a backend that it does not know "
                    "(docs/from_ddp.md)" % (rank, count))

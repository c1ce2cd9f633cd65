"""The number of steps that this process's optimizers have made; the other ranks hear it when an exception ends the process.

All of torch's optimizers call a hook at the end of step().  With several, such as a GAN's, the one that is ahead counts.

SPDX-License-Identifier: Apache-2.0
"""

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _leaving

_compiling = getattr(torch.compiler, "is_compiling", lambda: False)  # PyTorch 2.1 has none
_counts = weakref.WeakKeyDictionary()


def _stepped(optimizer, args, kwargs):
    if not _compiling():
        _counts[optimizer] = _counts.get(optimizer, 0) + 1
        _leaving.calling.here = True  # backward may have called Tally from threads of its own


_leaving.steps = lambda: max(_counts.values(), default=None)
register_optimizer_step_post_hook(_stepped)

"""The number of steps that this process's optimizers have made; the other ranks hear it when an exception ends the process.

All of torch's optimizers call a hook at the end of step().  With several, such as a GAN's, the one that is ahead counts.

warn_alone() finds a model that no rank has wrapped.  Each rank then trains a model of its own, and the ranks exchange
little but metrics: from the first step to the last fewer elements than one step has gradients.  Compressed gradients, and
parameters that local SGD averages every k steps, come to more.

SPDX-License-Identifier: Apache-2.0
"""

import logging
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _events, _leaving, _operations
from . import patches

_compiling = getattr(torch.compiler, "is_compiling", lambda: False)  # PyTorch 2.1 has none
_SELDOM = 10000  # steps; local SGD averages parameters more often, and compression sends more than an element in so many


class _Steps:
    """The steps of an optimizer."""

    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


_made = weakref.WeakKeyDictionary()  # optimizer -> its _Steps
_trained = {}  # elements of the gradients of one step -> _Steps; of optimizers that have made several beside a group


def _backends():
    """The backends of all process groups.  Only if all are Tally's, all gradients go through Tally."""
    return {backend for backend, _ in patches.groups().values()}


def _gradient_elements(optimizer):
    """The number of elements of an optimizer's gradients that need a reduction: not of sparse ones, which are gathered, nor of
    FSDP2's, which are DTensors."""
    plain = [getattr(group, "plain", group) for group in optimizer.__dict__.get("param_groups", ())]  # past gates: crossing/groups.py
    gradients = (p.grad for group in plain for p in group["params"])
    return sum(one.numel() for one in gradients if type(one) is torch.Tensor and one.layout is torch.strided)


def _stepped(optimizer, args, kwargs):
    if not _compiling():
        if not _made:
            _operations.forget_exchanged()
        steps = _made.setdefault(optimizer, _Steps())
        steps.count += 1
        if steps.count == 2 and _backends():  # the first may have no gradients
            _trained[_gradient_elements(optimizer) if _backends() == {"tally"} else 0] = steps
        _leaving.calling.here = True  # backward may have called Tally from threads of its own


_leaving.steps = lambda: max((one.count for one in _made.values()), default=None)
register_optimizer_step_post_hook(_stepped)


def warn_alone(rank):
    """At the end of the last group: warn if an optimizer has made several steps, and this process has exchanged too little
    since the first for gradients."""
    least, count, elements = min(((elements * max(1, one.count // _SELDOM), one.count, elements)
                                  for elements, one in list(_trained.items())), default=(0, 0, 0))
    _trained.clear()
    if _operations.exchanged < least and _backends() <= {"tally"}:
        said = "%d optimizer steps, and nothing was reduced" % count if not _operations.exchanged else (
            "%d optimizer steps of %d gradient elements each, and at most %d elements were reduced"
            % (count, elements, _operations.exchanged))
        _events.log(logging.WARNING, "rank %d torch: %s since the first: is the model in DistributedDataParallel? A framework "
                    "may leave it bare on a backend that it does not know (docs/from_ddp.md)" % (rank, said))

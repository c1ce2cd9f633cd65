"""Communication hooks for torch's DistributedDataParallel: gradients through Tally, all else through the process group.

    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(tally.torch.state(), tally.torch.ddp_hook)

Flow: register_comm_hook() tells the state the model's process group -> backward fills a bucket -> the hook submits its
average over the group's ranks, in place -> the hook, if the sum has ended by then, or a thread on the completion queue
completes the future that backward's end waits for.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import functools
import itertools

import torch
import torch.distributed as dist
from torch.futures import Future

from .. import _core
from .._core import BUCKET
from . import device
from .join import join_default
from .ops import Average, _reduce
from .sparse import SparseReduction

_numbers = collections.defaultdict(itertools.count)  # by ranks of a process group; None: all


class State:
    """What a hook keeps of one model: over which ranks it averages, and the model's number among theirs, which tells its
    buckets from other models'."""

    def __init__(self):
        self.number = None                # until it is registered
        self._ranks = self._group = None  # of the default process group, and the library's group of them; None: all
        self._joined = 0                  # generation of the communicator that has been looked at

    def __repr__(self):
        return "tally.torch.state() of model %s" % self.number

    def register(self, process_group):
        """Take the process group of the model, over which averages are taken."""
        ranks = tuple(dist.get_process_group_ranks(process_group))
        self._ranks = ranks if ranks != tuple(range(dist.get_world_size())) else None
        self.number = next(_numbers[self._ranks])

    def join(self):
        """Join the job at the first use: only then is the process group there, whoever makes it."""
        if self._joined == _core.generation() and _core.is_initialized():
            return
        join_default()
        if self.number is None:
            self.number = next(_numbers[None])
        self._group = self._ranks and _core.make_group("hook of ranks %s" % (self._ranks,), self._ranks)
        self._joined = _core.generation()

    # As a process set's.

    def group(self):
        return self._group

    def size(self):
        return len(self._ranks) if self._ranks else _core.size()


def state():
    """The state for register_comm_hook(): one for each model, registered in the same order on all its ranks."""
    return State()


def _have_registration_tell():
    """Have DDP's register_comm_hook() tell our state the model's process group: a bucket does not say it."""
    ddp = torch.nn.parallel.DistributedDataParallel
    register = ddp.register_comm_hook

    @functools.wraps(register)
    def register_comm_hook(self, state, hook):
        register(self, state, hook)
        if isinstance(state, State):
            state.register(self.process_group)

    ddp.register_comm_hook = register_comm_hook


_have_registration_tell()


def _ended(tensor):
    """(the future of an operation's result on `tensor`, what completes it at the operation's end)."""
    on = device.of(tensor) if device.supported(tensor.device) else None  # then it is refused
    begun, ended = Future() if on is None else on.runtime.future(), []

    def then(operation):
        ended.append(operation)
        begun.set_result(None)

    # What is raised here becomes the error of the future that then() makes, and of the backward that waits.  On a
    # device it runs on a stream of its own, which waits for the result; and who waits for the future waits for that.
    return begun.then(lambda _: ended[0].wait()), then


def _average_sparse(state, gradient, name, priority):
    """The future of a sparse gradient's average over the union of the ranks' rows."""
    future, then = _ended(gradient)
    SparseReduction(gradient, name, Average, BUCKET, priority, then, state)
    return future


def _average(state, bucket, dtype):
    """Start the average of a bucket, sent as `dtype` if one is given; the future of the bucket's tensor."""
    state.join()
    gradient = bucket.buffer()
    index = bucket.index()
    name = "model %d bucket %d" % (state.number, index)
    if gradient.is_sparse:
        return _average_sparse(state, gradient, name, index)
    sent, finish = gradient, None
    if gradient.is_complex():
        sent = torch.view_as_real(gradient)
    elif dtype is not None and gradient.dtype != dtype and gradient.is_floating_point():
        sent = gradient.to(dtype)

        def finish(result):
            with torch.no_grad():
                return gradient.copy_(result)

    future, then = _ended(gradient)
    # Backward fills the buckets of the last layers first; the next forward needs those of the first layers first.
    _reduce(sent, sent, name, Average, 1.0, 1.0, index, BUCKET, finish or (lambda _: gradient),
            group=state.group()).watch(then)
    return future


def ddp_hook(state, bucket):
    """The average of a bucket over the ranks of the model's process group, the same bits on each and in every run.

    state: what state() returned for this model; bucket: a torch.distributed.GradBucket.
    Returns a torch.futures.Future of the bucket's tensor.  Backward raises on all ranks where the ranks' buckets differ
    in shape or type, or a rank is gone, with the reason.  The divisor is the number of those ranks, also while some of them
    have no more input (DDP's join()).
    """
    return _average(state, bucket, None)


def ddp_hook_fp16(state, bucket):
    """As ddp_hook(), with floating-point gradients sent as float16 and added in float32."""
    return _average(state, bucket, torch.float16)


def ddp_hook_bf16(state, bucket):
    """As ddp_hook(), with floating-point gradients sent as bfloat16 and added in float32."""
    return _average(state, bucket, torch.bfloat16)

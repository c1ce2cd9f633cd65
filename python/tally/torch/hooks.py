"""Communication hooks for torch's DistributedDataParallel: gradients through Tally, all else through the process group.

    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(tally.torch.state(), tally.torch.ddp_hook)

Flow: backward fills a bucket -> the hook submits its average over the ranks, in place -> the hook, if the sum has
ended by then, or a thread on the completion queue completes the future that backward's end waits for.

SPDX-License-Identifier: Apache-2.0
"""

import itertools

import torch
from torch.futures import Future

from .. import _core
from .._core import BUCKET
from . import device
from .join import join_default
from .ops import Average, _reduce
from .sparse import SparseReduction

_numbers = itertools.count()


class State:
    """What a hook keeps of one model: its number, which tells its buckets from other models'."""

    def __init__(self):
        self.number = next(_numbers)
        self._joined = 0  # generation of the communicator that has been looked at

    def __repr__(self):
        return "tally.torch.state() of model %d" % self.number

    def join(self):
        """Join the job at the first use: only then is the process group there, whoever makes it."""
        if self._joined != _core.generation() or not _core.is_initialized():
            join_default()
            self._joined = _core.generation()


def state():
    """The state for register_comm_hook(): one for each model, made in the same order on all ranks."""
    return State()


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


def _average_sparse(gradient, name, priority):
    """The future of a sparse gradient's average over the union of the ranks' rows."""
    future, then = _ended(gradient)
    SparseReduction(gradient, name, Average, BUCKET, priority, then)
    return future


def _average(state, bucket, dtype):
    """Start the average of a bucket, sent as `dtype` if one is given; the future of the bucket's tensor."""
    state.join()
    gradient = bucket.buffer()
    index = bucket.index()
    name = "model %d bucket %d" % (state.number, index)
    if gradient.is_sparse:
        return _average_sparse(gradient, name, index)
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
    _reduce(sent, sent, name, Average, 1.0, 1.0, index, BUCKET, finish or (lambda _: gradient)).watch(then)
    return future


def ddp_hook(state, bucket):
    """The average of a bucket over all ranks, the same bits on every rank and in every run.

    state: what state() returned for this model; bucket: a torch.distributed.GradBucket.
    Returns a torch.futures.Future of the bucket's tensor.  Backward raises on all ranks where the ranks' buckets differ
    in shape or type, or a rank is gone, with the reason.  The divisor is the number of ranks, also while some of them
    have no more input (DDP's join()).
    """
    return _average(state, bucket, None)


def ddp_hook_fp16(state, bucket):
    """As ddp_hook(), with floating-point gradients sent as float16 and added in float32."""
    return _average(state, bucket, torch.float16)


def ddp_hook_bf16(state, bucket):
    """As ddp_hook(), with floating-point gradients sent as bfloat16 and added in float32."""
    return _average(state, bucket, torch.bfloat16)

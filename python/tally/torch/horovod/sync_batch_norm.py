"""Batch normalization over the batches of all ranks.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import itertools

import torch

from ... import _calls, _errors, _job
from ..._calls import STATE, Call
from ..._lib import ALLGATHER
from ..calls import allgather, reduce
from ..patches import BatchNorm

_numbers = {}  # generation of the communicator -> numbers of layers

_ROWS = Call("SyncBatchNorm", space=STATE)  # of gather(): one name, as ranks in different layers shall meet and be told


def gather(own):
    """(the ranks' numbers, concatenated; the count of each rank; the first number of each rank, as it came to the
    host). The host waits for no device, though the numbers may go to one.  Raises Error if a rank has joined.

    own: a tensor of one dimension, of float64, not empty.  Ranks call this in the same order.
    """
    handle = allgather(_ROWS, own)
    numbers, lengths = handle.wait(), handle.first_dims
    address = handle.operation.gathered()[0]
    begins = itertools.accumulate([0, *lengths[:-1]])
    return numbers, lengths, [ctypes.c_double.from_address(address + 8 * begin).value for begin in begins]


def refuse_gather(reason):
    """Make the other ranks' next gather() fail with this rank's reason."""
    _calls.refuse(ALLGATHER, _ROWS, reason)


class SyncBatchNorm(BatchNorm):
    """torch.nn.BatchNorm1d, 2d and 3d, with mean and variance of all ranks' batches while training.

    num_features, eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm1d.  Input: (N, C) or (N, C, ...)
        with C = num_features.  N may differ between ranks; at least one rank has more than one value a channel.
    The order of first use tells layers apart; it is the same on all ranks.  Some ranks may have further layers that
    they do not train.  While training, all ranks use their layers in the same order; otherwise all raise Error.
    """

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._number = None
        self._numbered_in = 0  # generation of the communicator

    def _check_input_dim(self, input):
        if input.dim() < 2:
            raise ValueError("expected an input of 2 dimensions or more, got one of %d" % input.dim())

    def forward(self, input):
        alone = _job.size() == 1 or (not self.training and self.track_running_stats)
        try:
            self._check_input_dim(input)
        except ValueError as reason:
            if not alone:
                refuse_gather(reason)  # the other ranks wait for this one's
            raise
        if alone:
            return super().forward(input)
        if self._numbered_in != _job.generation():
            self._numbered_in = _job.generation()
            self._number = next(_numbers.setdefault(self._numbered_in, itertools.count()))
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self._number)
        if self.training and self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_((variance * (count / (count - 1).clamp(min=1))).to(self.running_var.dtype),
                                       momentum)
        return output


class _Normalize(torch.autograd.Function):
    """Normalization over all axes except the second, in float32 or wider."""

    @staticmethod
    def forward(ctx, input, weight, bias, eps, number):
        channels = input.shape[1]
        wide = input.detach().to(torch.float64 if input.dtype == torch.float64 else torch.float32)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, channels] + [1] * (input.dim() - 2)
        length = input.numel() // max(1, channels)
        if length:
            variance, mean = torch.var_mean(wide, axes, correction=0)
        else:
            variance = mean = wide.new_zeros(channels)
        row = torch.cat([wide.new_full((1,), number), wide.new_full((1,), length), mean, variance]).to(torch.float64)
        numbers, lengths, layers = gather(row)
        if len(set(zip(layers, lengths))) > 1:
            raise _errors.disagreement("SyncBatchNorm", {
                rank: "layer %d of %d channels" % (layer, (length - 2) // 2)
                for rank, (layer, length) in enumerate(zip(layers, lengths))})
        # Of the ranks' means and variances in one go, in float64: the mean of all, and the mean square around it.
        counts, means, variances = numbers.view(len(lengths), -1)[:, 1:].split([1, channels, channels], 1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        ctx.scale = (variance + eps).rsqrt().to(wide.dtype).view(shape)
        ctx.axes, ctx.shape, ctx.number = axes, shape, number
        normal = (wide - mean.to(wide.dtype).view(shape)) * ctx.scale
        ctx.save_for_backward(normal, weight, count)
        ctx.dtype = input.dtype
        output = normal
        if weight is not None:
            output = output * weight.detach().view(shape) + bias.detach().view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx, gradient, *_):
        normal, weight, count = ctx.saved_tensors
        gradient = gradient.to(normal.dtype)
        sums = torch.stack([gradient.sum(ctx.axes), (gradient * normal).sum(ctx.axes)])
        own = sums.clone()
        weighted = gradient if weight is None else gradient * weight.detach().view(ctx.shape)
        if weight is not None:
            sums *= weight.detach()
        reduce(Call("sync_batch_norm.%d.backward" % ctx.number, space=STATE), sums, sums).wait()
        means = sums / count
        back = (weighted - means[0].view(ctx.shape) - normal * means[1].view(ctx.shape)) * ctx.scale
        affine = (None, None) if weight is None else (own[1].to(weight.dtype), own[0].to(weight.dtype))
        return (back.to(ctx.dtype), *affine, None, None)

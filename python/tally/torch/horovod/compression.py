"""Compressors: how gradients are converted before they are sent.

A compressor is any class with two static methods: compress(tensor) -> (tensor to send, context), and
decompress(tensor, context) -> tensor of the first type.

SPDX-License-Identifier: Apache-2.0
"""

import torch


class Compressor:
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class _Half(Compressor):
    """Sends floating-point tensors in a type of 16 bits, and others unchanged."""

    dtype = None

    @classmethod
    def compress(cls, tensor):
        if not tensor.dtype.is_floating_point or tensor.dtype == cls.dtype:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor, ctx):
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Half):
    dtype = torch.float16


class BF16Compressor(_Half):
    dtype = torch.bfloat16


class Compression:
    """The compressors, for `compression=`."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

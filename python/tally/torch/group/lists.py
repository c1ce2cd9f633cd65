"""Rules for the lists of tensors in one call: Gloo's, in Gloo's words.

Group calls these before it submits anything.  Each raises ValueError with the reason, which becomes the call's
RuntimeError; the other ranks are told.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import math

import torch
import torch.distributed as dist

_KIND = dist.ReduceOp.RedOpType
# How tensors of one list are combined before the ranks' results are: c10d's number -> a function of two tensors.
_COMBINE = {hash(kind): combine for kind, combine in (
    (_KIND.SUM, torch.add), (_KIND.MIN, torch.minimum), (_KIND.MAX, torch.maximum), (_KIND.PRODUCT, torch.mul),
    (_KIND.BAND, torch.bitwise_and), (_KIND.BOR, torch.bitwise_or), (_KIND.BXOR, torch.bitwise_xor))}

# torch's sums and products of these are those of the signed type of the same size.
_SIGNED = {getattr(torch, "u" + name): getattr(torch, name)
           for name in ("int16", "int32", "int64") if hasattr(torch, "u" + name)}


def of_tensors(value):
    """The list of a call's tensors, which may be one."""
    return [value] if isinstance(value, torch.Tensor) else list(value)


def of_lists(value):
    """The list of a call's lists of tensors, which may be one of them."""
    value = list(value)
    return [value] if value and isinstance(value[0], torch.Tensor) else [list(one) for one in value]


def root_rank(options, size):
    """The root that options, or a number in their place, name; c10d's default is 0."""
    root = options if isinstance(options, int) else getattr(options, "rootRank", 0)
    if not 0 <= root < size:
        raise ValueError("invalid root rank: %d; the group has ranks 0 to %d" % (root, size - 1))
    return root


def root_tensor(options, tensors):
    """The one of the list's tensors that options name."""
    root = getattr(options, "rootTensor", 0)
    if not 0 <= root < len(tensors):
        raise ValueError("invalid root tensor: %d; the list has %d" % (root, len(tensors)))
    return tensors[root]


def alike(tensors, like=None):
    """Check that all tensors of a list have one layout, type and shape: the first one's, or those of `like`."""
    if like is None:
        if not tensors:
            raise ValueError("requires non-empty tensor list")
        if len(tensors) == 1:
            return
        like = tensors[0]
    for what, of in (("layout", lambda one: one.layout), ("type", lambda one: one.dtype),
                     ("size", lambda one: list(one.shape))):
        expected = of(like)
        for index, tensor in enumerate(tensors):
            if of(tensor) != expected:
                raise ValueError("invalid tensor %s at index %d (expected %s, got %s)"
                                 % (what, index, expected, of(tensor)))


def of_one_type(tensors):
    """Check that all tensors of a list have the first one's type."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ValueError("tensors must all have the same type, not %s and %s" % (tensors[0].dtype, tensor.dtype))


def one(tensors, what=""):
    """The tensor of a list that may have no other.  what: "input " or "output ", if there are both."""
    if len(tensors) != 1:
        raise ValueError("requires a single-element %stensor list, not one of %d" % (what, len(tensors)))
    return tensors[0]


def of_root(lists, what, size, like, is_root):
    """The root's tensors, one for each rank and like `like`, from its list of one list; None on other ranks."""
    if not is_root:
        if lists:
            raise ValueError("requires empty %s on non-root" % what)
        return None
    if len(lists) != 1:
        raise ValueError("requires a single-element %s list containing a list with %d tensors" % (what, size))
    tensors, = lists
    if len(tensors) != size:
        raise ValueError("Incorrect %s list size %d. %s list size should be %d, same as size of the process group"
                         % (what, len(tensors), what.capitalize(), size))
    alike(tensors, like)
    return tensors


def gathered(lists, inputs, size):
    """The lists of an all-gather: one for each input, with a tensor for each input of each rank."""
    if not inputs:
        raise ValueError("requires non-empty input tensor list")
    if len(lists) != len(inputs):
        raise ValueError("requires input/output tensor lists to have the same length, not %d and %d"
                         % (len(inputs), len(lists)))
    for index, outputs in enumerate(lists):
        if len(outputs) != size * len(inputs):
            raise ValueError("invalid output tensor list at index %d (expected length %d, got %d)"
                             % (index, size * len(inputs), len(outputs)))
    alike(inputs)
    for outputs in lists:
        alike(outputs, inputs[0])


def gathered_apart(lists, inputs, size):
    """The lists of an all-gather of tensors that are not alike: one for each rank, with a tensor for each input."""
    if len(lists) != size:
        raise ValueError("output lists should be equal to world size, %d, not %d" % (size, len(lists)))
    for outputs in lists:
        if len(outputs) != len(inputs):
            raise ValueError("invalid output list of %d tensors, where there are %d inputs"
                             % (len(outputs), len(inputs)))
        for index, (output, given) in enumerate(zip(outputs, inputs)):
            if output.dtype != given.dtype:
                raise ValueError("invalid tensor type at index %d (expected %s, got %s)"
                                 % (index, given.dtype, output.dtype))
            if output.shape != given.shape:
                raise ValueError("invalid size of output tensor at index %d (expected length %s, got %s)"
                                 % (index, list(given.shape), list(output.shape)))


def by_rank(outputs, inputs, size):
    """What Gloo's future gives of an all-gather into `outputs`: the ranks' tensors, or for several inputs a list of each
    rank's.  Outputs whose memory has gaps stay whole."""
    if not all(output.is_contiguous() for output in outputs):
        return outputs
    pieces = [output.detach().view(size, *one.shape).unbind() for output, one in zip(outputs, inputs)]
    return list(pieces[0]) if len(pieces) == 1 else [list(one) for one in zip(*pieces)]


def factor(operator):
    """The factor of a PREMUL_SUM, a number or a tensor of one element."""
    number = float(operator.__getstate__()[1])
    if number == 0 or not math.isfinite(number):
        raise ValueError("PREMUL_SUM needs a finite factor other than 0, not %g" % number)
    return number


def combined(tensors, operator):
    """A new tensor that the list's tensors are reduced to."""
    dtype = tensors[0].dtype
    signed = _SIGNED.get(dtype, dtype)
    if signed != dtype and operator in (hash(_KIND.MIN), hash(_KIND.MAX)):
        raise ValueError("MIN and MAX of several tensors of %s are not supported; reduce each in a call of its own" % dtype)
    with torch.no_grad():
        return functools.reduce(_COMBINE[operator], [tensor.detach().view(signed) for tensor in tensors]).view(dtype)

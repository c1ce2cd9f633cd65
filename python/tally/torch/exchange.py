"""Operations after which each rank has something of its own: alltoall and reducescatter, as Horovod has them.

SPDX-License-Identifier: Apache-2.0
"""

import torch

from .. import _core
from .._core import USER
from .._lib import ALLGATHER, PUSH_PULL
from .compression import Compression
from .ops import (Average, Group, Sum, _all_or_none, _allgather, _backward_name, _check, _flow, _gathered, _names,
                  _reduce, _reduction)
from .process_sets import global_process_set


def _refused(kind, names, reason):
    """`reason`, once the other ranks have been told."""
    for name in names:
        _core.refuse(kind, name, USER, reason)
    return reason


# --- alltoall ----------------------------------------------------------------------------------------------


class _Exchange:
    """Handle of an alltoall: everybody sees all splits and all rows, and keeps its own."""

    def __init__(self, splits, rows, rank, size, dtype):
        self._splits, self._rows, self._rank, self._size, self._dtype = splits, rows, rank, size, dtype
        self._result = None

    def done(self):
        return self._splits.done() and self._rows.done()

    def wait(self):
        if self._result is None:
            splits, rows = Group([self._splits, self._rows]).wait()
            table = splits.view(self._size, self._size).tolist()
            pieces = rows.split(self._rows.first_dims)
            mine = [piece.narrow(0, sum(given[:self._rank]), given[self._rank])
                    for piece, given in zip(pieces, table)]
            received = torch.tensor([given[self._rank] for given in table], dtype=self._dtype)
            self._result = torch.cat(mine), received
        return self._result


def alltoall_async(tensor, splits=None, name=None, process_set=global_process_set):
    """Start an exchange of rows; the result is (tensor, received splits); see alltoall()."""
    names = (None, None) if name is None else (name + ".splits", name + ".rows")
    size = process_set.size()
    try:
        _check(tensor)
        rows = tensor.shape[0] if tensor.dim() else 0
        if splits is None:
            if rows % size:
                raise ValueError("the first dimension, %d, cannot be split over %d ranks evenly; give splits"
                                 % (rows, size))
            given = torch.full((size,), rows // size, dtype=torch.int64)
            dtype = torch.int32
        else:
            dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32
            given = torch.as_tensor(splits).to("cpu", torch.int64)
            if given.shape != (size,) or given.lt(0).any() or given.sum() != rows:
                raise ValueError("splits must be %d numbers from 0 whose sum is the first dimension, %d, not %s"
                                 % (size, rows, given.tolist()))
        if not tensor.dim():
            raise ValueError("alltoall needs a tensor with a first dimension")
    except (TypeError, ValueError, NotImplementedError) as reason:
        raise _refused(ALLGATHER, names, reason)
    group = process_set.group()
    return _Exchange(_allgather(given, names[0], group=group), _allgather(tensor, names[1], group=group),
                     process_set.rank(), size, dtype)


def alltoall(tensor, splits=None, name=None, process_set=global_process_set):
    """Rows of `tensor` to all ranks, and theirs.

    tensor: the same dtype and shape on all ranks but for the first dimension.
    splits: how many rows go to each rank, in order of ranks: integers, or a tensor of them; default: equally many.

    Returns the rows that all ranks had for this one, in order of ranks; where splits are given a pair of them and of
    how many came from each, in the type of splits (int32 for a list).  Gradients flow through the rows.
    """
    received = []

    def start(tensors):
        rows, lengths = alltoall_async(tensors[0], splits, name, process_set).wait()
        received.append(lengths)
        return [rows]

    def back(gradients):
        return [alltoall_async(gradients[0], received[-1], _backward_name(name), process_set).wait()[0]]

    rows = _flow(start, back, [tensor])[0]
    return rows if splits is None else (rows, received[-1])


# --- reducescatter -----------------------------------------------------------------------------------------


def _share(rows, rank, size):
    """(first row, rows) of a rank's share: where they do not come out even the first ranks have one more."""
    length, more = divmod(rows, size)
    return rank * length + min(rank, more), length + (rank < more)


def _scattered_name(name):
    # Apart from an allreduce of that name, which would match.
    return None if name is None else name + ".reducescatter"


def _reducescatter(tensors, names, reduction, process_set, prescale, postscale):
    names = [_scattered_name(name) for name in names]
    _all_or_none(PUSH_PULL, tensors, names)
    if any(not tensor.dim() for tensor in tensors):
        raise _refused(PUSH_PULL, names, ValueError("reducescatter needs tensors with a first dimension"))
    group, rank, size = process_set.group(), process_set.rank(), process_set.size()

    def keep(total):
        return total.narrow(0, *_share(total.shape[0], rank, size)).clone()

    return Group([_reduce(tensor, None, name, reduction, prescale, postscale, 0, finish=keep, group=group)
                  for tensor, name in zip(tensors, names)])


def _reducescattered(tensors, names, compression, op, process_set, prescale, postscale):
    reduction = _reduction(op, None)
    pairs = [compression.compress(one) if isinstance(one, torch.Tensor) else (one, None) for one in tensors]

    def start(inputs):
        return _reducescatter(inputs, names, reduction, process_set, prescale, postscale).wait()

    def back(gradients):
        # As in Horovod, the gradient of the average over the ranks of what is made of the results.
        scale = prescale * postscale * (process_set.size() if reduction == Sum else 1)
        names_back = [_backward_name(_scattered_name(name)) for name in names]
        return [one * scale for one in _gathered(gradients, names_back, process_set)]

    sent = [one for one, _ in pairs]
    results = _flow(start, back, sent) if reduction in (Sum, Average) else start(sent)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]


def reducescatter_async(tensor, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0,
                        postscale_factor=1.0):
    """Start a reduction of which this rank gets its rows; see reducescatter()."""
    return _reducescatter([tensor], [name], _reduction(op, None), process_set, prescale_factor,
                          postscale_factor).operations[0]


def reducescatter(tensor, name=None, compression=Compression.none, op=Average, process_set=global_process_set,
                  prescale_factor=1.0, postscale_factor=1.0):
    """This rank's share of the rows of the reduction of `tensor` over the ranks.

    tensor: the same dtype and shape on all ranks, with a first dimension of any length: where it cannot be split
    evenly, the first ranks get a row more.  op: Average, Sum, Min, Max or Product.  Other arguments as for
    allreduce().  Gradients flow through Sum and Average.
    """
    return _reducescattered([tensor], [name], compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter_async(tensors, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0,
                                postscale_factor=1.0):
    """Start a reducescatter of each of a list of tensors; the result is their list."""
    tensors = list(tensors)
    return _reducescatter(tensors, _names(name, len(tensors)), _reduction(op, None), process_set, prescale_factor,
                          postscale_factor)


def grouped_reducescatter(tensors, name=None, compression=Compression.none, op=Average,
                          process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0):
    """reducescatter() of each of a list of tensors, all submitted before the first is waited for."""
    tensors = list(tensors)
    return _reducescattered(tensors, _names(name, len(tensors)), compression, op, process_set, prescale_factor,
                            postscale_factor)

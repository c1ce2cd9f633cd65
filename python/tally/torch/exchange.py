"""Horovod's alltoall and reducescatter, after which each rank has a piece of its own.

SPDX-License-Identifier: Apache-2.0
"""

import errno
import math
import threading
import zlib

import torch

from .. import _core
from .._core import USER, Error
from .._lib import ALLGATHER, ALLTOALL, REDUCE_SCATTER
from . import device, uneven
from .compression import Compression
from .ops import (_DTYPES, Average, Group, Sum, _allgather, _backward_name, _check, _flow, _Gather, _gathered, _names,
                  _reduction, _refuse)
from .process_sets import global_process_set

# --- alltoall ----------------------------------------------------------------------------------------------


class _Exchange:
    """Handle of an alltoall: the ranks gather their splits -> at the gather's end each rank knows how much it receives, and
    submits the exchange of rows, in the thread on the completion queue."""

    def __init__(self, tensor, given, dtype, name, process_set):
        self._rows = tensor.detach().resolve_neg().contiguous()
        self._device = device.of(self._rows)
        self._ready = self._device and self._device.mark()
        self._given, self._dtype, self._name, self._process_set = given, dtype, name + ".rows", process_set
        self._group, self._rank, self._size = process_set.group(), process_set.rank(), process_set.size()
        self._exchange = self._failure = None
        self.submitted = threading.Event()
        # Rows of other shapes might have as many elements.
        shape = zlib.crc32(repr(tuple(tensor.shape[1:])).encode())
        _allgather(torch.tensor([[shape, *given]], device="cpu"), name + ".splits", then=self._splits_known,
                   process_set=process_set)
        uneven.begin_half(self)

    def _splits_known(self, operation):
        try:
            table = _Gather(operation, torch.int64, (1 + self._size,)).wait().tolist()
            for rank, (shape, *_) in enumerate(table):
                if shape != table[0][0]:
                    raise Error(_core.explain("ranks disagree on %r: the rows of the process set's ranks 0 and %d are of "
                                              "other shapes" % (self._name.removesuffix(".rows"), rank)), errno.EINVAL)
            rows, self._received = self._rows, [given[1 + self._rank] for given in table]
            each = rows[0].numel() if len(rows) else math.prod(rows.shape[1:])
            give, take = ([count * each for count in counts] for counts in (self._given, self._received))

            def submit(pair, then, result=None):
                return _core.alltoall(self._name, pair[0].data_ptr(), give, pair[1].data_ptr(), take,
                                      _DTYPES[rows.dtype], USER, pair, result, then=then, group=self._group)

            shape = (sum(self._received), *rows.shape[1:])
            if self._device is None:
                result = torch.empty(shape, dtype=rows.dtype, device="cpu")
                self._exchange = submit((rows, result), None, result)
            else:
                with self._device.arrived():
                    result = rows.new_empty(shape)
                self._exchange = device.begin(
                    self._device, [([(rows, None), (None, result)], submit, (ALLTOALL, self._name, USER, self._group))],
                    result, ready=self._ready)
        except Exception as failure:
            self._failure = failure
        self.submitted.set()

    def done(self):
        return self._failure is not None or (self._exchange is not None and self._exchange.done())

    def wait(self):
        _core.await_event(self.submitted)
        if self._failure is not None:
            raise _core.again(self._failure)
        rows = self._exchange.wait()
        if self._device is not None:
            self._device.keep([rows])  # it was made on another stream
        return rows, torch.tensor(self._received, dtype=self._dtype, device="cpu")


def alltoall_async(tensor, splits=None, name=None, process_set=global_process_set):
    """Start an exchange of rows; the result is (tensor, received splits); see alltoall()."""
    if name is None:
        name = "alltoall.noname.%d" % process_set.number("alltoall")
    size = process_set.size()
    try:
        _check(tensor)
        if not tensor.dim():
            raise ValueError("alltoall needs a tensor with a first dimension")
        rows, dtype = tensor.shape[0], torch.int32
        if splits is None:
            if rows % size:
                raise ValueError("the first dimension, %d, cannot be split over %d ranks evenly; give splits"
                                 % (rows, size))
            given = [rows // size] * size
        else:
            if isinstance(splits, torch.Tensor):
                dtype = splits.dtype
            given = [int(length) for length in splits]
            if len(given) != size or min(given) < 0 or sum(given) != rows:
                raise ValueError("splits must be %d numbers from 0 whose sum is the first dimension, %d, not %s"
                                 % (size, rows, given))
    except (TypeError, ValueError, NotImplementedError) as reason:
        _core.refuse(ALLGATHER, name + ".splits", USER, reason, process_set.group())
        raise
    return _Exchange(tensor, given, dtype, name, process_set)


def alltoall(tensor, splits=None, name=None, process_set=global_process_set):
    """Send rows of `tensor` to all ranks, and receive theirs.

    tensor: the same dtype and shape on all ranks, except the first dimension.
    splits: the number of rows for each rank, in order of ranks: integers, or a tensor of them; default: equal numbers.

    Returns the rows that all ranks had for this rank, in order of ranks.  With splits, returns a pair: these rows, and
    how many came from each rank, in the type of splits (int32 for a list).  Gradients flow through the rows.
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


def _scattered_name(name):
    return None if name is None else name + ".reducescatter"


def _reducescatter(tensors, names, reduction, process_set, prescale, postscale):
    names = [_scattered_name(name) for name in names]
    group, rank, size = process_set.group(), process_set.rank(), process_set.size()
    try:
        for tensor in tensors:
            _check(tensor)
            if not tensor.dim():
                raise ValueError("reducescatter needs a tensor with a first dimension")
    except (TypeError, ValueError, NotImplementedError) as reason:
        for tensor, name in zip(tensors, names):
            _refuse(tensor, REDUCE_SCATTER, name, USER, reason, group)
        raise
    operations = []
    for tensor, name in zip(tensors, names):
        packed = tensor.detach().resolve_neg().contiguous()
        # Where rows do not come out even the first ranks have one more.
        length, more = divmod(packed.shape[0], size)
        rows = [length + (one < more) for one in range(size)]
        each = math.prod(packed.shape[1:])
        result = packed.new_empty((rows[rank], *packed.shape[1:]))
        counts, code = [count * each for count in rows], _DTYPES[packed.dtype]
        if not packed.is_cpu:
            name = device.named(name, REDUCE_SCATTER, USER, group)

        shape = str(list(packed.shape))  # ranks whose tensors have as many elements in other rows are told

        def submit(pair, then, result=None, name=name, counts=counts, code=code, shape=shape):
            return _core.reduce_scatter(name, pair[0].data_ptr(), pair[1].data_ptr(), counts, code, reduction, prescale,
                                        postscale, USER, pair, result, then=then, group=group, note=shape)

        if packed.is_cpu:
            operations.append(submit((packed, result), None, result))
        else:
            operations.append(device.begin(
                device.of(packed), [([(packed, None), (None, result)], submit, (REDUCE_SCATTER, name, USER, group))],
                result))
    return Group(operations)


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
    """Start a reduction that gives this rank its rows; see reducescatter()."""
    return _reducescatter([tensor], [name], _reduction(op, None), process_set, prescale_factor,
                          postscale_factor).operations[0]


def reducescatter(tensor, name=None, compression=Compression.none, op=Average, process_set=global_process_set,
                  prescale_factor=1.0, postscale_factor=1.0):
    """Reduce `tensor` over the ranks, and return this rank's share of the rows.

    tensor: the same dtype and shape on all ranks.  The first dimension may have any length; if it does not divide evenly,
        the first ranks get one row more.
    op: Average, Sum, Min, Max or Product.
    Other arguments as for allreduce().  Gradients flow through Sum and Average.
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

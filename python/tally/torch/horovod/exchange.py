"""Horovod's alltoall and reducescatter, after which each rank has a piece of its own.

SPDX-License-Identifier: Apache-2.0
"""

import math
import threading
import zlib

import torch

from ... import _calls, _errors, _operations, _waits
from ..._calls import Call
from ..._lib import ALLGATHER, ALLTOALL, REDUCE_SCATTER
from .. import calls, device
from ..calls import DTYPES
from ..process_sets import global_process_set
from . import uneven
from .compression import Compression
from .ops import Average, Sum

# --- alltoall ----------------------------------------------------------------------------------------------


class _Exchange:
    """Handle of an alltoall: the ranks gather their splits -> at the gather's end each rank knows how much it receives, and
    submits the exchange of rows, in the thread on the completion queue."""

    def __init__(self, call, tensor, given, dtype, process_set):
        self._rows = tensor.detach().resolve_neg().contiguous()
        self._device = device.of(self._rows)
        self._ready = self._device and self._device.mark()
        self._call, self._given, self._dtype = call.but(name=call.name + ".rows"), given, dtype
        self._rank, self._size, self._ranks = process_set.rank(), process_set.size(), process_set.ranks
        self._exchange = self._failure = None
        self.submitted = threading.Event()
        # Rows of other shapes might have as many elements.
        shape = zlib.crc32(repr(tuple(tensor.shape[1:])).encode())
        calls.allgather(call.but(name=call.name + ".splits", then=self._splits_known),
                        torch.tensor([[shape, *given]], device="cpu"))
        uneven.begin_half(self)

    def _splits_known(self, operation):
        try:
            table = calls.Gather(operation, torch.int64, (1 + self._size,)).wait().tolist()
            kinds = [shape for shape, *_ in table]
            if len(set(kinds)) > 1:
                own = "rows of shape %s" % list(self._rows.shape[1:])
                raise _errors.disagreement("%r" % self._call.name.removesuffix(".rows"), {
                    rank: own if kind == kinds[self._rank] else "rows of another shape"
                    for rank, kind in zip(self._ranks, kinds)})
            rows, self._received = self._rows, [given[1 + self._rank] for given in table]
            each = rows[0].numel() if len(rows) else math.prod(rows.shape[1:])
            give, take = ([count * each for count in counts] for counts in (self._given, self._received))

            def submit(call, pair, result=None):
                return _operations.alltoall(call, pair[0].data_ptr(), give, pair[1].data_ptr(), take, DTYPES[rows.dtype], pair,
                                            result)

            shape = (sum(self._received), *rows.shape[1:])
            if self._device is None:
                result = torch.empty(shape, dtype=rows.dtype, device="cpu")
                self._exchange = submit(self._call, (rows, result), result)
            else:
                with self._device.arrived():
                    result = rows.new_empty(shape)
                self._exchange = device.begin(
                    self._call, self._device, [(self._call, ALLTOALL, [(rows, None), (None, result)], submit)], result,
                    self._ready)
        except Exception as failure:
            self._failure = failure
        self.submitted.set()

    def done(self):
        return self._failure is not None or (self._exchange is not None and self._exchange.done())

    def settle(self):
        """Wait until the exchange is submitted, or will not be."""
        _waits.await_event(self.submitted)

    def wait(self):
        self.settle()
        if self._failure is not None:
            raise _errors.again(self._failure)
        rows = self._exchange.wait()
        if self._device is not None:
            self._device.keep([rows])  # it was made on another stream
        return rows, torch.tensor(self._received, dtype=self._dtype, device="cpu")


def alltoall_async(tensor, splits=None, name=None, process_set=global_process_set):
    """Start an exchange of rows; the result is (tensor, received splits); see alltoall()."""
    if name is None:
        name = "alltoall.noname.%d" % process_set.number("alltoall")
    call, size = Call(name, group=process_set.group()), process_set.size()
    try:
        calls.check(tensor)
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
        _calls.refuse(ALLGATHER, call.but(name=name + ".splits"), reason)
        raise
    return _Exchange(call, tensor, given, dtype, process_set)


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
        return [alltoall_async(gradients[0], received[-1], calls.backward_name(name), process_set).wait()[0]]

    rows = calls.flow(start, back, [tensor])[0]
    return rows if splits is None else (rows, received[-1])


# --- reducescatter -----------------------------------------------------------------------------------------


def _scattering(several):
    """The Calls, under names of their own."""
    return [call.but(name=None if call.name is None else call.name + ".reducescatter") for call in several]


def _reducescatter(several, tensors, process_set):
    several, rank, size = _scattering(several), process_set.rank(), process_set.size()
    try:
        for tensor in tensors:
            calls.check(tensor)
            if not tensor.dim():
                raise ValueError("reducescatter needs a tensor with a first dimension")
    except (TypeError, ValueError, NotImplementedError) as reason:
        for call, tensor in zip(several, tensors):
            calls.refuse(REDUCE_SCATTER, call, tensor, reason)
        raise
    operations = []
    for call, tensor in zip(several, tensors):
        packed = tensor.detach().resolve_neg().contiguous()
        # Where rows do not come out even the first ranks have one more.
        length, more = divmod(packed.shape[0], size)
        rows = [length + (one < more) for one in range(size)]
        each = math.prod(packed.shape[1:])
        result = packed.new_empty((rows[rank], *packed.shape[1:]))
        counts, code = [count * each for count in rows], DTYPES[packed.dtype]
        call = call.but(note=str(list(packed.shape)))  # ranks whose tensors have as many elements in other rows are told

        def submit(call, pair, result=None, counts=counts, code=code):
            return _operations.reduce_scatter(call, pair[0].data_ptr(), pair[1].data_ptr(), counts, code, pair, result)

        if packed.is_cpu:
            operations.append(submit(call, (packed, result), result))
        else:
            call = device.named(REDUCE_SCATTER, call)
            operations.append(device.begin(
                call, device.of(packed), [(call, REDUCE_SCATTER, [(packed, None), (None, result)], submit)], result))
    return calls.Group(operations)


def _reducescattered(several, tensors, compression, process_set):
    pairs = [compression.compress(one) if isinstance(one, torch.Tensor) else (one, None) for one in tensors]

    def start(inputs):
        return _reducescatter(several, inputs, process_set).wait()

    def back(gradients):
        # As in Horovod, the gradient of the average over the ranks of what is made of the results.
        scales = [call.prescale * call.postscale * (process_set.size() if call.reduction == Sum else 1) for call in several]
        gathers = [Call(calls.backward_name(call.name), group=call.group) for call in _scattering(several)]
        return [one * scale for one, scale in zip(calls.gathered(gathers, gradients, process_set), scales)]

    sent = [one for one, _ in pairs]
    flows = all(call.reduction in (Sum, Average) for call in several)
    results = calls.flow(start, back, sent) if flows else start(sent)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]


def reducescatter_async(tensor, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0,
                        postscale_factor=1.0):
    """Start a reduction that gives this rank its rows; see reducescatter()."""
    call = Call(name, calls.reduction(op, None), process_set.group(), 0, prescale_factor, postscale_factor)
    return _reducescatter([call], [tensor], process_set).operations[0]


def reducescatter(tensor, name=None, compression=Compression.none, op=Average, process_set=global_process_set,
                  prescale_factor=1.0, postscale_factor=1.0):
    """Reduce `tensor` over the ranks, and return this rank's share of the rows.

    tensor: the same dtype and shape on all ranks.  The first dimension may have any length; if it does not divide evenly,
        the first ranks get one row more.
    op: Average, Sum, Min, Max or Product.
    Other arguments as for allreduce().  Gradients flow through Sum and Average.
    """
    call = Call(name, calls.reduction(op, None), process_set.group(), 0, prescale_factor, postscale_factor)
    return _reducescattered([call], [tensor], compression, process_set)[0]


def grouped_reducescatter_async(tensors, name=None, op=Average, process_set=global_process_set, prescale_factor=1.0,
                                postscale_factor=1.0):
    """Start a reducescatter of each of a list of tensors; the result is their list."""
    tensors = list(tensors)
    several = calls.several(name, len(tensors), calls.reduction(op, None), process_set.group(), 0, prescale_factor,
                            postscale_factor)
    return _reducescatter(several, tensors, process_set)


def grouped_reducescatter(tensors, name=None, compression=Compression.none, op=Average,
                          process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0):
    """reducescatter() of each of a list of tensors, all submitted before the first is waited for."""
    tensors = list(tensors)
    several = calls.several(name, len(tensors), calls.reduction(op, None), process_set.group(), 0, prescale_factor,
                            postscale_factor)
    return _reducescattered(several, tensors, compression, process_set)

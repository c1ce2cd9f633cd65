"""Sums of sparse tensors: rows that any rank has are summed like dense tensors; other rows are not sent.

Flow: the ranks gather the numbers of their rows -> at its end, in the thread on the completion queue, each lays its values
out over the union of rows, in order, and submits their reduction -> wait() makes a sparse tensor of the sums.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import threading

import torch

from ... import _calls, _errors, _job, _operations, _where
from ..._calls import Call
from ..._lib import ALLGATHER
from ..._operations import submit_to
from .. import calls
from ..process_sets import global_process_set
from . import uneven
from .ops import Average, Sum


class SparseReduction:
    """Handle of the sum or average of the ranks' sparse tensors: poll it with done(), end it with wait().

    For tensors that cannot be summed it raises TypeError or NotImplementedError, and tells the other ranks.
    """

    def __init__(self, call, tensor):
        gathering = Call(call.name + ".rows", group=call.group, space=call.space, then=self._rows_known, partial=True)
        self._call, self._then = call.but(name=call.name + ".values"), call.then
        try:
            if call.reduction not in (Sum, Average):
                raise NotImplementedError("sparse tensors can be summed and averaged only")
            if not tensor.is_cpu:
                raise NotImplementedError("sparse tensors on %s are not supported; make them dense" % tensor.device)
            tensor = tensor.detach().coalesce()
            values = tensor.values()
            calls.check(values)
        except (TypeError, NotImplementedError, RuntimeError, AttributeError) as reason:
            for one in (gathering, self._call):
                _calls.refuse(ALLGATHER, one, reason)
            raise
        self._gather = self._sum = self._result = self._failure = self._reason = None
        self.submitted = threading.Event()
        self._lock, self._early = threading.RLock(), False  # the sum has ended before it was known here
        self._sparse_dim = tensor.sparse_dim()
        self._shape = tuple(tensor.shape)
        # A row's place, as one number; coalesced tensors have them in order.
        self._strides = [1]
        for length in reversed(self._shape[1:self._sparse_dim]):
            self._strides.insert(0, self._strides[0] * length)
        self._own = (tensor.indices() * torch.tensor(self._strides, device="cpu").unsqueeze(1)).sum(0)
        self._values = values
        self._header = torch.tensor([len(self._shape), self._sparse_dim, *self._shape], device="cpu")
        own = torch.cat([self._header, self._own])
        try:
            submit_to(self._began, _operations.allgather, gathering, own.data_ptr(), len(own), calls.DTYPES[own.dtype], own.shape, own)
        except BaseException as error:
            if self._gather is not None:  # a signal handler has raised, and the other ranks wait for the sum
                error.tally_operation = self
            raise

    def _began(self, operation):
        self._gather = operation
        uneven.begin_half(self)

    def _rows_known(self, operation):
        """Submit the sum, if this has not been done: in the completion queue's thread, or in settle()."""
        with self._lock:
            if self.submitted.is_set():
                return
            try:
                if self._sum is None:
                    self._submit_sum(operation)
                if self._reason is not None:
                    self._sum.cancel(self._reason)
            except Exception as failure:
                if _where.is_handlers(failure):
                    raise
                self._failure = failure
            self.submitted.set()
            ended = self._early or self._failure is not None
        if self._then and ended:  # who is told may wait for us
            self._then(self)

    def _submit_sum(self, operation):
        gather = calls.Gather(operation, torch.int64, ())
        everything = gather.wait()
        self._rows = self._union(everything.split(gather.first_dims))
        summands = self._values.new_zeros((len(self._rows), *self._values.shape[1:]))
        summands[torch.searchsorted(self._rows, self._own)] = self._values
        call = self._call.but(then=self._then and self._told)
        submit_to(functools.partial(setattr, self, "_sum"), calls.reduce, call, summands, summands)
        self._own = self._values = None

    def settle(self):
        """Wait until the sum is submitted, or will not be."""
        if not self.submitted.is_set():
            self._gather.ends()
            self._rows_known(self._gather)  # where a signal handler has kept the queue from it

    def _told(self, _):
        with self._lock:
            self._early = not self.submitted.is_set()
        if not self._early:
            self._then(self)

    def _union(self, pieces):
        """The rows that any rank has, in order.  All ranks see the same pieces, and fail alike."""
        length = len(self._header)
        given = [(place, piece) for place, piece in enumerate(pieces) if len(piece)]  # one that has joined gives nothing
        like = given[0][1]
        for _, piece in given:
            if not torch.equal(piece[:length], like[:length]):
                ranks = _job.group_ranks(self._call.group)
                raise _errors.disagreement("%r" % self._call.name.removesuffix(".values"), {
                    ranks[one]: "sparse of shape %s, %d of its dimensions sparse" % (header[2:2 + header[0]], header[1])
                    for one, header in ((one, piece[:length].tolist()) for one, piece in given)})
        return torch.unique(torch.cat([piece[length:] for _, piece in given]))

    def cancel(self, reason):
        """As Operation's."""
        self._reason = reason  # for the sum, if that begins just now
        for operation in (self._gather, self._sum):
            if operation is not None:
                operation.cancel(reason)

    def done(self):
        return self._failure is not None or (self._sum is not None and self._sum.done())

    def wait(self):
        """The sum, coalesced."""
        if self._result is None:
            self.settle()
            if self._failure is not None:
                raise _errors.again(self._failure)
            values = self._sum.wait()
            rows, indices = self._rows, []
            for stride in self._strides:
                indices.append(rows // stride)
                rows = rows % stride
            self._result = torch.sparse_coo_tensor(torch.stack(indices), values, self._shape, device=values.device,
                                                   is_coalesced=True, check_invariants=False)
        return self._result

    __call__ = wait  # Horovod's handle is called for the result


def sparse_allreduce_async(tensor, name, op, process_set=global_process_set):
    """Start the sum or average of the ranks' sparse tensors of one shape; synchronize(handle) or handle() returns it.

    tensor: in COO layout; the ranks' rows may differ.  op: Sum or Average.  The result is coalesced, with the same bits
        on all ranks.  It has the rows that any rank has.
    """
    if name is None:
        name = "sparse.noname.%d" % process_set.number("sparse")
    return SparseReduction(Call(name, calls.reduction(op, None), process_set.group()), tensor)

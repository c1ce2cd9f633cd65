"""Ranges of a group's calls for torch.profiler, as Gloo's calls have them.

    c10d::allreduce_     while the call is submitted, in the thread that makes it
    tally:all_reduce     from then to the end, whichever thread sees that

Both have the shapes of the tensors that the call reads.  A call has ranges if its thread has a profiler on when it begins
(backward's threads have the caller's); no other call makes any.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib

import torch
from torch._C import _autograd

from .work import GroupWork

is_profiled = _autograd._profiler_enabled

_TITLES = {  # call -> (c10d's operator, how Gloo and NCCL call it)
    "allreduce": ("allreduce_", "all_reduce"),
    "allreduce_coalesced": ("allreduce_coalesced_", "all_reduce"),
    "reduce": ("reduce_", "reduce"),
    "reduce_scatter": ("reduce_scatter_", "reduce_scatter"),
    "reduce_scatter_single": ("_reduce_scatter_base_", "reduce_scatter"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    "broadcast": ("broadcast_", "broadcast"),
    "scatter": ("scatter_", "scatter"),
    "allgather": ("allgather_", "all_gather"),
    "allgather_coalesced": ("allgather_coalesced_", "all_gather"),
    "all_gather_single": ("_allgather_base_", "all_gather"),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced_", "all_gather"),
    "gather": ("gather_", "gather"),
    "all_to_all_single": ("alltoall_base_", "all_to_all"),
    "all_to_all": ("alltoall_", "all_to_all"),
    "send": ("send", "send"),
    "recv": ("recv_", "recv"),
    "recv from any source": ("recv_any_source_", "recvAnySource"),
    "barrier": ("barrier", "barrier"),
    "monitored_barrier": ("monitored_barrier_", "monitored_barrier"),
}


def _tensors(value):
    """All tensors in lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


class Ranges:
    """The two ranges of a call."""

    def __init__(self, what, inputs):
        operator, title = _TITLES[what]
        inputs = list(_tensors(inputs))
        # This one first: where one thread ends both, the other one lies within it.
        self._whole = _autograd._record_function_with_args_enter("tally:" + title, *inputs)
        self._submitting = _autograd._record_function_with_args_enter("c10d::" + operator, *inputs)

    def submitted(self):
        _autograd._record_function_with_args_exit(self._submitting)

    def ended(self):
        """Only the first time counts."""
        whole, self._whole = self._whole, None
        if whole is not None:
            _autograd._record_function_with_args_exit(whole)


@contextlib.contextmanager
def ranges(what):
    """The ranges of a call that ends before it returns."""
    if not is_profiled():
        yield
        return
    both = Ranges(what, ())
    try:
        yield
    finally:
        both.submitted()
        both.ended()


class ProfiledWork(GroupWork):
    """A call with ranges.

    inputs: the tensors that it reads, also in lists."""

    def __init__(self, group, what, numbered, outputs, options, inputs):
        GroupWork.__init__(self, group, what, numbered, outputs, options)
        self._inputs, self._ranges = inputs, None

    def __enter__(self):
        self._ranges = Ranges(self.what, self._inputs)
        del self._inputs
        try:
            return GroupWork.__enter__(self)
        except BaseException:
            self._ranges.submitted()
            self._ranges.ended()
            raise

    def __exit__(self, kind, error, trace):
        try:
            GroupWork.__exit__(self, kind, error, trace)
            self._see()  # or the range would last until somebody asks
        except BaseException:
            self._ranges.ended()
            raise
        finally:
            self._ranges.submitted()
            if error is not None:
                self._ranges.ended()

    def _close(self):
        GroupWork._close(self)
        self._ranges.ended()

"""Ranges of a group's calls for torch.profiler, as Gloo's calls have them.

    c10d::allreduce_     while the call is submitted, in the thread that makes it
    tally:all_reduce     from then to the end, whichever thread sees that; a bucket of the hook has this one

The second is asynchronous (is_async), as Gloo's.  Python cannot say so to the profiler, which takes an event for
asynchronous if another thread ends it than has begun it.  So a thread of its own ends it where that one would.

Both have the shapes of the tensors that the call reads.  A call has ranges if its thread has a profiler on when it begins
(backward's threads have the caller's); no other call makes any.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import threading

import torch

from ..patches import enter_range, exit_range, is_profiled
from . import dispatched
from .work import GroupWork

_TITLES = {  # call -> (c10d's operator, how Gloo and NCCL call it)
    "all_reduce": ("allreduce_", "all_reduce"),
    "all_reduce_coalesced": ("allreduce_coalesced_", "all_reduce"),
    "reduce": ("reduce_", "reduce"),
    "reduce_scatter": ("reduce_scatter_", "reduce_scatter"),
    "reduce_scatter_single": ("_reduce_scatter_base_", "reduce_scatter"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    "broadcast": ("broadcast_", "broadcast"),
    "scatter": ("scatter_", "scatter"),
    "all_gather": ("allgather_", "all_gather"),
    "all_gather_coalesced": ("allgather_coalesced_", "all_gather"),
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


class Range:
    """One range.  It begins when it is made."""

    def __init__(self, name, inputs):
        """name: None for no range."""
        self._record = name and enter_range(name, *_tensors(inputs))

    def end(self, _=None):
        """End the range, in any thread; only the first call counts."""
        record, self._record = self._record, None
        if record is not None:
            self._exit(record)

    _exit = staticmethod(exit_range)


class AsyncRange(Range):
    """A range that the profiler shows as asynchronous."""

    def __init__(self, name, inputs):
        self._thread = threading.get_ident()
        Range.__init__(self, name, inputs)

    def _exit(self, record):
        if threading.get_ident() != self._thread:
            Range._exit(record)
            return
        other = threading.Thread(target=Range._exit, args=(record,), name="tally-profile", daemon=True)
        other.start()
        other.join()


def _both(what, inputs):
    """(the range of a whole call, that of its submission)."""
    operator, title = _TITLES[what]
    submission = None if dispatched.in_kernel() else "c10d::" + operator  # else the operator itself has the range
    return AsyncRange("tally:" + title, inputs), Range(submission, inputs)


@contextlib.contextmanager
def ranges(what):
    """The ranges of a call that ends before it returns."""
    if not is_profiled():
        yield
        return
    whole, submission = _both(what, ())
    try:
        yield
    finally:
        submission.end()
        whole.end()


class ProfiledWork(GroupWork):
    """A call with ranges.

    inputs: the tensors that it reads, also in lists."""

    def __init__(self, group, what, numbered, outputs, options, inputs):
        GroupWork.__init__(self, group, what, numbered, outputs, options)
        self._inputs = inputs

    def __enter__(self):
        self._whole, self._submission = _both(self.what, self._inputs)
        del self._inputs
        try:
            return GroupWork.__enter__(self)
        except BaseException:
            self._submission.end()
            self._whole.end()
            raise

    def __exit__(self, kind, error, trace):
        try:
            GroupWork.__exit__(self, kind, error, trace)
            if error is None:
                self._see()  # or the range would last until somebody asks
        finally:
            self._submission.end()
            if error is not None:
                self._whole.end()

    def _close(self):
        GroupWork._close(self)
        self._whole.end()

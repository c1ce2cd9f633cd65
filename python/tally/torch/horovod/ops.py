"""Horovod's operations on PyTorch tensors, over `calls`; exchange.py has those that give each rank its own result.

Each `x_async` returns a handle for poll() and synchronize(); each `x` waits.  A trailing underscore means in place.  A
`grouped_x` takes a list; with a name, its i-th tensor is called `name.i`.  Operations are matched over the ranks by
kind and name, not by order of call; calls without a name are numbered per kind.  process_set: the ranks that take
part, by default all; roots are ranks of the job.  All raise

    ValueError           the name is in flight, or an argument makes no sense
    TypeError            a dtype or layout that cannot be summed
    NotImplementedError  a device that is not supported
    tally.Error          (a RuntimeError) on every rank, if ranks disagree on shape, dtype, op or root, if one
                         of them refused its tensor, or if the job has failed

A rank that raises over its tensor, root, priority or factors tells the others why, so their calls fail too instead of
waiting.  After an error a tensor's contents are undefined.  The communicator stays usable unless the job has failed.

SPDX-License-Identifier: Apache-2.0
"""

import re

import torch

from ... import _errors, _job, _operations
from ..._calls import Call, Reduction, reducing
from ..._lib import ALLGATHER, PUSH_PULL
from .. import calls
from ..process_sets import global_process_set
from .compression import Compression

Average = Reduction.Average
Sum = Reduction.Sum
Min = Reduction.Min
Max = Reduction.Max
Product = Reduction.Product


def _explain(sentence):
    """A sentence with the users' words for names that are made up here."""
    def said(match):
        if match[3] is not None:
            return "'%s'" % match[3]
        words, first = {"alltoall": ("alltoall", 0), "sparse": ("sparse_allreduce", 0), "device": ("call", 1)}[match[1]]
        return "%s no. %d" % (words, int(match[2]) + 1 - first)
    return _MADE_UP.sub(said, sentence)


_MADE_UP = re.compile(r"'(?:(alltoall|sparse|device)\.noname\.(\d+)(?:[.\[][^']*)?|([^']*)\.reducescatter)'")
_errors.explainers.append(_explain)


def poll(handle):
    """Whether the operation has ended, so that synchronize() will not block."""
    return handle.done()


def synchronize(handle):
    """Wait for an operation's end and return its result: a tensor, or a list for a grouped operation."""
    return handle.wait()


# --- allreduce ---------------------------------------------------------------------------------------------


def allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                    process_set=global_process_set, *, priority=0):
    """Start the reduction of `tensor` over the ranks into a new tensor of its shape and dtype; see allreduce()."""
    return calls.reduce(reducing(name, calls.reduction(op, average), process_set.group(), priority, prescale_factor,
                                 postscale_factor), tensor)


def allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                     process_set=global_process_set, *, priority=0):
    """Start the reduction of `tensor` over the ranks in place.  Do not touch it until the end."""
    return calls.reduce(reducing(name, calls.reduction(op, average), process_set.group(), priority, prescale_factor,
                                 postscale_factor), tensor, tensor)


def allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
               process_set=global_process_set, *, priority=0):
    """Reduce `tensor` over the ranks in place, and return it."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set,
                            priority=priority).wait()


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
              postscale_factor=1.0, process_set=global_process_set, *, priority=0):
    """The reduction of `tensor` over the ranks, elementwise, with the same bits on every rank.

    tensor: any shape, the same on all ranks; 0-d and empty ones too.  It is not changed.
    op: Average (default), Sum, Min, Max or Product; average: Horovod's older True or False, excludes op.
    compression: Compression.none, fp16 or bf16: the type in which floating-point tensors are sent.
    prescale_factor, postscale_factor: multiply each input before, the result after; not 0.
    priority: higher goes first.

    Returns a tensor of the same shape and dtype.  Gradients flow through Sum and Average.
    """
    call = Call(name, calls.reduction(op, average), process_set.group(), priority, prescale_factor, postscale_factor)
    return _allreduce([call], [tensor], compression)[0]


def _allreduce(forward, tensors, compression):
    """forward: the Calls of the tensors, which differ in name alone."""
    pairs = [compression.compress(one) if isinstance(one, torch.Tensor) else (one, None) for one in tensors]

    def run(inputs, these=forward):
        # What compression has copied is ours to overwrite, unless gradients need it.
        return calls.Group([calls.reduce(call, one, one if ours else None)
                            for call, one, ours in zip(these, inputs, own)]).wait()

    def back(gradients):
        # d sum(x_i) / d x_j = 1: the gradients of all ranks' results, reduced as the inputs were.
        return run(gradients, [call.but(name=calls.backward_name(call.name)) for call in forward])

    sent = [one for one, _ in pairs]
    flows = all(call.reduction <= 1 for call in forward) and torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in tensors)
    own = [not flows and one is not before for one, before in zip(sent, tensors)]
    results = calls.flow(run, back, sent) if flows else run(sent)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]


def _grouped(several, tensors, targets):
    calls.all_or_none(PUSH_PULL, several, tensors)
    return calls.Group([calls.reduce(*one) for one in zip(several, tensors, targets)])


def grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                            process_set=global_process_set, *, priority=0):
    """Start the reduction of each of a list of tensors into new ones; the result is their list."""
    tensors = list(tensors)
    several = calls.several(name, len(tensors), calls.reduction(op, average), process_set.group(), priority,
                            prescale_factor, postscale_factor)
    return _grouped(several, tensors, [None] * len(tensors))


def grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                             process_set=global_process_set, *, priority=0):
    """Start the reduction of each of a list of tensors in place."""
    tensors = list(tensors)
    several = calls.several(name, len(tensors), calls.reduction(op, average), process_set.group(), priority,
                            prescale_factor, postscale_factor)
    return _grouped(several, tensors, tensors)


def grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                       process_set=global_process_set, *, priority=0):
    """Reduce each of a list of tensors in place, and return them."""
    return grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set,
                                    priority=priority).wait()


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
                      postscale_factor=1.0, process_set=global_process_set, *, priority=0):
    """The reductions of a list of tensors, all submitted before the first wait.  Arguments as for allreduce().
    Gradients flow through Sum and Average."""
    tensors = list(tensors)
    several = calls.several(name, len(tensors), calls.reduction(op, average), process_set.group(), priority,
                            prescale_factor, postscale_factor)
    calls.all_or_none(PUSH_PULL, several, tensors)
    return _allreduce(several, tensors, compression)


# BytePS's names.  `version` has no effect: rounds of a name are counted by the library.


def push_pull_async(tensor, average=True, name=None, version=0, priority=0):
    """BytePS's name for allreduce_async(): the average (or the sum) into a new tensor."""
    return calls.reduce(Call(name, 1 if average else 0, priority=priority), tensor)


def push_pull_async_inplace(tensor, average=True, name=None, version=0, priority=0):
    """BytePS's name for allreduce_async_()."""
    return calls.reduce(Call(name, 1 if average else 0, priority=priority), tensor, tensor)


def push_pull_inplace(tensor, average=True, name=None, version=0, priority=0):
    """BytePS's name for allreduce_()."""
    return push_pull_async_inplace(tensor, average, name, version, priority).wait()


def push_pull(tensor, average=True, name=None, version=0, priority=0, compression=Compression.none):
    """BytePS's name for allreduce()."""
    return allreduce(tensor, name=name, compression=compression, op=Average if average else Sum, priority=priority)


# --- broadcast ---------------------------------------------------------------------------------------------


def broadcast_async(tensor, root_rank, name=None, process_set=global_process_set):
    """Start a broadcast of rank `root_rank`'s tensor into a new tensor; see broadcast()."""
    return calls.broadcast(Call(name, group=process_set.group()), tensor, None, root_rank, process_set)


def broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set):
    """Start a broadcast of rank `root_rank`'s tensor in place.  Do not touch it until the end."""
    return calls.broadcast(Call(name, group=process_set.group()), tensor, tensor, root_rank, process_set)


def broadcast_(tensor, root_rank, name=None, process_set=global_process_set):
    """Overwrite `tensor` with rank `root_rank`'s, and return it."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast(tensor, root_rank, name=None, process_set=global_process_set):
    """Rank `root_rank`'s tensor, as a new tensor on every rank.

    tensor: the same shape and dtype on all ranks; not changed.  Gradients flow through it to the root's: the average
        over the ranks, as in Horovod.
    """
    def start(tensors):
        return [broadcast_async(tensors[0], root_rank, name, process_set).wait()]

    def back(gradients):
        mean = allreduce_async(gradients[0], name=calls.backward_name(name), process_set=process_set).wait()
        return [mean if _job.rank() == root_rank else torch.zeros_like(mean)]

    return calls.flow(start, back, [tensor])[0]


# --- allgather ---------------------------------------------------------------------------------------------


def allgather_async(tensor, name=None, process_set=global_process_set):
    """Start the concatenation of all ranks' tensors; see allgather()."""
    return calls.allgather(Call(name, group=process_set.group()), tensor)


def allgather(tensor, name=None, process_set=global_process_set):
    """All ranks' tensors, concatenated along the first dimension, in order of ranks.

    tensor: the same dtype and shape on all ranks except in the first dimension; a 0-d tensor counts as shape (1,).
    Returns a new tensor.  Gradients flow through it: the average over the ranks, as in Horovod.
    """
    return calls.gathered([Call(name, group=process_set.group())], [tensor], process_set)[0]


def grouped_allgather_async(tensors, name=None, process_set=global_process_set):
    """Start the concatenations of each of a list of tensors; the result is their list."""
    tensors = list(tensors)
    several = calls.several(name, len(tensors), group=process_set.group())
    calls.all_or_none(ALLGATHER, several, tensors)
    return calls.Group([calls.allgather(*one) for one in zip(several, tensors)])


def grouped_allgather(tensors, name=None, process_set=global_process_set):
    """allgather() of each of a list of tensors, all submitted before the first wait."""
    tensors = list(tensors)
    several = calls.several(name, len(tensors), group=process_set.group())
    calls.all_or_none(ALLGATHER, several, tensors)
    return calls.gathered(several, tensors, process_set)


# --- barrier -----------------------------------------------------------------------------------------------


def barrier(process_set=global_process_set):
    """Wait until all ranks have called it.  Operations in flight may still go on: synchronize() waits for those."""
    _operations.barrier(group=process_set.group())

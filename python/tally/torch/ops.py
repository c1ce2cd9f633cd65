"""Horovod's operations on PyTorch tensors, over `tally._core`; exchange.py has those that give each rank its own result.

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

import ctypes
import re
import warnings

import torch

from .. import _core
from .._core import STATE, USER, Reduction
from .._lib import ALLGATHER, BROADCAST, DTYPE_CODES, PUSH_PULL
from . import device
from .compression import Compression
from .process_sets import global_process_set

Average = Reduction.Average
Sum = Reduction.Sum
Min = Reduction.Min
Max = Reduction.Max
Product = Reduction.Product

# Without complex numbers: a tensor of them may be a view whose memory holds the conjugates.  Older PyTorch has no uint16.
_DTYPES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()
           if hasattr(torch, name) and not name.startswith("complex")}
_STRIDED = torch.strided
_BY_NAME = (USER, STATE)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_REDUCTIONS = {reduction: int(reduction) for reduction in Reduction}


class _Adasum:
    """Horovod's name for a reduction that Tally does not have."""

    def __repr__(self):
        return "Adasum"


Adasum = _Adasum()


def _reduction(op, average):
    """The reduction that `op` and Horovod's older `average` name."""
    if op is Adasum:
        raise NotImplementedError("Adasum is not supported; use Average, with a learning rate to fit")
    if op is None:
        if average is None:
            return 1
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return 1 if average else 0
    if average is not None:
        raise ValueError("op and average exclude each other; give op alone")
    try:
        return _REDUCTIONS[op]
    except (KeyError, TypeError):
        raise ValueError("op must be Average, Sum, Min, Max or Product, not %r" % (op,)) from None


def _check(tensor):
    """Say why `tensor` cannot be handed over, if so."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("expected a torch.Tensor, got %s" % type(tensor).__name__)
    if hasattr(tensor, "device_mesh"):
        raise TypeError("a DTensor cannot be reduced as a whole; hand over its local tensor (to_local())")
    if tensor.is_nested:
        raise TypeError("a nested tensor cannot be summed as a whole; hand over its tensors (unbind())")
    if tensor.layout is not _STRIDED:
        raise TypeError("a tensor of layout %s cannot be summed; use its dense form, or gather indices and values"
                        % tensor.layout)
    device.of(tensor)  # raises for one that is not supported
    if tensor.dtype not in _DTYPES:
        raise TypeError("tensors of %s cannot be summed; supported are %s"
                        % (tensor.dtype, ", ".join(str(dtype) for dtype in _DTYPES)))


def _refuse(tensor, kind, name, space, reason, group):
    """Tell the other ranks why a tensor cannot be handed over, under the name that its operation would have had."""
    if isinstance(tensor, torch.Tensor) and not tensor.is_cpu and device.supported(tensor.device) and space in _BY_NAME:
        name = device.named(name, kind, space, group)
    _core.refuse(kind, name, space, reason, group)


def _dtype_code(tensor, kind, name, space, group=None):
    """The library's number for the tensor's dtype.  If there is none, raise, and tell the other ranks."""
    try:
        code = _DTYPES.get(tensor.dtype)
        if (code is None or not tensor.is_cpu or tensor.layout is not _STRIDED or type(tensor) not in _PLAIN
                or tensor.is_nested):
            _check(tensor)
        return code
    except AttributeError:  # no tensor at all
        reason = TypeError("expected a torch.Tensor, got %s" % type(tensor).__name__)
    except (TypeError, NotImplementedError) as error:
        reason = error
    _refuse(tensor, kind, name, space, reason, group)
    raise reason


def _reduce(source, target, name, reduction, prescale, postscale, priority, space=USER, finish=None, then=None,
            group=None, line=None, number=None, note=None):
    """Submit the reduction of `source` into `target`: the same tensor, or None for a new one.

    line, number: in an ordered name space, its Line and the number of this call.  note: as in _core.push_pull().
    """
    code = _dtype_code(source, PUSH_PULL, name, space, group)
    if source.is_contiguous() and not source.is_neg():
        packed = source
        if target is None:
            target = torch.empty_like(source, requires_grad=False)
            destination = target
        else:
            destination = source
    else:
        # The other ranks' strides are not known here: memory in another order is put in order first.
        packed = destination = source.detach().resolve_neg().contiguous()
        if target is None:
            target = packed
        else:
            finish = _unpack(packed, target, finish)
    if not packed.is_cpu:
        called = device.named(name, PUSH_PULL, space, group) if line is None else "call %d" % number
        return device.reduce(called, packed, destination, code, reduction, packed.shape, priority, prescale, postscale,
                             space, target, finish, then, group, line, note)
    return _core.push_pull(name, packed.data_ptr(), destination.data_ptr(), packed.numel(), code, reduction,
                           packed.shape, priority, prescale, postscale, space, (packed, destination, target), target,
                           finish, then, group, note)


def _unpack(packed, target, then):
    def finish(result):
        with torch.no_grad():
            target.detach().copy_(packed)
        return result if then is None else then(result)
    return finish


class Group:
    """Operations that are polled and waited for together."""

    __slots__ = ("operations",)

    def __init__(self, operations):
        self.operations = operations

    def done(self):
        return all(operation.done() for operation in self.operations)

    def wait(self):
        """The list of results; raises the first failure once all have ended."""
        results, failure = [], None
        for operation in self.operations:
            try:
                results.append(operation.wait())
            except _core.Error as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return results


def poll(handle):
    """Whether the operation has ended, so that synchronize() will not block."""
    return handle.done()


def synchronize(handle):
    """Wait for an operation's end and return its result: a tensor, or a list for a grouped operation."""
    return handle.wait()


# --- gradients through operations ---------------------------------------------------------------------------


class _Flow(torch.autograd.Function):
    """start(tensors) -> results; back(gradients of all results) -> gradients of all tensors."""

    @staticmethod
    def forward(ctx, start, back, *tensors):
        ctx.back = back
        return tuple(start(tensors))

    @staticmethod
    def backward(ctx, *gradients):
        return (None, None, *ctx.back(gradients))


def _flow(start, back, tensors):
    """start(tensors), so that gradients flow back through it if they are asked for."""
    if torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in tensors):
        return list(_Flow.apply(start, back, *tensors))
    return start(tensors)


def _names(name, count):
    return [None if name is None else "%s.%d" % (name, index) for index in range(count)]


def _explain(sentence):
    """A sentence with the users' words for names that are made up here."""
    def said(match):
        if match[3] is not None:
            return "'%s'" % match[3]
        words, first = {"alltoall": ("alltoall", 0), "sparse": ("sparse_allreduce", 0), "device": ("call", 1)}[match[1]]
        return "%s no. %d" % (words, int(match[2]) + 1 - first)
    return _MADE_UP.sub(said, sentence)


_MADE_UP = re.compile(r"'(?:(alltoall|sparse|device)\.noname\.(\d+)(?:[.\[][^']*)?|([^']*)\.reducescatter)'")
_core.explainers.append(_explain)


def _backward_name(name):
    return None if name is None else name + ".backward"


def _all_or_none(kind, tensors, names, group=None):
    """Check a list of tensors: if one cannot be handed over, none is, and the other ranks are told."""
    try:
        for tensor in tensors:
            _check(tensor)
    except (TypeError, NotImplementedError) as reason:
        for tensor, name in zip(tensors, names):
            _refuse(tensor, kind, name, USER, reason, group)
        raise


# --- allreduce ---------------------------------------------------------------------------------------------


def allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                    process_set=global_process_set, *, priority=0):
    """Start the reduction of `tensor` over the ranks into a new tensor of its shape and dtype; see allreduce()."""
    return _reduce(tensor, None, name, _reduction(op, average), prescale_factor, postscale_factor, priority,
                   group=process_set.group())


def allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                     process_set=global_process_set, *, priority=0):
    """Start the reduction of `tensor` over the ranks in place.  Do not touch it until the end."""
    return _reduce(tensor, tensor, name, _reduction(op, average), prescale_factor, postscale_factor, priority,
                   group=process_set.group())


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
    return _allreduce([tensor], [name], compression, _reduction(op, average), prescale_factor, postscale_factor,
                      process_set, priority)[0]


def _allreduce(tensors, names, compression, reduction, prescale, postscale, process_set, priority):
    group = process_set.group()
    pairs = [compression.compress(one) if isinstance(one, torch.Tensor) else (one, None) for one in tensors]

    def run(inputs, names):
        # What compression has copied is ours to overwrite, unless gradients need it.
        return Group([_reduce(one, one if ours else None, name, reduction, prescale, postscale, priority, group=group)
                      for one, ours, name in zip(inputs, own, names)]).wait()

    def back(gradients):
        # d sum(x_i) / d x_j = 1: the gradients of all ranks' results, reduced as the inputs were.
        return run(gradients, [_backward_name(name) for name in names])

    sent = [one for one, _ in pairs]
    flows = reduction <= 1 and torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in tensors)
    own = [not flows and one is not before for one, before in zip(sent, tensors)]
    if flows:
        results = _flow(lambda inputs: run(inputs, names), back, sent)
    else:
        results = run(sent, names)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]


def _grouped(tensors, targets, name, reduction, prescale, postscale, priority, process_set):
    names, group = _names(name, len(tensors)), process_set.group()
    _all_or_none(PUSH_PULL, tensors, names, group)
    return Group([_reduce(tensor, target, one, reduction, prescale, postscale, priority, group=group)
                  for tensor, target, one in zip(tensors, targets, names)])


def grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                            process_set=global_process_set, *, priority=0):
    """Start the reduction of each of a list of tensors into new ones; the result is their list."""
    tensors = list(tensors)
    return _grouped(tensors, [None] * len(tensors), name, _reduction(op, average), prescale_factor,
                    postscale_factor, priority, process_set)


def grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0,
                             process_set=global_process_set, *, priority=0):
    """Start the reduction of each of a list of tensors in place."""
    tensors = list(tensors)
    return _grouped(tensors, tensors, name, _reduction(op, average), prescale_factor, postscale_factor, priority,
                    process_set)


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
    names = _names(name, len(tensors))
    _all_or_none(PUSH_PULL, tensors, names, process_set.group())
    return _allreduce(tensors, names, compression, _reduction(op, average), prescale_factor, postscale_factor,
                      process_set, priority)


# BytePS's names.  `version` has no effect: rounds of a name are counted by the library.


def push_pull_async(tensor, average=True, name=None, version=0, priority=0):
    """BytePS's name for allreduce_async(): the average (or the sum) into a new tensor."""
    return _reduce(tensor, None, name, 1 if average else 0, 1.0, 1.0, priority)


def push_pull_async_inplace(tensor, average=True, name=None, version=0, priority=0):
    """BytePS's name for allreduce_async_()."""
    return _reduce(tensor, tensor, name, 1 if average else 0, 1.0, 1.0, priority)


def push_pull_inplace(tensor, average=True, name=None, version=0, priority=0):
    """BytePS's name for allreduce_()."""
    return _reduce(tensor, tensor, name, 1 if average else 0, 1.0, 1.0, priority).wait()


def push_pull(tensor, average=True, name=None, version=0, priority=0, compression=Compression.none):
    """BytePS's name for allreduce()."""
    return allreduce(tensor, name=name, compression=compression, op=Average if average else Sum, priority=priority)


# --- broadcast ---------------------------------------------------------------------------------------------


def _broadcast(tensor, target, root_rank, name, space=USER, process_set=global_process_set):
    group = process_set.group()
    code = _dtype_code(tensor, BROADCAST, name, space, group)
    finish = None
    if target is None:
        if _core.rank() == root_rank:
            buffer = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        else:
            buffer = tensor.new_empty(tensor.shape)
        target = buffer
    elif tensor.is_contiguous() and not tensor.is_neg():
        buffer = tensor
    else:
        buffer = tensor.detach().resolve_neg().contiguous()
        finish = _unpack(buffer, target, None)
    if not buffer.is_cpu:
        name = device.named(name, BROADCAST, space, group)
    root = process_set.place(root_rank, BROADCAST, name, space)
    if not buffer.is_cpu:
        shape, flat = buffer.shape, buffer.detach().view(-1)

        def submit(hosts, ended):
            return _core.broadcast(name, hosts[0].data_ptr(), flat.numel(), code, root, shape, space, hosts, None,
                                   None, ended, group)

        span = (flat, None) if _core.rank() == root_rank else (None, flat)
        return device.begin(device.of(flat), [([span], submit, (BROADCAST, name, space, group))], target, finish)
    return _core.broadcast(name, buffer.data_ptr(), buffer.numel(), code, root, buffer.shape, space,
                           (buffer, target), target, finish, None, group)


def broadcast_async(tensor, root_rank, name=None, process_set=global_process_set):
    """Start a broadcast of rank `root_rank`'s tensor into a new tensor; see broadcast()."""
    return _broadcast(tensor, None, root_rank, name, process_set=process_set)


def broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set):
    """Start a broadcast of rank `root_rank`'s tensor in place.  Do not touch it until the end."""
    return _broadcast(tensor, tensor, root_rank, name, process_set=process_set)


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
        mean = allreduce_async(gradients[0], name=_backward_name(name), process_set=process_set).wait()
        return [mean if _core.rank() == root_rank else torch.zeros_like(mean)]

    return _flow(start, back, [tensor])[0]


# --- allgather ---------------------------------------------------------------------------------------------


class _Gather:
    """Handle of a gathering: makes a tensor of the library's result when the operation has ended."""

    __slots__ = ("operation", "dtype", "rest", "like", "result", "first_dims")

    def __init__(self, operation, dtype, rest, like=None):
        self.operation, self.dtype, self.rest = operation, dtype, rest
        self.like = like  # a tensor on the device that the result is to be on; None: in host memory
        self.result = self.first_dims = None

    def done(self):
        return self.operation.done()

    def cancel(self, reason):
        self.operation.cancel(reason)

    def wait(self):
        if self.result is None:
            self.operation.wait()
            address, length, first_dims = self.operation.gathered()
            shape = (sum(first_dims),) + self.rest
            if self.like is not None:
                result = device.of(self.like).upload(address, length, self.like, shape)
            else:
                result = torch.empty(shape, dtype=self.dtype, device="cpu")
            if length and self.like is None:
                ctypes.memmove(result.data_ptr(), address, length)
            self.first_dims, self.result = first_dims, result
        return self.result


def _allgather(tensor, name, space=USER, then=None, process_set=global_process_set, partial=False):
    group = process_set.group()
    code = _dtype_code(tensor, ALLGATHER, name, space, group)
    packed = tensor.detach().resolve_neg().contiguous()
    shape = tuple(packed.shape) or (1,)
    ranks = None if group is None else process_set.size()
    if not packed.is_cpu:
        name, flat = device.named(name, ALLGATHER, space, group), packed.view(-1)

        def submit(hosts, ended):
            return _core.allgather(name, hosts[0].data_ptr(), flat.numel(), code, shape, space, hosts, ended, group,
                                   ranks, partial=partial)

        operation = device.begin(device.of(flat), [([(flat, None)], submit, (ALLGATHER, name, space, group))],
                                 then=then)
        return _Gather(operation, packed.dtype, shape[1:], packed.new_empty(0))
    operation = _core.allgather(name, packed.data_ptr(), packed.numel(), code, shape, space, packed, then, group,
                                ranks, partial=partial)
    return _Gather(operation, packed.dtype, shape[1:])


def allgather_async(tensor, name=None, process_set=global_process_set):
    """Start the concatenation of all ranks' tensors; see allgather()."""
    return _allgather(tensor, name, process_set=process_set)


def allgather(tensor, name=None, process_set=global_process_set):
    """All ranks' tensors, concatenated along the first dimension, in order of ranks.

    tensor: the same dtype and shape on all ranks except in the first dimension; a 0-d tensor counts as shape (1,).
    Returns a new tensor.  Gradients flow through it: the average over the ranks, as in Horovod.
    """
    return _gathered([tensor], [name], process_set)[0]


def grouped_allgather_async(tensors, name=None, process_set=global_process_set):
    """Start the concatenations of each of a list of tensors; the result is their list."""
    tensors = list(tensors)
    names = _names(name, len(tensors))
    _all_or_none(ALLGATHER, tensors, names, process_set.group())
    return Group([_allgather(tensor, one, process_set=process_set) for tensor, one in zip(tensors, names)])


def grouped_allgather(tensors, name=None, process_set=global_process_set):
    """allgather() of each of a list of tensors, all submitted before the first wait."""
    tensors = list(tensors)
    names = _names(name, len(tensors))
    _all_or_none(ALLGATHER, tensors, names, process_set.group())
    return _gathered(tensors, names, process_set)


def _gathered(tensors, names, process_set):
    group = process_set.group()
    places = []  # where this rank's rows lie in the results

    def start(tensors):
        gathers = [_allgather(one, name, process_set=process_set) for one, name in zip(tensors, names)]
        results = Group(gathers).wait()
        rank = process_set.rank()
        places.extend((one.shape, sum(gather.first_dims[:rank]), gather.first_dims[rank])
                      for one, gather in zip(tensors, gathers))
        return results

    def back(gradients):
        means = Group([_reduce(one, None, _backward_name(name), 1, 1.0, 1.0, 0, group=group)
                       for one, name in zip(gradients, names)]).wait()
        return [mean.narrow(0, begin, length).reshape(shape)
                for mean, (shape, begin, length) in zip(means, places)]

    return _flow(start, back, tensors)


# --- barrier -----------------------------------------------------------------------------------------------


def barrier(process_set=global_process_set):
    """Wait until all ranks have called it."""
    _core.barrier(group=process_set.group())

"""Horovod's operations on PyTorch tensors, over `tally._core`.

Each `x_async` returns a handle for poll() and synchronize(), each `x` waits; a trailing underscore means in place.
Operations are matched over the ranks by kind and name, not by order of call; calls without a name are numbered
per kind.  All raise

    ValueError           the name is in flight, or an argument makes no sense
    TypeError            a dtype or layout that cannot be summed
    NotImplementedError  a device that is not supported
    tally.Error          (a RuntimeError) on every rank, where ranks disagree on shape, dtype, op or root, where one
                         of them refused its tensor, or the job has failed

and a rank that raises over its tensor, root, priority or factors tells the others why, so that theirs fail too
instead of waiting.
After an error a tensor's contents are undefined; the communicator works on unless the job has failed.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import warnings

import torch

from .. import _core
from .._core import USER, Reduction
from .._lib import ALLGATHER, BROADCAST, DTYPE_CODES, PUSH_PULL
from .compression import Compression

Average = Reduction.Average
Sum = Reduction.Sum
Min = Reduction.Min
Max = Reduction.Max
Product = Reduction.Product

_DTYPES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}
_STRIDED = torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_REDUCTIONS = {reduction: int(reduction) for reduction in Reduction}


def _reduction(op, average):
    """The reduction that `op` and Horovod's older `average` stand for."""
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
    if tensor.device.type != "cpu":
        raise NotImplementedError("tensors on %s are not supported yet; move them to the CPU" % tensor.device)
    if tensor.dtype not in _DTYPES:
        raise TypeError("tensors of %s cannot be summed; supported are %s"
                        % (tensor.dtype, ", ".join(str(dtype) for dtype in _DTYPES)))


def _dtype_code(tensor, kind, name, space):
    """The library's number for the dtype of a tensor that it can take; else raise, and tell the other ranks."""
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
    _core.refuse(kind, name, space, reason)
    raise reason


def _reduce(source, target, name, reduction, prescale, postscale, priority, space=USER, finish=None, then=None):
    """Submit the reduction of `source` into `target`: the same tensor, or None for a new one."""
    code = _dtype_code(source, PUSH_PULL, name, space)
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
    return _core.push_pull(name, packed.data_ptr(), destination.data_ptr(), packed.numel(), code, reduction,
                           packed.shape, priority, prescale, postscale, space, (packed, destination, target), target,
                           finish, then)


def _unpack(packed, target, then):
    def finish(result):
        with torch.no_grad():
            target.copy_(packed)
        return result if then is None else then(result)
    return finish


class Group:
    """Operations that are polled and waited for as one."""

    __slots__ = ("operations",)

    def __init__(self, operations):
        self.operations = operations

    def done(self):
        return all(operation.done() for operation in self.operations)

    def wait(self):
        """The list of results; the first failure once all have ended."""
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


# --- allreduce ---------------------------------------------------------------------------------------------


def allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, *,
                    priority=0):
    """Start the reduction of `tensor` over all ranks into a new tensor of its shape and dtype; see allreduce()."""
    return _reduce(tensor, None, name, _reduction(op, average), prescale_factor, postscale_factor, priority)


def allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, *,
                     priority=0):
    """Start the reduction of `tensor` over all ranks in place; it must not be touched until the end."""
    return _reduce(tensor, tensor, name, _reduction(op, average), prescale_factor, postscale_factor, priority)


def allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, *, priority=0):
    """Reduce `tensor` over all ranks in place, and return it."""
    return _reduce(tensor, tensor, name, _reduction(op, average), prescale_factor, postscale_factor, priority).wait()


def allreduce(tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
              postscale_factor=1.0, *, priority=0):
    """The reduction of `tensor` over all ranks, elementwise, the same bits on every rank.

    tensor: any shape, the same on all ranks; 0-d and empty ones too.  It is not changed.
    op: Average (default), Sum, Min, Max or Product; average: Horovod's older True or False, excludes op.
    compression: Compression.none, fp16 or bf16, what to send floating-point tensors as.
    prescale_factor, postscale_factor: multiply each input before, the result after; not 0.
    priority: higher goes first.

    Returns a tensor of the same shape and dtype; gradients flow through Sum and Average.
    """
    reduction = _reduction(op, average)
    if (reduction <= 1 and torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad):
        sent, ctx = compression.compress(tensor)
        return compression.decompress(
            _Allreduce.apply(sent, name, reduction, prescale_factor, postscale_factor, priority), ctx)
    sent, ctx = compression.compress(tensor) if isinstance(tensor, torch.Tensor) else (tensor, None)
    # What compression has copied is ours to overwrite.
    target = None if sent is tensor else sent
    handle = _reduce(sent, target, name, reduction, prescale_factor, postscale_factor, priority)
    return compression.decompress(handle.wait(), ctx)


def _grouped(tensors, targets, name, reduction, prescale, postscale, priority):
    tensors = list(tensors)
    names = [None if name is None else "%s.%d" % (name, index) for index in range(len(tensors))]
    try:
        for tensor in tensors:
            _check(tensor)
    except (TypeError, NotImplementedError) as reason:
        for one in names:
            _core.refuse(PUSH_PULL, one, USER, reason)
        raise
    return Group([_reduce(tensor, target, one, reduction, prescale, postscale, priority)
                  for tensor, target, one in zip(tensors, targets, names)])


def grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, *,
                            priority=0):
    """Start the reduction of each of a list of tensors into new ones; the result is their list."""
    tensors = list(tensors)
    return _grouped(tensors, [None] * len(tensors), name, _reduction(op, average), prescale_factor,
                    postscale_factor, priority)


def grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, *,
                             priority=0):
    """Start the reduction of each of a list of tensors in place."""
    tensors = list(tensors)
    return _grouped(tensors, tensors, name, _reduction(op, average), prescale_factor, postscale_factor, priority)


def grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, *,
                       priority=0):
    """Reduce each of a list of tensors in place, and return them."""
    tensors = list(tensors)
    return _grouped(tensors, tensors, name, _reduction(op, average), prescale_factor, postscale_factor,
                    priority).wait()


def grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0,
                      postscale_factor=1.0, *, priority=0):
    """The reductions of a list of tensors, all submitted before the first is waited for.  With a name the i-th is
    called `name.i`.  Arguments as for allreduce(); gradients do not flow through it."""
    sent, ctxs = [], []
    for tensor in tensors:
        one, ctx = compression.compress(tensor) if isinstance(tensor, torch.Tensor) else (tensor, None)
        sent.append(one)
        ctxs.append(ctx)
    handle = _grouped(sent, [None] * len(sent), name, _reduction(op, average), prescale_factor, postscale_factor,
                      priority)
    return [compression.decompress(result, ctx) for result, ctx in zip(handle.wait(), ctxs)]


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


def _broadcast(tensor, target, root_rank, name, space=USER):
    code = _dtype_code(tensor, BROADCAST, name, space)
    finish = None
    if target is None:
        if _core.rank() == root_rank:
            buffer = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        else:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
        target = buffer
    elif tensor.is_contiguous() and not tensor.is_neg():
        buffer = tensor
    else:
        buffer = tensor.detach().resolve_neg().contiguous()
        finish = _unpack(buffer, target, None)
    return _core.broadcast(name, buffer.data_ptr(), buffer.numel(), code, root_rank, buffer.shape, space,
                           (buffer, target), target, finish)


def broadcast_async(tensor, root_rank, name=None):
    """Start a broadcast of rank `root_rank`'s tensor into a new tensor; see broadcast()."""
    return _broadcast(tensor, None, root_rank, name)


def broadcast_async_(tensor, root_rank, name=None):
    """Start a broadcast of rank `root_rank`'s tensor in place; it must not be touched until the end."""
    return _broadcast(tensor, tensor, root_rank, name)


def broadcast_(tensor, root_rank, name=None):
    """Overwrite `tensor` with rank `root_rank`'s, and return it."""
    return _broadcast(tensor, tensor, root_rank, name).wait()


def broadcast(tensor, root_rank, name=None):
    """Rank `root_rank`'s tensor, as a new tensor on every rank.

    tensor: the same shape and dtype on all ranks; not changed.  Gradients flow through it to the root's.
    """
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        return _Broadcast.apply(tensor, root_rank, name)
    return _broadcast(tensor, None, root_rank, name).wait()


# --- allgather ---------------------------------------------------------------------------------------------


class _Gather:
    """Handle of a gathering: makes a tensor of what the library holds when it has ended."""

    __slots__ = ("operation", "dtype", "rest", "result", "first_dims")

    def __init__(self, operation, dtype, rest):
        self.operation, self.dtype, self.rest = operation, dtype, rest
        self.result = self.first_dims = None

    def done(self):
        return self.operation.done()

    def wait(self):
        if self.result is None:
            self.operation.wait()
            address, length, first_dims = self.operation.gathered()
            result = torch.empty((sum(first_dims),) + self.rest, dtype=self.dtype)
            if length:
                ctypes.memmove(result.data_ptr(), address, length)
            self.first_dims, self.result = first_dims, result
        return self.result


def allgather_async(tensor, name=None):
    """Start the concatenation of all ranks' tensors; see allgather()."""
    return _allgather(tensor, name)


def _allgather(tensor, name, space=USER, then=None):
    code = _dtype_code(tensor, ALLGATHER, name, space)
    packed = tensor.detach().resolve_neg().contiguous()
    shape = tuple(packed.shape) or (1,)
    operation = _core.allgather(name, packed.data_ptr(), packed.numel(), code, shape, space, packed, then)
    return _Gather(operation, packed.dtype, shape[1:])


def allgather(tensor, name=None):
    """All ranks' tensors, one behind the other along the first dimension, in order of ranks.

    tensor: the same dtype and shape on all ranks but for the first dimension; a 0-d tensor counts as shape (1,).
    Returns a new tensor; gradients flow through it.
    """
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        return _Allgather.apply(tensor, name)
    return _allgather(tensor, name).wait()


# --- gradients through the operations ------------------------------------------------------------------------


def _backward_name(name):
    return None if name is None else name + ".backward"


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, name, reduction, prescale, postscale, priority):
        ctx.arguments = (reduction, prescale, postscale, priority)
        ctx.name = _backward_name(name)
        return _reduce(tensor, None, name, *ctx.arguments).wait()

    @staticmethod
    def backward(ctx, gradient):
        # d sum(x_i) / d x_j = 1: the gradients of all ranks' results, reduced as the inputs were.
        return (_reduce(gradient, None, ctx.name, *ctx.arguments).wait(),) + (None,) * 5


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, root_rank, name):
        ctx.root_rank, ctx.name = root_rank, _backward_name(name)
        return _broadcast(tensor, None, root_rank, name).wait()

    @staticmethod
    def backward(ctx, gradient):
        total = _reduce(gradient, None, ctx.name, 0, 1.0, 1.0, 0).wait()
        return total if _core.rank() == ctx.root_rank else torch.zeros_like(total), None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, name):
        gather = _allgather(tensor, name)
        result = gather.wait()
        ctx.name, ctx.shape = _backward_name(name), tensor.shape
        ctx.length = gather.first_dims[_core.rank()]
        ctx.offset = sum(gather.first_dims[:_core.rank()])
        return result

    @staticmethod
    def backward(ctx, gradient):
        total = _reduce(gradient, None, ctx.name, 0, 1.0, 1.0, 0).wait()
        return total.narrow(0, ctx.offset, ctx.length).reshape(ctx.shape), None

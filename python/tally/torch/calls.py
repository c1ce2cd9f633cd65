"""Calls on PyTorch tensors: checked, put in order, and handed to `tally._operations` as memory.  Inside the package only.

Flow: reduce(), broadcast() or allgather() takes a Call and a tensor -> contiguous memory of a type that the library has ->
`_operations`, or `device` for a tensor on a device -> a handle with done() and wait().  What cannot be handed over raises
TypeError or NotImplementedError, and the other ranks are told.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import warnings

import torch

from .. import _calls, _errors, _job, _operations, _where
from .._calls import HOROVOD, STATE, Call, Reduction
from .._lib import ALLGATHER, BROADCAST, DTYPE_CODES, PUSH_PULL
from . import device
from .process_sets import global_process_set

# Type -> the library's number.  Without complex numbers: a tensor of them may be a view whose memory holds the conjugates.
# Older PyTorch has no uint16.
DTYPES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()
          if hasattr(torch, name) and not name.startswith("complex")}
_STRIDED = torch.strided
_BY_NAME = (HOROVOD, STATE)
PLAIN = (torch.Tensor, torch.nn.Parameter)  # not of a class that may hide its memory
_REDUCTIONS = {reduction: int(reduction) for reduction in Reduction}


class _Adasum:
    """Horovod's name for a reduction that Tally does not have."""

    def __repr__(self):
        return "Adasum"


Adasum = _Adasum()


def reduction(op, average):
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


def check(tensor):
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
    if tensor.dtype not in DTYPES:
        raise TypeError("tensors of %s cannot be summed; supported are %s"
                        % (tensor.dtype, ", ".join(str(dtype) for dtype in DTYPES)))


def refuse(kind, call, tensor, reason):
    """Tell the other ranks why a tensor cannot be handed over, under the name that its operation would have had."""
    if (isinstance(tensor, torch.Tensor) and not tensor.is_cpu and device.supported(tensor.device)
            and call.space in _BY_NAME):
        call = device.named(kind, call)
    _calls.refuse(kind, call, reason)


def _dtype_code(kind, call, tensor):
    """The library's number for the tensor's dtype.  If there is none, raise, and tell the other ranks."""
    try:
        code = DTYPES.get(tensor.dtype)
        if (code is None or not tensor.is_cpu or tensor.layout is not _STRIDED or type(tensor) not in PLAIN
                or tensor.is_nested):
            check(tensor)
        return code
    except AttributeError:  # no tensor at all
        reason = TypeError("expected a torch.Tensor, got %s" % type(tensor).__name__)
    except (TypeError, NotImplementedError) as error:
        reason = error
    refuse(kind, call, tensor, reason)
    raise reason


def reduce(call, source, target=None):
    """Submit the reduction of `source` into `target`: the same tensor, or None for a new one."""
    code = _dtype_code(PUSH_PULL, call, source)
    if source.is_contiguous() and not source.is_neg():
        packed = destination = source
        if target is None:
            target = destination = torch.empty_like(source, requires_grad=False)
    else:
        # The other ranks' strides are not known here: memory in another order is put in order first.
        packed = destination = source.detach().resolve_neg().contiguous()
        if target is None:
            target = packed
        else:
            call = _unpacking(call, packed, target)
    if not packed.is_cpu:
        return device.reduce(call, packed, destination, code, target)
    address = packed.data_ptr()
    there = address if destination is packed else destination.data_ptr()
    return _operations.push_pull(call, address, there, packed.numel(), code, packed.shape, packed, target)


def _unpacking(call, packed, target):
    """The call, with `packed` copied to `target` at its end."""
    def finish(result):
        with torch.no_grad():
            target.detach().copy_(packed)
        return result if call.finish is None else call.finish(result)
    return call.but(finish=finish)


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
            except _errors.Error as error:
                if _where.is_handlers(error):
                    raise
                failure = failure or error
        if failure is not None:
            raise failure
        return results


class Gather:
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


def allgather(call, tensor):
    """Submit the concatenation of all ranks' tensors.  Returns a Gather."""
    code = _dtype_code(ALLGATHER, call, tensor)
    packed = tensor.detach().resolve_neg().contiguous()
    shape = tuple(packed.shape) or (1,)
    if packed.is_cpu:
        operation = _operations.allgather(call, packed.data_ptr(), packed.numel(), code, shape, packed)
        return Gather(operation, packed.dtype, shape[1:])
    call, flat = device.named(ALLGATHER, call), packed.view(-1)

    def submit(call, hosts):
        return _operations.allgather(call, hosts[0].data_ptr(), flat.numel(), code, shape, hosts)

    operation = device.begin(call, device.of(flat), [(call, ALLGATHER, [(flat, None)], submit)])
    return Gather(operation, packed.dtype, shape[1:], packed.new_empty(0))


def broadcast(call, tensor, target, root_rank, process_set=global_process_set):
    """Submit the broadcast of rank `root_rank`'s tensor into `target`: the same tensor, or None for a new one."""
    code = _dtype_code(BROADCAST, call, tensor)
    if target is None:
        if _job.rank() == root_rank:
            buffer = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        else:
            buffer = tensor.new_empty(tensor.shape)
        target = buffer
    elif tensor.is_contiguous() and not tensor.is_neg():
        buffer = tensor
    else:
        buffer = tensor.detach().resolve_neg().contiguous()
        call = _unpacking(call, buffer, target)
    if not buffer.is_cpu:
        call = device.named(BROADCAST, call)
    root = process_set.place(root_rank, BROADCAST, call)
    shape, count = buffer.shape, buffer.numel()
    if buffer.is_cpu:
        return _operations.broadcast(call, buffer.data_ptr(), count, code, root, shape, buffer, target)

    def submit(call, hosts):
        return _operations.broadcast(call, hosts[0].data_ptr(), count, code, root, shape, hosts)

    flat = buffer.detach().view(-1)
    span = (flat, None) if _job.rank() == root_rank else (None, flat)
    return device.begin(call, device.of(flat), [(call, BROADCAST, [span], submit)], target)


def all_or_none(kind, calls, tensors):
    """Check a list of tensors: if one cannot be handed over, none is, and the other ranks are told."""
    try:
        for tensor in tensors:
            check(tensor)
    except (TypeError, NotImplementedError) as reason:
        for call, tensor in zip(calls, tensors):
            refuse(kind, call, tensor, reason)
        raise


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


def flow(start, back, tensors):
    """start(tensors), so that gradients flow back through it if they are asked for."""
    if torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in tensors):
        return list(_Flow.apply(start, back, *tensors))
    return start(tensors)


def several(name, count, *terms, **more):
    """The Calls of a list of tensors: with a name, that of the i-th is `name.i`.  Other arguments are those of Call."""
    return [Call(None if name is None else "%s.%d" % (name, index), *terms, **more) for index in range(count)]


def backward_name(name):
    return None if name is None else name + ".backward"


def gathered(calls, tensors, process_set):
    """All ranks' tensors, concatenated, for each of a list of tensors; gradients flow through them."""
    places = []  # where this rank's rows lie in the results

    def start(tensors):
        gathers = [allgather(call, one) for call, one in zip(calls, tensors)]
        results = Group(gathers).wait()
        rank = process_set.rank()
        places.extend((one.shape, sum(gather.first_dims[:rank]), gather.first_dims[rank])
                      for one, gather in zip(tensors, gathers))
        return results

    def back(gradients):
        means = Group([reduce(Call(backward_name(call.name), Reduction.Average, call.group), one)
                       for call, one in zip(calls, gradients)]).wait()
        return [mean.narrow(0, begin, length).reshape(shape)
                for mean, (shape, begin, length) in zip(means, places)]

    return flow(start, back, tensors)

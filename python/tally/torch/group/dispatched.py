"""A process group's calls as c10d's operators, for when a dispatch mode is active or a tensor has no memory.

Flow: Group's method -> where passes() says so, the same method of the group's Front, a plain ProcessGroup, which calls the
operator -> the modes, such as CommDebugMode, FakeTensorMode or make_fx's -> for tensors with memory _Kernel: Group's method
itself; for others the operator's result without a call.

A call costs 20 us more on this way.  So it is taken only where a dispatch mode is active or a tensor is no plain one.

The kernels stand at the dispatch key BackendSelect, the last before those of devices.  There the operators' own kernels ask
the group for a Backend of C++, and Python cannot make one.  The kernels are put in with the first call that passes, and
leave other groups' calls to the operators' own.  A graph that was traced with a group can run: it calls the kernels, too.

c10d shows Python no reduction inside an operator's arguments, so the reduction is noted when the call is made.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import datetime
import functools
import threading
import types
import weakref

import torch
import torch.distributed as dist

from .. import patches
from ..calls import PLAIN
from ..patches import DispatchKey, keys_of, modes

# c10d's operator -> the method of Group.
_METHODS = {
    "allreduce_": "allreduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
    "allgather_": "allgather",
    "allgather_coalesced_": "allgather_coalesced",
    "_allgather_base_": "all_gather_single",
    "allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "gather_": "gather",
    "alltoall_base_": "all_to_all_single",
    "alltoall_": "alltoall",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv_anysource",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
}
# An operator's argument -> the field of c10d's options.
_FIELDS = {"root_rank": "rootRank", "root_tensor": "rootTensor", "async_op": "asyncOp"}
_LEFT_OUT = ("sparse_indices", "device_ids")  # and the groups have no use for them
_REMEMBERED = 4096

# reduction: of the call that this thread makes; work: the one that a kernel has made of it; in_kernel
_here = threading.local()
# Hash of an operator's argument -> (it, so that no other gets the hash; the reduction).
_reductions = collections.OrderedDict()
_lock = threading.Lock()   # guards it, and the next
_library = None            # that holds the kernels


def first(values):
    """The first tensor in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        found = first(value) if isinstance(value, (list, tuple)) else None
        if found is not None:
            return found
    return None


def passes(arguments, named):
    """Whether a call with these arguments must pass PyTorch's dispatcher."""
    if modes():
        return True
    tensor = arguments[0] if arguments else None
    if type(tensor) is list and tensor:
        tensor = tensor[0]
    if type(tensor) not in PLAIN:
        tensor = first((*arguments, *named.values()))
        if tensor is None:
            return False
    return tensor.is_meta or (type(tensor) not in PLAIN and keys_of(tensor).has(DispatchKey.Python))


def in_kernel():
    """Whether this thread runs an operator's kernel of ours."""
    return getattr(_here, "in_kernel", False)


if not patches.can_leave:
    def passes(arguments, named):
        return False


class Front(dist.ProcessGroup):
    """Stands for a group where operators are called: its methods are those of C++, which call them."""

    def __init__(self, group):
        super().__init__(group.rank(), group.size())
        self.group = weakref.ref(group)

    def getBackendName(self):
        return "tally"

    def getGroupName(self):
        return self.group().getGroupName()

    def getGroupDesc(self):
        return self.group().getGroupDesc()


def call(group, name, reduction, arguments, named):
    """Make the call of this name through the dispatcher.

    reduction: what the call has of it, in the form that Group's methods take."""
    _install()
    _here.reduction, _here.work = reduction, None
    try:
        work = getattr(group.front(), name)(*arguments, **named)
        return work if _here.work is None else _here.work
    finally:
        _here.reduction = _here.work = None


def _install():
    global _library
    with _lock:
        if _library is None:
            _library = patches.c10d_kernels({name: functools.partial(_Kernel, name, method) for name, method in _METHODS.items()})


def _note(argument, operator):
    """The reduction in an operator's argument."""
    known, given = hash(argument), getattr(_here, "reduction", None)
    with _lock:
        if given is not None:
            _reductions[known] = argument, given
            _reductions.move_to_end(known)
            if len(_reductions) > _REMEMBERED:
                _reductions.popitem(last=False)
        elif known not in _reductions:
            raise RuntimeError("%s in a traced graph: its reduction is not known in this process; trace the graph again"
                               % operator)
        return _reductions[known][1]


class _Kernel:
    """The kernel of one operator."""

    def __init__(self, name, method, operator):
        self.__name__, self._method, self._operator = name, method, operator
        self._arguments = [(one.name, one.default_value) for one in self._operator._schema.arguments]
        self._returns = len(self._operator._schema.returns)
        self._has_meta = patches.has_meta_kernel("c10d::" + name)

    def __call__(self, *arguments, **named):
        given = {name: default for name, default in self._arguments}
        given.update(zip(given, arguments), **named)
        group = dist.ProcessGroup.unbox(given.pop("process_group"))
        group = group.group() if isinstance(group, Front) else group
        ours, tensor, options = hasattr(group, "front"), first(arguments), types.SimpleNamespace()
        if ours and "reduce_op" in given:
            options.reduceOp = _note(given.pop("reduce_op"), self._operator)
        if tensor.is_meta or tensor.device.type == "meta":  # a fake one says the second
            if self._has_meta or not ours:
                return self._leave(patches.KeySet(DispatchKey.Meta), arguments, named)
            return self._result(arguments, _ended())
        if not ours:
            return self._leave(keys_of(tensor) & patches.BEHIND_OURS, arguments, named)
        for name in _LEFT_OUT:
            given.pop(name, None)
        options.timeout = datetime.timedelta(milliseconds=given.pop("timeout", None) or -1)
        for name, field in _FIELDS.items():
            if name in given:
                setattr(options, field, given.pop(name))
        before, _here.in_kernel = in_kernel(), True
        try:
            return self._make(getattr(type(group), self._method).direct, group, given, options, arguments)
        finally:
            _here.in_kernel = before

    def _make(self, method, group, given, options, arguments):
        if self._method == "monitored_barrier":
            limit = options.timeout if options.timeout.total_seconds() > 0 else None
            return method(group, limit, given["wait_all_ranks"])
        if self._method == "barrier":
            _here.work = method(group, options)
        elif "tag" in given:
            _here.work = method(group, *given.values())
        else:
            _here.work = method(group, *given.values(), opts=options)
        return self._result(arguments, _here.work)

    def _leave(self, keys, arguments, named):
        """Leave the call to the kernel of these dispatch keys."""
        return self._operator.redispatch(keys, *arguments, **named)

    def _result(self, arguments, work):
        return {0: None, 1: work.boxed(), 2: (arguments[0], work.boxed())}[self._returns]


def _ended():
    future = torch.futures.Future()
    future.set_result([])
    return patches.work_of(future)

"""The backend "tally" of torch.distributed: a process group whose collectives go through Tally.

    import tally.torch
    torch.distributed.init_process_group("tally")

Flow: torch calls a method of Group with tensors and options -> operations of `_core`, in a GroupWork.  Calls are
matched over the ranks by their order in the group: each group has an ordered name space of its own, in which the n-th
calls meet, and calls that differ in kind, shape, type, reduction or root fail on all ranks.

Sums follow the services' split.  What Tally has no operation for is made of those that it has: a gather is an
allgather that only the root keeps, a scatter a broadcast and a reduce_scatter a reduction of which each rank keeps its
part, an all_to_all an allgather with the lengths in front.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import ctypes
import errno
import functools
import itertools
import weakref
import zlib

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp

from .. import _core
from .._core import Error, Reduction
from .._lib import PUSH_PULL
from .join import join
from .ops import _DTYPES, _check, _reduce
from .work import GroupWork

# Name spaces of groups: the ordered ones (TALLY_SPACE_ORDERED in tally.h).
_SPACES = range(128, 256)

_KIND = ReduceOp.RedOpType
_REDUCTIONS = {_KIND.SUM: Reduction.Sum, _KIND.AVG: Reduction.Average, _KIND.MIN: Reduction.Min,
               _KIND.MAX: Reduction.Max, _KIND.PRODUCT: Reduction.Product}
_BITWISE = {_KIND.BAND: torch.bitwise_and, _KIND.BOR: torch.bitwise_or, _KIND.BXOR: torch.bitwise_xor}
# Sums and products of two's complements are those of unsigned numbers.
_UNSIGNED = {getattr(torch, "uint%d" % bits): getattr(torch, "int%d" % bits)
             for bits in (16, 32, 64) if hasattr(torch, "uint%d" % bits)}


# --- tensors on their way ----------------------------------------------------------------------------------------


def _flat(tensor):
    """What `tensor` holds, as a vector of a type that the library has: in its own memory if it is contiguous, else a
    copy."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.contiguous().view(-1)
    if flat.dtype in _DTYPES:
        return flat
    return flat.view(_UNSIGNED.get(flat.dtype, torch.uint8))


def _put(target, flat):
    """The opposite: into `target` what _flat() made of a tensor of its type and number of elements."""
    target = target.detach()
    if flat.data_ptr() == target.data_ptr():
        return
    if flat.dtype != target.dtype:
        if flat.data_ptr() % target.element_size():
            flat = flat.clone()
        flat = flat.view(target.dtype)
    target.copy_(flat.view(target.shape))


def _copy(target, source):
    if target.data_ptr() != source.data_ptr():
        target.detach().copy_(source)


# --- who takes part ----------------------------------------------------------------------------------------------


class _All:
    """All ranks of the job, in one ordered name space."""

    def __init__(self, space):
        self.space = space

    def reduce(self, source, target, reduction, then):
        """Reduce `source` into `target`: the same, or None for somewhere else."""
        return _reduce(source, target, None, int(reduction), 1.0, 1.0, 0, self.space, None, then)

    def broadcast(self, buffer, root, then):
        """Overwrite the vector `buffer` with the root's."""
        return _core.broadcast(None, buffer.data_ptr(), buffer.numel(), _DTYPES[buffer.dtype], root,
                               (buffer.numel(),), self.space, buffer, None, None, then)

    def gather(self, vector, then):
        """Gather vectors, whose lengths may differ; the operation has pieces()."""
        return _Gathering(_core.allgather(None, vector.data_ptr(), vector.numel(), _DTYPES[vector.dtype],
                                          (vector.numel(),), self.space, vector, then), vector.dtype)

    def barrier(self, then):
        return _core.barrier_async(None, self.space, then)

    def refuse(self, reason):
        _core.refuse(PUSH_PULL, None, self.space, reason)


class _Gathering:
    def __init__(self, operation, dtype):
        self._operation, self._dtype = operation, dtype
        self.done, self.wait = operation.done, operation.wait

    def pieces(self):
        """After the end: the ranks' vectors, in memory that lives as long as this object."""
        address, length, counts = self._operation.gathered()
        if not length:
            return [torch.empty(0, dtype=self._dtype) for _ in counts]
        return torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=self._dtype).split(counts)


class _Alone:
    """A group of this process alone, which needs no job."""

    space = None

    def reduce(self, source, target, reduction, then):
        return _Ended(then)

    def broadcast(self, buffer, root, then):
        return _Ended(then)

    def gather(self, vector, then):
        return _Ended(then, [vector])

    def barrier(self, then):
        return _Ended(then)

    def refuse(self, reason):
        pass


class _Ended:
    def __init__(self, then, pieces=()):
        self.pieces = lambda: pieces
        if then is not None:
            then(self)

    def done(self):
        return True

    def wait(self, timeout=None):
        pass


class _Spaces:
    """Name spaces for groups: the same on all ranks, which make and destroy groups in the same order."""

    def __init__(self):
        self._generation = 0

    def take(self):
        if self._generation != _core.generation():
            self._generation = _core.generation()
            self._fresh, self._used = iter(_SPACES), collections.deque()
        space = next(self._fresh, None)
        if space is None:
            if not self._used:
                raise RuntimeError("there are %d groups of all ranks already; destroy some" % len(_SPACES))
            space = self._used.popleft()
        return space

    def give_back(self, space):
        if self._generation == _core.generation():
            self._used.append(space)


_spaces = _Spaces()
_groups = weakref.WeakSet()  # that stand on the engine
_joined = 0                  # generation of the job that a group has joined, and the last of them leaves


# --- the group ---------------------------------------------------------------------------------------------------


def _list(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _lists(value):
    value = list(value)
    return [value] if value and isinstance(value[0], torch.Tensor) else [list(one) for one in value]


def _count(tensors):
    """Operations that the reduction of these takes."""
    return sum(2 if tensor.is_sparse else 1 for tensor in tensors)


def _operator(options):
    """The reduction that options, or a reduction in their place, ask for."""
    operator = getattr(options, "reduceOp", options)
    operator = getattr(operator, "op", operator)
    return _KIND.SUM if operator is None else operator


class Group(dist.ProcessGroup):
    """torch.distributed's process group over Tally; init_process_group() and new_group() make them.

    Methods take lists of tensors and options, as c10d's do, and return a GroupWork.  They raise tally.Error (a
    RuntimeError) where a rank is gone or the group has failed, NotImplementedError for what is not supported; ranks
    that wait for this one's call are told.
    """

    def __init__(self, store, rank, size, limit, name, ranks):
        super().__init__(rank, size)
        self.limit = limit  # seconds, for calls that give no other
        self._store, self._name, self._description = store, name, ""
        self._ranks = ranks
        self._failure = None
        self._works = weakref.WeakSet()

    def __str__(self):
        return "process group %s" % (self._description if self._description.strip("undefined") else self._name)

    # --- names and settings

    def getBackendName(self):
        return "tally"

    def setGroupName(self, name):
        self._name = name

    def getGroupName(self):
        return self._name

    def setGroupDesc(self, description):
        self._description = description

    def getGroupDesc(self):
        return self._description

    name = getBackendName
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _device_types = property(lambda self: [torch.device("cpu")])

    def get_group_store(self):
        return self._store

    def set_timeout(self, timeout):
        self.limit = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # --- life

    def check(self):
        """Raise if the group is no more."""
        if self._failure is not None:
            raise Error("%s can no longer be used: %s" % (self, self._failure), self._failure.errno)

    def fail(self, failure, work=None):
        """End the group, whose calls would no longer meet the other ranks', and a call, by default all."""
        self._failure = self._failure or failure
        for one in list(self._works) if work is None else [work]:
            one.fail(failure)

    def abort(self):
        """End the group and what is under way in it; tensors of calls that were may still be written."""
        self.fail(Error("%s was aborted" % self, errno.ECANCELED))
        self._leave()

    def shutdown(self):
        if self._failure is None:
            self._failure = Error("it was destroyed", errno.ESHUTDOWN)
            if self._ranks.space is not None:
                _spaces.give_back(self._ranks.space)
        self._leave()

    def _leave(self):
        global _joined
        _groups.discard(self)
        if not _groups and _joined == _core.generation():
            _joined = 0
            _core.shutdown()

    # --- helpers

    def refuse(self, reason):
        """Tell the ranks that wait for this one's next operation why there will be none."""
        self._ranks.refuse(reason)

    def _call(self, what, count, outputs, options):
        work = GroupWork(self, what, count, outputs, options)
        self._works.add(work)
        return work

    def _look_at(self, *tensors):
        for tensor in tensors:
            if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
                try:
                    _check(tensor)
                except TypeError as error:
                    raise NotImplementedError(str(error)) from None

    def _expect(self, ours, needed, what="tensors"):
        """Tensors of one call must fit together."""
        if ours != needed:
            raise ValueError("%s of %s, where %s is needed" % (what, ours, needed))

    def _root(self, options):
        root = options if isinstance(options, int) else options.rootRank
        if not 0 <= root < self.size():
            raise ValueError("root %d is no rank from 0 to %d" % (root, self.size() - 1))
        return root

    def _reduction(self, tensor, operator):
        """(a view of `tensor` and a Reduction), or (None and a function that folds vectors)."""
        dtype = tensor.dtype
        tensor = tensor.detach()
        if dtype is torch.bool and operator in (_KIND.BAND, _KIND.BOR):
            return tensor, Reduction.Min if operator == _KIND.BAND else Reduction.Max
        if operator in _BITWISE and not dtype.is_floating_point and not dtype.is_complex:
            return None, _BITWISE[operator]
        reduction = _REDUCTIONS.get(operator)
        if reduction is not None and dtype in _DTYPES and (dtype is not torch.bool or operator != _KIND.AVG):
            return tensor, reduction
        if dtype.is_complex and operator in (_KIND.SUM, _KIND.AVG):
            return torch.view_as_real(tensor.resolve_conj()), reduction
        if dtype in _UNSIGNED and operator in (_KIND.SUM, _KIND.PRODUCT):
            return tensor.view(_UNSIGNED[dtype]), reduction
        raise NotImplementedError("%s of %s is not supported" % (getattr(operator, "name", operator), dtype))

    def _reduce(self, work, tensor, operator, keep=True):
        """Add to `work` the reduction of `tensor`, in place if the result is to be kept."""
        if tensor.is_sparse:
            self._reduce_sparse(work, tensor, operator, keep)
            return
        self._look_at(tensor)
        source, reduction = self._reduction(tensor, operator)
        if source is not None:
            work.add(self._ranks.reduce, source, source if keep else None, reduction)
            return
        gathering = work.add(self._ranks.gather, _flat(tensor))
        if keep:
            work.follow(lambda: _put(tensor, functools.reduce(reduction, gathering.pieces())))

    def _reduce_sparse(self, work, tensor, operator, keep):
        """As for dense ones: the sum of the ranks' tensors.  Indices and values of all are gathered."""
        self._look_at(tensor.detach()._values())
        if operator not in (_KIND.SUM, _KIND.AVG):
            raise NotImplementedError("%s of a sparse tensor is not supported" % getattr(operator, "name", operator))
        compact = tensor.detach().coalesce()
        indices, values = compact.indices(), compact.values()
        gatherings = [work.add(self._ranks.gather, _flat(part)) for part in (indices.t(), values)]

        def combine():
            places, flat = (torch.cat(list(gathering.pieces())) for gathering in gatherings)
            places = places.view(-1, indices.shape[0]).t()
            summands = values.new_empty((places.shape[1],) + tuple(values.shape[1:]))
            _put(summands, flat)
            total = torch.sparse_coo_tensor(places, summands, tensor.shape, check_invariants=False).coalesce()
            # Not on a detached alias: a sparse tensor takes new indices and values.
            tensor.copy_(total / self.size() if operator == _KIND.AVG else total)
        if keep:
            work.follow(combine)

    def _gather(self, work, outputs, tensor):
        """Add to `work` the gathering of `tensor` into `outputs`, one for each rank; None: for the others."""
        gathering = work.add(self._ranks.gather, _flat(tensor))

        def spread():
            for rank, (target, piece) in enumerate(zip(outputs, gathering.pieces())):
                here, there = target.numel() * target.element_size(), piece.numel() * piece.element_size()
                if here != there:
                    raise Error("rank %d gives %d bytes, and %d are expected" % (rank, there, here), errno.EINVAL)
                _put(target, piece)
        if outputs is not None:
            work.follow(spread)

    # --- reductions

    def allreduce(self, tensors, opts=None, timeout=None):
        return self._allreduce("allreduce", _list(tensors), opts)

    def allreduce_coalesced(self, tensors, opts=None):
        return self._allreduce("allreduce_coalesced", _list(tensors), opts)

    def _allreduce(self, what, tensors, opts):
        with self._call(what, _count(tensors), tensors, opts) as work:
            for tensor in tensors:
                self._reduce(work, tensor, _operator(opts))
        return work

    def reduce(self, tensors, opts, op=None, timeout=None):
        tensors = _list(tensors)
        with self._call("reduce", _count(tensors), tensors, opts) as work:
            root = self._root(opts)
            for tensor in tensors:
                self._reduce(work, tensor, _operator(getattr(opts, "reduceOp", op)), self.rank() == root)
        return work

    def reduce_scatter(self, output_tensors, input_tensors, opts=None, timeout=None):
        outputs, lists = _list(output_tensors), _lists(input_tensors)
        with self._call("reduce_scatter", len(outputs), outputs, opts) as work:
            for output, inputs in zip(outputs, lists):
                self._reduce_scatter(work, output, inputs, opts)
        return work

    def reduce_scatter_single(self, output, input, opts=None):
        return self._reduce_scatter_singles("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return self._reduce_scatter_singles("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_scatter_singles(self, what, outputs, inputs, opts):
        with self._call(what, len(outputs), outputs, opts) as work:
            for output, everything in zip(outputs, inputs):
                self._expect(everything.numel(), output.numel() * self.size(), "number of elements")
                self._reduce_scatter(work, output, everything.reshape(-1).split([output.numel()] * self.size()), opts)
        return work

    def _reduce_scatter(self, work, output, inputs, opts):
        self._look_at(output, *inputs)
        self._expect(len(inputs), self.size(), "number of tensors")
        mine = inputs[self.rank()]
        self._expect((mine.numel(), mine.dtype), (output.numel(), output.dtype), "elements")
        everything = torch.cat([one.detach().reshape(-1) for one in inputs])
        self._reduce(work, everything, _operator(opts))
        work.follow(lambda: _put(output, _flat(everything.split([one.numel() for one in inputs])[self.rank()])))

    # --- data as it is

    def broadcast(self, tensors, opts, timeout=None):
        tensors = _list(tensors)
        with self._call("broadcast", len(tensors), tensors, opts) as work:
            self._look_at(*tensors)
            root = self._root(opts)
            for tensor in tensors:
                flat = _flat(tensor)
                work.add(self._ranks.broadcast, flat, root)
                work.follow(functools.partial(_put, tensor, flat))
        return work

    def scatter(self, output_tensors, input_tensors, opts, timeout=None):
        outputs = _list(output_tensors)
        with self._call("scatter", len(outputs), outputs, opts) as work:
            root = self._root(opts)
            lists = _lists(input_tensors) if self.rank() == root else [()] * len(outputs)
            for output, inputs in zip(outputs, lists):
                self._look_at(output, *inputs)
                if self.rank() == root:
                    self._expect([(one.numel(), one.dtype) for one in inputs],
                                 [(output.numel(), output.dtype)] * self.size())
                    flat = torch.cat([_flat(one) for one in inputs])
                else:
                    like = _flat(output)
                    flat = like.new_empty(like.numel() * self.size())
                work.add(self._ranks.broadcast, flat, root)
                work.follow(functools.partial(_put, output, flat.view(self.size(), -1)[self.rank()]
                                              if flat.numel() else flat))
        return work

    def allgather(self, output_tensors, input_tensors, opts=None, timeout=None):
        lists = _lists(output_tensors)
        return self._allgather("allgather", lists, _list(input_tensors), lists, opts)

    def allgather_coalesced(self, output_lists, input_list, opts=None):
        """output_lists: a list for each rank, with a tensor for each of the inputs."""
        return self._allgather("allgather_coalesced", [list(one) for one in zip(*output_lists)], input_list,
                               output_lists, opts)

    def _allgather(self, what, lists, inputs, result, opts):
        with self._call(what, len(inputs), result, opts) as work:
            for outputs, tensor in zip(lists, inputs):
                self._look_at(*outputs, tensor)
                self._expect([(one.numel(), one.dtype) for one in outputs],
                             [(tensor.numel(), tensor.dtype)] * self.size())
                self._gather(work, outputs, tensor)
        return work

    def all_gather_single(self, output, input, opts=None):
        return self._allgather_singles("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._allgather_singles("all_gather_single_coalesced", outputs, inputs, opts)

    def _allgather_singles(self, what, outputs, inputs, opts):
        with self._call(what, len(inputs), outputs, opts) as work:
            for output, tensor in zip(outputs, inputs):
                self._look_at(output, tensor)
                self._expect((output.numel(), output.dtype), (tensor.numel() * self.size(), tensor.dtype), "elements")
                packed = output.detach().contiguous()
                self._gather(work, packed.view(-1).split([tensor.numel()] * self.size()), tensor)
                work.follow(functools.partial(_copy, output, packed))
        return work

    def gather(self, output_tensors, input_tensors, opts, timeout=None):
        inputs = _list(input_tensors)
        with self._call("gather", len(inputs), output_tensors, opts) as work:
            root = self.rank() == self._root(opts)
            lists = _lists(output_tensors) if root else [None] * len(inputs)
            for outputs, tensor in zip(lists, inputs):
                self._look_at(*(outputs or ()), tensor)
                if root:
                    self._expect([(one.numel(), one.dtype) for one in outputs],
                                 [(tensor.numel(), tensor.dtype)] * self.size())
                self._gather(work, outputs, tensor)
        return work

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, opts=None):
        with self._call("all_to_all_single", 1, [output], opts) as work:
            self._look_at(output, input)
            packed = output.detach().contiguous()
            self._exchange(work, self._cut(packed, output_split_sizes), self._cut(input.detach(), input_split_sizes))
            work.follow(functools.partial(_copy, output, packed))
        return work

    def _cut(self, tensor, sizes):
        """Along the first dimension, one for each rank."""
        rows = tensor.shape[0] if tensor.dim() else 1
        sizes = list(sizes or [rows // self.size()] * self.size())
        self._expect((len(sizes), sum(sizes)), (self.size(), rows), "split into (pieces, rows)")
        return tensor.split(sizes)

    def alltoall(self, output_tensors, input_tensors, opts=None):
        with self._call("all_to_all", 1, output_tensors, opts) as work:
            self._look_at(*output_tensors, *input_tensors)
            self._expect((len(output_tensors), len(input_tensors)), (self.size(),) * 2, "numbers of tensors")
            self._exchange(work, output_tensors, input_tensors)
        return work

    def _exchange(self, work, outputs, inputs):
        """inputs[i] to rank i, outputs[i] from it.  Everybody sees all lengths, so that all fail where some differ."""
        dtype, size = inputs[0].dtype, self.size()
        self._expect({one.dtype for one in (*inputs, *outputs)}, {dtype}, "types")
        lengths = [zlib.crc32(str(dtype).encode())] + [one.numel() for one in (*inputs, *outputs)]
        header = torch.tensor(lengths, dtype=torch.int64).view(torch.uint8)
        gathering = work.add(self._ranks.gather, torch.cat([header] + [_flat(one).view(torch.uint8) for one in inputs]))

        def sort():
            pieces = gathering.pieces()
            table = [piece[:len(header)].clone().view(torch.int64).tolist() for piece in pieces]
            for i, j in itertools.product(range(size), repeat=2):
                if table[i][0] != table[0][0]:
                    raise Error("ranks 0 and %d have tensors of other types" % i, errno.EINVAL)
                given, taken = table[i][1 + j], table[j][1 + size + i]
                if given != taken:
                    raise Error("rank %d gives rank %d %d elements, and %d are expected" % (i, j, given, taken),
                                errno.EINVAL)
            for output, piece, (_, *given) in zip(outputs, pieces, table):
                start = len(header) + sum(given[:self.rank()]) * output.element_size()
                _put(output, piece[start:start + output.numel() * output.element_size()])
        work.follow(sort)

    def barrier(self, opts=None, timeout=None):
        with self._call("barrier", 1, [], opts) as work:
            work.add(self._ranks.barrier)
        return work

    # Older names, which torch calls too.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    all_to_all = alltoall

    # --- what there is not

    def send(self, tensors, dst, tag=0):
        raise _no_such("send")

    def recv(self, tensors, src, tag=0):
        raise _no_such("recv")

    def recv_anysource(self, tensors, tag=0):
        raise _no_such("recv from any source")


def _no_such(what):
    return NotImplementedError("%s: the backend tally has no point-to-point operations yet; use a group of the backend "
                               "gloo beside it" % what)


def create(options, _=None):
    """What torch.distributed calls to make a group.

    options: its DistributedBackendOptions.  Raises NotImplementedError for a group of some ranks, but not all."""
    global _joined
    rank, size, limit = options.group_rank, options.group_size, options.timeout.total_seconds()
    world = size if not dist.is_initialized() else dist.get_world_size()
    if size == world:
        joined = not _core.is_initialized()
        join(options.store, rank, size, limit)
        if joined:
            _joined = _core.generation()
        ranks = _All(_spaces.take())
    elif size == 1:
        ranks = _Alone()
    else:
        raise NotImplementedError("new_group with ranks %s of %d: groups of the backend tally have all ranks or one; "
                                  "use backend=\"gloo\" for others" % (list(options.global_ranks_in_group), world))
    group = Group(options.store, rank, size, limit, options.group_id, ranks)
    if ranks.space is not None:
        _groups.add(group)
    return group


if not hasattr(dist.Backend, "TALLY"):
    dist.Backend.register_backend("tally", create, extended_api=True, devices=["cpu"])

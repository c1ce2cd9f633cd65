"""The backend "tally" of torch.distributed: a process group whose collectives go through Tally.

    import tally.torch
    torch.distributed.init_process_group("tally")

Flow: torch calls a method of Group with tensors and options -> operations of `_operations`, in a GroupWork.  Each group is
one of the library's (tally_group_create) with an ordered name space, in which the n-th calls of its ranks meet; calls
that differ in kind, number of elements, type, reduction or root fail on all of them.  Shapes may differ, as with Gloo: a
tensor without dimensions meets one of one element.  Messages are matched by sender, receiver and tag, in their order.

A group's name space is ordered because torch matches calls by their order alone.  With numbers for each kind of
operation, a rank that broadcasts where the others reduce would wait for their next broadcast, as it does with Gloo.
Numbered together, the calls meet at one home, which compares them.

Sums follow the services' split.  A rank that wants no result gets none: reduce, reduce_scatter, gather, scatter and
all_to_all move no more bytes than they have to.

SPDX-License-Identifier: Apache-2.0
"""

import datetime
import errno
import functools
import itertools
import sys
import threading

import torch
import torch.distributed as dist

from ..._calls import Reduction
from ..._errors import Error
from .. import device, patches
from ..calls import DTYPES, PLAIN, check
from . import dispatched, earlier, lists, monitored, vectors
from .methods import takes_any_names
from .profile import ProfiledWork, is_profiled, ranges
from .work import GroupWork, Together, UnderWay, just_ended

# c10d's reductions by their numbers, which are also their hashes: to compare two of them takes a microsecond.
_KIND = dist.ReduceOp.RedOpType
_SUM, _AVG, _MIN, _MAX, _PRODUCT, _BAND, _BOR, _BXOR = map(hash, (
    _KIND.SUM, _KIND.AVG, _KIND.MIN, _KIND.MAX, _KIND.PRODUCT, _KIND.BAND, _KIND.BOR, _KIND.BXOR))
_PREMUL_SUM = hash(getattr(_KIND, "PREMUL_SUM", None))
_NAMES = {hash(kind): name for name, kind in _KIND.__members__.items()}
_REDUCTIONS = {_SUM: Reduction.Sum, _AVG: Reduction.Average, _MIN: Reduction.Min, _MAX: Reduction.Max,
               _PRODUCT: Reduction.Product}
_BITWISE = {_BAND: 5, _BOR: 6, _BXOR: 7}  # TALLY_BAND and so on in tally.h
# (dtype, c10d's number) -> the library's number, of what it reduces as it is.
_DIRECT = {(dtype, operator): int(reduction) for dtype in DTYPES for operator, reduction in (
    *_REDUCTIONS.items(), *(() if dtype.is_floating_point else _BITWISE.items()))
    if (dtype, operator) != (torch.bool, _AVG)}

_traced = True  # whether torch.compile would look into what is called here


def _operator(work, options):
    """The number of the reduction that options, or a reduction in their place, name; the argument itself if it names
    none.  PREMUL_SUM is a sum whose factor the work takes."""
    operator = getattr(options, "reduceOp", options)
    if operator is None:
        return _SUM
    number = hash(operator)
    if number == _PREMUL_SUM:
        work.prescale = lists.factor(operator)
        return _SUM
    return number if number in _NAMES else operator


def _make_beside(group, kind, backend):
    """Make another backend's group over the ranks of `group`, for a type of device.  All of these ranks call this."""
    ranks = dist.get_process_group_ranks(group)
    return patches.make_group(len(ranks), group.rank(), ranks, backend, group.get_group_store(),
                              "%s's for %s" % (group.getGroupName(), kind), datetime.timedelta(seconds=group.limit))


class Group(dist.ProcessGroup):
    """torch.distributed's process group over Tally; init_process_group() and new_group() make them.

    Methods take lists of tensors and options, as c10d's do, and return a GroupWork.  They raise tally.Error (a
    RuntimeError) if a rank is gone or the group has failed, and NotImplementedError for calls that are not supported.
    Ranks that wait for this one's call are told.
    """

    def __init__(self, store, rank, size, limit, name, ranks, leave):
        """leave: called with the group at its end."""
        super().__init__(rank, size)
        self.limit = limit  # seconds, for calls that give no other
        self._store, self._name, self._description = store, name, ""
        self._ranks, self._leave = ranks, leave
        self.job = ranks.job  # the one beside this process's that it is; None: it is in this process's
        self.call = ranks.call
        self.failure = None  # why it can no longer be used
        self._others = None  # type of device -> another backend that has it, or its group once there is one
        self._making = threading.Lock()  # guards changes of it
        self.mixed = True    # whether there may be any; the first call finds out
        self._works = UnderWay()
        self.in_flight = earlier.InFlight()
        self._held = set()  # of them those whose end nobody has asked for, where torch keeps but half of them
        self._together = None  # calls begun since _start_coalescing()
        self._turn = threading.RLock()  # of who is submitting a call
        self.begun = 0  # calls that meet in their order
        self._monitored = 0  # calls of monitored_barrier()
        self._front = None   # stands for it where c10d's operators are called

    def __str__(self):
        described = self._description not in ("", "undefined")  # torch's word for none
        return "process group %s" % (self._description if described else self._name)

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
    _device_types = property(lambda self: [torch.device("cpu"), torch.device("cuda")])

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def supports_tensor_alloc(self, device):
        return False

    def _get_backend(self, place):
        """The answer for torch, which looks for NCCL here: this group, if the device has no other."""
        other = (self._others or {}).get(place.type)
        return self if other is None or isinstance(other, str) else other._get_backend(place)

    def get_group_store(self):
        return self._store

    def set_timeout(self, timeout):
        self.limit = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self):
        return self.begun

    def _set_sequence_number_for_group(self):
        """The sequence number begins at 0 on all ranks."""

    def _has_hooks(self):
        return False

    # --- life

    def _wait_for_pending_works(self):
        for work in self._works.all():
            work.wait()

    def gone(self):
        """The error that calls raise after a failure."""
        return Error("%s can no longer be used: %s" % (self, self.failure), self.failure.errno)

    def fail(self, failure, work=None):
        """End the group, because its calls would no longer meet the other ranks'. End a call, by default all."""
        self.failure = self.failure or failure
        for one in self._works.all() if work is None else [work]:
            one.fail(failure)

    def abort(self):
        """End the group and its calls in flight, on all ranks.  Once this returns, no thread uses tensors of its calls.
        """
        works = self._works.all()
        self.fail(Error("%s was aborted" % self, errno.ECANCELED))
        for work in works + self._works.all():
            work.ends()
        self._leave(self)

    def shutdown(self):
        if self.failure is None:
            self.failure = Error("it was destroyed", errno.ESHUTDOWN)
        self._leave(self)

    # --- helpers

    def front(self):
        self._front = self._front or dispatched.Front(self)
        return self._front

    def other(self, place):
        """The other backend's group over the same ranks, if one was asked for on the tensors' device; else None.

        For "cpu:tally,cuda:nccl" torch makes this group alone, or has it stand for the other.  The other one is made in
        the first call that needs it, which all ranks make; another thread waits for it.
        """
        if self._others is None:
            if self.failure is not None:
                raise self.gone()  # torch knows no other of a group that was destroyed
            pairs = [pair.split(":") for pair in dist.get_backend_config(self).split(",")]
            with self._making:
                self._others = self._others or {pair[0]: pair[1] for pair in pairs
                                                if len(pair) == 2 and pair[1] != "tally"}
            self.mixed = bool(self._others)
        other = self._others.get(place.type)
        if isinstance(other, str):
            with self._making:
                other = self._others[place.type]
                if isinstance(other, str):
                    other = self._others[place.type] = _make_beside(self, place.type, other)
        return other

    def meet(self, what):
        """Wait until all ranks have made the group, which an error calls `what`.

        For "cpu:gloo,cuda:tally" torch makes Gloo's group first, and drops it for this one.  Gloo's of a slower rank may
        still be connecting to it.
        """
        self._ranks.meet(self._store.timeout.total_seconds(), what)

    def refuse(self, reason):
        """Tell the ranks that wait for this one's next operation why it will not come."""
        self._ranks.refuse(reason)

    def enter(self, work):
        """Note a call.  If it is numbered, count it and hold other threads' calls back until leave(): the calls of the
        group's ranks meet in the order in which their operations are submitted.

        A rank that begins a call when another has ended must have begun none in between: on other ranks those may come
        first.
        """
        self._works.add(work)
        if not work.numbered:
            return
        self._turn.acquire()
        after = just_ended()
        follows = after is not None and after.group is self
        between = follows and after.latest != self.begun
        self.begun += 1
        work.number = work.latest = self.begun
        if follows:
            after.latest = self.begun
        if between:
            self.leave()
            work.give_up(Error(
                "%s of %s was begun when an earlier call had ended (in the then() of its future), and others had been "
                "begun in between: on other ranks they may come first. A hook that begins calls so needs one bucket "
                "(bucket_cap_mb), and no find_unused_parameters" % (work.what, self), errno.EDEADLK))
        if not work.blocks:
            self.in_flight.add(work)
        elif self.in_flight:
            work.end_after(self.in_flight.all())

    def leave(self):
        self._turn.release()

    def _call(self, what, outputs, options, numbered=True, inputs=None):
        """A call to be filled in.  inputs: the tensors that it reads, if they are not its outputs."""
        global _traced
        if _traced and "torch._dynamo" in sys.modules:
            _traced = not patches.leave_untraced("tally")
        if is_profiled():
            work = ProfiledWork(self, what, numbered, outputs, options, outputs if inputs is None else inputs)
        else:
            work = GroupWork(self, what, numbered, outputs, options)
        if self._together is not None:
            self._together.append(work)
        return work

    def hold(self, work):
        """Keep a call that has begun until its end is asked for."""
        self._held.add(work)

    def let_go(self, work):
        """Let go of a call: the thread that has asked for its end sees to it from here on."""
        self._held.discard(work)

    def _look_at(self, work, *tensors):
        if not tensors:
            raise ValueError("requires non-empty tensor list")
        for tensor in tensors:
            if (tensor.layout is not torch.strided or tensor.is_nested
                    or not (tensor.is_cpu or device.supported(tensor.device))):
                try:
                    check(tensor)
                except TypeError as error:
                    raise NotImplementedError(str(error)) from None
        work.look_at(tensors)

    def _expect(self, ours, needed, what="tensors"):
        """Check that the tensors of one call fit together."""
        if ours != needed:
            raise ValueError("%s of %s, where %s is needed" % (what, ours, needed))

    def _root(self, options):
        return lists.root_rank(options, self.size())

    def _reduction(self, tensor, operator):
        """(a view of `tensor`, the number of a reduction)."""
        dtype = tensor.dtype
        if tensor.requires_grad:  # detach() lets go of the GIL, and another thread may keep it for a while
            tensor = tensor.detach()
        reduction = _DIRECT.get((dtype, operator))
        if reduction is not None:
            return tensor, reduction
        if dtype.is_complex and operator in (_SUM, _AVG):
            return torch.view_as_real(tensor.resolve_conj()), int(_REDUCTIONS[operator])
        raise self._unsupported(operator, dtype)

    @staticmethod
    def _unsupported(operator, what):
        return NotImplementedError("%s of %s is not supported" % (_NAMES.get(operator, operator), what))

    def _reduce(self, work, tensors, operator, root=None):
        """Add to `work` the reduction of each of the tensors in place, at all ranks or at the root."""
        if root is None and len(tensors) == 1:  # what most calls are about goes by a short way
            tensor, = tensors
            reduction = _DIRECT.get((tensor.dtype, operator))
            if (reduction is not None and tensor.is_cpu and type(tensor) in PLAIN and tensor.layout is torch.strided
                    and not tensor.is_nested and tensor.is_contiguous() and not tensor.is_neg()):
                work.add(self._ranks.reduce_plain, tensor, reduction=reduction, in_place=True)
                return
        keep, finish = root is None or root == self.rank(), None
        if len(tensors) == 1 and tensors[0].is_sparse:
            self._reduce_sparse(work, tensors, operator, keep)
            return
        self._look_at(work, *tensors)
        tensor = tensors[0]
        if len(tensors) > 1:
            lists.of_one_type(tensors)
            self._reduction(tensor, operator)  # before cat(), which may not know the type either
            tensor = torch.cat([one.detach().reshape(-1) for one in tensors])
            finish = functools.partial(vectors.apart, tensors, tensor)
        elif tensor.dtype.is_complex and tensor.is_conj():  # its memory holds the conjugate (asking lets go of the GIL)
            tensor = tensor.detach().resolve_conj()
            finish = functools.partial(vectors.copy, tensors[0].detach(), tensor)
        source, reduction = self._reduction(tensor, operator)
        packed = source.resolve_neg().contiguous()
        work.look_at([packed])
        if root is None:
            in_place = finish is None and packed is source
            work.add(self._ranks.reduce, packed, reduction=reduction, note=vectors.note(tensors), in_place=in_place)
        else:
            work.add(self._ranks.reduce_to, packed, root, reduction=reduction, note=vectors.note(tensors))
        if keep and packed is not source:
            work.follow(functools.partial(vectors.copy, source, packed))
        if keep and finish:
            work.follow(finish)

    def _reduce_list(self, work, tensors, operator):
        """Add to `work` the reduction of all tensors of all ranks' lists, into each of them."""
        tensors = list(tensors)  # the caller's may change
        lists.alike(tensors)
        if operator == _AVG:  # Gloo averages the first, and leaves a sum in the others
            raise self._unsupported(operator, "several tensors")
        if tensors[0].is_sparse:
            self._reduce_sparse(work, tensors, operator, True)
            return
        self._look_at(work, *tensors)
        views, (reduction, *_) = zip(*[self._reduction(tensor, operator) for tensor in tensors])
        total = lists.combined(views, operator).contiguous()
        work.look_at([total])
        work.add(self._ranks.reduce, total, reduction=reduction, note=vectors.note(tensors[:1]))
        work.follow(functools.partial(vectors.spread, tensors, vectors.flat(total)))

    def _reduce_sparse(self, work, tensors, operator, keep):
        """Like the reduction of dense tensors: the sum of the ranks' tensors.  Indices and values of all ranks are
        gathered."""
        tensor = tensors[0]
        for one in tensors:
            self._look_at(work, one.detach()._values())
        if not tensor.is_cpu:
            raise NotImplementedError("sparse tensors on %s are not supported" % tensor.device)
        if operator not in (_SUM, _AVG):
            raise self._unsupported(operator, "a sparse tensor")
        if work.prescale != 1:
            raise self._unsupported(_PREMUL_SUM, "a sparse tensor")
        compact = functools.reduce(torch.add, [one.detach() for one in tensors]).coalesce()
        indices, values = compact.indices(), compact.values()
        widths = [indices.shape[0] * indices.element_size(), values.shape[1:].numel() * values.element_size()]
        rows = torch.cat([vectors.flat(part).view(torch.uint8).view(indices.shape[1], width)
                          for part, width in zip((indices.t(), values), widths)], 1)
        gathering = work.add(self._ranks.gather, rows.view(-1), note="sparse %s %s, %d of it dense" % (
            str(tensor.dtype)[len("torch."):], list(tensor.shape), tensor.dense_dim()))

        def combine():
            rows = torch.cat(list(gathering.pieces()))
            rows = rows.view(rows.numel() // max(sum(widths), 1), sum(widths))  # of rows without a byte none are needed
            places, flat = (part.reshape(-1) for part in rows.split(widths, 1))
            places = places.view(torch.int64).view(len(rows), indices.shape[0]).t()
            summands = values.new_empty((len(rows),) + tuple(values.shape[1:]))
            vectors.put(summands, flat)
            total = torch.sparse_coo_tensor(places, summands, tensor.shape, device=summands.device,
                                            check_invariants=False).coalesce()
            # Not on a detached alias: a sparse tensor takes new indices and values.
            for one in tensors:
                with torch.inference_mode(one.is_inference()):
                    one.copy_(total / self.size() if operator == _AVG else total)
        if keep:
            work.follow(combine)

    def _gather(self, work, inputs, outputs, note):
        """Add to `work` the gathering of the inputs, of which all ranks have equally many, into tensors for each rank
        in turn."""
        source = vectors.together(inputs)
        target, finish = vectors.landing(outputs)
        place = target.data_ptr() + self.rank() * source.numel() * source.element_size()
        if source.data_ptr() != place and vectors.overlap(source, target):
            source = source.clone()
        work.add(self._ranks.gather_into, source, target, note=note)
        if finish:
            work.follow(finish)

    # --- reductions

    def allreduce(self, tensors, opts=None, timeout=None):
        if type(tensors) is not list:  # most are, and a call costs a bucket's time
            tensors = lists.of_tensors(tensors)
        with self._call("all_reduce", tensors, timeout or opts) as work:
            if len(tensors) == 1:
                self._reduce(work, tensors, _operator(work, opts))
            else:
                self._reduce_list(work, tensors, _operator(work, opts))
        return work

    def allreduce_coalesced(self, tensors, opts=None):
        tensors = lists.of_tensors(tensors)
        with self._call("all_reduce_coalesced", tensors, opts) as work:
            self._reduce(work, tensors, _operator(work, opts))
        return work

    def reduce(self, tensors, opts=None, op=None, timeout=None):
        tensors = lists.of_tensors(tensors)
        with self._call("reduce", tensors, timeout or opts) as work:
            root = self._root(opts)
            lists.root_tensor(opts, tensors)
            self._reduce(work, [lists.one(tensors)], _operator(work, getattr(opts, "reduceOp", op)), root)
        return work

    def reduce_scatter(self, output_tensors, input_tensors, opts=None, timeout=None):
        outputs, inputs = lists.of_tensors(output_tensors), lists.of_lists(input_tensors)
        with self._call("reduce_scatter", outputs, timeout or opts, inputs=inputs) as work:
            output, pieces = lists.one(outputs, "output "), lists.one(inputs, "input ")
            self._expect(len(pieces), self.size(), "number of input tensors")
            self._look_at(work, output, *pieces)
            self._expect(pieces[self.rank()].numel(), output.numel(), "number of elements")
            self._expect({one.dtype for one in pieces}, {output.dtype}, "types")
            self._reduction(output, _operator(work, opts))  # before cat(), which may not know the type either
            self._reduce_scatter(work, outputs, torch.cat([one.detach().reshape(-1) for one in pieces]),
                                 [one.numel() for one in pieces], opts, vectors.note(pieces[:1]))
        return work

    def reduce_scatter_single(self, output, input, opts=None):
        return self._reduce_scatter_singles("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return self._reduce_scatter_singles("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_scatter_singles(self, what, outputs, inputs, opts):
        with self._call(what, outputs, opts, inputs=inputs) as work:
            self._look_at(work, *outputs, *inputs)
            self._expect([one.numel() for one in inputs], [one.numel() * self.size() for one in outputs],
                         "number of elements")
            everything = inputs[0]
            if len(inputs) > 1:
                self._expect({one.dtype for one in inputs}, {everything.dtype}, "types")
                self._reduction(everything, _operator(work, opts))  # as above
                everything = torch.cat([one.detach().reshape(self.size(), output.numel())
                                        for one, output in zip(inputs, outputs)], 1)
            self._reduce_scatter(work, outputs, everything, [everything.numel() // self.size()] * self.size(), opts,
                                 vectors.note(outputs))
        return work

    def _reduce_scatter(self, work, outputs, everything, counts, opts, note):
        """counts: each rank's elements in `everything`."""
        self._expect({one.dtype for one in outputs}, {everything.dtype}, "types")
        source, reduction = self._reduction(everything.detach().reshape(-1).resolve_neg(), _operator(work, opts))
        source = source.contiguous()
        width = source.numel() // everything.numel() if everything.numel() else 1  # complex numbers are two
        target, finish = vectors.landing(outputs)
        work.add(self._ranks.reduce_scatter, source, target, [width * one for one in counts], reduction=reduction, note=note)
        if finish:
            work.follow(finish)

    # --- data as it is

    def broadcast(self, tensors, opts=None, timeout=None):
        """tensors: all are overwritten with one of the root's: the first, or the one that opts.rootTensor names."""
        tensors = lists.of_tensors(tensors)
        with self._call("broadcast", tensors, timeout or opts) as work:
            root, tensor = self._root(opts), lists.root_tensor(opts, tensors)
            lists.alike(tensors)
            self._look_at(work, *tensors)
            flat = vectors.flat(tensor)
            work.add(self._ranks.broadcast, flat, root, note=vectors.note([tensor]))
            if self.rank() != root or len(tensors) > 1:
                work.follow(functools.partial(vectors.spread, tensors, flat))
        return work

    def scatter(self, output_tensors, input_tensors, opts=None, timeout=None):
        outputs = lists.of_tensors(output_tensors)
        with self._call("scatter", outputs, timeout or opts, inputs=input_tensors) as work:
            root, output, source, counts = self._root(opts), lists.one(outputs, "output "), None, None
            pieces = lists.of_root(lists.of_lists(input_tensors), "input", self.size(), output, self.rank() == root)
            self._look_at(work, output, *(pieces or ()))
            if pieces is not None:
                source = vectors.together(pieces)
                counts = [source.numel() // self.size()] * self.size()
            target, finish = vectors.landing(outputs)
            work.add(self._ranks.scatter, source, counts, target, root, note=vectors.note(outputs))
            if finish:
                work.follow(finish)
        return work

    def allgather(self, output_tensors, input_tensors, opts=None):
        """output_tensors: a list for each of the inputs, all with the same tensors, one for each input of each rank."""
        outputs, inputs = lists.of_lists(output_tensors), lists.of_tensors(input_tensors)
        results = outputs[0] if len(outputs) == 1 else outputs  # so Gloo's future has it
        with self._call("all_gather", results, opts, inputs=inputs) as work:
            lists.gathered(outputs, inputs, self.size())
            self._look_at(work, *itertools.chain(*outputs), *inputs)
            self._gather(work, inputs, outputs[0], vectors.note(inputs))
            for others in outputs[1:]:
                for pair in zip(others, outputs[0]):
                    work.follow(functools.partial(vectors.copy, *pair))
        return work

    def allgather_coalesced(self, output_lists, input_list, opts=None):
        """output_lists: a list for each rank, with a tensor for each of the inputs."""
        with self._call("all_gather_coalesced", output_lists, opts, inputs=input_list) as work:
            lists.gathered_apart(output_lists, input_list, self.size())
            self._look_at(work, *itertools.chain(*output_lists), *input_list)
            self._gather(work, input_list, list(itertools.chain(*output_lists)), vectors.note(input_list))
        return work

    def all_gather_single(self, output, input, opts=None):
        return self._allgather_singles("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._allgather_singles("all_gather_single_coalesced", outputs, inputs, opts)

    def _allgather_singles(self, what, outputs, inputs, opts):
        with self._call(what, outputs, opts, inputs=inputs) as work:
            self._look_at(work, *outputs, *inputs)
            self._expect([(one.numel(), one.dtype) for one in outputs],
                         [(one.numel() * self.size(), one.dtype) for one in inputs], "elements")
            work.show(functools.partial(lists.by_rank, outputs, inputs, self.size()))
            if len(outputs) == 1:
                self._gather(work, inputs, outputs, vectors.note(inputs))
                return work
            packed = [one.detach().contiguous() for one in outputs]
            work.look_at(packed)
            pieces = zip(*(one.view(-1).split([tensor.numel()] * self.size()) for one, tensor in zip(packed, inputs)))
            self._gather(work, inputs, list(itertools.chain(*pieces)), vectors.note(inputs))
            for pair in zip(outputs, packed):
                work.follow(functools.partial(vectors.copy, *pair))
        return work

    def gather(self, output_tensors, input_tensors, opts=None, timeout=None):
        inputs, outputs = lists.of_tensors(input_tensors), lists.of_lists(output_tensors)
        results = outputs[0] if outputs else []
        with self._call("gather", results, timeout or opts, inputs=inputs) as work:
            root, tensor, target, counts = self._root(opts), lists.one(inputs, "input "), None, None
            pieces = lists.of_root(outputs, "output", self.size(), tensor, self.rank() == root)
            self._look_at(work, tensor, *(pieces or ()))
            flat = vectors.flat(tensor)
            if pieces is not None:
                target, counts = flat.new_empty(flat.numel() * self.size()), [flat.numel()] * self.size()
                work.follow(functools.partial(vectors.apart, pieces, target))
            work.add(self._ranks.gather_to, flat, target, counts, root, note=vectors.note(inputs))
        return work

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, opts=None):
        with self._call("all_to_all_single", [output], opts, inputs=input) as work:
            self._look_at(work, output, input)
            self._expect(input.dtype, output.dtype, "types")
            source = vectors.flat(input)
            target, finish = vectors.landing([output])
            if source.data_ptr() == target.data_ptr():
                source = source.clone()
            work.add(self._ranks.exchange, source, self._cut(input, input_split_sizes, source),
                     target, self._cut(output, output_split_sizes, target), note=vectors.note([input]))
            if finish:
                work.follow(finish)
        return work

    def _cut(self, tensor, sizes, flat):
        """Each rank's number of elements of `flat`, if `sizes` are rows of the tensor."""
        rows = tensor.shape[0] if tensor.dim() else 1
        sizes = list(sizes or [rows // self.size()] * self.size())
        self._expect((len(sizes), sum(sizes)), (self.size(), rows), "split into (pieces, rows)")
        return [size * (flat.numel() // rows) for size in sizes] if rows else sizes

    def alltoall(self, output_tensors, input_tensors, opts=None):
        with self._call("all_to_all", output_tensors, opts, inputs=input_tensors) as work:
            self._look_at(work, *output_tensors, *input_tensors)
            self._expect((len(output_tensors), len(input_tensors)), (self.size(),) * 2, "numbers of tensors")
            self._expect({one.dtype for one in (*input_tensors, *output_tensors)}, {input_tensors[0].dtype}, "types")
            source = vectors.together(input_tensors)
            width = input_tensors[0].element_size() // source.element_size()
            target = source.new_empty(width * sum(one.numel() for one in output_tensors))
            work.add(self._ranks.exchange, source, [width * one.numel() for one in input_tensors],
                     target, [width * one.numel() for one in output_tensors], note=vectors.note(input_tensors[:1]))
            work.follow(functools.partial(vectors.apart, output_tensors, target))
        return work

    # --- messages

    def send(self, tensors, dst, tag=0):
        tensors = lists.of_tensors(tensors)
        with self._call("send", tensors, None, numbered=False) as work:
            self._look_at(work, *tensors)
            for tensor in tensors:
                work.add(self._ranks.send, vectors.flat(tensor), dst, tag, note=vectors.note([tensor]))
        return work

    def recv(self, tensors, src, tag=0):
        return self._receive("recv", tensors, src, tag)

    def recv_anysource(self, tensors, tag=0):
        return self._receive("recv from any source", tensors, None, tag)

    def _receive(self, what, tensors, src, tag):
        tensors = lists.of_tensors(tensors)
        with self._call(what, tensors, None, numbered=False) as work:
            self._look_at(work, *tensors)
            for tensor in tensors:
                target, finish = vectors.landing([tensor])
                operation = work.add(self._ranks.receive, target, src, tag, note=vectors.note([tensor]))
                if finish:
                    work.follow(finish)
            work.sender = lambda: src if src is not None else operation.sender
        return work

    def barrier(self, opts=None, timeout=None):
        work = self._call("barrier", [], timeout or opts)
        with self._turn:  # all of these have been submitted
            before = self.in_flight.all()
        raised = True
        try:
            if work.blocks:
                earlier.wait(self, before, work.end)
            raised = False
        finally:  # where a signal handler has raised, the other ranks' barriers still meet this one
            if not raised or self.failure is None:
                with work:
                    work.end_after(before)
                    work.follow(functools.partial(self.in_flight.hear, work.number))
                    work.add(self._ranks.barrier)
        return work

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier in which rank 0 finds the ranks that do not come within the time-out, by default the group's.

        wait_all_ranks: name all of them, not the first only.  Raises tally.Error with the names on all ranks that are
            here.  Unlike other time-outs this one leaves the group usable.
        """
        if self.failure is not None:
            raise self.gone()
        with self._turn:
            before, after = self.in_flight.all(), self.begun + 1
        number, self._monitored = self._monitored, self._monitored + 1
        with ranges("monitored_barrier"):
            monitored.barrier(self._ranks, number, self.limit if timeout is None else timeout.total_seconds(),
                              wait_all_ranks)
        for call in before:
            call.ends()
            call.join()
        self.in_flight.hear(after)

    # Each of a pair by the names that it has had, of which torch calls either.
    for one in (("allreduce",), ("allreduce_coalesced",), ("reduce",), ("reduce_scatter",), ("broadcast",), ("scatter",),
                ("allgather",), ("allgather_coalesced",), ("gather",), ("alltoall", "all_to_all"), ("send",), ("recv",),
                ("recv_anysource",), ("reduce_scatter_single", "_reduce_scatter_base"),
                ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
                ("all_gather_single", "_allgather_base"),
                ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
                ("all_to_all_single", "alltoall_base"), ("barrier",), ("monitored_barrier",)):
        method = locals()[one[0]]
        for called in one:
            locals()[called] = takes_any_names(method, called, *one)
    del one, called, method

    # --- calls that are waited for as one

    def _start_coalescing(self, place):
        other = self.other(place)
        if other is not None:
            other._start_coalescing(place)
        else:
            self._together = []

    def _end_coalescing(self, place):
        other = self.other(place)
        if other is not None:
            return other._end_coalescing(place)
        together, self._together = self._together, None
        return Together(together)

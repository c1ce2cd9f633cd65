"""Communication hooks for DistributedDataParallel: gradients go through Tally, the rest through the process group.

    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(tally.torch.state(), tally.torch.ddp_hook)

Flow: register_comm_hook() notes the model and its process group -> backward fills a bucket -> the hook submits its average
over the group's ranks, in place -> the hook, if the sum has ended by then, or a thread on the completion queue completes
the future that backward's end waits for.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import functools
import itertools
import re
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from ... import _calls, _errors, _job
from ..._calls import BUCKET, Call
from ..._lib import ALLGATHER, PUSH_PULL
from .. import device, patches
from ..calls import reduce
from ..crossing import gates
from ..group import outcome
from ..meeting import join_default
from ..group.profile import AsyncRange, is_profiled
from ..group.work import deadlines
from ..horovod.ops import Average
from ..horovod.sparse import SparseReduction

_calling = threading.local()            # .model: the _Model whose hook runs in this thread
_models = WeakTensorKeyDictionary()     # parameter -> the _Model that it is in, of several the last
_numbers = weakref.WeakKeyDictionary()  # default process group -> {ranks of a process group; None: all -> numbers}
_made = weakref.WeakKeyDictionary()     # DistributedDataParallel -> (ranks of its process group; None: all, its number)
# (generation of the communicator, ranks) -> weak references to the default process groups that had models in it: a rank may
# have had others before it joined.
_worlds = collections.defaultdict(list)


def _world():
    return dist.group.WORLD if dist.is_initialized() else _Model


def _numbered(process_group):
    """(the model's ranks, or None for all; the next number of a model of these ranks)."""
    ranks = None
    if process_group is not None:
        ranks = tuple(dist.get_process_group_ranks(process_group))
        ranks = ranks if ranks != tuple(range(dist.get_world_size())) else None
    return ranks, next(_numbers.setdefault(_world(), collections.defaultdict(itertools.count))[ranks])


class _Model:
    """A DistributedDataParallel that has a hook, ours or another one.  None stands for a reducer of another kind, which
    averages over all ranks.  A model's number among the models of its ranks tells its buckets from theirs."""

    def __init__(self, parallel=None):
        # Weak: the parameters lead here, and shall keep nothing.
        self.module = parallel and weakref.ref(parallel.module)
        self._process_group = parallel and weakref.ref(parallel.process_group)
        self._made = parallel and _made.get(parallel)
        self.number = None   # until a state is registered with it
        self.limit = None    # seconds: the process group's time-out, where nothing else ends what waits
        self.name = None     # on all its ranks
        self._ranks = None   # of the process group; None: all
        self._group = None   # the library's group of the ranks; None: all
        self._joined = 0     # generation of the communicator that has been looked at
        self.hook = None     # the _Hook that torch calls
        self._buckets = {}   # index -> (job, and where its gradients lie; weak references to its parameters; its Call)

    def count(self):
        """Take the next number, but only once the hook is known to be Tally's: torch may not know another hook's
        process group."""
        if self.number is not None:
            return
        if self._process_group is not None:
            self.limit = getattr(self._process_group(), "limit", None)  # a group of the backend "tally" has one
        self._ranks, self.number = self._made or _numbered(self._process_group and self._process_group())

    def enter(self):
        """Join the job at the first use: only then does the process group exist, whichever code makes it."""
        if self._joined == _job.generation() and _job.is_initialized():
            return
        join_default()
        ranks = self._ranks
        self._group = ranks and _job.make_group("hook of ranks %s" % (ranks,), ranks)
        self._joined = _job.generation()
        world, worlds = weakref.ref(_world()), _worlds[self._joined, ranks]
        if world not in worlds:
            worlds.append(world)
        turn = worlds.index(world)
        self.name = "model %d%s" % (self.number, " of process group %d" % (turn + 1) if turn else "")

    def call(self, bucket, buffer):
        """The Call that averages a bucket, whose gradients are in this buffer."""
        index = bucket.index()
        place = self._joined, None if buffer.is_sparse else (buffer.data_ptr(), buffer.numel())
        known = self._buckets.get(index)
        if known is None or known[0] != place:  # torch rebuilds them after the first step
            # Backward fills the buckets of the last layers first; the next forward needs those of the first layers first.
            call = Call("%s bucket %d" % (self.name, index), Average, self._group, index, space=BUCKET)
            known = self._buckets[index] = place, [weakref.ref(p) for p in bucket.parameters()], call
        return known[2]

    def describe(self, index):
        """The first and the last parameter of a bucket, for errors."""
        module = self.module and self.module()
        if module is None or index not in self._buckets:
            return None
        with gates.through():
            names = {id(p): name for name, p in module.named_parameters()}
        held = [names.get(id(reference())) for reference in self._buckets[index][1]]
        if not held or None in held:
            return None
        return held[0] if len(held) == 1 else "%s \u2026 %s" % (held[0], held[-1])

    def refuse(self, bucket, reason):
        """Tell the ranks that wait for this one's bucket why it does not come."""
        self.enter()
        buffer = bucket.buffer()
        kind, what = (ALLGATHER, ".rows") if buffer.is_sparse else (PUSH_PULL, "")
        call = self.call(bucket, buffer)
        _calls.refuse(kind, call.but(name=call.name + what), reason)


def _explain(sentence):
    """A sentence with the parameters of the bucket that it names: "bucket 3 of DDP model 0 (layer1.weight \u2026 layer2.bias)"."""
    def described(match):
        name, index = match[1], int(match[2])
        models = {model for model in list(_models.values()) if (model.name, model._joined) == (name, _job.generation())}
        held = {model.describe(index) for model in models} - {None}
        said = held.pop() if len(held) == 1 else None  # models of other process groups may have the name
        return "bucket %d of DDP %s (%s)" % (index, name, said) if said else match[0]

    return _BUCKET.sub(described, sentence) if " bucket " in sentence else sentence


_BUCKET = re.compile(r"'(model \d+(?: of process group \d+)?) bucket (\d+)[^']*'")
_errors.explainers.append(_explain)


class State:
    """A hook's state: the model that its buckets belong to."""

    def __init__(self):
        self._model = None  # until it is registered
        self._given = None  # it, where register_comm_hook() got this; else a hook of the user's own has it

    def __getstate__(self):
        return {"_model": None, "_given": None}  # a pickled model is another one

    def __repr__(self):
        return "tally.torch.state() of model %s" % (self._model and self._model.number)

    def register(self, model):
        """Take the model, or the same module wrapped anew."""
        model.count()
        if self._model is not None and self._model.module is not model.module:
            raise ValueError("the state() of one model is used for another; make one for each")
        self._model = model

    def enter(self, bucket):
        """The model that a bucket belongs to, in the job."""
        if bucket.index() == 0 or self._model is None:  # a hook of the user's own may call ours with a state of any model
            parameters = bucket.parameters()
            model = getattr(_calling, "model", None) or self._given  # the second in a callback of the user's hook
            model = model or (_models.get(parameters[0]) if parameters else None)
            model = model or self._model or _Model()
            if model is not self._model:
                try:
                    self.register(model)
                except ValueError as reason:
                    model.refuse(bucket, reason)
                    raise
        self._model.enter()
        return self._model


def state():
    """The state for register_comm_hook(): one for each model."""
    return State()


class _Hook:
    """Any hook of a model that it knows: a bucket does not name its model, and a parameter may be in several."""

    def __init__(self, hook, model):
        functools.update_wrapper(self, hook)
        self.hook, self._model = hook, model

    def __call__(self, state, bucket):
        before, _calling.model = getattr(_calling, "model", None), self._model
        try:
            return self.hook(state, bucket)
        finally:
            _calling.model = before

    def __deepcopy__(self, _):
        return self  # a copy is over the same ranks

    def __reduce__(self):
        return _itself, (self.hook,)


def _itself(hook):
    return hook


def _numbering(init):
    """DistributedDataParallel's __init__(), which numbers the model."""
    def make(self, *arguments, **named):
        init(self, *arguments, **named)
        try:
            _made[self] = _numbered(self.process_group)
        except (KeyError, RuntimeError, ValueError):  # a process group that torch does not know
            pass

    return make


def _noting(register):
    """DistributedDataParallel's register_comm_hook(), which notes the model.  This serves any hook, because a user's own hook
    may call ours."""
    def register_comm_hook(self, state, hook):
        if not callable(hook):  # torch says so in its own words
            register(self, state, hook)
            return
        if any(hook is one for one in (ddp_hook, ddp_hook_fp16, ddp_hook_bf16)) and not isinstance(state, State):
            raise TypeError("a hook of Tally's needs tally.torch.state(), one for each model, not %r" % (state,))
        model = _Model(self)
        model.hook = _Hook(hook, model)
        register(self, state, model.hook)
        for parameter in self.module.parameters():
            _models[parameter] = model
        if isinstance(state, State):
            state.register(model)
            state._given = model

    return register_comm_hook


patches.make_ddp(_numbering)
patches.register_comm_hook(_noting)


class _Late:
    """Takes a bucket back on all ranks if its sum has not ended within `limit` seconds.  A rank that comes later would
    otherwise get a sum of other memory."""

    def __init__(self, limit, then):
        self.deadline, self._limit, self._then = time.monotonic() + limit, limit, then
        self._operation = None

    has_ended = property(lambda self: self.deadline is None)

    def watch(self, operation):
        """Watch the operation whose end calls end(); the operation keeps this object alive."""
        if self.deadline is not None:
            self._operation = operation
            deadlines.watch(self)

    def end(self, operation):
        self.deadline = self._operation = None
        self._then(operation)

    def expire(self):
        operation, self.deadline = self._operation, None
        if operation is not None:
            operation.cancel("Timed out after %g s, the group's time-out: a rank is late, or has not run this "
                             "backward" % self._limit)


def _nothing(_):
    """The listener for an operation that may take any time."""


def _ended(tensor, limit):
    """(the future of an operation's result on `tensor`; the call that completes it at the operation's end; the listener
    for the operation once it has begun)."""
    on = device.of(tensor) if device.supported(tensor.device) else None  # then it is refused
    begun, ended = outcome.Begun() if on is None else on.runtime.future(), []

    def then(operation):
        if on is None:
            begun.end(operation.wait)
            return
        ended.append(operation)
        begun.set_result(None)

    # What is raised here becomes the error of the future that then() makes, and of the backward that waits.  On a
    # device it runs on a stream of its own, which waits for the result; and who waits for the future waits for that.
    future = begun.then_outcome() if on is None else begun.then(lambda _: ended.pop().wait())  # what is left keeps itself
    if is_profiled():
        future.add_done_callback(AsyncRange("tally:all_reduce", tensor).end)
    if limit is None:
        return future, then, _nothing
    late = _Late(limit, then)
    return future, late.end, late.watch


def _average(state, bucket, dtype):
    """Start the average of a bucket, sent as `dtype` if one is given.  Returns the future of the bucket's tensor."""
    if not hasattr(bucket, "buffer"):
        raise NotImplementedError("the hook takes DistributedDataParallel's buckets, not %s: not where "
                                  "torch._dynamo.config.optimize_ddp is \"python_reducer\" (use \"ddp_optimizer\", or the "
                                  "backend \"tally\"), nor FSDP1's gradients (for FSDP2 there is tally.torch.hsdp())"
                                  % type(bucket).__name__)
    model = state.enter(bucket)
    gradient = bucket.buffer()
    future, then, begun = _ended(gradient, model.limit)
    if gradient.is_sparse:
        begun(SparseReduction(model.call(bucket, gradient).but(then=then), gradient))
        return future
    operation = start(model, bucket, dtype)
    begun(operation)
    operation.watch(then)
    return future


def start(model, bucket, dtype):
    """Submit the average of a dense bucket, in place.  Returns the operation."""
    # Its version tells whether somebody else writes to the bucket, and does not count what is written here.
    gradient = sent = bucket.buffer().data
    call = model.call(bucket, gradient)
    if gradient.is_complex():
        sent, call = torch.view_as_real(gradient), call.but(finish=lambda _: gradient)
    elif dtype is not None and gradient.dtype != dtype and gradient.is_floating_point():
        sent = gradient.to(dtype)

        def finish(result):
            with torch.no_grad():
                return gradient.copy_(result)

        call = call.but(finish=finish)
    return reduce(call, sent, sent)


def ddp_hook(state, bucket):
    """The average of a bucket over the ranks of the model's process group, with the same bits on each rank and in every
    run.

    state: the result of state() for this model; bucket: a torch.distributed.GradBucket.
    Returns a torch.futures.Future of the bucket's tensor.  If the ranks' buckets differ in shape or type, or a rank is
    gone, backward raises on all ranks, with the reason.  The divisor is the number of the ranks, also while some of
    them have no more input (DDP's join()).
    """
    return _average(state, bucket, None)


def ddp_hook_fp16(state, bucket):
    """Like ddp_hook(), with floating-point gradients sent as float16 and added in float32."""
    return _average(state, bucket, torch.float16)


def ddp_hook_bf16(state, bucket):
    """Like ddp_hook(), with floating-point gradients sent as bfloat16 and added in float32."""
    return _average(state, bucket, torch.bfloat16)

"""A device that is not there, for tests of tally.torch.device: tensors in host memory that behave as CUDA's do.

What a thread asks of a tensor is put on the stream that is current, and done later: one thread takes the streams' next
pieces of work in an order that the seed decides, as adverse as streams and events allow.  Memory holds rubbish until its
work is done, and again once nobody holds the tensor, unless a stream was said to use it (record_stream).  What would
make a program wait for the device is an error: item(), copies to memory that is not pinned or that block.

Flow: install() puts Fakes where tally.torch.device looks for its devices; tensor() makes tensors, read() looks at them.
"""

import contextlib
import random
import sys
import threading
import weakref
from collections import deque

import torch
from torch.utils._pytree import tree_flatten, tree_map

_RUBBISH = 0xA5
_FAR = 1 << 60  # added to addresses: who reads them as the host's does not get far
_SYNCHRONIZES = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")


class Event:
    def __init__(self):
        self._done = threading.Event()

    def query(self):
        return self._done.is_set()

    def synchronize(self):
        if not self._done.wait(60):
            raise AssertionError("an event has not come within 60 s")


class Stream:
    def __init__(self):
        self.work = deque()
        self.held = False


class _World:
    """All streams, and the thread that does their work."""

    def __init__(self):
        self._changed = threading.Condition()
        self._streams = []  # that have work
        self._random = random.Random(0)
        self._thread = None
        self.wrong = []

    def seed(self, seed):
        with self._changed:
            self._random = random.Random(seed)

    def put(self, stream, *work):
        """Add work to a stream: an Event to wait for, or a function."""
        with self._changed:
            stream.work.extend(work)
            if stream not in self._streams:
                self._streams.append(stream)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def hold(self, stream, held):
        with self._changed:
            stream.held = held
            self._changed.notify_all()

    def _ready(self):
        ready = []
        for stream in list(self._streams):
            if stream.held:
                continue
            while stream.work and isinstance(stream.work[0], Event) and stream.work[0].query():
                stream.work.popleft()
            if not stream.work:
                self._streams.remove(stream)
            elif not isinstance(stream.work[0], Event):
                ready.append(stream)
        return ready

    def _run(self):
        favourite = None
        while True:
            with self._changed:
                ready = self._ready()
                while not ready:
                    self._changed.wait()
                    ready = self._ready()
                # Runs of one stream's work, so that others fall far behind.
                if favourite not in ready or self._random.random() < 0.3:
                    favourite = self._random.choice(ready)
                work = favourite.work.popleft()
            try:
                work()
            except Exception as error:
                self.wrong.append((getattr(work, "said", work), error))
            del ready, work


world = _World()
_current = threading.local()


class Fake:
    """As tally.torch.device.Cuda."""

    def __init__(self, place):
        self.place = torch.device(place)
        self._default = Stream()
        self._lock = threading.RLock()
        self.pinned_storages = {}  # address -> bytes
        self.pinned_bytes = self.pinned_most = 0
        self.fail_pinned = self.fail_copies = 0
        self.copies_out = self.copies_in = 0

    def stream(self):
        return Stream()

    def current(self):
        return getattr(_current, "streams", {}).get(self.place, self._default)

    @contextlib.contextmanager
    def on(self, stream):
        if not hasattr(_current, "streams"):
            _current.streams = {}
        before = _current.streams.get(self.place)
        _current.streams[self.place] = stream
        try:
            yield
        finally:
            _current.streams[self.place] = before or self._default

    def record(self, stream):
        event = Event()
        world.put(stream, event._done.set)
        return event

    def let_wait(self, stream, event):
        world.put(stream, event)

    def keep(self, tensor, stream):
        tensor.block.kept.add(stream)

    def pinned(self, length):
        if self.fail_pinned:
            self.fail_pinned -= 1
            raise RuntimeError("out of pinned memory")
        memory = torch.full((length,), _RUBBISH, dtype=torch.uint8)
        address = memory.untyped_storage().data_ptr()
        with self._lock:
            self.pinned_storages[address] = length
            self.pinned_bytes += length
            self.pinned_most = max(self.pinned_most, self.pinned_bytes)
        weakref.finalize(memory, self._unpinned, length).atexit = False
        return memory

    def _unpinned(self, length):
        with self._lock:
            self.pinned_bytes -= length

    def future(self):
        return Future(self)


class Future:
    """As torch.futures.Future(devices=...) where the value of the first is no tensor."""

    def __init__(self, runtime):
        self._runtime, self._future, self._event = runtime, torch.futures.Future(), None

    def set_result(self, value):
        self._future.set_result(value)

    def done(self):
        return self._future.done()

    def then(self, callback):
        child = Future(self._runtime)

        def run(_):
            own = self._runtime.stream()
            with self._runtime.on(own):
                try:
                    value = callback(self)
                    child._event = self._runtime.record(own)
                except Exception as error:
                    child._future.set_exception(error)
                else:
                    child._future.set_result(value)
        self._future.add_done_callback(run)
        return child

    def wait(self):
        value = self._future.wait()
        if self._event is not None:
            self._runtime.let_wait(self._runtime.current(), self._event)
        return value


class _Block:
    """Memory of one allocation."""

    def __init__(self, memory, runtime):
        self.kept = set()
        self._memory, self._runtime, self._stream = memory, runtime, runtime.current()

    def __del__(self, _is_finalizing=sys.is_finalizing):
        if _is_finalizing():
            return
        # What the allocator may give to another as soon as its own stream, and those it was told of, are through.
        later = Stream()
        memory = self._memory.view(-1).view(torch.uint8) if self._memory.numel() else None
        events = [self._runtime.record(stream) for stream in {self._stream, *self.kept}]

        def spoil():
            if memory is not None:
                memory.fill_(_RUBBISH)
        world.put(later, *events, spoil)


class Tensor(torch.Tensor):
    """Looks like one on a device; `inner` is its memory."""

    @staticmethod
    def __new__(cls, inner, block, runtime):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(),
                                                   storage_offset=inner.storage_offset(), dtype=inner.dtype)
        made.inner, made.block, made.runtime = inner, block, runtime
        return made

    device = property(lambda self: self.runtime.place)
    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: False)  # torch.distributed would ask what a real one can do
    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self):
        return self.inner.data_ptr() + _FAR

    def __repr__(self):
        return "fake tensor of shape %s" % (tuple(self.shape),)

    __str__ = __repr__
    __format__ = lambda self, _: repr(self)

    def tolist(self):
        raise AssertionError("tolist() would wait for the device")

    def __reduce_ex__(self, protocol):
        raise AssertionError("pickling would wait for the device")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        found = []
        tree_map(lambda one: found.append(one) if isinstance(one, Tensor) else None, (args, kwargs))
        runtime = found[0].runtime
        if any(one.runtime is not runtime for one in found):
            raise AssertionError("%s of tensors on several devices" % name)
        if name in _SYNCHRONIZES:
            raise AssertionError("%s would wait for the device" % name)
        kwargs.pop("pin_memory", None)
        if name == "_to_copy" and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
            raise AssertionError("%s to the host would wait for the device" % name)
        kwargs.pop("device", None)
        bare_args, bare = tree_map(lambda one: one.inner if isinstance(one, Tensor) else one, (args, kwargs))
        if func.is_view or name in ("detach", "alias"):
            return tree_map(lambda one: cls(one, found[0].block, runtime), func(*bare_args, **bare))
        stream = runtime.current()
        if name == "copy_":
            cls._check_copy(args, kwargs, runtime)
        if func._schema.is_mutable:
            def work():
                func(*bare_args, **bare)
            work.said = (name, [one.shape if isinstance(one, torch.Tensor) else one for one in args])
            world.put(stream, work)
            return args[0]
        shapes = func(*bare_args, **bare)  # of what is there now; for the shapes alone

        def make(shape):
            memory = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
            _spoil(memory)
            return cls(memory, _Block(memory, runtime), runtime)
        results = tree_map(lambda one: make(one) if isinstance(one, torch.Tensor) else one, shapes)
        if not name.startswith(("new_empty", "empty")):
            targets = tree_map(lambda one: one.inner if isinstance(one, Tensor) else one, results)

            def work():
                for target, value in zip(tree_flatten(targets)[0], tree_flatten(func(*bare_args, **bare))[0]):
                    if isinstance(target, torch.Tensor):
                        target.copy_(value)
            work.said = (name, [one.shape if isinstance(one, torch.Tensor) else one for one in args], results)
            world.put(stream, work)
        return results

    @classmethod
    def _check_copy(cls, args, kwargs, runtime):
        target, source = args[:2]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        for host, out in ((target, True), (source, False)):
            if not isinstance(host, Tensor):
                if blocks or host.untyped_storage().data_ptr() not in runtime.pinned_storages:
                    raise AssertionError("a copy %s the device that blocks" % ("from" if out else "to"))
                if runtime.fail_copies:
                    runtime.fail_copies -= 1
                    raise RuntimeError("a copy has failed")
                if out:
                    runtime.copies_out += 1
                else:
                    runtime.copies_in += 1


def _spoil(memory):
    if memory.numel():
        memory.untyped_storage().copy_(torch.full((memory.untyped_storage().nbytes(),), _RUBBISH,
                                                  dtype=torch.uint8).untyped_storage())


def tensor(values, place="cuda:0"):
    """A tensor of these values, which are there once the current stream has come so far."""
    from tally.torch import device
    runtime = device._devices[torch.device(place)].runtime
    memory = torch.empty_like(values)
    _spoil(memory)
    made, values = Tensor(memory, _Block(memory, runtime), runtime), values.clone()
    world.put(runtime.current(), lambda: memory.copy_(values))
    return made


def read(one):
    """What the current stream finds in a tensor."""
    if not isinstance(one, Tensor):
        return one
    runtime, inner, found = one.runtime, one.inner, []
    world.put(runtime.current(), lambda: found.append(inner.clone()))
    runtime.record(runtime.current()).synchronize()
    return found[0]


@contextlib.contextmanager
def install(seed=0, chunk_bytes=1 << 20, pool_bytes=1 << 25, places=("cuda:0",), patience_s=1000):
    """Devices of these names, for tensors of a test; yields the Devices.  At the end all pinned memory must be back."""
    from real_device import placed
    from tally.torch import device
    from tally.torch.group import dispatched
    world.seed(seed)
    world.wrong.clear()
    made = [device.Device(Fake(place), chunk_bytes, pool_bytes) for place in places]
    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, None
    plain, dispatched.PLAIN = dispatched.PLAIN, (*dispatched.PLAIN, Tensor)  # a real one is no subclass
    try:
        with placed(places, made, patience_s):
            yield made
        assert not world.wrong, world.wrong
    finally:
        torch.cuda.synchronize = synchronize
        dispatched.PLAIN = plain

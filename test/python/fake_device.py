"""A device that is not there, for tests of CUDA tensors: tensors that behave as CUDA's do, in memory and on streams of the
tests' driver (test/device/fake_cuda/), which Tally's library finds, too.

What a thread asks of a tensor is put on the stream that is current: the driver calls a function there.  It does so as late as
CUDA allows, when something waits for it; some streams are waited for early, at random, by a thread of this module.  Memory
holds rubbish until its work is done, and again once nobody holds the tensor, unless a stream was said to use it
(record_stream).  What would make a program wait for the device is an error: item(), copies to memory that is not pinned or
that block.  A read of a device's memory on the host ends the process.

Flow: install() puts Fakes where tally.torch.device looks for its devices; tensor() makes tensors, read() looks at them.
"""

import contextlib
import ctypes
import itertools
import os
import queue
import random
import sys
import threading
import weakref
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p

import torch
from torch.utils._pytree import tree_flatten, tree_map

import jobs
import tally

_RUBBISH = 0xA5
_ROOM = 64 << 20     # bytes of a device
_SMALLEST = 512      # bytes of a block
_NOT_READY = 600     # CUDA_ERROR_NOT_READY
_POOL_BYTES = 1 << 25
_SYNCHRONIZES = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")


# --- the driver ----------------------------------------------------------------------------------------------------


_function = ctypes.CFUNCTYPE(None, c_void_p)
_arguments = {
    "cuInit": (c_uint,),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuLaunchHostFunc": (c_void_p, _function, c_void_p),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "fake_cuda_data": (c_void_p,),
    "fake_cuda_fail": (ctypes.c_char_p,),
    "fake_cuda_hold": (c_void_p, c_int),
    "fake_cuda_moved": (c_int, c_int),
    "fake_cuda_pinned": (),
}
_results = {"fake_cuda_data": c_void_p, "fake_cuda_moved": c_uint64, "fake_cuda_pinned": c_uint64}


def _load():
    os.environ["FAKE_CUDA"] = "gpus=2"
    library = ctypes.CDLL(str(jobs.BUILD / "meson" / "test" / "device" / "libcuda.so.1"))
    for name, arguments in _arguments.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = _results.get(name, c_int)
    assert library.cuInit(0) == 0
    return library


_cuda = _load()


class _World:
    """What waits on the streams, and the thread that waits for some of them early."""

    def __init__(self):
        self.wrong = []
        self._random = random.Random(0)
        self._work = {}  # number -> function
        self._numbers = itertools.count(1)
        self._early = queue.SimpleQueue()
        self._called = _function(self._call)
        self._thread = None

    def seed(self, seed):
        self._random = random.Random(seed)

    def put(self, stream, work, early=False):
        """Call work() on a stream."""
        number = next(self._numbers)
        self._work[number] = work
        stream.gpu.call("cuLaunchHostFunc", stream.handle, self._called, number)
        if early or self._random.random() < 0.3:
            self._early.put(stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
                self._thread.start()

    def hold(self, stream, held):
        _cuda.fake_cuda_hold(stream.handle, held)

    def _call(self, number):
        work = self._work.pop(number)
        try:
            work()
        except Exception as error:
            self.wrong.append((getattr(work, "said", work), error))

    def _run(self):
        _cuda.cuThreadExchangeStreamCaptureMode(byref(c_int(2)))  # graphs are another thread's
        while True:
            stream = self._early.get()
            stream.gpu.call("cuStreamSynchronize", stream.handle)


world = _World()


class _Gpu:
    """One of the driver's GPUs: its context, and memory for tensors that is reused at once."""

    def __init__(self, number):
        self.context = c_void_p()
        assert _cuda.cuDevicePrimaryCtxRetain(byref(self.context), number) == 0
        address = c_ulonglong()
        self.call("cuMemAlloc_v2", byref(address), _ROOM)
        self.address, self.data = address.value, _cuda.fake_cuda_data(address.value)
        self._end, self._free = 0, {}  # bytes -> offsets

    def call(self, name, *arguments, but=0):
        """Call the driver in this context; returns 0, or the code `but`."""
        before = c_void_p()
        assert _cuda.cuCtxPushCurrent_v2(self.context) == 0
        try:
            code = getattr(_cuda, name)(*arguments)
        finally:
            _cuda.cuCtxPopCurrent_v2(byref(before))
        if code not in (0, but):
            raise RuntimeError("%s failed: %d" % (name, code))
        return code

    def take(self, length):
        """(bytes, offset) of free memory."""
        size = max(_SMALLEST, 1 << max(0, length - 1).bit_length())
        with contextlib.suppress(KeyError, IndexError):
            return size, self._free[size].pop()
        offset, self._end = self._end, self._end + size
        assert self._end <= _ROOM, "out of the device's memory"
        return size, offset

    def give(self, size, offset):
        self._free.setdefault(size, []).append(offset)


_gpus = {}


def _gpu(number):
    if number not in _gpus:
        _gpus[number] = _Gpu(number)
    return _gpus[number]


class Stream:
    def __init__(self, gpu):
        self.gpu, handle = gpu, c_void_p()
        gpu.call("cuStreamCreate", byref(handle), 1)
        self.handle = handle.value  # never destroyed, as PyTorch's


class Event:
    def __init__(self, stream):
        self._gpu, handle = stream.gpu, c_void_p()
        self._gpu.call("cuEventCreate", byref(handle), 2)
        self.handle = handle.value
        weakref.finalize(self, self._gpu.call, "cuEventDestroy_v2", self.handle).atexit = False
        self._gpu.call("cuEventRecord", self.handle, stream.handle)

    def query(self):
        return self._gpu.call("cuEventQuery", self.handle, but=_NOT_READY) == 0

    def synchronize(self):
        self._gpu.call("cuEventSynchronize", self.handle)


# --- a device ------------------------------------------------------------------------------------------------------


_current = threading.local()


class Fake:
    """As tally.torch.device.Cuda."""

    def __init__(self, place):
        self.place = torch.device(place)
        self.gpu = _gpu(self.place.index)
        self._default = Stream(self.gpu)
        self._few = [Stream(self.gpu) for _ in range(4)]  # PyTorch hands out its streams in turn, too
        self._lock = threading.RLock()
        self.pinned_storages = {}  # address -> bytes
        self.pinned_bytes = self.pinned_most = 0

    def stream(self):
        return Stream(self.gpu)

    def one_of_a_few(self):
        return world._random.choice(self._few)

    def current(self):
        return getattr(_current, "streams", {}).get(self.place, self._default)

    def is_capturing(self):
        status = c_int()
        self.gpu.call("cuStreamIsCapturing", self.current().handle, byref(status))
        return status.value != 0

    def handle(self, stream):
        return stream.handle

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
        return Event(stream)

    def let_wait(self, stream, event):
        self.gpu.call("cuStreamWaitEvent", stream.handle, event.handle, 0)

    def keep(self, tensor, stream):
        tensor.block.kept.add(stream)

    def pinned(self, length):
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

    def __init__(self, runtime, length):
        gpu = runtime.gpu
        self.kept, self.stream, self._runtime = set(), runtime.current(), runtime
        self._size, self._offset = gpu.take(length)
        self.address = gpu.address + self._offset
        self.data = gpu.data + self._offset
        self.bytes = torch.frombuffer((ctypes.c_uint8 * self._size).from_address(self.data), dtype=torch.uint8)
        self.bytes.fill_(_RUBBISH)

    def __del__(self, _is_finalizing=sys.is_finalizing):
        if _is_finalizing():
            return
        # The allocator may give it to another as soon as its own stream, and those it was told of, are through.
        memory, size, offset, gpu = self.bytes, self._size, self._offset, self._runtime.gpu

        def spoil():
            memory.fill_(_RUBBISH)
            gpu.give(size, offset)
        later = self.stream
        if self.kept:
            later = self._runtime.one_of_a_few()
            for stream in {self.stream, *self.kept}:
                self._runtime.let_wait(later, Event(stream))
        world.put(later, spoil, early=True)


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
        return self.inner.data_ptr() - self.block.data + self.block.address if self.inner.numel() else 0

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
            return _new(cls, shape, runtime)
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


def _new(cls, like, runtime):
    """A tensor of like's shape, strides and type, with rubbish."""
    length = (1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride()))) if like.numel() else 0
    block = _Block(runtime, length * like.element_size())
    inner = torch.empty(0, dtype=like.dtype).set_(block.bytes.untyped_storage(), 0, like.shape, like.stride())
    return cls(inner, block, runtime)


def tensor(values, place="cuda:0"):
    """A tensor of these values, which are there once the current stream has come so far."""
    from tally.torch import device
    runtime = device._devices[torch.device(place)].runtime
    made, values = _new(Tensor, values.contiguous(), runtime), values.clone()
    inner = made.inner
    world.put(runtime.current(), lambda: inner.copy_(values))
    return made


def read(one):
    """What the current stream finds in a tensor."""
    if not isinstance(one, Tensor):
        return one
    runtime, inner, found = one.runtime, one.inner, []
    world.put(runtime.current(), lambda: found.append(inner.clone()))
    runtime.record(runtime.current()).synchronize()
    return found[0]


def moved():
    """Bytes that Tally's library has copied so far from GPU 0 to the host, and back."""
    return _cuda.fake_cuda_moved(1, 0), _cuda.fake_cuda_moved(0, 1)


def pinned():
    """The most bytes that Tally's library has pinned at a time since the last call."""
    return _cuda.fake_cuda_pinned()


def fail(what):
    """Let a call of the driver fail: CALL:CODE[:N]; "" none any more."""
    _cuda.fake_cuda_fail(what.encode())


@contextlib.contextmanager
def captured(runtime):
    """Within this context the current stream is captured into a graph."""
    stream, graph = runtime.current().handle, c_void_p()
    runtime.gpu.call("cuStreamBeginCapture_v2", stream, 0)
    try:
        yield
    finally:
        runtime.gpu.call("cuStreamEndCapture", stream, byref(graph))


@contextlib.contextmanager
def _job_with(pool_bytes):
    """A job whose library pins no more than so many bytes for a device."""
    if pool_bytes == _POOL_BYTES:
        yield
        return
    os.environ["TALLY_DEVICE_MEMORY"] = str(max(pool_bytes, 1 << 16))
    tally.shutdown()
    tally.init()
    try:
        yield
    finally:
        del os.environ["TALLY_DEVICE_MEMORY"]


@contextlib.contextmanager
def install(seed=0, chunk_bytes=1 << 20, pool_bytes=_POOL_BYTES, places=("cuda:0",), patience_s=1000):
    """Devices of these names, for tensors of a test; yields the Devices.  At the end all pinned memory must be back.

    For another size of the pool the job is left and joined anew."""
    from real_device import placed
    from tally.torch import device
    from tally.torch.group import dispatched
    world.seed(seed)
    world.wrong.clear()
    made = [device.Device(Fake(place), chunk_bytes, pool_bytes) for place in places]
    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, None
    plain, dispatched.PLAIN = dispatched.PLAIN, (*dispatched.PLAIN, Tensor)  # a real one is no subclass
    try:
        with _job_with(pool_bytes), placed(places, made, patience_s):
            yield made
        assert not world.wrong, world.wrong
    finally:
        torch.cuda.synchronize = synchronize
        dispatched.PLAIN = plain

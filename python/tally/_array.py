"""push_pull for arrays of any library.

Finds an array's memory by NumPy's array interface, DLPack or the buffer protocol, and hands it to `_operations`.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import sys
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

from . import _calls, _memory, _operations
from ._calls import USER, Call, Reduction
from ._job import own, unusable
from ._lib import DTYPE_CODES, DTYPE_NAMES, PUSH_PULL

# Libraries whose arrays must not be written, whatever their exports say.
_IMMUTABLE = ("jax", "jaxlib", "tensorflow")


class _View:
    """An array's memory."""

    __slots__ = ("pointer", "count", "dtype", "shape", "readonly", "keep", "strided")

    def __init__(self, pointer, count, dtype, shape, readonly, keep, strided=False):
        self.pointer, self.count, self.dtype = pointer, count, dtype
        self.shape, self.readonly, self.keep = shape, readonly, keep
        self.strided = strided  # not contiguous; of NumPy's arrays alone


def _dtype_code(name):
    code = DTYPE_CODES.get(name)
    if code is None:
        raise TypeError("elements of type %s cannot be summed; supported are %s" % (name, ", ".join(DTYPE_NAMES)))
    return code


_numpy_codes = {}  # numpy.dtype -> code; what is found once is not looked up by name again


def _view_numpy(array, interface):
    dtype = array.dtype
    code = _numpy_codes.get(dtype)
    if code is None:
        code = _dtype_code(dtype.name)
        if not dtype.isnative:
            raise TypeError("elements of foreign byte order (%s) cannot be summed; hand over array.astype(%r)" % (
                dtype.str, dtype.newbyteorder("=").str))
        _numpy_codes[dtype] = code
    pointer, readonly = interface["data"]
    return _View(pointer, array.size, code, array.shape, readonly, array, interface["strides"] is not None)


# --- DLPack (dmlc/dlpack, include/dlpack/dlpack.h), versions 0 and 1 ----------------------------------------


class _DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _DLManaged(Structure):
    _fields_ = [("tensor", _DLTensor), ("context", c_void_p), ("deleter", c_void_p)]


class _DLManagedVersioned(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("context", c_void_p), ("deleter", c_void_p),
                ("flags", c_uint64), ("tensor", _DLTensor)]


_DL_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost: memory that a processor may read
_DL_READ_ONLY = 1
_DL_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}

_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype = ctypes.c_int
_capsule_is.argtypes = [ctypes.py_object, c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, c_char_p]


def _view_dlpack(array):
    device = int(array.__dlpack_device__()[0]) if hasattr(array, "__dlpack_device__") else 1
    if device not in _DL_HOST:
        raise NotImplementedError("arrays on a device (DLPack device type %d) are not supported yet; copy to the host "
                                  "first" % device)
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:  # from before version 1
        capsule = array.__dlpack__()
    # The capsule is not consumed: it keeps its name, and with its last reference calls the exporter's deleter.
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = _DLManagedVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        readonly = bool(managed.flags & _DL_READ_ONLY)
    else:
        managed = _DLManaged.from_address(_capsule_pointer(capsule, b"dltensor"))
        readonly = False
    tensor = managed.tensor
    kind = _DL_CODES.get(tensor.code, "opaque")
    code = _dtype_code("bool" if kind == "bool" and tensor.bits == 8 and tensor.lanes == 1 else
                       "%s%d%s" % (kind, tensor.bits, "x%d" % tensor.lanes if tensor.lanes != 1 else ""))
    shape = tuple(tensor.shape[:tensor.ndim])
    count = 1
    contiguous = True
    for axis in reversed(range(tensor.ndim)):
        if tensor.strides and shape[axis] != 1 and tensor.strides[axis] != count:
            contiguous = False
        count *= shape[axis]
    if not contiguous and count > 0:
        raise ValueError("the array of shape %s is not contiguous; hand over a contiguous copy" % (shape,))
    if type(array).__module__.split(".")[0] in _IMMUTABLE:
        readonly = True
    return _View((tensor.data or 0) + tensor.byte_offset, count, code, shape, readonly, (array, capsule))


def _numpy(reason):
    try:
        import numpy
    except ImportError:
        raise ImportError("NumPy is needed for %s" % reason) from None
    return numpy


def _numpy_dtype(numpy, code):
    name = DTYPE_NAMES[code]
    if name != "bfloat16":
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError("the package ml_dtypes is needed for a bfloat16 result") from None
    return numpy.dtype(ml_dtypes.bfloat16)


def _like(array, result):
    """Convert the NumPy array `result` to the library of `array`, if that is known."""
    if type(array).__module__.split(".")[0] == "tensorflow":
        return sys.modules["tensorflow"].convert_to_tensor(result)
    namespace = getattr(array, "__array_namespace__", None)
    return namespace().asarray(result) if namespace is not None else result


def alloc(shape, dtype="float32"):
    """Return a NumPy array of zeros in memory that the ranks of this machine share.  push_pull() copies nothing there.

    shape: a number or a tuple; dtype: what numpy.dtype() takes.
    The array is contiguous and begins at a page.  Its memory is freed with the last view of it.  It is ordinary memory
    where this machine's ranks do not sum in shared memory (see tally_alloc() in tally.h).  A forked process does not
    have it and must not touch it.

    Raises MemoryError, which names the limit."""
    numpy = _numpy("alloc()")
    dtype = numpy.dtype(dtype)
    shape = tuple(shape) if hasattr(shape, "__len__") else (shape,)
    count = 1
    for extent in shape:
        count *= extent
    memory = _memory.alloc(count * dtype.itemsize)
    return numpy.frombuffer(memory, dtype=dtype, count=count).reshape(shape)


def push_pull_async(array, name=None, op=Reduction.Average, *, priority=0, prescale_factor=1.0, postscale_factor=1.0):
    """Start a push_pull and return its Operation.  Its wait() returns the same as push_pull()."""
    if own.comm is None:
        raise unusable()
    if type(op) is not Reduction:
        op = Reduction(op)
    try:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(array, numpy.ndarray):
            view = _view_numpy(array, array.__array_interface__)
        elif numpy is not None and isinstance(array, numpy.generic):
            value = numpy.array(array)  # a scalar has no memory that lasts
            view = _view_numpy(value, value.__array_interface__)
            view.readonly = True
        elif hasattr(array, "__dlpack__"):
            view = _view_dlpack(array)
        else:
            try:
                memory = memoryview(array)
            except TypeError:
                raise TypeError("%s speaks neither DLPack nor the buffer protocol; hand over an array, such as "
                                "numpy.asarray() makes" % type(array).__name__) from None
            wrapped = _numpy("objects of the buffer protocol").asarray(memory)
            view = _view_numpy(wrapped, wrapped.__array_interface__)
        memory = view.keep
        source, target, keep, result, finish = view.pointer, view.pointer, [memory, array], array, None
        if view.readonly:
            numpy = _numpy("read-only arrays, whose result needs an array of its own")
            if view.strided:
                memory = numpy.ascontiguousarray(memory)
                source = memory.__array_interface__["data"][0]
            output = numpy.empty(view.shape, _numpy_dtype(numpy, view.dtype))
            target = output.__array_interface__["data"][0]
            keep += [memory, output]
            result, finish = output, lambda done: _like(array, done)
        elif view.strided:
            packed = memory.copy(order="C")
            source = target = packed.__array_interface__["data"][0]
            keep.append(packed)

            def finish(done):
                memory[...] = packed
                return done
    except Exception as reason:
        _calls.refuse(PUSH_PULL, Call(name, space=USER), reason)
        raise
    op = int(op)  # its hash costs less than that of an enumeration's member
    if finish is None:
        call = _calls.reducing(name, op, None, priority, prescale_factor, postscale_factor, USER)
    else:
        call = Call(name, op, None, priority, prescale_factor, postscale_factor, USER, finish=finish)
    return _operations.push_pull(call, source, target, view.count, view.dtype, view.shape, keep, result)


def push_pull(array, name=None, op=Reduction.Average, *, priority=0, prescale_factor=1.0, postscale_factor=1.0):
    """Reduce `array` over all ranks, elementwise.  All ranks get the result.

    array: an array in host memory with DLPack (JAX, TensorFlow, PyTorch, CuPy's pinned arrays), NumPy's array interface
        or the buffer protocol (bytearray, array.array, mmap).  Any shape, the same on all ranks.  The type is float32,
        float64, float16, bfloat16, complex64, complex128, bool, or a signed or unsigned integer of 8 to 64 bits.
        Complex numbers have no Min and Max.
    name: matches this array with the other ranks' array; None: calls without a name are matched in order.
    op: Reduction.Average, Sum, Min, Max or Product.
    priority: higher goes first.
    prescale_factor, postscale_factor: factors for each input before, and for the result after; not 0.

    Returns `array` itself, overwritten.  If it cannot be written (JAX, TensorFlow, read-only buffers), returns a new
    array of its library, or of NumPy.

    Raises TypeError (element type), ValueError (name in flight, array not contiguous), NotImplementedError (array on a
    device), and Error if the ranks disagree, on each of them, or the job has failed.
    """
    return push_pull_async(array, name, op, priority=priority, prescale_factor=prescale_factor,
                           postscale_factor=postscale_factor).wait()

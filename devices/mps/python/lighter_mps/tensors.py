# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plain `torch.Tensor`s on `mps:0` without a compiler: their storage address is the number the host knows them by.

Used by `hot`, the pure-Python hot path; the Rust core makes tensors its own way. `address = number << 40 | offset`, so
`data_ptr()` of a view carries the offset by itself. Two ways exist: DLPack with device type Metal (torch >= 2.9), and
the C shim `aoti_torch_create_tensor_from_blob` (older), which has no deleter, so that a finalizer on the storage
takes its place. A number goes back to the pool only when its FREE is on the stream (`Pool.drain`).
"""

import ctypes
import os
import weakref
from struct import Struct, pack

import torch
from lighter_mps_wire import protocol
from lighter_mps_wire.dtypes import ELEMENTS, tables

_KDL_METAL = 8
_MPS = 13
# DLPack's type codes; a type that DLPack cannot name is made as bytes and viewed.
_DLPACK_CODES = {
    "int8": 0, "int16": 0, "int32": 0, "int64": 0,
    "uint8": 1, "uint16": 1, "uint32": 1, "uint64": 1,
    "float16": 2, "float32": 2, "float64": 2,
    "bfloat16": 4, "complex32": 5, "complex64": 5, "complex128": 5, "bool": 6,
}  # fmt: skip

# DLManagedTensor: data, device type and id, rank, type code, bits, lanes, shape, strides, byte offset, context, deleter.
_MANAGED = Struct("<QiiiBBHQQQQQ")
_CONTEXT_AT = 48
_DELETER_AT = 56
_STRUCT_BYTES = 64
_CHUNK = 4096
_TAKEN = b"dltensor"

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Pool:
    """Numbers of storages: free ones, and those whose tensors are gone but whose FREE is not on the stream yet."""

    def __init__(self):
        self.free = []
        # Deleters append here, from any thread; `list.append` is atomic under the GIL.
        self.gone = []
        self.highest = 0

    def grow(self) -> int:
        """Adds a chunk of fresh numbers and gives the first of them."""
        first = self.highest + 1
        if first + _CHUNK > protocol.MAX_STORAGE_NUMBER:
            raise RuntimeError(f"lighter-mps: more than {self.highest} storages are alive on the device")
        self.highest += _CHUNK
        self.free.extend(range(self.highest, first - 1, -1))
        return first

    def drain(self, out: bytearray) -> None:
        """Puts a FREE for every tensor that is gone on the stream; only then may its number be used again."""
        numbers = self.gone[:]
        if numbers:
            del self.gone[: len(numbers)]
            out += pack(f"<BI{len(numbers)}Q", protocol.FREE, len(numbers), *numbers)
            self.free.extend(numbers)


class Layout:
    """Sizes, strides and element type of new tensors, in the form that making one wants."""

    __slots__ = ("sizes", "strides", "code", "rank", "type_code", "bits", "dtype", "array", "shape_at", "strides_at", "bytes")

    def __init__(self, sizes, strides, code: int):
        self.sizes, self.strides, self.code = tuple(sizes), tuple(strides), code
        self.rank = rank = len(self.sizes)
        name, width = ELEMENTS[code]
        self.dtype = tables().dtypes[code]
        self.type_code = _DLPACK_CODES.get(name)
        self.bits = 8 * width
        self.array = (ctypes.c_int64 * (2 * rank + 1))(*self.sizes, *self.strides)
        self.shape_at = ctypes.addressof(self.array)
        self.strides_at = self.shape_at + 8 * rank
        self.bytes = span(self.sizes, self.strides) * width


def span(sizes, strides) -> int:
    """Elements from the first to the last that a tensor of this shape reaches."""
    reach = 1
    for size, stride in zip(sizes, strides):
        if size == 0:
            return 0
        reach += (size - 1) * stride
    return reach


def contiguous_strides(sizes) -> tuple:
    """Row-major strides, as torch gives them (a size of 0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size if size > 1 else 1
    return tuple(reversed(strides))


def dlpack_maker(pool: Pool):
    """`make(layout) -> (tensor, number)` and `close()` by DLPack."""
    chunks = []
    gone, free = pool.gone.append, pool.free
    head = _MANAGED.pack_into
    adopt, capsule = torch._C._from_dlpack, _new_capsule

    def deleted(managed):
        gone(ctypes.c_uint64.from_address(managed + _CONTEXT_AT).value)

    callback = _DELETER(deleted)
    deleter = [ctypes.cast(callback, ctypes.c_void_p).value]

    def grow() -> None:
        pool.grow()
        chunk = ctypes.create_string_buffer(_STRUCT_BYTES * _CHUNK)
        # Storages outlive the interpreter's modules, so neither this memory nor the callback may ever be freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(chunk))
        chunks.append((chunk, ctypes.addressof(chunk)))

    def make(layout: Layout):
        if not free:
            grow()
        number = free.pop()
        chunk, base = chunks[(number - 1) // _CHUNK]
        at = (number - 1) % _CHUNK * _STRUCT_BYTES
        if layout.type_code is None:
            return viewed(layout, number, chunk, base, at)
        head(
            chunk, at, number << 40, _KDL_METAL, 0, layout.rank, layout.type_code, layout.bits, 1,
            layout.shape_at, layout.strides_at, 0, number, deleter[0],
        )  # fmt: skip
        return adopt(capsule(base + at, _TAKEN, None)), number

    def viewed(layout: Layout, number: int, chunk, base: int, at: int):
        array = (ctypes.c_int64 * 2)(layout.bytes, 1)
        place = ctypes.addressof(array)
        head(chunk, at, number << 40, _KDL_METAL, 0, 1, 1, 8, 1, place, place + 8, 0, number, deleter[0])
        flat = adopt(capsule(base + at, _TAKEN, None)).view(layout.dtype)
        return flat.as_strided(layout.sizes, layout.strides), number

    def close() -> None:
        deleter[0] = 0
        for chunk, _ in chunks:
            for at in range(_DELETER_AT, _STRUCT_BYTES * _CHUNK, _STRUCT_BYTES):
                chunk[at : at + 8] = b"\0" * 8

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
    return make, close


def shim_maker(pool: Pool, library: ctypes.CDLL):
    """`make` and `close` by torch's C shim and a finalizer."""
    create = library.aoti_torch_create_tensor_from_blob
    create.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
        ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p,
    ]  # fmt: skip
    steal, capsule, finalize = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr, _new_capsule, weakref.finalize
    gone, free = pool.gone.append, pool.free

    def make(layout: Layout):
        if not free:
            pool.grow()
        number = free.pop()
        handle = ctypes.c_void_p()
        failed = create(
            number << 40, layout.rank, layout.shape_at, layout.strides_at, 0, layout.code, _MPS, 0, ctypes.byref(handle)
        )
        if failed:
            raise RuntimeError(f"lighter-mps: torch made no tensor of {layout.sizes} {layout.dtype}")
        tensor = steal(capsule(handle.value, None, None))
        finalize(tensor.untyped_storage(), gone, number).atexit = False
        return tensor, number

    return make, lambda: None


def shim_as_strided(library: ctypes.CDLL):
    """`as_strided` by torch's C shim, for a torch whose own kernel refuses a tensor of this device."""
    reinterpret = library.aoti_torch__reinterpret_tensor
    reinterpret.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    steal, capsule = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr, _new_capsule

    def as_strided(tensor, size, stride, storage_offset=None):
        rank = len(size)
        array = (ctypes.c_int64 * (2 * rank + 1))(*size, *stride)
        place = ctypes.addressof(array)
        source, result = ctypes.c_void_p(tensor._cdata), ctypes.c_void_p()
        # The shim counts from the tensor's own offset.
        shift = 0 if storage_offset is None else storage_offset - tensor.storage_offset()
        handle = ctypes.addressof(source)
        if reinterpret(handle, rank, place, place + 8 * rank, shift, ctypes.byref(result)):
            raise RuntimeError(f"lighter-mps: torch made no view of sizes {size}, strides {stride}")
        return steal(capsule(result.value, None, None))

    return as_strided


def torch_version() -> tuple:
    """Major and minor version of the installed torch."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def shim_library(torch_lib_dir: str) -> ctypes.CDLL:
    """Torch's CPU library, which is loaded already."""
    return ctypes.CDLL(os.path.join(torch_lib_dir, "libtorch_cpu.so"))

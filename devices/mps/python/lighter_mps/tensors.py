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

from .deleter import STRUCT_BYTES, Slab

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
_GROWTH = 4096
_MOST = 1 << 20
_NAME = b"dltensor"

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

class Pool:
    """Numbers of storages: free ones, and those whose tensors are gone but whose FREE is not on the stream yet."""

    def __init__(self):
        self.free = []
        self.highest = 0
        # flag[0] is not 0 where some tensor is gone; `take()` gives their numbers.
        self.flag = [0]
        self.take = list

    def grow(self) -> None:
        """Adds fresh numbers."""
        first = self.highest + 1
        if first + _GROWTH > _MOST:
            raise RuntimeError(f"lighter-mps: {self.highest} storages are alive on the device, and no more can be")
        self.highest += _GROWTH
        self.free.extend(range(self.highest, first - 1, -1))

    def drain(self, out: bytearray) -> None:
        """Puts a FREE for every tensor that is gone on the stream; only then may its number be used again."""
        numbers = self.take()
        if numbers:
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
    """`make(layout) -> (tensor, number)` by DLPack."""
    slab = Slab(_MOST)
    pool.flag, pool.take = slab.words, slab.gone
    free, memory, base, deleter = pool.free, slab.memory, slab.base, slab.deleter
    fill, adopt, capsule = _MANAGED.pack_into, torch._C._from_dlpack, _new_capsule

    def make(layout: Layout):
        if not free:
            pool.grow()
        number = free.pop()
        at = number * STRUCT_BYTES
        if layout.type_code is None:
            return viewed(layout, number, at)
        fill(
            memory, at, number << 40, _KDL_METAL, 0, layout.rank, layout.type_code, layout.bits, 1,
            layout.shape_at, layout.strides_at, 0, 0, deleter,
        )  # fmt: skip
        return adopt(capsule(base + at, _NAME, None)), number

    def viewed(layout: Layout, number: int, at: int):
        array = (ctypes.c_int64 * 2)(layout.bytes, 1)
        place = ctypes.addressof(array)
        fill(memory, at, number << 40, _KDL_METAL, 0, 1, 1, 8, 1, place, place + 8, 0, 0, deleter)
        flat = adopt(capsule(base + at, _NAME, None)).view(layout.dtype)
        return flat.as_strided(layout.sizes, layout.strides), number

    return make


def _giver(library: ctypes.CDLL):
    """`give(handle) -> tensor`. Torch's binding makes a Python object of a handle's tensor and, despite its name, leaves
    the handle, which holds the tensor too: it has to be deleted, or nothing made so is ever freed. A torch that deletes
    it itself is told apart by the first tensor's count."""
    steal, capsule, delete = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr, _new_capsule, library.aoti_torch_delete_tensor_object
    delete.argtypes = [ctypes.c_void_p]
    leaves_handle = None

    def give(handle: ctypes.c_void_p):
        nonlocal leaves_handle
        tensor = steal(capsule(handle.value, None, None))
        if leaves_handle is None:
            leaves_handle = tensor._use_count() > 1
        if leaves_handle:
            delete(handle)
        return tensor

    return give


def shim_maker(pool: Pool, library: ctypes.CDLL):
    """`make` by torch's C shim and a finalizer."""
    lost = []
    flag = pool.flag

    def gone(number: int) -> None:
        lost.append(number)
        flag[0] = 1

    def take() -> list:
        flag[0] = 0
        numbers = lost[:]
        del lost[: len(numbers)]
        # The last first, as with the deleter.
        numbers.reverse()
        return numbers

    pool.take = take
    create = library.aoti_torch_create_tensor_from_blob
    create.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
        ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p,
    ]  # fmt: skip
    give, finalize = _giver(library), weakref.finalize
    untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    untrack.restype, untrack.argtypes = None, [ctypes.py_object]
    free = pool.free

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
        tensor = give(handle)
        storage = tensor.untyped_storage()
        # Torch's storage object is kept alive by C++ without the collector knowing; one that it breaks up as garbage
        # would seem gone here while tensors still use it.
        untrack(storage)
        finalize(storage, gone, number).atexit = False
        return tensor, number

    return make


def shim_as_strided(library: ctypes.CDLL):
    """`as_strided` by torch's C shim, for a torch whose own kernel refuses a tensor of this device."""
    reinterpret = library.aoti_torch__reinterpret_tensor
    reinterpret.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    give = _giver(library)

    def as_strided(tensor, size, stride, storage_offset=None):
        rank = len(size)
        array = (ctypes.c_int64 * (2 * rank + 1))(*size, *stride)
        place = ctypes.addressof(array)
        source, result = ctypes.c_void_p(tensor._cdata), ctypes.c_void_p()
        own_offset = tensor.storage_offset()
        offset = own_offset if storage_offset is None else storage_offset
        storage, width = tensor.untyped_storage().nbytes(), tensor.element_size()
        reach = span(size, stride)
        # The shim checks no bounds.
        if reach and (offset + reach) * width > storage:
            raise RuntimeError(
                f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {width} "
                f"requiring a storage size of {(offset + reach) * width} are out of bounds for storage of size {storage}"
            )
        # It counts from the tensor's own offset.
        shift = offset - own_offset
        handle = ctypes.addressof(source)
        if reinterpret(handle, rank, place, place + 8 * rank, shift, ctypes.byref(result)):
            raise RuntimeError(f"lighter-mps: torch made no view of sizes {size}, strides {stride}")
        return give(result)

    return as_strided


def torch_version() -> tuple:
    """Major and minor version of the installed torch."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def shim_library(torch_lib_dir: str) -> ctypes.CDLL:
    """Torch's CPU library, which is loaded already."""
    return ctypes.CDLL(os.path.join(torch_lib_dir, "libtorch_cpu.so"))

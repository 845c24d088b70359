# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operators that never cross the wire: views, empty tensors, storages, sizes.

`kernels` registers everything in `table()`. A view is a new tensor on the same storage; a new tensor is a number and an
ALLOC. Memory that has to grow is a new storage, since the host's storages never change their size.
"""

import math

import torch
from lighter_mps_wire import frames, protocol
from lighter_mps_wire.dtypes import tables

from . import copies, errors, link
from .tensors import contiguous_strides, span

_aten = torch.ops.aten
_cpu_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_codes = tables().codes
_plain_formats = (None, torch.contiguous_format, torch.preserve_format)


class _State:
    hot = None


def install(hot) -> None:
    """Takes the hot path."""
    _State.hot = hot


def on_cpu(op):
    """Torch's own CPU kernel of an operator that touches metadata only."""
    redispatch = op.redispatch
    return lambda *args, **kwargs: redispatch(_cpu_keys, *args, **kwargs)


_set = on_cpu(_aten.set_.source_Storage_storage_offset)


def allocate(sizes, strides, dtype):
    """A tensor with memory of its own on the device."""
    if dtype is torch.float64 or dtype is torch.complex128:
        errors.refuse_float64()
    code = _codes.get(dtype)
    if code is None:
        raise TypeError(f"lighter-mps: {dtype} does not exist on this device")
    link.check()
    hot = _State.hot
    tensor = hot.new_tensor(sizes, strides, code)
    reach = span(sizes, strides) * dtype.itemsize
    hot.append(frames.message(protocol.ALLOC, hot.number(tensor), reach, code))
    return tensor


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """aten::empty.memory_format"""
    _check_kind(layout, pin_memory)
    if memory_format in _plain_formats:
        strides = contiguous_strides(size)
    else:
        strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return allocate(size, strides, dtype or torch.get_default_dtype())


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    """aten::empty_strided"""
    _check_kind(layout, pin_memory)
    return allocate(size, stride, dtype or torch.get_default_dtype())


def _check_kind(layout, pin_memory) -> None:
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"lighter-mps: {layout} tensors do not exist on this device, only dense ones do")
    if pin_memory:
        raise RuntimeError("Cannot pin 'mps' memory: only dense CPU tensors can be pinned")


def zero_tensor(size, dtype=None, layout=None, device=None, pin_memory=None):
    """aten::_efficientzerotensor: a plain tensor of zeros serves as well."""
    return empty(size, dtype, layout, device, pin_memory).zero_()


def new_storage(tensor, sizes, strides, fresh=None):
    """Gives a tensor a new storage of these sizes: `fresh`'s, or an empty one."""
    fresh = allocate(sizes, strides, tensor.dtype) if fresh is None else fresh
    return _set(tensor, fresh.untyped_storage(), 0, list(sizes), list(strides))


def resize_(self, size, memory_format=None):
    """aten::resize_: what was there stays there, in order of elements."""
    if list(self.shape) == list(size) and memory_format in _plain_formats:
        return self
    if memory_format in _plain_formats:
        strides = contiguous_strides(size)
    else:
        strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
    needed = (span(size, strides) + self.storage_offset()) * self.element_size()
    storage = self.untyped_storage()
    if needed <= storage.nbytes() or 0 in size:
        return _set(self, storage, self.storage_offset(), list(size), list(strides))
    fresh = allocate((needed // self.element_size(),), (1,), self.dtype)
    kept = storage.nbytes() // self.element_size()
    if kept:
        everything = _set(torch.empty((0,), dtype=self.dtype, device="mps"), storage, 0, [kept], [1])
        fresh[:kept].copy_(everything)
    return _set(self, fresh.untyped_storage(), self.storage_offset(), list(size), list(strides))


def resize_as(self, template, memory_format=None):
    """aten::_resize_output_ and resize_as_"""
    return resize_(self, template.shape, memory_format)


def set_storage(self, source, storage_offset=0, size=None, stride=()):
    """aten::set_ from a storage"""
    if size is None:
        size = [source.nbytes() // self.element_size()]
    return _set(self, source, storage_offset, list(size), list(stride) or list(contiguous_strides(size)))


def set_tensor(self, source):
    """aten::set_ from a tensor"""
    return _set(self, source.untyped_storage(), source.storage_offset(), list(source.shape), list(source.stride()))


def set_nothing(self):
    """aten::set_ to an empty storage"""
    return new_storage(self, (0,), (1,))


def _arange(start, end, step, dtype):
    if dtype is None:
        whole = all(type(number) in (int, bool) for number in (start, end, step))
        dtype = torch.int64 if whole else torch.get_default_dtype()
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    if not (math.isfinite(start) and math.isfinite(end)):
        raise RuntimeError(f"unsupported range: {start} -> {end}")
    if dtype.is_floating_point:
        count = math.ceil((end - start) / step)
    else:
        start, end, step = int(start), int(end), int(step)
        count = -(-(end - start) // step)
    out = allocate((count,), (1,), dtype)
    return _aten.arange.start_out(start, end, step, out=out) if count else out


def arange(end, dtype=None, layout=None, device=None, pin_memory=None):
    """aten::arange; the size is known here, so that no `out=` has to be resized by the host."""
    _check_kind(layout, pin_memory)
    return _arange(0, end, 1, dtype)


def arange_start(start, end, dtype=None, layout=None, device=None, pin_memory=None):
    """aten::arange.start"""
    _check_kind(layout, pin_memory)
    return _arange(start, end, 1, dtype)


def arange_step(start, end, step=1, dtype=None, layout=None, device=None, pin_memory=None):
    """aten::arange.start_step"""
    _check_kind(layout, pin_memory)
    return _arange(start, end, step, dtype)


def _no(*_args, **_kwargs) -> bool:
    return False


def _native(name: str, *functions):
    """The core's own form of an operator, which falls back to ours for what is rare; None where there is no core."""
    made = getattr(_State.hot, name, None)
    return made(*functions) if made and functions else made


def table() -> dict:
    """Every operator that is done here, by its name without the namespace."""
    return {
        "as_strided": _State.hot.as_strided,
        "view": _native("view") or on_cpu(_aten.view.default),
        "unfold": on_cpu(_aten.unfold.default),
        "_reshape_alias": on_cpu(_aten._reshape_alias.default),
        "view_as_real": on_cpu(_aten.view_as_real.default),
        "view_as_complex": on_cpu(_aten.view_as_complex.default),
        "is_set_to": on_cpu(_aten.is_set_to.default),
        "empty.memory_format": _native("empty", empty) or empty,
        "empty_strided": _native("empty_strided", empty_strided) or empty_strided,
        "_efficientzerotensor": zero_tensor,
        "arange": arange,
        "arange.start": arange_start,
        "arange.start_step": arange_step,
        "copy_": _native("copy", copies.copy_, copies.device_copy()) or copies.copy_,
        "_copy_from": copies.copy_from,
        "_copy_from_and_resize": copies.copy_from_and_resize,
        "_local_scalar_dense": copies.local_scalar_dense,
        "resize_": resize_,
        "resize_as_": resize_as,
        "_resize_output_": lambda self, size, device: resize_(self, size),
        "set_": set_nothing,
        "set_.source_Storage_storage_offset": set_storage,
        "set_.source_Storage": set_storage,
        "set_.source_Tensor": set_tensor,
        "is_pinned": _no,
        "record_stream": lambda self, stream: None,
        # Questions whether another library would do the work; asked on behalf of CUDA.
        "_use_cudnn_ctc_loss": _no,
        "_use_cudnn_ctc_loss.Tensor": _no,
        "_use_miopen_ctc_loss": _no,
        "_use_miopen_ctc_loss.Tensor": _no,
    }

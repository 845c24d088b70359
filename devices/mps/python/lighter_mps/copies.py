# SPDX-License-Identifier: MIT OR Apache-2.0
"""Data that crosses between the container's memory and the device, and single numbers that come back.

`local` registers `copy_`, `_copy_from`, `_copy_from_and_resize`, `_local_scalar_dense`; `surface` uses `upload` and
`download`. The bytes of a source are taken at the call, whatever `non_blocking` says. A source or target with any
strides is allowed: what goes over the wire is packed, and strides are resolved on the side where that costs a copy
in memory, not a message.
"""

import ctypes

import torch
from lighter_mps_wire import frames, protocol
from lighter_mps_wire.dtypes import tables
from lighter_mps_wire.values import encode

from . import errors, link
from .signatures import resolve_lazy

# Below this, bytes ride in the stream: a message in the ring costs more than it saves.
RING_FROM_BYTES = 4096
INLINE_PIECE_BYTES = 4 << 20
_codes = tables().codes
_scalar_dtypes = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)
    + (torch.float32, torch.float64)
)


class _State:
    hot = None
    # Kernels of copy_ and fill_ on the device.
    device_copy = device_fill = None


def install(hot, device_copy, device_fill) -> None:
    """Takes the hot path and the two kernels that copying needs."""
    _State.hot, _State.device_copy, _State.device_fill = hot, device_copy, device_fill


def device_copy():
    """The kernel of aten::copy_ for two tensors on the device."""
    return _State.device_copy


def descriptor(address: int, sizes, strides, code: int) -> bytes:
    """A place on the device, as the bulk messages name it."""
    return encode([address, list(sizes), list(strides), code])


def _described(tensor) -> bytes:
    return descriptor(tensor.data_ptr(), tensor.shape, tensor.stride(), _codes[tensor.dtype])


def _memory(tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; it has to outlive the view."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _dense_order(tensor):
    """The order of dimensions in which this tensor is contiguous, or None."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def upload(target, source) -> None:
    """Container to device; `source` is a CPU tensor of any type and layout that can be broadcast."""
    source = source.detach()
    if target.numel() == 0:
        torch.broadcast_shapes(source.shape, target.shape)
        return
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    if source.dim() == 0 and source.dtype in _scalar_dtypes and not target.is_complex():
        _State.device_fill(target, source.item())
        return
    if source.dtype != target.dtype:
        source = source.to(target.dtype)
    if source.numel() != target.numel():
        staged = torch.empty(source.shape, dtype=target.dtype, device="mps")
        upload(staged, source)
        _State.device_copy(target, staged)
        return
    if source.shape != target.shape:
        source = source.expand(target.shape)
    order = _dense_order(target)
    if order is None:
        source = source.contiguous()
        if source.numel() * source.element_size() > _largest():
            staged = torch.empty(source.shape, dtype=target.dtype, device="mps")
            upload(staged, source)
            _State.device_copy(target, staged)
            return
        _send(target, _memory(source))
        return
    source = source.permute(order).contiguous()
    _send_flat(target, source)


def _largest() -> int:
    """Bytes that one bulk message may carry."""
    ring = link.ring()
    return ring.segment_bytes if ring is not None else INLINE_PIECE_BYTES


def _send_flat(target, source) -> None:
    """To a dense target, in pieces that the ring holds."""
    data, width, code = _memory(source), source.element_size(), _codes[target.dtype]
    address = target.data_ptr()
    piece = _largest() // width * width
    if len(data) <= piece:
        _send_bytes(_described(target) if target.is_contiguous() else _flat(address, len(data), width, code), data)
        return
    for start in range(0, len(data), piece):
        part = data[start : start + piece]
        _send_bytes(_flat(address + start, len(part), width, code), part)


def _flat(address: int, size: int, width: int, code: int) -> bytes:
    return descriptor(address, (size // width,), (1,), code)


def _send(target, data: memoryview) -> None:
    _send_bytes(_described(target), data)


def _send_bytes(place: bytes, data: memoryview) -> None:
    link.check()
    ring = link.ring()
    if ring is not None and len(data) >= RING_FROM_BYTES:
        with link.lock:
            offset = ring.fill(data)
            link.send(frames.message(protocol.UPLOAD_RING, offset, len(data), body=place))
            ring.filled()
        return
    # One piece: another thread's message may come before or after it, not within.
    link.send(frames.message(protocol.UPLOAD, len(data), body=place, data=data.tobytes()))


def download(source, target=None):
    """Device to container: a CPU tensor of the source's type, or `target`, which must be contiguous and fit."""
    if target is None:
        target = torch.empty(source.shape, dtype=source.dtype)
    if source.numel() == 0:
        return target
    data = _memory(target)
    link.check()
    ring = link.ring()
    if len(data) > _largest() and not source.is_contiguous():
        source = source.contiguous()
    if ring is None or len(data) < RING_FROM_BYTES:
        link.request_into(frames.message(protocol.DOWNLOAD, body=_described(source)), data)
        return target
    with link.lock:
        _receive_ring(ring, source, data)
    return target


def _receive_ring(ring, source, data: memoryview) -> None:
    """One piece of the ring is filled by the host while the one before it is copied out here."""
    width, code = source.element_size(), _codes[source.dtype]
    address = source.data_ptr()
    piece = ring.segment_bytes // width * width
    waiting = []

    def take() -> None:
        ticket, offset, into = waiting.pop(0)
        link.collect(ticket)
        ring.copy_out(offset, into)

    for start in range(0, len(data), piece):
        part = data[start : start + piece]
        place = _described(source) if len(data) <= piece else _flat(address + start, len(part), width, code)
        offset = ring.claim(len(part))
        waiting.append((link.post(frames.message(protocol.DOWNLOAD_RING, offset, body=place)), offset, part))
        if len(waiting) > 1:
            take()
    while waiting:
        take()


def copy_(self, source, non_blocking=False):
    """aten::copy_ where either side is on the device."""
    if self.is_conj() or self.is_neg():
        return _copy_to_lazy(self, source)
    if source.is_mps and (source.is_conj() or source.is_neg()):
        source = resolve_lazy(source)
    if not self.is_mps:
        _copy_to_container(self, source)
    elif source.is_mps:
        _State.device_copy(self, source)
    else:
        upload(self, source)
    return self


def _copy_to_lazy(self, source):
    """The target's bits are a promise about its reader, so the opposite is what has to be stored."""
    if self.is_conj():
        torch._conj(self).copy_(torch.conj_physical(source) if source.is_complex() else source)
    else:
        torch._neg_view(self).copy_(torch.neg(source))
    return self


def _copy_to_container(target, source) -> None:
    if target.dtype == source.dtype and target.shape == source.shape and target.is_contiguous():
        download(source, target.detach())
        return
    if target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride():
        order = _dense_order(target)
        if order is not None:
            download(source.permute(order), target.detach().permute(order))
            return
    target.copy_(download(source))


def copy_from(source, target, non_blocking=False):
    """aten::_copy_from."""
    return copy_(target, source)


def copy_from_and_resize(source, target):
    """aten::_copy_from_and_resize."""
    target.resize_(source.shape)
    return copy_(target, source)


def local_scalar_dense(tensor):
    """aten::_local_scalar_dense, which is `item()`: a round trip."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = resolve_lazy(tensor)
    link.check()
    return link.request(frames.message(protocol.ITEM, body=_described(tensor)))

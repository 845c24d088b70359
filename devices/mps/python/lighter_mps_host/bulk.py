# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors' bytes between the client and the device: through the stream, or through the ring that both sides map.

Refuses descriptors that do not fit together, more bytes than the storage or the client's limit holds, and rings that
could be shortened while they are read (no seals), which would end this process with a bus error.
"""

import fcntl
import mmap
import os

import torch

from lighter_mps_wire.protocol import ADDRESS_BITS

from .errors import Failure, Refusal, Violation
from .reader import tensor_bytes
from .storages import BYTES, TENSOR

MIN_RING_BYTES = 64 << 10
MAX_RING_BYTES = 1 << 30
ALIGNMENT = 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class Ring:
    """The memory that the client shares for bulk data."""

    def __init__(self, descriptor: int, size):
        if type(size) is not int or not MIN_RING_BYTES <= size <= MAX_RING_BYTES:
            raise Violation(f"a ring of {size!r:.40} bytes; {MIN_RING_BYTES} to {MAX_RING_BYTES} are taken")
        if not SEALS:
            raise Violation("this host's system has no sealed memory, so it takes no ring")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            raise Violation("the ring is no memfd") from None
        if seals & SEALS != SEALS:
            raise Violation("the ring is not sealed against shrinking and growing")
        if os.fstat(descriptor).st_size != size:
            raise Violation(f"the ring has {os.fstat(descriptor).st_size} bytes, {size} were announced")
        try:
            self.memory = mmap.mmap(descriptor, size)
        except OSError as error:
            raise Violation(f"the ring cannot be mapped: {error.strerror}") from None
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.size = size

    def part(self, offset: int, size: int, dtype):
        """Bytes of the ring as a flat tensor."""
        if offset % ALIGNMENT or offset > self.size or size > self.size - offset:
            raise Violation(f"{size} bytes at {offset} of a ring of {self.size}: out of it, or not a multiple of 16")
        return self.tensor[offset : offset + size].view(dtype)


class Descriptor:
    """What UPLOAD, DOWNLOAD and ITEM name: a tensor of the client's, or the failure that it is."""

    def __init__(self, value, storages):
        match value:
            case [int(address), list(sizes), list(strides), int(code)] if len(sizes) == len(strides):
                pass
            case _:
                raise Violation("a tensor's descriptor has the wrong form")
        if any(type(number) is not int or number < 0 for number in (address, *sizes, *strides)):
            raise Violation("a tensor's descriptor has numbers out of range")
        self.address, self.sizes, self.code = address, tuple(sizes), code
        self.layout = storages.passing_layout(self.sizes, tuple(strides), code)
        elements = 1
        for size in sizes:
            elements *= size
        self.bytes = elements * self.layout.item_bytes
        self.storages = storages

    def tensor(self):
        """The tensor itself; raises Failed where there is only a failure."""
        return self.layout.get(self.address) if self.address in self.layout else self.layout.fresh(self.address)

    def check_target(self) -> None:
        """An upload writes each byte once, so it is never larger than its storage."""
        entry = self.storages.heap.get(self.address >> ADDRESS_BITS)
        if self.bytes and entry is not None and type(entry[TENSOR]) is not Failure and self.bytes > entry[BYTES]:
            raise Refusal(f"an upload of {self.bytes} bytes into a storage of {entry[BYTES]}")


def upload(reader, descriptor: Descriptor, size: int) -> None:
    """UPLOAD: the bytes follow in the stream. They are taken in any case, so that the next message is found."""
    taken = False
    try:
        if size != descriptor.bytes:
            raise Violation(f"an upload of {size} bytes for a tensor of {descriptor.bytes}")
        descriptor.check_target()
        target = descriptor.tensor()
        if size == 0:
            return
        if target.device.type == "cpu" and target.is_contiguous():
            taken = True
            reader.take_into(tensor_bytes(target, size))
            return
        source = torch.empty(descriptor.sizes, dtype=descriptor.layout.dtype)
        taken = True
        reader.take_into(tensor_bytes(source, size))
        target.copy_(source)
    finally:
        if not taken:
            reader.skip(size)


def upload_from_ring(ring: Ring, descriptor: Descriptor, offset: int, size: int) -> None:
    """UPLOAD_RING."""
    if size != descriptor.bytes:
        raise Violation(f"an upload of {size} bytes for a tensor of {descriptor.bytes}")
    part = ring.part(offset, size, descriptor.layout.dtype)
    descriptor.check_target()
    if size:
        descriptor.tensor().copy_(part.view(descriptor.sizes))


def download(descriptor: Descriptor):
    """DOWNLOAD: the tensor's elements, dense, in the processor's memory."""
    if descriptor.bytes > descriptor.storages.max_bytes:
        raise descriptor.storages.out_of_memory(descriptor.bytes)
    return descriptor.tensor().to("cpu").contiguous()


def download_to_ring(ring: Ring, descriptor: Descriptor, offset: int) -> None:
    """DOWNLOAD_RING."""
    part = ring.part(offset, descriptor.bytes, descriptor.layout.dtype)
    tensor = descriptor.tensor()
    if descriptor.bytes:
        part.view(descriptor.sizes).copy_(tensor)

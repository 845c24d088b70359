# SPDX-License-Identifier: MIT OR Apache-2.0
"""The memory that client and host share for bulk data: a memfd, whose descriptor goes over the socket once.

Used by `copies`, under `link.lock`. The ring is cut into segments. A segment that was filled is used again only after a
reply that was asked for later than its last message has come, so one segment's WAIT is asked for as soon as it is full
and read only when its turn comes again: the host copies one while the client fills the next.
"""

import ctypes
import fcntl
import mmap
import os

from lighter_mps_wire import protocol

from . import link

SEGMENTS = 4
SEGMENT_BYTES = 16 << 20
_ALIGNMENT = 64
# linux/fcntl.h; Python has names for them only in some builds.
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4
_WAIT = bytes((protocol.WAIT,))


class Ring:
    """The mapping, and where the next bytes go."""

    bytes = SEGMENTS * SEGMENT_BYTES
    segment_bytes = SEGMENT_BYTES

    def __init__(self, descriptor: int):
        self.map = mmap.mmap(descriptor, self.bytes)
        self.view = memoryview(self.map)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.segment = 0
        self.used = 0
        self.tickets = [None] * SEGMENTS

    def claim(self, size: int) -> int:
        """The offset of `size` free bytes in one piece; waits for the host where all segments are in use."""
        if self.used + size > SEGMENT_BYTES:
            if self.tickets[self.segment] is None:
                self.tickets[self.segment] = link.post(_WAIT)
            self.segment = (self.segment + 1) % SEGMENTS
            self.used = 0
            ticket, self.tickets[self.segment] = self.tickets[self.segment], None
            if ticket is not None:
                link.collect(ticket)
        offset = self.segment * SEGMENT_BYTES + self.used
        self.used += size + -size % _ALIGNMENT
        return offset

    def fill(self, data: memoryview) -> int:
        """Copies bytes in; gives their offset."""
        offset = self.claim(len(data))
        source = ctypes.addressof(ctypes.c_char.from_buffer(data))
        ctypes.memmove(self.base + offset, source, len(data))
        return offset

    def filled(self) -> None:
        """The message that names the bytes is on the stream; a full segment is asked to be free again at once."""
        if self.used >= SEGMENT_BYTES // 2:
            self.tickets[self.segment] = link.post(_WAIT)
            self.segment = (self.segment + 1) % SEGMENTS
            self.used = 0
            ticket, self.tickets[self.segment] = self.tickets[self.segment], None
            if ticket is not None:
                link.collect(ticket)

    def copy_out(self, offset: int, into: memoryview) -> None:
        """Copies bytes out."""
        target = ctypes.addressof(ctypes.c_char.from_buffer(into))
        ctypes.memmove(target, self.base + offset, len(into))


def make():
    """A new ring and the descriptor to pass, or None where this kernel or sandbox gives no memfd."""
    try:
        descriptor = os.memfd_create("lighter-mps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    os.ftruncate(descriptor, Ring.bytes)
    # The host refuses memory that could be taken from under it.
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    return descriptor, Ring(descriptor)

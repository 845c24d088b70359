# SPDX-License-Identifier: MIT OR Apache-2.0
"""The stream's bytes: one growing buffer that messages are read from in place, and sending.

`Session` runs through `buffer` itself; it calls `fill` only where a message is not there whole. The end of the stream
between messages is None's business (`fill` says False), inside a message it is a Violation.
"""

import ctypes
import socket

from .errors import Violation

FIRST_BYTES = 256 << 10
# Heads are unpacked before it is known whether they are there whole; what lies behind the end is never used.
SLACK_BYTES = 64


class Reader:
    """Buffered reading of a stream socket."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.buffer = bytearray(FIRST_BYTES + SLACK_BYTES)
        self.view = memoryview(self.buffer)
        self.at = self.end = 0
        self.received = self.sent = 0

    def fill(self, wanted: int, inside: bool = True) -> bool:
        """Makes `wanted` bytes stand at `at`; False where the stream ends and no message was begun."""
        if self.at + wanted > len(self.buffer) - SLACK_BYTES:
            self.move(wanted)
        elif self.at == self.end:
            self.at = self.end = 0
        while self.end - self.at < wanted:
            with self.view[self.end : len(self.buffer) - SLACK_BYTES] as room:
                got = self.connection.recv_into(room)
            if got == 0:
                if inside or self.end > self.at:
                    raise Violation("the stream ended inside a message")
                return False
            self.end += got
            self.received += got
        return True

    def move(self, wanted: int) -> None:
        """Moves what is left to the front, of a larger buffer where this one is too small."""
        rest = bytes(self.view[self.at : self.end])
        if wanted > len(self.buffer) - SLACK_BYTES:
            self.view.release()
            self.buffer = bytearray(2 * wanted + SLACK_BYTES)
            self.view = memoryview(self.buffer)
        self.buffer[: len(rest)] = rest
        self.at, self.end = 0, len(rest)

    def take(self, size: int) -> bytes:
        """The next bytes, copied."""
        self.fill(size)
        data = bytes(self.view[self.at : self.at + size])
        self.at += size
        return data

    def take_into(self, target: memoryview) -> None:
        """The next bytes, as many as the target holds: what is buffered first, the rest straight from the socket."""
        done = min(len(target), self.end - self.at)
        target[:done] = self.view[self.at : self.at + done]
        self.at += done
        while done < len(target):
            with target[done:] as room:
                got = self.connection.recv_into(room)
            if got == 0:
                raise Violation("the stream ended inside a message")
            done += got
            self.received += got

    def skip(self, size: int) -> None:
        """Passes over bytes without keeping them."""
        waste = memoryview(bytearray(min(size, 1 << 20)))
        while size:
            part = min(size, len(waste))
            self.take_into(waste[:part])
            size -= part

    def send(self, *parts) -> None:
        """Sends all of it."""
        for part in parts:
            self.connection.sendall(part)
            self.sent += len(part)


def tensor_bytes(tensor, size: int) -> memoryview:
    """The memory of a contiguous tensor of the processor's; valid as long as the tensor lives."""
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")

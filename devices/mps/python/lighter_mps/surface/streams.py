# SPDX-License-Identifier: MIT OR Apache-2.0
"""`torch.mps.Stream` and the functions around it, in the torch versions that have them.

The host runs every operator of a client in one queue, in order (two threads on one Metal device crash). So a stream
is a name here: work put on any of them runs after everything before it, which is more order than a program may ask
for, never less.
"""

import itertools
import threading

import torch

_ids = itertools.count(1)
_current = threading.local()


class Stream:
    """A name for the one queue; the stream 0 is the default one."""

    def __init__(self, *, stream_id: int | None = None):
        self.stream_id = next(_ids) if stream_id is None else stream_id

    def synchronize(self) -> None:
        """Waits for everything that was put on the device."""
        torch.mps.synchronize()

    def query(self) -> bool:
        """Whether the work is done; waits for it, as the queue has no other way to know."""
        torch.mps.synchronize()
        return True

    def __eq__(self, other):
        return isinstance(other, Stream) and self.stream_id == other.stream_id

    def __hash__(self):
        return hash(self.stream_id)

    def __repr__(self):
        return f"<torch.mps.Stream stream_id={self.stream_id}>"


def _current_stream():
    return getattr(_current, "stream", None) or Stream(stream_id=0)


def _set_stream(stream):
    _current.stream = stream


def install() -> None:
    """Replaces the class where torch has one; older versions have no streams for mps."""
    if not hasattr(torch.mps, "Stream"):
        return
    import torch.mps.streams as streams

    torch._C._mps_getCurrentStream = _current_stream
    torch._C._mps_setStream = _set_stream
    Stream.__module__ = "torch.mps"
    torch.mps.Stream = streams.Stream = Stream

# SPDX-License-Identifier: MIT OR Apache-2.0
"""`torch.accelerator` on mps: waiting, memory figures and the default generator.

Torch's C++ asks an allocator and a guard object in this process for these; the figures are the host's. Which of the
names exist depends on the torch version; a name that torch lacks stays away.
"""

import torch

from lighter_mps_wire import protocol

from .. import link
from . import generator, messages


class _Peaks:
    """What `max_memory_*` report: the highest figure that was seen when somebody asked."""

    def __init__(self):
        self.allocated = 0
        self.reserved = 0

    def note(self, figures: dict) -> dict:
        # A driver that does not say what it holds holds at least this.
        figures["driver_bytes"] = figures["driver_bytes"] or figures["held_bytes"]
        self.allocated = max(self.allocated, figures["held_bytes"])
        self.reserved = max(self.reserved, figures["driver_bytes"])
        return figures

    def reset(self, *_):
        self.__init__()


def _statistics(figures: dict, peaks: _Peaks) -> dict:
    """The nested form that `torch.accelerator.memory_stats` flattens."""

    def pools(current, peak):
        return {"all": {"current": current, "peak": peak}}

    return {
        "allocated": pools(figures["storages"], figures["storages"]),
        "allocated_bytes": pools(figures["held_bytes"], peaks.allocated),
        "active": pools(figures["storages"], figures["storages"]),
        "active_bytes": pools(figures["held_bytes"], peaks.allocated),
        "reserved_bytes": pools(figures["driver_bytes"], peaks.reserved),
    }


def _capability(_index=0) -> dict:
    """Element types that a tensor on mps may have."""
    names = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "bool", "complex64", "complex32")
    return {"supported_dtypes": {getattr(torch, name) for name in names}}


def _functions() -> dict:
    peaks = _Peaks()

    def figures():
        return peaks.note(messages.query(protocol.QUERY_MEMORY))

    def memory_info(_index=0):
        held = figures()["driver_bytes"]
        total = int(messages.query(protocol.QUERY_DEVICE)["max_bytes"])
        return max(total - held, 0), total

    return {
        "_accelerator_synchronizeDevice": lambda _index=0: link.wait(),
        "_accelerator_emptyCache": lambda: messages.query(protocol.QUERY_EMPTY_CACHE) and None,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": lambda _index=0: _statistics(figures(), peaks),
        "_accelerator_resetPeakStats": peaks.reset,
        "_accelerator_resetAccumulatedStats": lambda _index=0: None,
        "_accelerator_getMemoryInfo": memory_info,
        "_accelerator_getDeviceCapability": _capability,
        "_accelerator_getDefaultGenerator": lambda _index=0: generator.default_generator(),
    }


def install() -> None:
    """Replaces the C functions that this torch has."""
    for name, function in _functions().items():
        if hasattr(torch._C, name):
                setattr(torch._C, name, function)

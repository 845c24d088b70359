# SPDX-License-Identifier: MIT OR Apache-2.0
"""`torch.mps`, `torch.backends.mps` and the `torch._C._mps_*` functions under them.

Torch's own Python code stays; the C functions that a Linux build refuses (`... without MPS backend`) or lacks are
answered here. Refused with a clear sentence: what only exists inside a Mac's own process (Metal shaders, signposts,
captures, host pointers of Metal buffers).
"""

import torch

from lighter_mps_wire import protocol

from .. import link
from . import fork, messages

_events = messages.Numbers(protocol.EVENT, protocol.EVENT_FREE)

# C functions that need Metal in this very process -> what they are for
_NEEDS_METAL = {
    "_mps_compileShader": "torch.mps.compile_shader",
    "_mps_loadMetalllib": "torch.mps.load_metallib",
    "_mps_loadMetallibFromPath": "torch.mps.load_metallib",
    "_mps_host_alias_storage": "torch.mps._host_alias_storage",
    "_mps_startCapture": "torch.mps.profiler.metal_capture",
    "_mps_profilerStartTrace": "torch.mps.profiler.start",
}


class _DeviceContext:
    """`torch.mps.device(index)`: there is one device, so entering it only checks the index."""

    def __init__(self, device):
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        if index not in (None, -1, 0):
            raise RuntimeError(f"mps:{index} is not there: the mps device has the index 0 only")

    def __enter__(self):
        return None

    def __exit__(self, *exception):
        return False


def _refusal(name: str):
    def refuse(*args, **kwargs):
        raise RuntimeError(
            f"{name} is not there for the mps device in a container: it needs Metal in this process, "
            "and the operators run in the host's PyTorch; run it on the host itself"
        )

    return refuse


def _functions() -> dict:
    """Every C function by its name in `torch._C`."""

    def memory(key):
        figures = messages.query(protocol.QUERY_MEMORY)
        return int(figures["held_bytes"] if figures[key] is None else figures[key])

    def about(key):
        return messages.query(protocol.QUERY_DEVICE).get(key)

    def acquire_event(enable_timing=False):
        number = _events.take()
        messages.event(number, protocol.EVENT_NEW)
        return number

    functions = {
        "_mps_is_available": lambda: True,
        "_mps_is_in_bad_fork": fork.in_forked_child,
        # What depends on the Mac's system is decided by the host's torch, operator by operator.
        "_mps_is_on_macos_or_newer": lambda major, minor: True,
        "_mps_deviceSynchronize": link.wait,
        "_mps_emptyCache": lambda: messages.query(protocol.QUERY_EMPTY_CACHE) and None,
        "_mps_setMemoryFraction": _check_fraction,
        "_mps_currentAllocatedMemory": lambda: memory("held_bytes"),
        "_mps_driverAllocatedMemory": lambda: memory("driver_bytes"),
        "_mps_recommendedMaxMemory": lambda: int(about("max_bytes")),
        "_mps_maxBufferLength": lambda: int(about("max_bytes")),
        "_mps_get_name": lambda: str(about("name")),
        "_mps_get_core_count": lambda: int(about("cores") or 0),
        "_mps_acquireEvent": acquire_event,
        "_mps_releaseEvent": _events.give_back,
        "_mps_recordEvent": lambda event: messages.event(event, protocol.EVENT_RECORD),
        # One queue on the host: whatever follows runs after the event anyway.
        "_mps_waitForEvent": lambda event: None,
        "_mps_synchronizeEvent": lambda event: messages.event_ask(event, protocol.EVENT_WAIT) and None,
        "_mps_queryEvent": lambda event: bool(messages.event_ask(event, protocol.EVENT_QUERY)),
        "_mps_elapsedTimeOfEvents": lambda start, end: float(
            messages.event_ask(start, protocol.EVENT_ELAPSED, end)
        ),
        "_mps_isCaptureEnabled": lambda: False,
        "_mps_isCapturing": lambda: False,
        "_mps_stopCapture": lambda *args: None,
        "_mps_profilerStopTrace": lambda: None,
    }
    return functions | {name: _refusal(public) for name, public in _NEEDS_METAL.items()}


def _check_fraction(fraction: float) -> None:
    """Accepted without effect: the host's own limit on the worker (`max_bytes`) is what counts."""


def _forget_answers() -> None:
    """Answers that torch remembered before the device was there."""
    for name in ("is_available", "is_macos13_or_newer", "is_macos_or_newer", "get_name", "get_core_count"):
        clear = getattr(getattr(torch.backends.mps, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def install() -> None:
    """Puts the functions in place."""
    for name, function in _functions().items():
        setattr(torch._C, name, function)
    torch._C._has_mps = True
    torch.mps._is_in_bad_fork = fork.in_forked_child
    torch.mps.device = _DeviceContext
    # Checkpoints keep a device's random state only where its module says that it is in use.
    torch.mps._initialized = True
    if not hasattr(torch.mps, "is_available"):
        torch.mps.is_available = lambda: torch.mps.device_count() > 0
    if not hasattr(torch.mps, "current_device"):
        torch.mps.current_device = lambda: 0
    _forget_answers()

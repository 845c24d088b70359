# SPDX-License-Identifier: MIT OR Apache-2.0
"""`torch.Event` and `torch.Stream` on mps, the classes that are the same for every accelerator.

In C++ both ask the device's guard, which in this process knows neither the host's clock nor its queue. `install` puts
classes in torch's place that are torch's own for every other device; on mps an event is the host's, and a stream is a
name of its one queue.
"""

import torch

_Event, _Stream = torch.Event, torch.Stream


def _kind(base):
    """A metaclass by which a class that took the place of `base` still has all of `base`'s objects as instances."""

    class Kind(type(base)):
        def __instancecheck__(cls, instance):
            return isinstance(instance, base) if cls.__base__ is base else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass):
            return issubclass(subclass, base) if cls.__base__ is base else super().__subclasscheck__(subclass)

    return Kind


def _is_mps(device) -> bool:
    return device is None or torch.device("mps" if isinstance(device, int) else device).type == "mps"


class Event(_Event, metaclass=_kind(_Event)):
    """A mark in a device's work; on mps the host's, which measures there."""

    def __new__(cls, device=None, **kwargs):
        if _is_mps(device):
            event = _Event.__new__(cls, device="mps")
            event._mark = torch.mps.Event(enable_timing=kwargs.get("enable_timing", False))
            event._recorded = False
            return event
        return _Event(device, **kwargs) if cls is Event else _Event.__new__(cls, device, **kwargs)

    def record(self, stream=None):
        """Notes where the device's work is."""
        if not hasattr(self, "_mark"):
            return super().record(*([] if stream is None else [stream]))
        self._mark.record()
        self._recorded = True
        return None

    def wait(self, stream=None):
        """Makes later work come after the event, which in one queue it does."""
        if not hasattr(self, "_mark"):
            super().wait(*([] if stream is None else [stream]))

    def query(self):
        """Whether the work before the event is done."""
        if not hasattr(self, "_mark"):
            return super().query()
        return not self._recorded or self._mark.query()

    def synchronize(self):
        """Waits until the work before the event is done."""
        if not hasattr(self, "_mark"):
            return super().synchronize()
        if self._recorded:
            self._mark.synchronize()
        return None

    def elapsed_time(self, end_event):
        """Milliseconds between two recorded events."""
        if not hasattr(self, "_mark"):
            return super().elapsed_time(end_event)
        return self._mark.elapsed_time(end_event._mark)


class Stream(_Stream, metaclass=_kind(_Stream)):
    """A queue of a device's work; on mps a name of the one that there is."""

    def __new__(cls, device=None, **kwargs):
        if _is_mps(device) and "stream_id" not in kwargs:
            return _Stream.__new__(cls, device="mps")
        return _Stream(device, **kwargs) if cls is Stream else _Stream.__new__(cls, device, **kwargs)

    def synchronize(self):
        """Waits for everything that was put on the device."""
        if self.device.type == "mps":
            torch.mps.synchronize()
        else:
            super().synchronize()

    def record_event(self, event=None):
        """An event at the end of what was put on the device so far."""
        if self.device.type != "mps":
            return super().record_event(*([] if event is None else [event]))
        event = Event("mps", enable_timing=True) if event is None else event
        event.record()
        return event

    def wait_event(self, event):
        """Makes later work come after the event, which in one queue it does."""
        if self.device.type != "mps":
            super().wait_event(event)

    def wait_stream(self, other):
        """Makes later work come after the other stream's, which in one queue it does."""
        if self.device.type != "mps":
            super().wait_stream(other)


def install() -> None:
    """Puts both classes in torch's place."""
    for ours in (Event, Stream):
        ours.__module__ = "torch"
        setattr(torch, ours.__name__, ours)
    if hasattr(torch._C, "_accelerator_getStream"):
        torch._C._accelerator_getStream = lambda _index=0: Stream("mps")

# SPDX-License-Identifier: MIT OR Apache-2.0
"""`torch.Generator(device="mps")`, and the default generator of the device.

`install` puts a class in torch's place whose instances for mps are real `torch._C.Generator` objects (the argument
parsers in C++ ask for nothing else) with a number that names a generator on the host. For every other device the
class gives torch's own objects, and `isinstance(x, torch.Generator)` stays true for all of them.

The kernels find the number with `number_of`: dispatch hands them another Python object for the same C++ generator, so
the C++ address is the key. A generator of the container's own processor has no number; `cpu_generator` runs such an
operator here.
"""

import ctypes
import os
import weakref

import torch

from lighter_mps_wire import protocol

from . import messages

# c10::default_rng_seed_val: what torch gives a generator that nobody seeded
DEFAULT_SEED = 67280421310721
SEED_BITS = 53

_Base = torch._C.Generator
_numbers = messages.Numbers(protocol.GENERATOR, protocol.GENERATOR_FREE)
# address of the C++ generator -> number on the host
_by_address: dict = {}
_default = None


class _GeneratorType(type(_Base)):
    """Makes `isinstance` and `issubclass` true for torch's own generators too."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, _Base) if cls is Generator else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass):
        return issubclass(subclass, _Base) if cls is Generator else super().__subclasscheck__(subclass)


class Generator(_Base, metaclass=_GeneratorType):
    """`torch.Generator`: a random number generator of the given device, the processor's by default."""

    def __new__(cls, device=None):
        device = torch.device("cpu" if device is None else device)
        if device.type != "mps":
            return _Base(device) if cls is Generator else _Base.__new__(cls, device)
        return _new(cls, None)

    @property
    def device(self):
        """Where the generator's numbers are drawn."""
        return _mps() if self._cdata in _by_address else super().device

    def manual_seed(self, seed):
        """Seeds the generator; returns it."""
        super().manual_seed(seed)
        number = _by_address.get(self._cdata)
        if number is not None:
            messages.generator_seed(number, int(seed))
        return self

    def seed(self):
        """Seeds the generator with a number from the operating system; returns that number."""
        if self._cdata not in _by_address:
            return super().seed()
        seed = int.from_bytes(os.urandom(8), "little") >> (64 - SEED_BITS)
        self.manual_seed(seed)
        return seed

    def initial_seed(self):
        """The seed that the generator began with."""
        number = _by_address.get(self._cdata)
        return super().initial_seed() if number is None else messages.generator_initial_seed(number)

    def get_state(self):
        """The state as a ByteTensor on the processor."""
        number = _by_address.get(self._cdata)
        if number is None:
            return super().get_state()
        return torch.frombuffer(bytearray(messages.generator_state(number)), dtype=torch.uint8)

    def set_state(self, new_state):
        """Puts a state back that `get_state` gave; returns the generator."""
        number = _by_address.get(self._cdata)
        if number is None:
            return super().set_state(new_state)
        if not isinstance(new_state, torch.Tensor) or new_state.dtype is not torch.uint8 or new_state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        messages.generator_set_state(number, _bytes(new_state))
        return self

    def clone_state(self):
        """Another generator with the same state."""
        if self._cdata not in _by_address:
            return super().clone_state()
        return Generator("mps").set_state(self.get_state())

    def get_offset(self):
        """Refused as on a Mac: the device's generators have no offset."""
        return self._only_elsewhere("get_offset")

    def set_offset(self, offset):
        """Refused as on a Mac: the device's generators have no offset."""
        return self._only_elsewhere("set_offset", offset)

    def graphsafe_get_state(self):
        """Refused as on a Mac: there are no graphs to be safe for."""
        return self._only_elsewhere("graphsafe_get_state")

    def graphsafe_set_state(self, state):
        """Refused as on a Mac: there are no graphs to be safe for."""
        return self._only_elsewhere("graphsafe_set_state", state)

    def __reduce__(self):
        if self._cdata not in _by_address:
            return super().__reduce__()
        return _with_state, (self.get_state(),)

    def _only_elsewhere(self, name, *args):
        if self._cdata in _by_address:
            raise RuntimeError(f"torch.Generator.{name} is not there for the mps device; use get_state and set_state")
        return getattr(super(), name)(*args)


def _new(cls, number):
    """An mps generator; `number` only for the default one, which the host has from the start."""
    # The C++ object is a processor's generator: C++ has no class for mps in a Linux build. Operators on the processor
    # that are handed this generator draw from it, so it is seeded alike.
    generator = _Base.__new__(cls, torch.device("cpu"))
    if number is None:
        number = _numbers.take()
        messages.generator_new(number, DEFAULT_SEED)
        weakref.finalize(generator, _gone, generator._cdata, number).atexit = False
    _by_address[generator._cdata] = number
    return generator


def _gone(address, number):
    _by_address.pop(address, None)
    _numbers.give_back(number)


def _with_state(state):
    return Generator("mps").set_state(state)


def _bytes(tensor) -> bytes:
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _mps():
    return torch.device("mps", 0)


def number_of(generator) -> int | None:
    """The host's number of a generator as an operator got it; None for one of the container's processor."""
    return _by_address.get(generator._cdata)


def default_generator():
    """The device's default generator."""
    return _default


def install() -> None:
    """Puts the class in torch's place and makes the default generator."""
    global _default
    _default = _new(Generator, protocol.DEFAULT_GENERATOR)
    Generator.__module__ = "torch"
    torch.Generator = Generator
    torch._C._mps_get_default_generator = default_generator
    torch.mps._default_mps_generator = _default

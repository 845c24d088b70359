# SPDX-License-Identifier: MIT OR Apache-2.0
"""The messages that torch's Python surface sends: generators, events, memory and device questions.

Used by the other files of this folder only. A message without a reply does not connect: `link` keeps it for the
connection, so `torch.manual_seed` works before, and without, a service on the host.
"""

from collections import deque
from itertools import count
from struct import pack

from lighter_mps_wire import protocol
from lighter_mps_wire.frames import message

from .. import link

MASK_64 = (1 << 64) - 1


class Numbers:
    """Numbers for things that the client names on the wire; a number that was given back is told to the host later.

    Things die in finalizers, which may run in the middle of anything, also while the client writes a message. So a
    finalizer only notes the number, and the next message of the same kind tells the host.
    """

    def __init__(self, kind: int, free: int):
        self._kind = kind
        self._free = free
        self._next = count(1)
        self._dead = deque()

    def take(self) -> int:
        """A number that was never used before."""
        self.sweep()
        return next(self._next)

    def give_back(self, number: int) -> None:
        """Called by finalizers on any thread."""
        self._dead.append(number)

    def sweep(self) -> None:
        """Tells the host about everything that died."""
        while self._dead:
            link.send(message(self._kind, self._dead.popleft(), self._free))


def generator_new(number: int, seed: int) -> None:
    """Makes a generator on the host."""
    head = message(protocol.GENERATOR, number, protocol.GENERATOR_NEW)
    link.send(head + pack("<Q", seed & MASK_64))


def generator_seed(number: int, seed: int) -> None:
    """Seeds a generator; in order with the operators around it."""
    head = message(protocol.GENERATOR, number, protocol.GENERATOR_SEED)
    link.send(head + pack("<Q", seed & MASK_64))


def generator_state(number: int) -> bytes:
    """A generator's state, as the host's torch writes it."""
    return link.request_bytes(message(protocol.GENERATOR, number, protocol.GENERATOR_GET_STATE))


def generator_set_state(number: int, state: bytes) -> None:
    """Puts a state back; the host refuses one of another size."""
    if len(state) > protocol.MAX_GENERATOR_STATE_BYTES:
        raise RuntimeError(f"a generator state of {len(state)} bytes is none of the mps device's")
    head = message(protocol.GENERATOR, number, protocol.GENERATOR_SET_STATE)
    link.request(head + pack("<I", len(state)) + state)


def generator_initial_seed(number: int) -> int:
    """The seed that a generator began with."""
    return link.request(message(protocol.GENERATOR, number, protocol.GENERATOR_INITIAL_SEED)) & MASK_64


def query(what: int):
    """The answer to one of the QUERY messages."""
    return link.request(message(protocol.QUERY, what))


def event(number: int, what: int) -> None:
    """An EVENT message without a reply: new or record."""
    link.send(message(protocol.EVENT, number, what))


def event_ask(number: int, what: int, other: int | None = None):
    """An EVENT message with a reply: elapsed, wait or query."""
    tail = b"" if other is None else pack("<I", other)
    return link.request(message(protocol.EVENT, number, what) + tail)

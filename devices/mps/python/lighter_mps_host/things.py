# SPDX-License-Identifier: MIT OR Apache-2.0
"""The client's generators and events by number. Refuses numbers in use, numbers of nothing, and floods of them."""

import torch

from lighter_mps_wire import protocol

from .errors import Violation

MAX_GENERATORS = 4096
MAX_EVENTS = 65_536


class Generators:
    """Number 0 is the device's default generator, which lives as long as the worker."""

    def __init__(self, engine):
        self.engine, self.device = engine, engine.device
        self.known = {protocol.DEFAULT_GENERATOR: engine.default_generator()}

    def get(self, number: int) -> torch.Generator:
        """A generator that exists."""
        found = self.known.get(number)
        if found is None:
            raise Violation(f"generator {number} is used but does not exist")
        return found

    def new(self, number: int, seed: int) -> None:
        if number in self.known or len(self.known) >= MAX_GENERATORS:
            raise Violation(f"generator {number} exists already, or there are {MAX_GENERATORS}")
        made = self.known[number] = self.engine.new_generator()
        made.manual_seed(seed)

    def free(self, number: int) -> None:
        if number == protocol.DEFAULT_GENERATOR or self.known.pop(number, None) is None:
            raise Violation(f"generator {number} is freed but does not exist")

    def state(self, number: int) -> bytes:
        state = self.get(number).get_state()
        return bytes(state.tolist())

    def set_state(self, number: int, state: bytes) -> None:
        self.get(number).set_state(torch.tensor(list(state), dtype=torch.uint8))


class Events:
    """Marks in the device's work."""

    def __init__(self, engine):
        self.engine = engine
        self.known = {}

    def get(self, number: int):
        found = self.known.get(number)
        if found is None:
            raise Violation(f"event {number} is used but does not exist")
        return found

    def new(self, number: int) -> None:
        if number in self.known or len(self.known) >= MAX_EVENTS:
            raise Violation(f"event {number} exists already, or there are {MAX_EVENTS}")
        self.known[number] = self.engine.new_event()

    def free(self, number: int) -> None:
        if self.known.pop(number, None) is None:
            raise Violation(f"event {number} is freed but does not exist")

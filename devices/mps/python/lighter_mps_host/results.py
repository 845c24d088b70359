# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a signature the careful way, once or when nothing may be assumed, and looks at what came out.

Used for RUN, and for the first CALL of a signature that came by DEFINE. Results that are arguments are told apart from
new ones; what shares memory with an argument or another result, lies at an offset, holds a larger storage than it needs,
or is on another device, is cloned, so that each new result has a storage of its own.
"""

import torch

from lighter_mps_wire.dtypes import tables
from lighter_mps_wire.protocol import (
    ADDRESS_BITS,
    SHAPE_LIST,
    SHAPE_SINGLE,
    SHAPE_TUPLE,
    SHAPE_VOID,
    SLOT_BOOL,
    SLOT_FLOAT,
    SLOT_INT,
    SLOT_TENSOR,
)
from lighter_mps_wire.values import ScalarSlot, TensorSlot

from .errors import Refusal, Violation
from .signatures import New, Signature
from .storages import span_bytes

Tensor = torch.Tensor


class Outcome:
    """What one careful run gave."""

    __slots__ = ("copied", "new", "resized", "results", "shape")

    def __init__(self, shape: str):
        self.shape, self.results, self.new, self.resized = shape, [], [], []
        # Whether any new result had to be copied to be a tensor of its own; it will have to each time.
        self.copied = False

    def predictable(self) -> bool:
        """Whether later calls may do without a reply."""
        return not self.resized and all(result is None or result[0] in "an" for result in self.results)


def slot_values(slots: str, values: list) -> list:
    """A RUN's slot values, checked against their kinds."""
    kinds = {SLOT_TENSOR: (int,), SLOT_INT: (int,), SLOT_FLOAT: (float,), SLOT_BOOL: (bool, int)}
    if len(values) != len(slots):
        raise Violation(f"{len(values)} values came for {len(slots)} slots")
    for kind, value in zip(slots, values, strict=True):
        if type(value) not in kinds[kind] or (kind == SLOT_TENSOR and value < 0):
            raise Violation(f"a slot of kind {kind} got {value!r:.60}")
    return values


class Run:
    """One careful run of a signature with its slots' values."""

    def __init__(self, signature: Signature, values, storages):
        self.signature, self.values, self.storages = signature, values, storages
        # By slot and look: an argument that comes twice is one tensor, so that it is known again as a result.
        self.tensors = {}
        self.written = []

    def fill(self, value, written: bool):
        """An argument with its slots filled."""
        kind = type(value)
        if kind is list:
            return [self.fill(entry, written) for entry in value]
        if kind is ScalarSlot:
            number = self.values[value.slot]
            return bool(number) if self.signature.slots[value.slot] == SLOT_BOOL else number
        if kind is not TensorSlot:
            return value
        tensor = self.tensors.get(value)
        if tensor is None:
            layout = self.storages.passing_layout(value.sizes, value.strides, value.dtype)
            # Not one that is kept: an operator may resize a result in place, and kept views must not change.
            tensor = self.tensors[value] = layout.fresh(self.values[value.slot])
        if written:
            self.written.append((value, tensor))
        return tensor

    def fill_all(self) -> tuple:
        """All arguments, by position and by keyword."""
        signature, written = self.signature, self.signature.operator.written
        names = signature.operator.positional
        arguments = [self.fill(value, name in written) for name, value in zip(names, signature.arguments, strict=False)]
        return arguments, {name: self.fill(value, name in written) for name, value in signature.keywords.items()}

    def execute(self, call) -> Outcome:
        """Calls the operator; raises what it raises."""
        arguments, keywords = self.fill_all()
        signature, operator = self.signature, self.signature.operator
        result = call(*arguments, **keywords)
        outcome = Outcome(shape_of(operator, result))
        self.note_resized(outcome)
        order = {slot: index for index, slot in enumerate(signature.tensor_slots)}
        by_id = {id(tensor): order[value.slot] for value, tensor in self.tensors.items()}
        self.taken = {tensor.untyped_storage()._cdata for tensor in self.tensors.values()}
        for entry in [] if outcome.shape == SHAPE_VOID else [result] if outcome.shape == SHAPE_SINGLE else result:
            outcome.results.append(self.describe(entry, by_id, outcome))
        return outcome

    def note_resized(self, outcome: Outcome) -> None:
        """Finds results given by the caller that the operator resized."""
        for slot, tensor in self.written:
            if tuple(tensor.shape) != slot.sizes:
                number = self.values[slot.slot] >> ADDRESS_BITS
                if number not in self.storages.heap:
                    raise Refusal(f"operator {self.signature.name} resizes a tensor that has no storage")
                self.storages.resized(number)
                index = self.signature.tensor_slots.index(slot.slot)
                outcome.resized.append([index, list(tensor.shape), list(tensor.stride())])

    def describe(self, entry, by_id: dict, outcome: Outcome):
        """One result as the reply tells it; new tensors are collected."""
        if entry is None:
            return None
        if isinstance(entry, Tensor):
            if id(entry) in by_id:
                return ["a", by_id[id(entry)]]
            tensor = self.own(entry)
            outcome.copied |= tensor is not entry
            outcome.new.append(tensor)
            code = tables().codes.get(tensor.dtype)
            if code is None:
                raise Refusal(f"operator {self.signature.name} gave a {tensor.dtype}, which is not carried")
            return ["n", list(tensor.shape), list(tensor.stride()), code]
        if isinstance(entry, (list, tuple)):
            return ["l", [self.describe(inner, by_id, outcome) for inner in entry]]
        if isinstance(entry, (bool, int, float, complex, str)):
            return ["v", entry]
        raise Refusal(f"operator {self.signature.name} gave a {type(entry).__name__}, which is not carried")

    def own(self, tensor: Tensor) -> Tensor:
        """A new result with a storage of its own, on the device, from offset 0."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise Refusal(f"operator {self.signature.name} gave a tensor that is not strided, which is not carried")
        if tensor.device != self.storages.device or tensor.is_conj() or tensor.is_neg():
            tensor = copied(tensor, self.storages.device)
        storage = tensor.untyped_storage()
        span = span_bytes(tuple(tensor.shape), tensor.stride(), tensor.element_size())
        if storage._cdata in self.taken or tensor.storage_offset() or storage.nbytes() > max(span, 1 << 12):
            tensor = copied(tensor, self.storages.device)
            storage = tensor.untyped_storage()
        self.taken.add(storage._cdata)
        return tensor


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device with the same strides where they leave no holes and no overlap, else a dense one."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.clone(memory_format=torch.preserve_format) if tensor.device == device else tensor.to(device)


def shape_of(operator, result) -> str:
    """How an operator's results are put together."""
    if not operator.returns:
        return SHAPE_VOID
    if isinstance(result, list):
        return SHAPE_LIST
    return SHAPE_TUPLE if isinstance(result, tuple) else SHAPE_SINGLE


def compare(signature: Signature, outcome: Outcome) -> str:
    """What is not as predicted, or nothing. Strides may differ: they are laid out anew."""
    if outcome.shape != signature.shape or len(outcome.results) != len(signature.results):
        return f"{len(outcome.results)} results of shape {outcome.shape!r}, predicted {len(signature.results)} of "
    if outcome.resized:
        return "a result given by the caller was resized"
    for got, wanted in zip(outcome.results, signature.results, strict=True):
        if type(wanted) is New:
            layout = wanted.layout
            if got is None or got[0] != "n" or tuple(got[1]) != layout.sizes or got[3] != layout.code:
                return f"predicted a new {layout.dtype} of {list(layout.sizes)}, got {got!r:.200}"
        elif wanted is None:
            if got is not None:
                return f"predicted None, got {got!r:.200}"
        elif got != ["a", wanted]:
            return f"predicted argument {wanted}, got {got!r:.200}"
    return ""


def laid_out(tensor: Tensor, layout) -> Tensor:
    """The tensor itself, or its values in the strides that were predicted."""
    if tensor.stride() == layout.strides:
        return tensor
    made = torch.empty_strided(layout.sizes, layout.strides, dtype=layout.dtype, device=tensor.device)
    return made.copy_(tensor)

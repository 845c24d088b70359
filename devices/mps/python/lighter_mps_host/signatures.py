# SPDX-License-Identifier: MIT OR Apache-2.0
"""What DEFINE and RUN describe: an operator, its arguments with places for each call's tensors and numbers, its results.

`parse` turns a decoded body into a `Signature` and refuses what does not fit together: a body of the wrong form is a
Violation, an operator or argument that this host does not run is a Refusal, which only this signature's calls get to see.
"""

import torch

from lighter_mps_wire.dtypes import DEVICE_MPS, element_name, tables
from lighter_mps_wire.frames import call_struct
from lighter_mps_wire.protocol import (
    MAX_SLOTS,
    SHAPE_LIST,
    SHAPE_SINGLE,
    SHAPE_TUPLE,
    SHAPE_VOID,
    SLOT_FORMATS,
    SLOT_TENSOR,
)
from lighter_mps_wire.values import Device, Dtype, Generator, Layout, MemoryFormat, ScalarSlot, TensorSlot

from .errors import Failure, Refusal, Violation, failure_of
from .schemas import Operator, check_kinds, find

# First fields of both bodies: id, operator, kinds, positional arguments, keyword arguments, kinds of slots.
COMMON = (int, str, str, list, dict, str)


class New:
    """A predicted result that is a new tensor."""

    __slots__ = ("bytes", "layout")

    def __init__(self, layout):
        self.layout, self.bytes = layout, layout.span


class Signature:
    """One way of calling one operator."""

    __slots__ = (
        "arguments",
        "body_bytes",
        "call",
        "copied",
        "failure",
        "keywords",
        "name",
        "number",
        "operator",
        "results",
        "shape",
        "slots",
        "struct",
        "tensor_slots",
    )

    def __init__(self, number: int, name: str, slots: str):
        self.number, self.name, self.slots = number, name, slots
        self.tensor_slots = [index for index, kind in enumerate(slots) if kind == SLOT_TENSOR]
        self.operator = self.call = self.failure = self.struct = self.shape = self.results = None
        self.arguments, self.keywords = [], {}
        self.copied = False

    def outputs(self) -> int:
        """New storages that each call makes."""
        return sum(type(result) is New for result in self.results)

    def predict(self, shape: str, results: list) -> None:
        """Sets what each call is expected to give; `results` holds New, argument indexes and None."""
        self.shape, self.results = shape, results
        self.struct = call_struct(self.slots, self.outputs())


def parse(fields: list, generators) -> Signature:
    """The signature that the common fields of DEFINE and RUN describe; one with a `failure` is refused when called."""
    if len(fields) < len(COMMON) or any(type(field) is not kind for field, kind in zip(fields, COMMON, strict=False)):
        raise Violation("a signature's body has the wrong form")
    number, name, kinds, arguments, keywords, slots = fields[: len(COMMON)]
    if not 0 <= number < 1 << 32:
        raise Violation(f"signature number {number} is out of range")
    if len(slots) > MAX_SLOTS or not set(slots) <= SLOT_FORMATS.keys():
        raise Violation(f"slots {slots[:40]!r} are too many or of unknown kinds")
    signature = Signature(number, name[:200], slots)
    check_slots(slots, [arguments, keywords])
    try:
        operator = signature.operator = find(name)
        names = check_kinds(operator, kinds, len(arguments), list(keywords))
        place(signature, operator, dict(zip(names, arguments, strict=True)) | keywords, generators)
    except Refusal as error:
        signature.failure = failure_of(error, signature.name, number)
    return signature


def check_slots(slots: str, arguments) -> None:
    """Each slot must be used, and be of the kind that its use needs."""
    used = set()
    waiting = [arguments]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is list:
            waiting.extend(value)
        elif kind is dict:
            waiting.extend(value.values())
        elif kind is TensorSlot or kind is ScalarSlot:
            if value.slot >= len(slots) or (slots[value.slot] == SLOT_TENSOR) != (kind is TensorSlot):
                raise Violation(f"slot {value.slot} of a signature is missing or of another kind")
            used.add(value.slot)
    if len(used) != len(slots):
        raise Violation(f"a signature has {len(slots)} slots and uses {len(used)} of them")


def place(signature: Signature, operator: Operator, by_name: dict, generators) -> None:
    """Orders arguments as this torch's schema wants them: positional as far as none is left out, the rest by name."""
    by_name = {name: native(value, generators) for name, value in by_name.items()}
    if by_name.get("pin_memory"):
        raise Refusal(f"operator {operator.name}: pinned memory is not carried to the host")
    positional = []
    for name in operator.positional:
        if name not in by_name:
            break
        positional.append(by_name.pop(name))
    signature.arguments, signature.keywords = positional, by_name


def native(value, generators):
    """A decoded argument with torch's objects in place of codes; slots stay."""
    kind = type(value)
    if kind is list:
        return [native(entry, generators) for entry in value]
    if kind is dict:
        raise Refusal("an argument is a dictionary, which no operator takes")
    if kind is Dtype:
        if value.code not in tables().dtypes:
            raise Refusal(f"the host's torch {torch.__version__} has no {element_name(value.code)}")
        return tables().dtypes[value.code]
    if kind is Device:
        return generators.device if value.code == DEVICE_MPS else torch.device("cpu")
    if kind is MemoryFormat:
        return tables().formats[value.code]
    if kind is Layout:
        return torch.strided
    if kind is Generator:
        return generators.get(value.number)
    return value


def parse_results(signature: Signature, shape, results, storages) -> None:
    """The prediction that comes with a DEFINE."""
    if shape not in (SHAPE_SINGLE, SHAPE_TUPLE, SHAPE_LIST, SHAPE_VOID) or type(results) is not list:
        raise Violation("predicted results have the wrong form")
    if len(results) != (1 if shape == SHAPE_SINGLE else 0 if shape == SHAPE_VOID else len(results)):
        raise Violation(f"{len(results)} predicted results do not fit shape {shape!r}")
    predicted = []
    for result in results:
        match result:
            case None:
                predicted.append(None)
            case ["a", int(index)] if 0 <= index < len(signature.tensor_slots):
                predicted.append(index)
            case ["n", list(sizes), list(strides), int(code)] if len(sizes) == len(strides):
                if any(type(number) is not int or number < 0 for number in [*sizes, *strides]):
                    raise Violation("a predicted result has sizes or strides that are no numbers")
                try:
                    predicted.append(New(storages.layout(tuple(sizes), tuple(strides), code)))
                except (Refusal, KeyError) as error:
                    signature.failure = signature.failure or failure_of(error, signature.name, signature.number)
                    predicted.append(New(storages.layout((0,), (1,), 0)))
            case _:
                raise Violation("a predicted result has the wrong form")
    signature.predict(shape, predicted)


def mismatch(signature: Signature, what: str) -> Failure:
    """The failure of a call whose results are not as predicted."""
    return Failure(signature.name, "RuntimeError", f"the host's result is not as predicted: {what}", signature.number)

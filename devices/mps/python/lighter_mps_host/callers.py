# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiles a signature into one straight-line Python function that runs a CALL: look up arguments, call, check, keep.

The source is put together from the templates below and indexes alone. Every object, also every value that a client
sent, comes in as a cell of a closure, and the only names taken from elsewhere are argument names of this torch's own
schemas. Equal sources are compiled once. Long lists become loops, so that the source stays short whatever is sent.
"""

from lighter_mps_wire.protocol import ADDRESS_BITS, MAX_STORAGE_NUMBER, SHAPE_SINGLE, SHAPE_VOID, SLOT_BOOL
from lighter_mps_wire.values import ScalarSlot, TensorSlot

from .results import copied, laid_out
from .schemas import safe_keyword
from .signatures import New, Signature

# More of anything than this becomes a loop.
MAX_UNROLLED = 24
MAX_SOURCES = 16_384
SOURCES = {}


class Mismatch(RuntimeError):
    """A result is not as predicted."""


def relayout(tensor, layout):
    """A result whose shape, type or strides are not those that were predicted: laid out anew, or refused."""
    if tensor.shape != layout.sizes or tensor.dtype is not layout.dtype:
        raise Mismatch(
            f"the host's result is not as predicted: {list(layout.sizes)} {layout.dtype} was, "
            f"{list(tensor.shape)} {tensor.dtype} came"
        )
    return laid_out(tensor, layout)


class Source:
    """The source of one caller and the objects that it closes over."""

    def __init__(self, signature: Signature, storages, call):
        self.signature, self.storages = signature, storages
        self.cells = {}
        self.lines = []
        self.operator = self.cell("op", call)

    def cell(self, prefix: str, value) -> str:
        """Names an object."""
        name = f"{prefix}{len(self.cells)}"
        self.cells[name] = value
        return name

    def argument(self, value) -> str:
        """The expression that gives an argument from the slots `s`."""
        kind = type(value)
        if kind is TensorSlot:
            layout = self.storages.layout(value.sizes, value.strides, value.dtype)
            return f"{self.cell('layout', layout)}[s[{value.slot + 2}]]"
        if kind is ScalarSlot:
            slot = f"s[{value.slot + 2}]"
            return f"{slot} != 0" if self.signature.slots[value.slot] == SLOT_BOOL else slot
        if kind is list and holds_slots(value):
            if len(value) > MAX_UNROLLED:
                parts = self.cell("parts", [self.part(entry) for entry in value])
                return f"[part(s) for part in {parts}]"
            return "[" + ", ".join(self.argument(entry) for entry in value) + "]"
        return self.cell("constant", value)

    def part(self, value):
        """An entry of a long list, as a function of the slots."""
        kind = type(value)
        if kind is TensorSlot:
            layout, index = self.storages.layout(value.sizes, value.strides, value.dtype), value.slot + 2
            return lambda s: layout[s[index]]
        if kind is ScalarSlot:
            index = value.slot + 2
            return (lambda s: s[index] != 0) if self.signature.slots[value.slot] == SLOT_BOOL else lambda s: s[index]
        if kind is list:
            parts = [self.part(entry) for entry in value]
            return lambda s: [part(s) for part in parts]
        return lambda s: value

    def call(self) -> str:
        """The expression that calls the operator."""
        signature = self.signature
        arguments = [self.argument(value) for value in signature.arguments]
        odd = {}
        for name, value in signature.keywords.items():
            if safe_keyword(name):
                arguments.append(f"{name}={self.argument(value)}")
            else:
                odd[name] = value
        if odd:
            pairs = ", ".join(f"{self.cell('name', name)}: {self.argument(value)}" for name, value in odd.items())
            arguments.append("**{" + pairs + "}")
        return f"{self.operator}({', '.join(arguments)})"

    def check(self, tensor: str, layout) -> None:
        """Lines that look whether a new result is as predicted, and lay it out anew where only strides differ."""
        if self.signature.copied:
            self.lines.append(f"{tensor} = copied({tensor}, device)")
        one = self.cell("layout", layout)
        sizes, dtype = self.cell("sizes", layout.sizes), self.cell("dtype", layout.dtype)
        if dense(layout.sizes, layout.strides):
            strides = f"not {tensor}.is_contiguous()"
        else:
            strides = f"{tensor}.stride() != {self.cell('strides', layout.strides)}"
        self.lines += [
            f"if {tensor}.shape != {sizes} or {tensor}.dtype is not {dtype} or {strides}:",
            f"    {tensor} = relayout({tensor}, {one})",
        ]

    def keep(self, tensor: str, layout, number: str) -> None:
        """Lines that keep a new result under its number."""
        one, size = self.cell("layout", layout), self.cell("bytes", layout.span)
        self.lines += [
            f"number = {number}",
            f"if number in heap or not 0 < number <= {MAX_STORAGE_NUMBER}:",
            "    check_number(number)",
            f"address = number << {ADDRESS_BITS}",
            f"{one}[address] = {tensor}",
            f"heap[number] = [{tensor}, {size}, {one}, address]",
        ]

    def results(self) -> None:
        """Lines that check all new results, then keep them: a failure must not leave some of them behind."""
        signature = self.signature
        first = len(signature.slots) + 2
        new = [(index, result.layout) for index, result in enumerate(signature.results) if type(result) is New]
        if len(new) > MAX_UNROLLED:
            if self.signature.copied:
                self.lines.append("r = [None if entry is None else copied(entry, device) for entry in r]")
            self.lines.append(f"keep_all(storages, r, {self.cell('kept', new)}, s[{first}:])")
            return
        if signature.shape == SHAPE_SINGLE:
            names = ["r"]
        else:
            names = [f"t{index}" for index, _ in new]
            self.lines += [f"t{index} = r[{index}]" for index, _ in new]
        for name, (_, layout) in zip(names, new, strict=True):
            self.check(name, layout)
        for position, (name, (_, layout)) in enumerate(zip(names, new, strict=True)):
            self.keep(name, layout, f"s[{first + position}]")

    def compile(self):
        """The caller: takes a buffer and where its CALL begins."""
        signature = self.signature
        total = sum(result.bytes for result in signature.results if type(result) is New)
        call = self.call()
        made = signature.shape != SHAPE_VOID and signature.outputs()
        if total:
            size = self.cell("bytes", total)
            self.lines += [f"total = held[0] + {size}", "if total > most:", f"    raise out_of_memory({size})"]
        self.lines.append(f"r = {call}" if made else call)
        if made:
            self.results()
        if total:
            self.lines.append("held[0] = total")
        names = ["unpack", "heap", "held", "most", "out_of_memory", "check_number", "relayout", "keep_all", "copied"]
        names += ["storages", "device"]
        storages = self.storages
        common = [signature.struct.unpack_from, storages.heap, storages.held, storages.max_bytes]
        common += [storages.out_of_memory, storages.check_number, relayout, keep_all, copied]
        common += [storages, storages.device]
        make = compiled(f"def make({', '.join([*names, *self.cells])}):", self.lines)
        return make(*common, *self.cells.values())


def compiled(head: str, lines: list):
    """The function that makes a caller of this source, compiled at its first use."""
    body = ["    def call(buffer, at):", "        s = unpack(buffer, at)", *(f"        {line}" for line in lines)]
    text = "\n".join([head, *body, "    return call"])
    make = SOURCES.get(text)
    if make is None:
        if len(SOURCES) >= MAX_SOURCES:
            SOURCES.clear()
        space = {"__builtins__": {}}
        exec(compile(text, "<caller>", "exec"), space)
        make = SOURCES[text] = space["make"]
    return make


def keep_all(storages, results, kept: list, numbers) -> None:
    """Checks and keeps many results; the caller has accounted for their bytes."""
    tensors = []
    for index, layout in kept:
        tensor = results[index]
        if tensor.shape != layout.sizes or tensor.dtype is not layout.dtype or tensor.stride() != layout.strides:
            tensor = relayout(tensor, layout)
        tensors.append(tensor)
    for tensor, (_, layout), number in zip(tensors, kept, numbers, strict=True):
        storages.check_number(number)
        address = number << ADDRESS_BITS
        layout[address] = tensor
        storages.heap[number] = [tensor, layout.span, layout, address]


def dense(sizes: tuple, strides: tuple) -> bool:
    """Whether strides are what `is_contiguous` means: those of dimensions of one element do not matter."""
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def holds_slots(value) -> bool:
    """Whether a list has a slot anywhere in it."""
    return any(
        type(entry) in (TensorSlot, ScalarSlot) or (type(entry) is list and holds_slots(entry)) for entry in value
    )


def caller(signature: Signature, storages, call):
    """The compiled function for a signature whose first run went well."""
    return Source(signature, storages, call).compile()

# SPDX-License-Identifier: MIT OR Apache-2.0
"""The client's storages by number, and the views through which operators see them.

A `Layout` is one (sizes, strides, element type); it is a dictionary from address to the tensor that looks so, filled on
demand, so that compiled callers find an argument by one look-up. Whoever frees or poisons a storage takes its views out
of every layout. Refuses: numbers out of range or in use (Violation), views out of bounds (torch's own error), and more
bytes than the client may hold (OutOfMemory).
"""

import torch

from lighter_mps_wire.dtypes import element_bytes, element_name, tables
from lighter_mps_wire.protocol import ADDRESS_BITS, MAX_STORAGE_BYTES, MAX_STORAGE_NUMBER, OFFSET_MASK

from .errors import Failed, Failure, OutOfMemory, Refusal, Violation

Tensor = torch.Tensor
# A key-value cache is written at one offset after another: views of one storage that are kept at most.
MAX_VIEWS = 512
MAX_LAYOUTS = 65_536
MAX_RANK = 64
MAX_ELEMENTS = 1 << 48

# An entry of the heap is a list: the tensor (or the Failure that poisons it), its bytes, then a layout and an address
# for each view of it that is kept. A list, since millions come and go and nothing is cheaper.
TENSOR, BYTES, FIRST_VIEW = 0, 1, 2


class Layout(dict):
    """Tensors of one shape, stride and element type, by address."""

    __slots__ = ("code", "dtype", "item_bytes", "sizes", "span", "storages", "strides")

    def __init__(self, storages: "Storages", sizes: tuple, strides: tuple, code: int):
        super().__init__()
        self.storages, self.sizes, self.strides, self.code = storages, sizes, strides, code
        self.dtype = tables().dtypes.get(code)
        if self.dtype is None:
            raise Refusal(f"the host's torch {torch.__version__} has no {element_name(code)}")
        self.item_bytes = element_bytes(code)
        self.span = span_bytes(sizes, strides, self.item_bytes)

    def __missing__(self, address: int):
        """Makes the view that is not there yet and keeps it. A quarter of a training step's arguments come here."""
        entry = self.storages.heap.get(address >> ADDRESS_BITS)
        if entry is not None and type(entry[TENSOR]) is Tensor and entry[TENSOR].dtype is self.dtype:
            offset = (address & OFFSET_MASK) // self.item_bytes
            if offset * self.item_bytes != address & OFFSET_MASK:
                return self.fresh(address)
            tensor = entry[TENSOR].as_strided(self.sizes, self.strides, offset)
        else:
            tensor = self.fresh(address)
        if entry is not None:
            if len(entry) > FIRST_VIEW + 2 * MAX_VIEWS:
                drop_views(entry)
            entry.append(self)
            entry.append(address)
            self[address] = tensor
        return tensor

    def fresh(self, address: int):
        """A tensor of its own that looks at these bytes; for results that an operator may resize."""
        entry = self.storages.heap.get(address >> ADDRESS_BITS)
        if entry is None:
            if address == 0 and self.span == 0:
                return torch.empty(self.sizes, dtype=self.dtype, device=self.storages.device)
            raise Violation(f"storage {address >> ADDRESS_BITS} is used but does not exist")
        base = entry[TENSOR]
        if type(base) is Failure:
            raise Failed(base)
        offset, rest = divmod(address & OFFSET_MASK, self.item_bytes)
        if rest:
            raise Refusal(f"a {element_name(self.code)} tensor begins at byte {address & OFFSET_MASK} of its storage")
        if base.dtype is self.dtype:
            return base.as_strided(self.sizes, self.strides, offset)
        # `set_` would make the storage larger where this look does not fit into it.
        storage = base.untyped_storage()
        if (address & OFFSET_MASK) + self.span > storage.nbytes():
            raise Refusal(
                f"a {element_name(self.code)} tensor of sizes {list(self.sizes)} and strides {list(self.strides)} at byte "
                f"{address & OFFSET_MASK} is out of bounds for its storage of {storage.nbytes()} bytes"
            )
        empty = torch.empty(0, dtype=self.dtype, device=self.storages.device)
        return empty.set_(storage, offset, self.sizes, self.strides)


def span_bytes(sizes: tuple, strides: tuple, item_bytes: int) -> int:
    """Bytes from the first to the last element; refuses what no storage could hold."""
    if len(sizes) > MAX_RANK:
        raise Refusal(f"a tensor of {len(sizes)} dimensions; at most {MAX_RANK} are carried")
    elements, last = 1, 0
    for size, stride in zip(sizes, strides, strict=True):
        elements *= size
        last += (size - 1) * stride
        if elements > MAX_ELEMENTS:
            raise Refusal(f"a tensor of sizes {list(sizes)} has too many elements")
    if elements == 0:
        return 0
    if (last + 1) * item_bytes > MAX_STORAGE_BYTES:
        raise Refusal(f"a tensor of sizes {list(sizes)} and strides {list(strides)} is larger than any storage")
    return (last + 1) * item_bytes


def drop_views(entry: list) -> None:
    """Forgets the views of a storage, not the storage."""
    for index in range(FIRST_VIEW, len(entry), 2):
        entry[index].pop(entry[index + 1], None)
    del entry[FIRST_VIEW:]


class Storages:
    """All storages of one client."""

    def __init__(self, device: torch.device, max_bytes: int, max_storages: int):
        self.device, self.max_bytes, self.max_storages = device, max_bytes, max_storages
        self.heap = {}
        self.layouts = {}
        # One cell that compiled callers can close over.
        self.held = [0]

    def layout(self, sizes: tuple, strides: tuple, code: int) -> Layout:
        """The layout that all signatures with these three share."""
        key = (sizes, strides, code)
        found = self.layouts.get(key)
        if found is None:
            if len(self.layouts) >= MAX_LAYOUTS:
                # Callers keep theirs; new ones get one of the same look, which is as good.
                self.layouts.clear()
            found = self.layouts[key] = Layout(self, sizes, strides, code)
        return found

    def passing_layout(self, sizes: tuple, strides: tuple, code: int) -> Layout:
        """A layout for one use, kept by nobody unless a signature already does."""
        found = self.layouts.get((sizes, strides, code))
        return Layout(self, sizes, strides, code) if found is None else found

    def check_room(self, wanted: int) -> None:
        """Refuses what would be more than the client may hold."""
        if self.held[0] + wanted > self.max_bytes:
            raise self.out_of_memory(wanted)

    def out_of_memory(self, wanted: int) -> OutOfMemory:
        return OutOfMemory(
            f"MPS backend out of memory (MPS allocated: {words(self.held[0])}, max allowed: {words(self.max_bytes)}). "
            f"Tried to allocate {words(wanted)}. The host's lighter sets this limit for each container."
        )

    def check_number(self, number: int) -> None:
        """A number for a new storage must be in range and free."""
        if not 0 < number <= MAX_STORAGE_NUMBER:
            raise Violation(f"storage number {number} is out of range")
        if number in self.heap:
            raise Violation(f"storage number {number} is in use already")

    def check_count(self) -> None:
        """Called now and then: a client may be over by what one buffer of messages makes."""
        if len(self.heap) > self.max_storages:
            raise Violation(f"{len(self.heap)} storages are over the limit of {self.max_storages}")

    def put(self, number: int, tensor, size: int) -> None:
        """Keeps a new storage."""
        self.check_number(number)
        self.heap[number] = [tensor, size]
        self.held[0] += size

    def poison(self, number: int, failure: Failure) -> None:
        """Keeps a failure in the place of a result."""
        self.check_number(number)
        self.heap[number] = [failure, 0]

    def allocate(self, number: int, size: int, code: int) -> None:
        """ALLOC."""
        self.check_number(number)
        if size > MAX_STORAGE_BYTES:
            raise self.out_of_memory(size)
        self.check_room(size)
        dtype, item_bytes = tables().dtypes.get(code), None
        if dtype is not None:
            item_bytes = element_bytes(code)
        if item_bytes is None or size % item_bytes:
            dtype, item_bytes = torch.uint8, 1
        self.put(number, torch.empty(size // item_bytes, dtype=dtype, device=self.device), size)

    def free(self, numbers) -> None:
        """FREE. Unknown numbers are passed over: a client may be interrupted between taking a number and using it."""
        heap, held = self.heap, 0
        for number in numbers:
            entry = heap.pop(number, None)
            if entry is not None:
                held += entry[BYTES]
                if len(entry) == FIRST_VIEW + 2:
                    entry[FIRST_VIEW].pop(entry[FIRST_VIEW + 1], None)
                elif len(entry) > FIRST_VIEW:
                    drop_views(entry)
        self.held[0] -= held

    def resized(self, number: int) -> None:
        """Takes a storage's new size into account after an operator resized a tensor in it."""
        entry = self.heap[number]
        size = entry[TENSOR].untyped_storage().nbytes()
        self.held[0] += size - entry[BYTES]
        entry[BYTES] = size


def words(size: int) -> str:
    """A size as torch writes it."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"

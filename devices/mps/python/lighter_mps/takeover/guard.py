# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device guard for mps: the object that torch asks for the current device and stream.

torch keeps one guard a device type in an exported array, and nobody has filled mps's place in a Linux build. A guard is an object
whose first word points to a vtable. Ours is a copy of the CPU's guard, a device without streams, where the methods that name a
device or that the CPU refuses are replaced by functions that return a constant. A method that a future torch adds thus
does what the base class says. Called by `install()`; refuses to replace a guard that somebody else has put there.
"""

from .errors import TakeoverError
from .layouts import Layout
from .native import Libraries, Write, lasting_words, read_words
from .thunks import MPS

REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
MARK = int.from_bytes(b"LIGHTmps", "little")

_CPU = 0

# A Device and a Stream of mps:0 both begin with the byte 13 and are 0 after it, as the constant 13 is.
_RESULTS = {
    "type": MPS, "exchangeDevice": MPS, "getDevice": MPS, "setDevice": 0, "uncheckedSetDevice": 0, "deviceCount": 1,
    "getStream": MPS, "getDefaultStream": MPS, "getStreamFromGlobalPool": MPS, "getNewStream": MPS, "exchangeStream": MPS,
    "record": 0, "block": 0, "queryEvent": 1, "destroyEvent": 0, "synchronizeEvent": 0,
    "queryStream": 1, "synchronizeStream": 0, "synchronizeDevice": 0, "recordDataPtrOnStream": 0,
}


def is_ours(libraries: Libraries) -> bool:
    """Does mps's place hold a guard of lighter-mps, of this or of another copy of it?"""
    guard = read_words(_place(libraries), 1)[0]
    return bool(guard) and read_words(guard, 2)[1] == MARK


def prepare(libraries: Libraries, layout: Layout, thunks: "dict[int, int]") -> "list[Write]":
    """The write that makes the guard torch's; the object is complete."""
    place = _place(libraries)
    taken, = read_words(place, 1)
    if taken:
        raise TakeoverError(
            f"torch's mps device already belongs to {libraries.file(taken) or 'another package'}; "
            "uninstall that package, or do not import it together with lighter_mps"
        )
    cpu, = read_words(libraries.address(REGISTRY) + 8 * _CPU, 1)
    if not cpu:
        raise TakeoverError("torch has no device guard for the CPU, so this build of it is not complete; use a torch wheel from PyPI")
    table, = read_words(cpu, 1)
    methods = copy_table(libraries, table, layout, len(layout.guard), "device guard")
    header, methods = methods[:2], methods[2:]
    for slot, name in enumerate(layout.guard):
        if name in _RESULTS:
            methods[slot] = thunks[_RESULTS[name]]
    vtable = lasting_words(header + methods) + 16
    return [Write(place, lasting_words([vtable, MARK]))]


def counts_agree(libraries: Libraries, layout: Layout) -> bool:
    """Do the guards that torch has itself have as many methods as the layout?

    A vtable does not say where it ends. What follows may look like another method, but not behind each of the guards.
    """
    lengths = []
    for guard in read_words(libraries.address(REGISTRY), libraries.size(REGISTRY) // 8):
        if guard:
            table, = read_words(guard, 1)
            length = 0
            while length <= len(layout.guard) and libraries.is_code(read_words(table + 8 * length, 1)[0]):
                length += 1
            lengths.append(length)
    return min(lengths, default=0) == len(layout.guard)


def copy_table(libraries: Libraries, table: int, layout: Layout, count: int, what: str) -> "list[int]":
    """A vtable: its two words before the methods, and `count` methods, each of which is an address in a library."""
    words = read_words(table - 16, 2)
    if words[0] != 0 or not libraries.file(words[1]):
        raise TakeoverError(f"torch's {what} is not the plain object it should be, so this build cannot be given an mps device; use a torch wheel from PyPI")
    for slot in range(count):
        word, = read_words(table + 8 * slot, 1)
        if not libraries.is_code(word):
            raise TakeoverError(
                f"torch's {what} ends after {slot} methods, and by {layout.source} there are {count}: {layout.disagreement()}"
            )
        words.append(word)
    return words


def _place(libraries: Libraries) -> int:
    size = libraries.size(REGISTRY)
    if size < 8 * (MPS + 1) or size % 8:
        raise TakeoverError(f"torch's array of device guards has {size} bytes and no place for mps; use a torch wheel from PyPI")
    return libraries.address(REGISTRY) + 8 * MPS

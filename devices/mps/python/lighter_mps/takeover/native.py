# SPDX-License-Identifier: MIT OR Apache-2.0
"""Addresses in torch's loaded libraries, and memory that outlives the interpreter.

Called by the rest of `takeover`. Symbols are looked up in the libraries that this process has loaded already, in dependency order
from torch's extension module, so it does not matter where a distribution puts them. Memory comes from the C library and is never
given back: torch's threads and destructors use it after Python has ended.
"""

import bisect
import ctypes

from .errors import TakeoverError

_LINK_DETAIL_SYMBOL = 1  # RTLD_DL_SYMENT of dladdr1


class _Place(ctypes.Structure):
    """glibc's Dl_info."""

    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]


class _Symbol(ctypes.Structure):
    """ELF64's Sym."""

    _fields_ = [
        ("name", ctypes.c_uint32), ("info", ctypes.c_uint8), ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16), ("value", ctypes.c_uint64), ("size", ctypes.c_uint64),
    ]


def _function(name: str, result, *arguments):
    # Old glibc keeps dladdr1 in a library of its own, which torch has loaded.
    for library in (None, "libdl.so.2"):
        try:
            found = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
        found.restype, found.argtypes = result, arguments
        return found
    raise TakeoverError(f"the C library of this system has no {name}, which finding torch's tables needs; use an image with glibc")


class Libraries:
    """The libraries of the imported torch."""

    def __init__(self, extension_file: str):
        self._handle = ctypes.CDLL(extension_file)
        self._where = _function(
            "dladdr1", ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Place), ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
        )
        self._mappings = _file_mappings()
        self._starts = [mapping[0] for mapping in self._mappings]

    def address(self, symbol: str) -> int:
        """The address of an exported function or variable."""
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(self._handle, symbol))
        except ValueError:
            raise TakeoverError(
                f"torch's libraries export no {symbol}, so this build of torch cannot be given an mps device; use a torch wheel from PyPI"
            ) from None

    def call(self, symbol: str) -> int:
        """The pointer that an exported function without arguments returns."""
        return ctypes.CFUNCTYPE(ctypes.c_void_p)(self.address(symbol))() or 0

    def size(self, symbol: str) -> int:
        """The size of an exported variable, as its library's symbol table says."""
        place, detail = _Place(), ctypes.c_void_p()
        address = self.address(symbol)
        if not self._where(address, place, detail, _LINK_DETAIL_SYMBOL) or not detail.value or place.address != address:
            raise TakeoverError(f"the size of torch's {symbol} cannot be read, so its layout is not known; use a torch wheel from PyPI")
        return _Symbol.from_address(detail.value).size

    def file(self, address: int) -> str:
        """The library that an address lies in, or nothing if it is in none."""
        found = self._mapping(address)
        return found[3] if found else ""

    def is_code(self, address: int) -> bool:
        """Does a library's machine code hold this address?"""
        found = self._mapping(address)
        return found is not None and found[2]

    def _mapping(self, address: int) -> "tuple[int, int, bool, str] | None":
        at = bisect.bisect_right(self._starts, address) - 1
        return self._mappings[at] if at >= 0 and address < self._mappings[at][1] else None


def _file_mappings() -> "list[tuple[int, int, bool, str]]":
    """Beginning, end, whether it is executable, and the path, of each part of a file in this process's memory, in order."""
    mappings = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.rstrip("\n").split(None, 5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    start, end = fields[0].split("-")
                    mappings.append((int(start, 16), int(end, 16), "x" in fields[1], fields[5]))
    except OSError as error:
        raise TakeoverError(f"/proc/self/maps cannot be read ({error.strerror}), and torch's tables cannot be checked without it; mount /proc") from None
    return mappings


class Write:
    """One pointer to store. Everything that can fail has been done before the first one is."""

    __slots__ = ("address", "value")

    def __init__(self, address: int, value: int):
        self.address = address
        self.value = value

    def perform(self) -> None:
        """An aligned store of eight bytes: another thread sees the old pointer or the new one."""
        ctypes.c_uint64.from_address(self.address).value = self.value


def read_words(address: int, count: int) -> "list[int]":
    """`count` words of memory that is known to be there."""
    return list((ctypes.c_uint64 * count).from_address(address))


def lasting_words(words: "list[int]") -> int:
    """The address of a copy of `words` that is never freed."""
    allocate = _function("malloc", ctypes.c_void_p, ctypes.c_size_t)
    address = allocate(8 * len(words))
    if not address:
        raise TakeoverError("no memory for torch's tables")
    (ctypes.c_uint64 * len(words)).from_address(address)[:] = words
    return address

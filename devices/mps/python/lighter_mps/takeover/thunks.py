# SPDX-License-Identifier: MIT OR Apache-2.0
"""Machine code that returns a constant: the methods of the vtables that `guard` and `hooks` build.

The Rust core, where it is there, has such functions in its `.so`; without it they are written into a page of memory, which is
writable first and executable after, never both. A constant is returned in the first result register, and 0 in the second:
that is `Device(mps, 0)` and `Stream(mps:0, id 0)` for 13, and true, false or a number for the rest.
"""

import ctypes
import sys

from .errors import TakeoverError
from .native import _function

MPS = 13
VALUES = (0, 1, MPS)

_SLOT_BYTES = 16
_PAGE_BYTES = 65536  # the largest page of the architectures in question
_READ, _WRITE, _EXECUTE = 1, 2, 4
_PRIVATE_ANONYMOUS = 0x22
_FAILED = (1 << 64) - 1


def encode(machine: str, value: int) -> bytes:
    """A function that returns (value, 0), in the code of `machine`."""
    if not 0 <= value < 1 << 16:
        raise ValueError(f"{value} does not fit into one instruction")
    if machine == "x86_64":
        # endbr64; mov eax, value; xor edx, edx; ret
        return b"\xf3\x0f\x1e\xfa" + b"\xb8" + value.to_bytes(4, "little") + b"\x31\xd2" + b"\xc3"
    if machine == "aarch64":
        # bti c; mov x0, #value; mov x1, #0; ret
        return b"".join(w.to_bytes(4, "little") for w in (0xD503245F, 0xD2800000 | value << 5, 0xD2800001, 0xD65F03C0))
    raise TakeoverError(f"there is no mps device for the processor {machine}; x86_64 and aarch64 are supported")


def addresses(machine: str, core=None) -> "dict[int, int]":
    """Where the function that returns each of `VALUES` is; from `core.thunk_addresses()` if there is such a thing."""
    provided = getattr(core, "thunk_addresses", None)
    if provided is not None:
        given = dict(provided())
        missing = [value for value in VALUES if not given.get(value)]
        if missing:
            raise TakeoverError(f"lighter_mps._core has no functions for {missing}: it is of another version; reinstall lighter-mps")
        return given
    return _page({value: encode(machine, value) for value in VALUES})


def _page(codes: "dict[int, bytes]") -> "dict[int, int]":
    map_memory = _function(
        "mmap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    )
    protect = _function("mprotect", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = map_memory(None, _PAGE_BYTES, _READ | _WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    if page in (None, _FAILED):
        raise TakeoverError("no memory for a page of machine code")
    found = {}
    for number, (value, code) in enumerate(codes.items()):
        found[value] = page + number * _SLOT_BYTES
        ctypes.memmove(found[value], code, len(code))
    # No cache needs flushing by hand on x86_64; on aarch64 the page was never executed before, and mprotect to executable
    # makes the kernel synchronise the caches when the page is first fetched from.
    if protect(page, _PAGE_BYTES, _READ | _EXECUTE) != 0:
        raise TakeoverError(
            f"this system forbids new machine code in {sys.executable or 'this process'}, which the pure-Python lighter-mps needs; "
            "install the lighter-mps wheel with its compiled core, which needs none"
        )
    return found

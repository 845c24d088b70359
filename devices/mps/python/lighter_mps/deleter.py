# SPDX-License-Identifier: MIT OR Apache-2.0
"""A deleter in machine code for storages, and the memory that it works on. Used by `tensors`, so by the pure client only.

Torch calls a storage's deleter on any thread, without the GIL, while an exception is on its way, and after the
interpreter has ended; a Python function is wrong in each of these places (ctypes clears the exception). So the deleter
is eight instructions that push the storage's DLManagedTensor on a stack, whose links lie in the structs themselves, and
Python takes the whole stack when it next writes. The structs lie in one mapping, one of 64 bytes for each number;
number 0 is never used, and its first word is the stack's head. Nothing here is ever unmapped.
"""

import ctypes
import mmap
import platform
import sys

STRUCT_BYTES = 64
_LINK_AT = 48  # DLManagedTensor::manager_ctx, which is ours to use
_CODE_BYTES = 4096
_READ_WRITE, _READ_EXECUTE = 3, 5


class Slab:
    """Structs for storages' numbers, and those whose storages are gone."""

    def __init__(self, count: int):
        memory = mmap.mmap(-1, count * STRUCT_BYTES)
        # Storages outlive the interpreter's modules.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self.memory = memory
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # words[0] is the head of the stack: not 0 where some storage is gone.
        self.words = memoryview(memory).cast("Q")
        push, take = _code(platform.machine(), self.base)
        code = _executable(push.ljust(128, b"\0") + take)
        self.deleter = code
        # Called with the GIL, which is cheaper than giving it back for four instructions.
        self.take = ctypes.PYFUNCTYPE(ctypes.c_uint64)(code + 128)

    def gone(self) -> list:
        """Numbers of all storages that are gone since the last call."""
        numbers = []
        at, base, words = self.take(), self.base, self.words
        while at:
            number = (at - base) // STRUCT_BYTES
            numbers.append(number)
            at = words[number * (STRUCT_BYTES // 8) + _LINK_AT // 8]
        return numbers


def _code(machine: str, head: int):
    """`push(struct*)` and `take() -> struct*` for the stack whose head is at this address."""
    if machine == "x86_64":
        load_head = b"\xf3\x0f\x1e\xfa\x49\xbb" + head.to_bytes(8, "little")  # endbr64; mov r11, head
        push = (
            b"\x49\x8b\x03"  # mov rax, [r11]
            b"\x48\x89\x47\x30"  # again: mov [rdi+48], rax
            b"\xf0\x49\x0f\xb1\x3b"  # lock cmpxchg [r11], rdi
            b"\x75\xf5"  # jne again
            b"\xc3"
        )
        take = b"\x31\xc0\x49\x87\x03\xc3"  # xor eax, eax; xchg rax, [r11]; ret
        return load_head + push, load_head + take
    if machine == "aarch64":
        parts = [head >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
        load_head = [0xD503245F] + [  # bti c; movz and movk x9
            base | part << 5 for base, part in zip((0xD2800009, 0xF2A00009, 0xF2C00009, 0xF2E00009), parts)
        ]
        push = [
            0xF940012A,  # again: ldr x10, [x9]
            0xF900180A,  # str x10, [x0, #48]
            0xC85F7D2C,  # ldxr x12, [x9]
            0xEB0A019F,  # cmp x12, x10
            0x54FFFF81,  # b.ne again
            0xC80BFD20,  # stlxr w11, x0, [x9]
            0x35FFFF4B,  # cbnz w11, again
            0xD65F03C0,
        ]
        take = [
            0xC85FFD20,  # again: ldaxr x0, [x9]
            0xC80BFD3F,  # stlxr w11, xzr, [x9]
            0x35FFFFCB,  # cbnz w11, again
            0xD65F03C0,
        ]
        return tuple(b"".join(word.to_bytes(4, "little") for word in load_head + part) for part in (push, take))
    raise RuntimeError(f"lighter-mps: there is no mps device for the processor {machine}; x86_64 and aarch64 are supported")


def _executable(code: bytes) -> int:
    """The address of a page that holds this code; it is writable first and executable after, never both."""
    page = mmap.mmap(-1, _CODE_BYTES, prot=_READ_WRITE)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(address, _CODE_BYTES, _READ_EXECUTE):
        raise RuntimeError(
            f"lighter-mps: this system forbids new machine code in {sys.executable or 'this process'}; "
            "install the lighter-mps wheel with its compiled core, which needs none"
        )
    return address

# SPDX-License-Identifier: MIT OR Apache-2.0
"""The machine code that returns constants, as bytes for each processor, and run on this one."""

import ctypes
import platform
import types
import unittest
from unittest import mock

from takeover_support import in_child, takeover

thunks = takeover("thunks")
TakeoverError = takeover().TakeoverError


class Pair(ctypes.Structure):
    """A structure of two words, as a Stream is: it is returned in two registers."""

    _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]


class Encoding(unittest.TestCase):
    def test_x86_64(self):
        for value, code in ((0, "b800000000"), (1, "b801000000"), (13, "b80d000000"), (0x1234, "b834120000")):
            self.assertEqual(thunks.encode("x86_64", value).hex(), "f30f1efa" + code + "31d2" + "c3")

    def test_aarch64(self):
        # As an assembler gives them: bti c; mov x0, #value; mov x1, #0; ret
        for value, code in ((0, "000080d2"), (1, "200080d2"), (13, "a00180d2"), (0xFFFF, "e0ff9fd2")):
            self.assertEqual(thunks.encode("aarch64", value).hex(), "5f2403d5" + code + "010080d2" + "c0035fd6")

    def test_each_fits_its_slot(self):
        for machine in ("x86_64", "aarch64"):
            self.assertLessEqual(len(thunks.encode(machine, thunks.MPS)), thunks._SLOT_BYTES)

    def test_refuses_what_it_cannot_encode(self):
        with self.assertRaises(ValueError):
            thunks.encode("x86_64", 1 << 16)
        with self.assertRaises(ValueError):
            thunks.encode("aarch64", -1)
        with self.assertRaisesRegex(TakeoverError, "processor riscv64; x86_64 and aarch64"):
            thunks.encode("riscv64", 0)


class Running(unittest.TestCase):
    def test_both_registers(self):
        found = in_child(self._answers)
        self.assertEqual(found, [[0, 0], [1, 0], [13, 0]])

    @staticmethod
    def _answers():
        made = thunks.addresses(platform.machine())
        # Arguments in the registers that a method has them in must not matter.
        kind = ctypes.CFUNCTYPE(Pair, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
        answers = [kind(made[value])(7, 8, 9) for value in thunks.VALUES]
        return [[answer.first, answer.second] for answer in answers]

    def test_the_page_cannot_be_written(self):
        with self.assertRaisesRegex(AssertionError, "SIGSEGV"):
            in_child(lambda: ctypes.memset(thunks.addresses(platform.machine())[0], 0, 1) and None)

    def test_a_system_that_forbids_machine_code(self):
        real = thunks._function

        def function(name, *types_):
            return (lambda *_: -1) if name == "mprotect" else real(name, *types_)

        with mock.patch.object(thunks, "_function", function), self.assertRaisesRegex(TakeoverError, "forbids new machine code.*compiled core"):
            thunks.addresses(platform.machine())


class FromTheCore(unittest.TestCase):
    def test_its_functions_are_taken(self):
        core = types.SimpleNamespace(thunk_addresses=lambda: {0: 16, 1: 32, 13: 48})
        self.assertEqual(thunks.addresses("any processor", core), {0: 16, 1: 32, 13: 48})

    def test_a_core_without_them_is_no_matter(self):
        self.assertEqual(set(in_child(lambda: list(thunks.addresses(platform.machine(), types.SimpleNamespace())))), {0, 1, 13})

    def test_one_that_lacks_some_is_refused(self):
        core = types.SimpleNamespace(thunk_addresses=lambda: {0: 16, 1: 0})
        with self.assertRaisesRegex(TakeoverError, r"no functions for \[1, 13\].*reinstall"):
            thunks.addresses("x86_64", core)


if __name__ == "__main__":
    unittest.main()

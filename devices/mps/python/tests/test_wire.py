# SPDX-License-Identifier: MIT OR Apache-2.0
"""The wire's values and heads: what goes in comes out, what is broken is refused by name, and no bytes harm."""

import math
import os
import random
import struct
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lighter_mps_wire import frames, protocol  # noqa: E402
from lighter_mps_wire.values import (  # noqa: E402
    Device,
    Dtype,
    Generator,
    Layout,
    MemoryFormat,
    ScalarSlot,
    TensorSlot,
    WireError,
    decode,
    encode,
)

ROUNDS = int(os.environ.get("LIGHTER_FUZZ_MESSAGES", "5000"))
SEED = int(os.environ.get("LIGHTER_FUZZ_SEED", "1"))


def some_value(dice: random.Random, depth: int = 0):
    """Any value that the wire knows."""
    kinds = 17 if depth < protocol.MAX_DEPTH else 15
    match dice.randrange(kinds):
        case 0:
            return None
        case 1:
            return dice.random() < 0.5
        case 2:
            return dice.choice([0, 1, -1, 2**63 - 1, -(2**63), dice.getrandbits(40)])
        case 3:
            return dice.choice([0.0, -0.0, 1.5, math.inf, -math.inf, 5e-324, dice.random()])
        case 4:
            return complex(dice.random(), dice.choice([-0.0, math.inf]))
        case 5:
            return "".join(dice.choice("aä€😀\0") for _ in range(dice.randrange(6)))
        case 6:
            return dice.randbytes(dice.randrange(9))
        case 7:
            return Dtype(dice.choice([0, 6, 11, 15, 24, 29]))
        case 8:
            return Device(dice.randrange(2))
        case 9:
            return MemoryFormat(dice.randrange(4))
        case 10:
            return Layout()
        case 11 | 12:
            rank = dice.randrange(5)
            sizes, strides = ([dice.getrandbits(dice.choice([2, 62])) for _ in range(rank)] for _ in range(2))
            return TensorSlot(dice.randrange(65536), 6, tuple(sizes), tuple(strides))
        case 13:
            return ScalarSlot(dice.randrange(65536))
        case 14:
            return Generator(dice.getrandbits(32))
        case 15:
            return [some_value(dice, depth + 1) for _ in range(dice.randrange(5))]
        case _:
            return {str(key): some_value(dice, depth + 1) for key in range(dice.randrange(4))}


class Values(unittest.TestCase):
    def test_any_value_comes_back_as_it_went(self):
        dice = random.Random(SEED)
        for _ in range(ROUNDS):
            value = some_value(dice)
            back = decode(encode(value))
            # repr tells -0.0 from 0.0, True from 1 and one coded type from another.
            self.assertEqual(repr(back), repr(value))

    def test_changed_bytes_are_a_value_or_refused_and_a_value_encodes_again(self):
        dice = random.Random(SEED + 1)
        refused = 0
        for _ in range(ROUNDS):
            data = bytearray(encode([some_value(dice), some_value(dice)]))
            for _ in range(dice.randrange(1, 4)):
                match dice.randrange(4):
                    case 0 if data:
                        data[dice.randrange(len(data))] = dice.randrange(256)
                    case 1:
                        del data[dice.randrange(len(data) + 1) :]
                    case 2:
                        data += dice.randbytes(3)
                    case _:
                        at = dice.randrange(len(data) + 1)
                        data[at : at + 4] = struct.pack("<I", dice.choice([0, 1, 65536, 65537, 2**31, 2**32 - 1]))
            try:
                value = decode(data)
            except WireError:
                refused += 1
            else:
                self.assertEqual(encode(value), bytes(data))
        self.assertGreater(refused, ROUNDS // 4)

    def test_random_bytes_raise_nothing_but_wire_errors(self):
        dice = random.Random(SEED + 2)
        for _ in range(ROUNDS):
            data = bytes(dice.randrange(18) if dice.random() < 0.7 else dice.randrange(256) for _ in range(40))
            try:
                decode(data[: dice.randrange(41)])
            except WireError:
                pass

    def test_a_not_a_number_keeps_its_bits(self):
        for bits in (0x7FF8000000000001, 0xFFF8000000000000):
            data = b"\x04" + struct.pack("<Q", bits)
            self.assertEqual(encode(decode(data)), data)

    def test_depth_is_bounded_both_ways(self):
        value = 1
        for _ in range(protocol.MAX_DEPTH):
            value = [value]
        self.assertEqual(decode(encode(value)), value)
        with self.assertRaisesRegex(WireError, "nested more than 8 deep"):
            encode([value])
        with self.assertRaisesRegex(WireError, "nested more than 8 deep"):
            decode(b"\x08\x01\0\0\0" * 100_000 + b"\0")

    def test_caps_and_lengths(self):
        refusals = {
            b"": "ends too early",
            b"\x11": "unknown tag 17 at byte 0",
            b"\x00\x00": "1 bytes are left over",
            b"\x03\x00": "ends too early",
            b"\x06\xff\xff\xff\xff": "4294967295 bytes are announced",
            b"\x08\xff\xff\xff\xff": "over the limit of 65536",
            b"\x08\x00\x01\x00\x00": "256 entries are announced",
            b"\x06\x01\x00\x00\x00\xff": "no UTF-8",
            b"\x0a\x63": "unknown element type 99",
            b"\x0b\x02": "unknown device 2",
            b"\x0c\x04": "unknown memory format 4",
            b"\x0d\x01": "unknown layout 1",
            b"\x0e\x00\x00\x06\x01" + struct.pack("<qq", -1, 1): "negative size",
            b"\x0e\x00\x00\x06\x01" + struct.pack("<qq", 1, -1): "negative size or stride",
            b"\x0e\x00\x00\x06\xff" + bytes(8): "ends too early",
            b"\x09\x02\0\0\0" + b"\x01\0\0\0a\x00" * 2: "'a' comes twice",
            bytes(protocol.MAX_BODY_BYTES + 1): "over the limit of 1048576",
        }
        for data, words in refusals.items():
            with self.subTest(data=data[:12]), self.assertRaisesRegex(WireError, words):
                decode(data)

    def test_what_has_no_form_is_named(self):
        for value, words in (
            (object(), "object has no form"),
            ({1: 2}, "key is a int"),
            (2**63, "does not fit"),
            ("\ud800", "no UTF-8"),
            ([0] * 65537, "over the limit of 65536"),
            (bytes(protocol.MAX_BODY_BYTES), "over the limit of 1048576"),
            (TensorSlot(0, 6, (1,), ()), "1 sizes and 0 strides"),
            (TensorSlot(65536, 6, (), ()), "does not fit"),
            (TensorSlot(0, 6, (1,) * 256, (1,) * 256), "does not fit"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex(WireError, words):
                encode(value)


class Frames(unittest.TestCase):
    def test_a_hello_comes_back(self):
        data = frames.hello(protocol.FLAG_RING, {"torch": "2.15.0", "ring_bytes": 1 << 28})
        version, flags, size = frames.parse_hello(data[: frames.HELLO.size])
        self.assertEqual((version, flags), (protocol.VERSION, protocol.FLAG_RING))
        self.assertEqual(decode(data[frames.HELLO.size :]), {"torch": "2.15.0", "ring_bytes": 1 << 28})
        self.assertEqual(size, len(data) - frames.HELLO.size)

    def test_strangers_and_huge_hellos_are_refused(self):
        with self.assertRaisesRegex(WireError, "b'HTTP'"):
            frames.parse_hello(b"HTTP" + bytes(8))
        with self.assertRaisesRegex(WireError, "over the limit of 65536"):
            frames.parse_hello(frames.HELLO.pack(protocol.MAGIC, 1, 0, 65537))

    def test_a_call_is_kind_signature_slots_and_numbers(self):
        call = frames.call_struct("TifbT", 2)
        data = call.pack(protocol.CALL, 7, protocol.address(3, 16), -1, 0.5, True, 0, 9, 10)
        self.assertEqual(len(data), 1 + 4 + 8 * 7)
        self.assertEqual(data[:5], b"\x01\x07\0\0\0")
        self.assertEqual(struct.unpack_from("<Q", data, 5)[0], (3 << 40) + 16)

    def test_messages_carry_the_length_of_their_body(self):
        self.assertEqual(frames.message(protocol.WAIT), b"\x03")
        self.assertEqual(frames.message(protocol.RUN, body=b"abc"), b"\x05\x03\0\0\0abc")
        self.assertEqual(
            frames.message(protocol.UPLOAD, 4, body=b"ab", data=b"wxyz"),
            b"\x08\x02\0\0\0" + struct.pack("<Q", 4) + b"abwxyz",
        )
        self.assertEqual(frames.numbers(protocol.FREE, [1, 2]), b"\x02\x02\0\0\0" + struct.pack("<QQ", 1, 2))


if __name__ == "__main__":
    unittest.main()

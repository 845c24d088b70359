# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies between the container and the device: every layout, type and way, in the ring and in the stream."""

import itertools
import unittest

import torch
from ondevice import run_program

LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0),
    "sliced": lambda x: x[1:, ::2],
    "offset": lambda x: x[2],
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]),
    "one number": lambda x: x[1, 2, 3],
    "empty": lambda x: x[:, :0],
}
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


def source(dtype, scale):
    x = torch.arange(4 * 5 * 6 * scale, dtype=torch.float32).remainder(97).sub(40).reshape(4, 5, 6 * scale)
    return torch.complex(x, -x) if dtype.is_complex else x.to(dtype)


class Layouts(unittest.TestCase):
    def test_every_layout_of_both_sides(self):
        for (one, take), (other, put), scale in itertools.product(LAYOUTS.items(), LAYOUTS.items(), (1, 40)):
            here = take(source(torch.float32, scale))
            with self.subTest(source=one, target=other, scale=scale):
                there = here.to("mps")
                self.assertTrue(torch.equal(there.cpu(), here))
                base = torch.zeros(4, 5, 6 * scale)
                if other == "expanded":
                    continue
                target = put(base.to("mps"))
                if target.shape != here.shape:
                    continue
                target.copy_(here)
                self.assertTrue(torch.equal(target.cpu(), here))
                back = put(base.clone())
                back.copy_(there)
                self.assertTrue(torch.equal(back, here))

    def test_every_type(self):
        for dtype in TYPES:
            for take in LAYOUTS.values():
                here = take(source(dtype, 40))
                there = here.to("mps")
                self.assertEqual(there.dtype, dtype)
                self.assertTrue(torch.equal(there.cpu(), here), dtype)

    def test_changes_of_type(self):
        for one, other in itertools.product(TYPES, TYPES):
            if one.is_complex and not other.is_complex:
                continue
            here = source(one, 1)
            with self.subTest(one=one, other=other):
                expected = here.to(other)
                self.assertTrue(torch.equal(here.to("mps").to(other).cpu(), expected))
                self.assertTrue(torch.equal(torch.zeros_like(expected).to("mps").copy_(here).cpu(), expected))
                self.assertTrue(torch.equal(torch.zeros_like(expected).copy_(here.to("mps")), expected))

    def test_broadcast_and_numbers(self):
        x = torch.zeros(3, 4, device="mps")
        x.copy_(torch.arange(4.0))
        x[1] = 7
        x[2, 1:3] = torch.tensor(5.0)
        x[0, 0] = True
        expected = torch.zeros(3, 4).copy_(torch.arange(4.0))
        expected[1], expected[2, 1:3], expected[0, 0] = 7, 5, 1
        self.assertTrue(torch.equal(x.cpu(), expected))
        with self.assertRaises(RuntimeError):
            x.copy_(torch.ones(5))

    def test_items(self):
        for value in (True, 7, -(2**40), 1.5, 2 + 3j):
            for dtype in (torch.bool, torch.int64, torch.float32, torch.complex64):
                here = torch.tensor([0, value], dtype=torch.complex64 if type(value) is complex else None)
                if type(value) is complex and not dtype.is_complex:
                    continue
                here = here.to(dtype)
                self.assertEqual(here.to("mps")[1].item(), here[1].item())
                self.assertIs(type(here.to("mps")[1].item()), type(here[1].item()))

    def test_the_bytes_are_taken_at_the_call(self):
        here = torch.ones(1 << 20)
        there = here.to("mps", non_blocking=True)
        here.zero_()
        self.assertEqual(there.sum().item(), float(1 << 20))


BIG = """
import torch, lighter_mps
from lighter_mps import link
x = torch.arange(12 << 20, dtype=torch.int32).reshape(3, 4, -1)
y = x.to("mps")
assert (link.ring() is not None) == {ring}, link.ring()
assert torch.equal(y.cpu(), x)
assert torch.equal(y.transpose(0, 1).cpu(), x.transpose(0, 1))
z = torch.empty_like(y); z.copy_(x.transpose(0, 1).contiguous().transpose(0, 1)); assert torch.equal(z.cpu(), x)
w = torch.zeros(4, 3, x.shape[2], dtype=torch.int32, device="mps")[:, :, ::2]; w.copy_(x.transpose(0, 1)[:, :, ::2])
assert torch.equal(w.cpu(), x.transpose(0, 1)[:, :, ::2])
for n in range(100):
    t = torch.full((1 << 18,), float(n)); assert t.to("mps").sum().item() == float(n << 18)
held = [torch.full((1 << 18,), float(n)).to("mps") for n in range(100)]
for n, t in enumerate(held):
    assert t[7].item() == n
print("done")
"""


class Bulk(unittest.TestCase):
    def test_more_than_the_ring_holds(self):
        done = run_program(BIG.format(ring=True))
        self.assertEqual(done.stdout.strip(), "done", done.stderr)

    def test_in_the_stream(self):
        done = run_program(BIG.format(ring=False), LIGHTER_MPS_RING="0")
        self.assertEqual(done.stdout.strip(), "done", done.stderr)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operators whose results mean something else in another version of torch, with the host's version told otherwise.

That the versions really differ so is seen by `tools/op-db --torch 2.6.0 --host-torch 2.15.0` and the other way round.
"""

import unittest
from unittest import mock

import ondevice  # noqa: F401  (first: it makes the device)
import torch

from lighter_mps import link, versions

OLD, NEW = "2.6.0+cu124", "2.15.0"


class Numbers(unittest.TestCase):
    def test_of_versions(self):
        for text, expected in (("2.11.0+cu130", (2, 11)), ("2.6.0", (2, 6)), ("2.15.0+cu132", (2, 15))):
            self.assertEqual(versions.number(text), expected)


class Solve(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.matrix = torch.randn(2, 3, 3) + 3 * torch.eye(3)
        self.right = torch.randn(2, 3, 4)

    def factors(self, matrix):
        results = torch._linalg_solve_ex(matrix.to("mps"), self.right.to("mps"))
        return [result.cpu() for result in results]

    def test_a_host_of_this_version_is_not_asked_twice(self):
        ours = self.factors(self.matrix)
        for mine, expected in zip(ours, torch._linalg_solve_ex(self.matrix, self.right)):
            self.assertTrue(torch.equal(mine, expected))

    def test_a_host_of_the_other_kind_gives_the_factors_that_this_torch_reads(self):
        is_new = versions.number(str(torch.__version__)) >= (2, 11)
        with mock.patch.dict(link._State.host, torch=OLD if is_new else NEW):
            _, lu, pivots, _ = self.factors(self.matrix)
        # The host is of this version in truth; what is asked besides is what this version's own gradient reads.
        expected = torch.linalg.lu_factor_ex(self.matrix if is_new else self.matrix.mT)
        self.assertTrue(torch.equal(lu, expected[0]) and torch.equal(pivots, expected[1]))
        with mock.patch.dict(link._State.host, torch=OLD if is_new else NEW):
            matrix = self.matrix.to("mps").requires_grad_()
            torch.linalg.solve(matrix, self.right.to("mps")).sum().backward()
        reference = self.matrix.clone().requires_grad_()
        torch.linalg.solve(reference, self.right).sum().backward()
        self.assertTrue(torch.allclose(matrix.grad.cpu(), reference.grad, rtol=1e-5, atol=1e-6))


if __name__ == "__main__":
    unittest.main()

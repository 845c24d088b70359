# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether optimizers take all parameters in one call: where the host has kernels for that, and only there."""

import copy
import sys
import unittest
from unittest import mock

import ondevice  # noqa: F401  (first: it makes the device)
import torch

import lighter_mps
from lighter_mps import link


def train(model, inputs, steps=3, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


class Lists(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        self.inputs = torch.randn(16, 4)
        torch.zeros(1, device="mps").cpu()

    def on_device(self):
        """The trained parameters, and how many operators a step took once each was known."""
        model, inputs = copy.deepcopy(self.model).to("mps"), self.inputs.to("mps")
        train(copy.deepcopy(model), inputs)
        before = lighter_mps.statistics()["calls"]
        result = train(model, inputs)
        return result, lighter_mps.statistics()["calls"] - before

    def test_a_host_with_kernels_for_lists_gets_lists(self):
        plain, singly = self.on_device()
        with mock.patch.dict(link._State.host, device="cuda:0"):
            listed, in_lists = self.on_device()
        self.assertLess(in_lists, singly * 0.7)
        reference = train(copy.deepcopy(self.model), self.inputs, foreach=True)
        for ours, other, one in zip(listed, reference, plain):
            self.assertTrue(torch.allclose(ours, other, rtol=1e-6, atol=1e-7))
            self.assertTrue(torch.allclose(ours, one, rtol=1e-5, atol=1e-6))

    def test_a_host_without_takes_them_one_by_one(self):
        supported = sys.modules["torch.optim.optimizer"]._get_foreach_kernels_supported_devices
        self.assertNotIn("mps", supported())
        for device in ("xpu:1", "cuda"):
            with mock.patch.dict(link._State.host, device=device):
                self.assertIn("mps", supported())
        for device in ("mps", "cpu"):
            with mock.patch.dict(link._State.host, device=device):
                self.assertNotIn("mps", supported())


if __name__ == "__main__":
    unittest.main()

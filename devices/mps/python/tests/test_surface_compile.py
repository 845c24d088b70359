# SPDX-License-Identifier: MIT OR Apache-2.0
"""torch.compile on the device: eager, aot_eager, our own backend, and what the default one does."""

import sys
import unittest
import warnings

import torch
import torch.nn.functional as F
from ondevice import assert_same, run_program
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


def step(module, device):
    """Loss and gradients of one step."""
    module = module.to(device)
    inputs = torch.linspace(-1, 1, 24, device=device).reshape(4, 6)
    loss = module(inputs).square().mean()
    loss.backward()
    return [loss, [parameter.grad for parameter in module.parameters()]]


class Compile(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()

    def check(self, **keywords):
        expected = step(model(), "cpu")
        module = model().to("mps")
        compiled = torch.compile(module, **keywords)
        found = step(compiled, "mps")
        assert_same(self, expected, found)

    def test_backends_by_name(self):
        for backend in ("eager", "aot_eager", "lighter"):
            with self.subTest(backend=backend):
                torch._dynamo.reset()
                self.check(backend=backend)

    def test_the_default_backend_goes_to_ours(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.check()
        texts = [str(warning.message) for warning in caught]
        self.assertLessEqual(sum('backend="lighter"' in text for text in texts), 1)
        self.check(mode="reduce-overhead")
        self.check(fullgraph=True, dynamic=True)

    def test_the_warning_names_the_backend_once(self):
        program = (
            "import torch, lighter_mps\n"
            "f = torch.compile(lambda x: x.sin() + 1)\n"
            "g = torch.compile(lambda x: x.cos() + 1)\n"
            "x = torch.ones(3, device='mps')\n"
            "print(f(x).tolist(), g(x).tolist())\n"
        )
        result = run_program(program)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr.count('backend="lighter"'), 1, result.stderr)

    def test_a_graph_that_makes_its_own_tensors(self):
        @torch.compile
        def make(n):
            return torch.arange(n, device="mps") * 2

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.assertEqual(make(4).tolist(), [0, 2, 4, 6])

    def test_in_place_views_and_attention(self):
        def function(x):
            y = x.clone()
            y[0].add_(1)
            q = y.reshape(1, 1, 4, 6)
            return F.scaled_dot_product_attention(q, q, q).sum() + y.t()[2].sum()

        for device in ("mps",):
            x = torch.linspace(-1, 1, 24).reshape(4, 6)
            here = x.clone().requires_grad_()
            function(here).backward()
            there = x.to(device).requires_grad_()
            compiled = torch.compile(function, backend="lighter", fullgraph=True)
            result = compiled(there)
            result.backward()
            assert_same(self, [function(here), here.grad], [result, there.grad], rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                assert_same(self, function(here), compiled(there), rtol=1e-4, atol=1e-5)

    def test_a_transformer_layer(self):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        x = torch.linspace(-1, 1, 80).reshape(2, 5, 8)
        expected = layer(x)
        compiled = torch.compile(layer.to("mps"), backend="lighter")
        assert_same(self, expected, compiled(x.to("mps")), rtol=1e-4, atol=1e-5)

    def test_listed_and_known_to_modules(self):
        module = model().to("mps")
        module.compile(backend="lighter")
        self.assertEqual(module(torch.ones(1, 6, device="mps")).shape, (1, 2))
        self.assertIn("lighter", torch._dynamo.list_backends())

    def test_import_alone_leaves_dynamo_out(self):
        result = run_program("import sys, torch; before = 'torch._dynamo' in sys.modules; import lighter_mps; "
                             "print(before, 'torch._dynamo' in sys.modules)")
        before, after = result.stdout.split()
        self.assertEqual(before, after, result.stderr)


@unittest.skipIf(sys.version_info >= (3, 14) and not hasattr(torch, "accelerator"), "dynamo lacks this Python")
class OnTheProcessor(unittest.TestCase):
    def test_other_graphs_still_reach_inductor(self):
        seen = []
        torch._dynamo.reset()
        import torch._inductor.compile_fx as compile_fx

        kept = compile_fx.compile_fx

        def noted(graph, inputs, **_keywords):
            seen.append(graph)
            return graph.forward

        compile_fx.compile_fx = noted
        try:
            torch.compile(lambda x: x + 1)(torch.ones(2))
        finally:
            compile_fx.compile_fx = kept
        self.assertEqual(len(seen), 1)


if __name__ == "__main__":
    unittest.main()

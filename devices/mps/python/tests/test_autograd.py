# SPDX-License-Identifier: MIT OR Apache-2.0
"""Autograd and torch.func on the device: what they compute, and what they refuse, is the processor's."""

import unittest

import torch
import torch.nn.functional as F
from ondevice import assert_as_on_cpu, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def ramp(device, *sizes):
    count = torch.Size(sizes).numel()
    return torch.linspace(-1, 1, count, device=device).reshape(sizes)


class Autograd(unittest.TestCase):
    def test_double_backward(self):
        def run(device):
            x = ramp(device, 5).requires_grad_()
            (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            return [first, second]

        assert_as_on_cpu(self, run)

    def test_gradient_penalty(self):
        def run(device):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
            x = ramp(device, 3, 4).requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (grad.norm(2, dim=1) - 1).square().mean().backward()
            return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

        torch.manual_seed(0)
        assert_as_on_cpu(self, run)

    def test_hooks(self):
        def run(device):
            seen = []
            layer = build_linear(device)
            x = ramp(device, 2, 3).requires_grad_()
            x.register_hook(lambda grad: grad * 2)
            layer.register_forward_hook(lambda _m, _i, out: out + 1)
            layer.register_full_backward_hook(lambda _m, _gi, go: seen.append(go[0]))
            layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            layer(x).square().sum().backward()
            return [x.grad, seen]

        assert_as_on_cpu(self, run)

    def test_in_place_on_views(self):
        def run(device):
            x = ramp(device, 3, 4).requires_grad_()
            y = x * 1
            y[1].mul_(3)
            y.t()[2] += 1
            y.view(-1)[::5].zero_()
            y.sum().backward()
            return [y, x.grad]

        assert_as_on_cpu(self, run)

    def test_version_counter(self):
        x = ramp("mps", 3).requires_grad_()
        y = x.exp()
        y.add_(1)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()
        with self.assertRaisesRegex(RuntimeError, "leaf Variable that requires grad"):
            x.add_(1)

    def test_custom_function(self):
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**3

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return 3 * x**2 * grad

        def run(device):
            x = ramp(device, 4).requires_grad_()
            Cube.apply(x).sum().backward()
            return x.grad

        assert_as_on_cpu(self, run)

    def test_saved_tensor_hooks(self):
        def run(device):
            x = ramp(device, 4).requires_grad_()
            with torch.autograd.graph.save_on_cpu():
                y = (x.exp() * x).sum()
            y.backward()
            return x.grad

        assert_as_on_cpu(self, run)

    def test_anomaly_detection_names_the_operator(self):
        x = torch.tensor([-1.0], device="mps", requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            with self.assertRaisesRegex(RuntimeError, "nan values"):
                torch.sqrt(x).sum().backward()

    def test_mixed_devices_in_one_graph(self):
        def run(device):
            x = ramp("cpu", 4).requires_grad_()
            (x.to(device).exp().cpu() * x).sum().backward()
            return x.grad

        assert_as_on_cpu(self, run)

    def test_inference_mode(self):
        with torch.inference_mode():
            tensor = torch.ones(2, device="mps") + 1
        self.assertTrue(tensor.is_inference())
        self.assertEqual(tensor.tolist(), [2.0, 2.0])


def build_linear(device):
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(device)


class Checkpointing(unittest.TestCase):
    def test_same_gradients(self):
        def run(device):
            torch.manual_seed(0)
            block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device)
            x = ramp(device, 2, 6).requires_grad_()
            results = []
            for reentrant in (True, False):
                x.grad = None
                checkpoint(block, x, use_reentrant=reentrant).sum().backward()
                results.append(x.grad.clone())
            checkpoint_sequential(block, 2, x, use_reentrant=False).sum().backward()
            return [*results, x.grad]

        assert_as_on_cpu(self, run)

    def test_dropout_draws_the_same_numbers_again(self):
        for reentrant in (True, False):
            with self.subTest(use_reentrant=reentrant):
                torch.manual_seed(0)
                x = torch.ones(200, device="mps", requires_grad=True)
                result = checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=reentrant)
                result.sum().backward()
                assert_same(self, result, x.grad)


class Functions(unittest.TestCase):
    def test_func_grad_and_friends(self):
        def run(device):
            x = ramp(device, 4)
            f = lambda t: (t.sin() * t).sum()  # noqa: E731
            return [
                torch.func.grad(f)(x),
                torch.func.grad(lambda t: torch.func.grad(f)(t).sum())(x),
                torch.func.vjp(lambda t: t**2, x)[1](torch.ones_like(x)),
                torch.func.jvp(lambda t: t**2, (x,), (torch.ones_like(x),)),
                torch.func.jacrev(lambda t: t**2)(x),
                torch.func.jacfwd(lambda t: t**2)(x),
                torch.func.hessian(f)(x),
            ]

        assert_as_on_cpu(self, run)

    def test_vmap(self):
        def run(device):
            x, w = ramp(device, 5, 3), ramp(device, 3, 2)
            return [
                torch.func.vmap(lambda t: t @ w)(x),
                torch.func.vmap(lambda t: t.sum() * t)(x),
                torch.func.vmap(torch.func.grad(lambda t: (t @ w).square().sum()))(x),
                torch.func.vmap(lambda t: F.softmax(t, -1), in_dims=1)(x),
            ]

        assert_as_on_cpu(self, run)

    def test_functional_call_for_each_sample(self):
        def run(device):
            model = build_linear(device)
            parameters = {name: value.detach() for name, value in model.named_parameters()}
            x, y = ramp(device, 4, 3), ramp(device, 4, 2)

            def loss(parameters, sample, target):
                return F.mse_loss(torch.func.functional_call(model, parameters, (sample,)), target)

            return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)

        assert_as_on_cpu(self, run)

    def test_forward_mode(self):
        def run(device):
            import torch.autograd.forward_ad as forward

            with forward.dual_level():
                dual = forward.make_dual(ramp(device, 4), torch.ones(4, device=device))
                return list(forward.unpack_dual(dual.exp() * 2))

        assert_as_on_cpu(self, run)

    def test_gradcheck_in_single_precision(self):
        x = ramp("mps", 3).requires_grad_()
        self.assertTrue(
            torch.autograd.gradcheck(lambda t: (t * 2).tanh(), (x,), eps=1e-2, atol=1e-2, rtol=1e-2, fast_mode=False)
        )


class Attention(unittest.TestCase):
    def both(self, run, **tolerances):
        assert_as_on_cpu(self, run, **({"rtol": 1e-4, "atol": 1e-5} | tolerances))

    def test_with_and_without_gradient(self):
        for causal in (False, True):

            def run(device, causal=causal):
                q, k, v = (ramp(device, 2, 3, 5, 4) * s for s in (1.0, -0.5, 2.0))
                with torch.no_grad():
                    plain = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                q.requires_grad_()
                F.scaled_dot_product_attention(q, k, v, is_causal=causal).square().sum().backward()
                return [plain, q.grad]

            with self.subTest(is_causal=causal):
                self.both(run)

    def test_masks_scale_and_groups(self):
        def run(device):
            q, k, v = ramp(device, 1, 4, 3, 4), ramp(device, 1, 2, 5, 4), ramp(device, 1, 2, 5, 4)
            mask = torch.ones(3, 5, dtype=torch.bool, device=device).tril(1)
            additive = torch.zeros(3, 5, device=device).masked_fill(~mask, float("-inf"))
            results = []
            for keywords in ({"attn_mask": mask}, {"attn_mask": additive}, {"scale": 0.3}):
                results.append(F.scaled_dot_product_attention(q[:, :2], k, v, **keywords))
            results.append(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
            q.requires_grad_()
            grouped = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.5)
            grouped.sum().backward()
            return [*results, grouped, q.grad]

        self.both(run)

    def test_under_func_transforms(self):
        def run(device):
            q = ramp(device, 2, 3, 4)
            attend = lambda t: F.scaled_dot_product_attention(t, t, t)  # noqa: E731
            return [
                torch.func.vmap(attend)(q),
                torch.func.grad(lambda t: attend(t).square().sum())(q),
                torch.func.jvp(attend, (q,), (torch.ones_like(q),)),
            ]

        self.both(run)

    def test_multihead_attention(self):
        def run(device):
            torch.manual_seed(0)
            layer = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
            x = ramp(device, 2, 5, 8)
            padding = torch.tensor([[False] * 5, [False, False, True, True, True]], device=device)
            results = [*layer(x, x, x, key_padding_mask=padding)]
            results.append(layer(x, x, x, need_weights=False)[0])
            layer.eval()
            with torch.no_grad():
                results.append(layer(x, x, x, need_weights=False)[0])
            return results

        self.both(run)

    def test_dropout(self):
        with torch.no_grad():
            q = torch.ones(1, 1, 64, 4, device="mps")
            torch.manual_seed(0)
            result = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        self.assertGreater(result.std().item(), 0.0)


if __name__ == "__main__":
    unittest.main()

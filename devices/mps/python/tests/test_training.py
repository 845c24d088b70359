# SPDX-License-Identifier: MIT OR Apache-2.0
"""Training on the device against the same training on the processor, in the same process.

The host computes on its processor with the same torch, so a loop that goes wrong shows in the last digits; tolerances
are there for kernels that may choose another order of additions.
"""

import unittest
import warnings

import torch
import torch.nn.functional as F
from ondevice import assert_as_on_cpu, assert_same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20


def build(make):
    """The same model on every call, whatever was drawn before."""
    torch.manual_seed(0)
    return make()


def train(device, model, inputs, targets, optimizer, loss_function=F.mse_loss, steps=STEPS, closure=False):
    """Trains a copy on the device; gives every loss and the parameters at the end."""
    model = model.to(device)
    inputs, targets = inputs.to(device), targets.to(device)
    optimizer = optimizer(model.parameters())
    losses = []

    def step():
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(optimizer.step(step).detach() if closure else step().detach())
        if not closure:
            optimizer.step()
    return [torch.stack(losses), model.state_dict()]


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
    "SGD_foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
}


class Optimizers(unittest.TestCase):
    def test_each_against_the_processor(self):
        torch.manual_seed(1)
        inputs, targets = torch.randn(32, 8), torch.randn(32, 4)
        for name, optimizer in OPTIMIZERS.items():
            with self.subTest(optimizer=name):
                closure = name == "LBFGS"
                losses, _ = assert_as_on_cpu(
                    self,
                    lambda device, o=optimizer, c=closure: train(device, build(mlp), inputs, targets, o, closure=c),
                    rtol=1e-4,
                    atol=1e-5,
                )
                self.assertLess(losses[-1].item(), losses[0].item())

    def test_schedulers_and_clipping(self):
        torch.manual_seed(1)
        inputs, targets = torch.randn(32, 8), torch.randn(32, 4)

        def loop(device):
            model = build(mlp).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
            norms = []
            for _ in range(10):
                optimizer.zero_grad(set_to_none=False)
                F.smooth_l1_loss(model(inputs.to(device)), targets.to(device)).backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
            return [torch.stack(norms), model.state_dict()]

        assert_as_on_cpu(self, loop)

    def test_averaged_model(self):
        def loop(device):
            model = build(mlp).to(device)
            averaged = torch.optim.swa_utils.AveragedModel(model)
            for _ in range(3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.5)
                averaged.update_parameters(model)
            return averaged.state_dict()

        assert_as_on_cpu(self, loop)


class SmallGpt(nn.Module):
    """Tokens, causal attention blocks, a head that shares the embedding's weight."""

    def __init__(self, vocabulary=31, width=32, heads=4, layers=2, length=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


class Models(unittest.TestCase):
    def compare(self, make, inputs, targets, loss_function=F.mse_loss, steps=8, rtol=2e-4, atol=2e-5):
        losses, _ = assert_as_on_cpu(
            self,
            lambda device: train(
                device, build(make), inputs, targets, lambda p: torch.optim.Adam(p, lr=0.01), loss_function, steps
            ),
            rtol=rtol,
            atol=atol,
        )
        self.assertLess(losses[-1].item(), losses[0].item())

    def test_convolutions_and_norms(self):
        torch.manual_seed(2)

        def make():
            return nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 8, 3, stride=2, groups=2),
                nn.GroupNorm(2, 8),
                nn.SiLU(),
                nn.ConvTranspose2d(8, 4, 2, stride=2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(4, 5),
            )

        self.compare(make, torch.randn(6, 3, 16, 16), torch.randint(0, 5, (6,)), F.cross_entropy)

    def test_channels_last(self):
        torch.manual_seed(2)
        inputs = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)

        def run(device):
            model = build(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).to(device)
            model = model.to(memory_format=torch.channels_last)
            result = model(inputs.to(device))
            self.assertTrue(result.is_contiguous(memory_format=torch.channels_last))
            result.sum().backward()
            return [result, model[0].weight.grad]

        assert_as_on_cpu(self, run)

    def test_evaluation_of_batch_norm(self):
        def run(device):
            model = build(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))).to(device)
            inputs = torch.linspace(-1, 1, 100, device=device).reshape(1, 1, 10, 10)
            for _ in range(3):
                model(inputs)
            model.eval()
            with torch.no_grad():
                return [model(inputs), model.state_dict()]

        assert_as_on_cpu(self, run)

    def test_recurrent_networks(self):
        torch.manual_seed(3)

        class Recurrent(nn.Module):
            def __init__(self, kind):
                super().__init__()
                self.net = kind(5, 7, num_layers=2, batch_first=True, bidirectional=True)
                self.head = nn.Linear(14, 1)

            def forward(self, inputs):
                return self.head(self.net(inputs)[0][:, -1])

        inputs, targets = torch.randn(4, 6, 5), torch.randn(4, 1)
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            with self.subTest(kind=kind.__name__):
                self.compare(lambda kind=kind: Recurrent(kind), inputs, targets)

    def test_packed_sequences(self):
        def run(device):
            net = build(lambda: nn.LSTM(3, 4, batch_first=True)).to(device)
            inputs = torch.linspace(-1, 1, 24, device=device).reshape(2, 4, 3)
            packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([4, 2]), batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)[0]

        assert_as_on_cpu(self, run)

    def test_transformer_layer(self):
        torch.manual_seed(4)
        inputs = torch.randn(3, 10, 16)
        make = lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)  # noqa: E731
        self.compare(make, inputs, torch.randn(3, 10, 16), steps=5)

    def test_small_gpt(self):
        torch.manual_seed(5)
        tokens = torch.randint(0, 31, (4, 17))

        def loss(logits, targets):
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        self.compare(SmallGpt, tokens[:, :-1], tokens[:, 1:], loss, steps=6)

    def test_generation_with_a_growing_input(self):
        def run(device):
            model = build(SmallGpt).to(device).eval()
            tokens = torch.tensor([[1, 2]], device=device)
            with torch.no_grad():
                for _ in range(6):
                    tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
            return tokens

        assert_as_on_cpu(self, run)

    def test_embeddings_and_losses(self):
        torch.manual_seed(6)
        tokens, targets = torch.randint(0, 20, (4, 6)), torch.randint(0, 3, (4,))
        self.compare(
            lambda: nn.Sequential(nn.EmbeddingBag(20, 8, mode="mean"), nn.LayerNorm(8), nn.Linear(8, 3)),
            tokens, targets, lambda out, target: F.nll_loss(F.log_softmax(out, -1), target),
        )  # fmt: skip


class Loading(unittest.TestCase):
    def test_loader_with_and_without_workers(self):
        inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(7))
        data = TensorDataset(inputs, inputs[:, :4] * 2)

        def loop(device, workers, pin):
            model = build(mlp).to(device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            loader = DataLoader(
                data, 16, shuffle=True, num_workers=workers, pin_memory=pin, generator=torch.Generator().manual_seed(8)
            )
            for _ in range(2):
                for batch, target in loader:
                    optimizer.zero_grad()
                    F.mse_loss(model(batch.to(device, non_blocking=True)), target.to(device)).backward()
                    optimizer.step()
            return model.state_dict()

        expected = loop("cpu", 0, False)
        for workers in (0, 2):
            for pin in (False, True):
                with self.subTest(workers=workers, pin_memory=pin), warnings.catch_warnings():
                    # Torch warns that it pins nothing for mps; that is as on a Mac.
                    warnings.simplefilter("ignore")
                    assert_same(self, expected, loop("mps", workers, pin))


class MixedPrecision(unittest.TestCase):
    def test_autocast(self):
        torch.manual_seed(9)
        inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
        for dtype in (torch.float16, torch.bfloat16):
            with self.subTest(dtype=dtype):
                model = build(mlp).to("mps")
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                losses = []
                for _ in range(10):
                    optimizer.zero_grad()
                    with torch.autocast("mps", dtype=dtype):
                        output = model(inputs.to("mps"))
                        loss = F.mse_loss(output.float(), targets.to("mps"))
                    self.assertEqual(output.dtype, dtype)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                self.assertEqual(model[0].weight.grad.dtype, torch.float32)
                self.assertLess(losses[-1], losses[0])
                reference = train("cpu", build(mlp), inputs, targets, lambda p: torch.optim.Adam(p, lr=0.01), steps=10)
                self.assertAlmostEqual(losses[-1], reference[0][-1].item(), delta=0.05)

    def test_grad_scaler(self):
        def loop(device):
            model = build(mlp).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3)
            inputs = torch.linspace(-1, 1, 64, device=device).reshape(8, 8)
            scales = []
            for step in range(8):
                optimizer.zero_grad()
                loss = model(inputs).square().mean() * (float("inf") if step == 4 else 1.0)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            return [torch.tensor(scales), model.state_dict()]

        assert_as_on_cpu(self, loop)

    def test_models_in_half_precision(self):
        for dtype in (torch.float16, torch.bfloat16):
            with self.subTest(dtype=dtype):
                assert_as_on_cpu(
                    self,
                    lambda device, dtype=dtype: build(mlp).to(device, dtype)(torch.ones(2, 8, device=device, dtype=dtype)),
                    rtol=1e-2,
                    atol=1e-2,
                )


if __name__ == "__main__":
    unittest.main()

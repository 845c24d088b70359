# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small nets with something to learn, for the gates and the benchmark of the mps device.

Each function draws from torch's generator and gives a model, inputs, targets, a loss function and a number of steps, all
on the processor. Needs no device.
"""

import torch
import torch.nn.functional as F
from torch import nn

BATCH = 64
WORDS, CONTEXT = 48, 24


class Block(nn.Module):
    """A layer of a GPT: attention to what came before, then an MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attention(self.norm_1(x)).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """A small one, for words of a made-up language."""

    def __init__(self, width=64, heads=4, layers=2, context=CONTEXT):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words):
        places = torch.arange(words.shape[1], device=words.device)
        return self.head(self.norm(self.blocks(self.word(words) + self.place(places)))).flatten(0, 1)


def mlp():
    inputs = torch.randn(256, 16)
    targets = torch.sin(inputs @ torch.randn(16, 4))
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)), inputs, targets, F.mse_loss, 60


def conv():
    labels = torch.randint(0, 4, (BATCH,))
    pictures = torch.randn(BATCH, 3, 12, 12) + F.one_hot(labels, 4).float()[:, :3, None, None]
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 4),
    )
    return net, pictures, labels, F.cross_entropy, 40


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    inputs = torch.randn(16, 10, 32)
    return layer, inputs, inputs.flip(1).tanh(), F.mse_loss, 60


def gpt():
    start, step = torch.randint(0, WORDS, (16, 1)), torch.randint(1, 4, (16, 1))
    words = (start + step * torch.arange(CONTEXT + 1)) % WORDS
    return Gpt(), words[:, :-1], words[:, 1:].flatten(), F.cross_entropy, 40

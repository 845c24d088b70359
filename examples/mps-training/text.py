# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains a small text model on the mps device, saves it, and fine-tunes it for another kind of text.

usage: text.py [--steps N] TEXT CURVE_SVG

It first learns English from the manual that comes with Python, letter by letter, then goes on from the saved file with
TEXT, which is held against a part of it that is never learned from. Prints what the model writes before and after.
"""

import argparse
import pydoc_data.topics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from curve import draw
from torch import nn

import lighter_mps  # noqa: F401  (the import is what makes the device)

DEVICE = "mps"
CONTEXT, BATCH, WIDTH = 64, 24, 96
LETTERS = "\n" + "".join(map(chr, range(32, 127)))


class Model(nn.Module):
    """A transformer that says which letter comes next."""

    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters):
        length = letters.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, device=letters.device)
        places = torch.arange(length, device=letters.device)
        return self.head(self.layers(self.letter(letters) + self.place(places), mask=later, is_causal=True))


def encode(text):
    return torch.tensor([LETTERS.index(letter) for letter in text if letter in LETTERS])


def batch(text):
    starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,))
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).to(DEVICE)
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model, text):
    letters, following = batch(text)
    return F.cross_entropy(model(letters).flatten(0, 1), following.flatten())


def train(model, text, steps, rate):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=rate), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, text)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def held_back(model, text):
    torch.manual_seed(1)
    return torch.stack([loss_of(model, text) for _ in range(8)]).mean().item()


@torch.no_grad()
def write(model, start, count=120):
    torch.manual_seed(2)
    letters = encode(start)[None].to(DEVICE)
    for _ in range(count):
        chances = F.softmax(model(letters[:, -CONTEXT:])[:, -1] / 0.6, dim=1)
        letters = torch.cat([letters, torch.multinomial(chances, 1)], dim=1)
    return "".join(LETTERS[letter] for letter in letters[0].tolist())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("text")
    parser.add_argument("curve")
    options = parser.parse_args()
    manual = encode("\n\n".join(pydoc_data.topics.topics.values()))
    own = encode(Path(options.text).read_text(encoding="utf-8"))
    own, unseen = own[: len(own) * 4 // 5], own[len(own) * 4 // 5 :]
    torch.manual_seed(0)
    model, started = Model().to(DEVICE), time.monotonic()
    losses = train(model, manual, options.steps, 3e-3)
    print(f"Python's manual: loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps, {time.monotonic() - started:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        torch.save(model.state_dict(), path)
        model = Model().to(DEVICE)
        model.load_state_dict(torch.load(path, weights_only=True))
    before, wrote = held_back(model, unseen), write(model, "You may ")
    tuned = train(model, own, options.steps // 3, 1e-3)
    after = held_back(model, unseen)
    print(f"fine-tuned in {len(tuned)} steps: loss of text that it had not seen {before:.2f} to {after:.2f}")
    print(f"it wrote before: {wrote!r}\nand after:       {write(model, 'You may ')!r}")
    draw(options.curve, "A small text model: loss of each step", {"the mps device": losses + tuned}, {len(losses): "fine-tuning"})


main()

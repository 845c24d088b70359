# SPDX-License-Identifier: MIT OR Apache-2.0
"""Learns to tell handwritten digits apart on the mps device, with a small convolutional net.

usage: images.py [--compare] [--epochs N] DIGITS_CSV_GZ CURVE_SVG

DIGITS_CSV_GZ is scikit-learn's: 1797 pictures of 8 by 8, one a line, with the digit last. A fifth of them is held back
and never learned from. --compare trains on the processor as well, from the same start, and draws both curves.
"""

import argparse
import gzip
import time

import torch
import torch.nn.functional as F
from curve import draw
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lighter_mps  # noqa: F401  (the import is what makes the device)

HELD_BACK = 360


def read(path):
    with gzip.open(path, "rt") as file:
        rows = torch.tensor([[float(field) for field in line.split(",")] for line in file])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    pictures, digits = rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1].long()
    return TensorDataset(pictures[HELD_BACK:], digits[HELD_BACK:]), (pictures[:HELD_BACK], digits[:HELD_BACK])


def net():
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(48 * 16, 10),
    )


def train(device, learned, epochs):
    """The model and every step's loss."""
    torch.manual_seed(0)
    model, losses = net().to(device), []
    batches = DataLoader(learned, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for pictures, digits in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pictures.to(device)), digits.to(device))
            loss.backward()
            optimizer.step()
            # Not .item(): that would wait for every step.
            losses.append(loss.detach())
    return model.eval(), torch.stack(losses).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("digits")
    parser.add_argument("curve")
    options = parser.parse_args()
    learned, (pictures, digits) = read(options.digits)
    curves = {}
    for device in ("mps", "cpu") if options.compare else ("mps",):
        started = time.monotonic()
        model, losses = train(device, learned, options.epochs)
        with torch.no_grad():
            right = (model(pictures.to(device)).argmax(1).cpu() == digits).sum().item()
        name = "the mps device" if device == "mps" else "the container's processor"
        curves[name] = losses
        print(
            f"{name}: loss {losses[0]:.2f} to {losses[-1]:.3f} in {len(losses)} steps, {time.monotonic() - started:.1f} s; "
            f"{right} of {len(digits)} pictures that it had not seen are right"
        )
    draw(options.curve, "Handwritten digits: loss of each step", curves)


main()

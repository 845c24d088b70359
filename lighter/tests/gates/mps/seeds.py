# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains with dropout on the mps device from a seed, and prints every loss and a draw of the device's generator.

usage: seeds.py SEED STEPS
"""

import json
import sys

import torch
from torch import nn

import lighter_mps  # noqa: F401  (the import is what makes the device)


def main():
    seed, steps = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    inputs = torch.randn(64, 16, device="mps")
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)).to("mps")
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps({"seed": seed, "losses": losses, "draw": torch.rand(4, device="mps").tolist()}), flush=True)


main()

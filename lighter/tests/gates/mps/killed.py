# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains on the mps device until that fails, and prints the error's type and text as one JSON line.

A program whose host has been killed must learn so from one clear error: it ends by itself, and well, when it does.
"""

import json
import time

import torch
from torch import nn

import lighter_mps  # noqa: F401  (the import is what makes the device)

LIMIT_S = 300


def main():
    torch.set_num_threads(1)
    model = nn.Linear(16, 16).to("mps")
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(64, 16, device="mps")
    steps, end = 0, time.monotonic() + LIMIT_S
    try:
        # A test that has failed must not wait for it for ever.
        while time.monotonic() < end:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % 20 == 0:
                loss.item()
                print(f"step {steps}", flush=True)
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)


main()

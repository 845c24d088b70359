# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains on the mps device and prints what it holds there as one JSON line: early, late, and after everything is gone.

It then waits for /stop, so that the host can be asked what it holds for this container.
"""

import gc
import json
import os
import time

import torch
from torch import nn

import lighter_mps  # noqa: F401  (the import is what makes the device)

LIMIT_S = 300


def train(model, optimizer, inputs, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    torch.mps.synchronize()
    return torch.mps.current_allocated_memory()


def main():
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to("mps")
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(256, 256, device="mps")
    early = train(model, optimizer, inputs, 10)
    late = train(model, optimizer, inputs, 200)
    del model, optimizer, inputs
    gc.collect()
    torch.mps.synchronize()
    after = torch.mps.current_allocated_memory()
    print(json.dumps({"early": early, "late": late, "after": after}), flush=True)
    # A test that has failed must not wait for it for ever.
    end = time.monotonic() + LIMIT_S
    while not os.path.exists("/stop") and time.monotonic() < end:
        time.sleep(0.05)


main()

# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains small models on the mps device and on the container's own processor, from the same start.

usage: train.py CASE…      mlp, conv, transformer, gpt, loader, saved

Prints one JSON line for each: the first and the last loss on the device, the largest difference of a step's loss
between the two, the greatest loss, and the round trips of the last step.
"""

import json
import os
import sys
import tempfile

import torch
from nets import BATCH, conv, gpt, mlp, transformer
from torch.utils.data import DataLoader, TensorDataset

import lighter_mps


def step(model, optimizer, inputs, targets, loss_function):
    optimizer.zero_grad()
    loss = loss_function(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(device, make):
    """The losses of every step, and the round trips of the last."""
    torch.manual_seed(0)
    model, inputs, targets, loss_function, steps = make()
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    assert type(inputs) is torch.Tensor and inputs.device.type == device
    optimizer, losses, trips = optimizer_of(model), [], 0
    for _ in range(steps):
        before = lighter_mps.statistics()["round_trips"]
        losses.append(step(model, optimizer, inputs, targets, loss_function))
        trips = lighter_mps.statistics()["round_trips"] - before
    return torch.stack(losses).cpu(), trips


def train_loader(device, _make):
    """Batches from two worker processes, made on the processor there."""
    torch.manual_seed(0)
    model, inputs, targets, loss_function, _ = mlp()
    model = model.to(device)
    batches = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, num_workers=2, persistent_workers=True)
    optimizer, losses = optimizer_of(model), []
    for _ in range(10):
        for some, wanted in batches:
            losses.append(step(model, optimizer, some.to(device), wanted.to(device), loss_function))
    return torch.stack(losses).cpu(), 0


def train_saved(device, _make):
    """Saves model and optimizer half way, and goes on from the file."""
    torch.manual_seed(0)
    model, inputs, targets, loss_function, steps = mlp()
    inputs, targets, losses = inputs.to(device), targets.to(device), []
    model = model.to(device)
    optimizer = optimizer_of(model)
    for _ in range(steps // 2):
        losses.append(step(model, optimizer, inputs, targets, loss_function))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        saved = torch.load(path, weights_only=True)
        assert all(tensor.device.type == device for tensor in saved["model"].values())
        elsewhere = torch.load(path, map_location="cpu", weights_only=True)
        assert all(tensor.device.type == "cpu" for tensor in elsewhere["model"].values())
    torch.manual_seed(1)
    model = mlp()[0].to(device)
    optimizer = optimizer_of(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for _ in range(steps // 2):
        losses.append(step(model, optimizer, inputs, targets, loss_function))
    return torch.stack(losses).cpu(), 0


CASES = {
    "mlp": (train, mlp), "conv": (train, conv), "transformer": (train, transformer), "gpt": (train, gpt),
    "loader": (train_loader, None), "saved": (train_saved, None),
}


def main():
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        run, make = CASES[name]
        (expected, _), (found, trips) = run("cpu", make), run("mps", make)
        result = {
            "case": name, "first": found[0].item(), "last": found[-1].item(),
            "difference": (found - expected).abs().max().item(), "round_trips": trips,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

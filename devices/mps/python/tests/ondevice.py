# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of the device's surface share: the device in this very process, and comparing with the processor.

Importing it starts a host of its own (unless LIGHTER_MPS names one), imports `lighter_mps` and leaves one thread to torch.
The host computes on its processor with the same torch, so most results must be equal to the last bit.
"""

import atexit
import os
import subprocess
import sys
from pathlib import Path

from harness import ROOT, Host

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TORCH_FOLDER = str(Path(torch.__file__).resolve().parent.parent)
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
HOST = None

torch.set_num_threads(1)
if not os.environ.get("LIGHTER_MPS"):
    os.environ.setdefault("LIGHTER_TEST_HOST_TORCH", os.environ.get("LIGHTER_TEST_TORCH", TORCH_FOLDER))
    HOST = Host()
    HOST.__enter__()
    atexit.register(HOST.__exit__, None, None, None)
    os.environ["LIGHTER_MPS"] = HOST.address

import lighter_mps  # noqa: E402,F401  (the import is what makes the device)


def to_cpu(value):
    """The same structure with every tensor on the processor."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_cpu(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_cpu(entry) for entry in value]
    return value


def assert_same(case, expected, found, rtol=1e-5, atol=1e-6):
    """Equal structure, types, shapes, and numbers within a tolerance; `expected` and `found` may lie anywhere."""
    torch.testing.assert_close(to_cpu(found), to_cpu(expected), rtol=rtol, atol=atol, equal_nan=True)


def assert_as_on_cpu(case, function, rtol=1e-5, atol=1e-6):
    """Runs `function(device)` on both, each from the same seed, and compares what it returns.

    The processor uses the plain formula of attention, as the device does where gradients are wanted: its fused kernel
    adds in another order, and some gradients (a key's bias has none) are nothing but the rounding.
    """
    results = []
    for device in ("cpu", "mps"):
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.MATH):
            results.append(function(device))
    assert_same(case, *results, rtol=rtol, atol=atol)
    return results[1]


def run_program(text, timeout=120, **environment):
    """Runs a program in a fresh process that has the same torch and the same host; gives its result."""
    path = os.pathsep.join([str(ROOT), TORCH_FOLDER])
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )

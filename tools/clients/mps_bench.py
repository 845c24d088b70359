# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures one way to compute with torch, for tools/bench-mps, and prints the figures as one JSON line.

usage: mps_bench.py native|device|rgpu [--quick]

native is torch in this very process, device is lighter's mps device (its variables choose core, pure or synchronous),
and rgpu is that package. Times are medians; an operator's is over a thousand in a row, with the wait for the last.
"""

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lighter/tests/gates/mps"))

import torch

torch.set_num_threads(1)

import nets
import torch.nn.functional as F

KIND = sys.argv[1]
QUICK = "--quick" in sys.argv
DEVICE = {"native": "cpu", "device": "mps", "rgpu": "rgpu"}[KIND]
MEBIBYTES = 8 if QUICK else 100
# A model of 10.8 million parameters.
GPT = {"width": 384, "heads": 6, "layers": 6, "context": 64}

if KIND == "device":
    import lighter_mps
    from lighter_mps.surface import messages
    from lighter_mps_wire import protocol
elif KIND == "rgpu":
    import rgpu  # noqa: F401  (the import is what makes the device)


def wait():
    if KIND == "device":
        lighter_mps.synchronize()
    elif KIND == "rgpu":
        torch.ones(1, device=DEVICE).cpu()


def host_seconds():
    return messages.query(protocol.QUERY_CPU_SECONDS) if KIND == "device" else 0.0


def timed(function, times):
    """Microseconds of one call: by the clock, of this process, of the host's."""
    samples = []
    for _ in range(2 if QUICK else 5):
        for _ in range(20):
            function()
        wait()
        wall, own, host = time.perf_counter(), time.process_time(), host_seconds()
        for _ in range(times):
            function()
        own = time.process_time() - own
        wait()
        samples.append((time.perf_counter() - wall, own, host_seconds() - host))
    return [statistics.median(column) / times * 1e6 for column in zip(*samples)]


def operators():
    a, b = (torch.randn(64, 64).to(DEVICE) for _ in range(2))
    times = 100 if QUICK else 1000
    cases = {
        "add": lambda: a + b,
        "add_": lambda: a.add_(b),
        "mul by a number": lambda: a * 1.5,
        "t (a view)": lambda: a.t(),
        "item": lambda: a[0, 0].item(),
    }
    return {name: timed(function, times if name != "item" else times // 10) for name, function in cases.items()}


def steps(model, optimizer, inputs, targets, loss_function, warm, count):
    """Milliseconds of a step, and what a step costs on the wire."""
    def step():
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(warm):
        step()
    wait()
    before = lighter_mps.statistics() if KIND == "device" else {}
    started = time.perf_counter()
    for _ in range(count):
        step()
    after = lighter_mps.statistics() if KIND == "device" else {}
    wait()
    used = {name: (after[name] - before[name]) / count for name in ("calls", "round_trips", "bytes_sent") if before}
    return {"ms": (time.perf_counter() - started) / count * 1e3, **used}


def repeated(make, warm, count, rounds):
    results = [make(warm, count) for _ in range(1 if QUICK else rounds)]
    return {**results[-1], "ms": statistics.median(result["ms"] for result in results)}


def mlp(warm, count):
    torch.manual_seed(0)
    model, inputs, targets, loss_function, _ = nets.mlp()
    model = model.to(DEVICE)
    # Unfused and one tensor at a time everywhere, which is what MPS itself does, so that all do the same work.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False, fused=False)
    return steps(model, optimizer, inputs.to(DEVICE), targets.to(DEVICE), loss_function, warm, count)


def gpt(warm, count):
    torch.manual_seed(0)
    model = nets.Gpt(**GPT).to(DEVICE)
    words = torch.randint(0, nets.WORDS, (8, GPT["context"] + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)
    inputs, targets = words[:, :-1].to(DEVICE), words[:, 1:].flatten().to(DEVICE)
    return steps(model, optimizer, inputs, targets, F.cross_entropy, warm, count)


def bulk():
    """GiB a second, up and down."""
    here = torch.randn(MEBIBYTES << 18)
    there = here.to(DEVICE)
    up, down = [], []
    for _ in range(7):
        started = time.perf_counter()
        there = here.to(DEVICE)
        wait()
        middle = time.perf_counter()
        there.cpu()
        up.append(middle - started)
        down.append(time.perf_counter() - middle)
    return [MEBIBYTES / 1024 / statistics.median(times) for times in (up, down)]


def main():
    few = KIND == "rgpu" or QUICK
    result = {"mlp": repeated(mlp, 10, 10 if few else 200, 5), "operators": operators()}
    if KIND != "native":
        result["bulk"] = bulk()
    # The peer lacks operators of it, and takes minutes.
    if KIND != "rgpu":
        result["gpt"] = repeated(gpt, 1 if QUICK else 3, 1 if QUICK else 5, 3)
    print(json.dumps(result), flush=True)


main()

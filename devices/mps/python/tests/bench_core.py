# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a call costs the client: microseconds of this thread's processor time, the least of many rounds. No test.

usage: bench_core.py hot|core [ROUNDS]

Kernels are registered with torch's dispatcher, so that its part is in the figures; a thread reads and drops the bytes.
`call` is the kernel alone, called without the dispatcher; the first line says how fast the machine is at the moment.
"""

import sys
import time

import torch
from core_scenarios import new_output, returns
from core_support import HotPath, Peer

CALLS = 200


def least(rounds: int, work) -> float:
    """Microseconds of one call, in the best round."""
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            work()
        best = min(best, (time.thread_time_ns() - start) / CALLS / 1000)
    return best


def main():
    name, rounds = sys.argv[1], int((sys.argv + ["30"])[2])
    path = HotPath(name, peer=Peer(keep=False))
    library = torch.library.Library("aten", "IMPL", "MPS")
    add = path.kernel(new_output(path), [True, True], ["alpha"])
    add_ = path.kernel(returns(lambda args, _: args[0], "s", [0]), [False, True], ["alpha"])
    library.impl("add.Tensor", add)
    library.impl("add_.Tensor", add_)
    library.impl("as_strided", path.hot.as_strided)
    if hasattr(path.hot, "view"):
        library.impl("view", path.hot.view)
        library.impl("empty.memory_format", path.hot.empty(None))
    x, y = path.new(64, 64), path.new(64, 64)
    a, b = torch.ones(4), torch.ones(4)
    forms = {
        "native add_ of 4": lambda: a.add_(b),
        "add": lambda: torch.add(x, y),
        "add, call": lambda: add(x, y),
        "add a number": lambda: x + 2.5,
        "add_": lambda: x.add_(y),
        "add_, call": lambda: add_(x, y),
        "t": lambda: x.t(),
    }
    if hasattr(path.hot, "view"):
        forms["view"] = lambda: x.view(4096)
        forms["empty"] = lambda: torch.empty(64, 64, device="mps")
    with torch.no_grad():
        for form, work in forms.items():
            print(f"{name:5} {form:16} {least(rounds, work):6.2f} µs")


if __name__ == "__main__":
    main()

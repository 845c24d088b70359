# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls of kernels with every kind of argument and result, done by one hot path; prints what came of each as JSON.

usage: core_scenarios.py hot|core [MAKER]      MAKER: the core's way to make tensors, see tensors.rs

`test_core.py` runs it once with each and compares: misses, results and bytes must be the same.
"""

import json
import sys

import torch
from core_support import HotPath

SIGNATURES = iter(range(1, 1000))
FLOAT = 6


def new_output(path, count=1, kind="s", code=FLOAT):
    """An answer that gives new tensors of the first tensor's sizes, and a plan for them."""

    def answer(*args, **kwargs):
        shape = next(tuple(entry.shape) for entry in args if isinstance(entry, torch.Tensor) and entry.is_mps)
        tensors = [path.new(*shape, code=code) for _ in range(count)]
        plan = (next(SIGNATURES), kind, [(shape, tensors[0].stride(), code)] * count)
        result = tensors[0] if kind == "s" else tensors if kind == "l" else tuple(tensors)
        return result, plan

    return answer


def returns(result_of, kind, outputs):
    """An answer that gives `result_of(args, kwargs)` and a plan with these outputs."""
    return lambda *args, **kwargs: (result_of(args, kwargs), (next(SIGNATURES), kind, outputs))


def nothing(*args, **kwargs):
    """An answer of no result and a plan for that."""
    return None, (next(SIGNATURES), "v", [])


def outputs(path):
    """New tensors, arguments, keywords, None, lists, tuples, nothing."""
    x, y = path.new(2, 3), path.new(2, 3)
    add = path.kernel(new_output(path), [True, True])
    results = [add(x, y) for _ in range(4)]
    yield [(tuple(r.shape), r.stride(), str(r.dtype), str(r.device), type(r).__name__, path.hot.number(r)) for r in results]
    in_place = path.kernel(returns(lambda args, _: args[0], "s", [0]))
    yield [in_place(x, y) is x for _ in range(3)]
    out = path.kernel(returns(lambda _, kwargs: kwargs["out"], "s", ["out"]))
    yield [out(x, out=y) is y for _ in range(3)]
    yield [out(x, dim=1, out=y) is y for _ in range(3)]
    two = path.kernel(new_output(path, 2, "t"))
    yield [[path.hot.number(entry) for entry in two(x)] for _ in range(3)]
    many = path.kernel(new_output(path, 3, "l"))
    yield [type(many(x)).__name__ for _ in range(3)]
    mixed = path.kernel(returns(lambda args, kwargs: (args[1], None, kwargs["a"]), "t", [1, None, "a"]))
    yield [[entry is x for entry in mixed(y, x, a=x)] for _ in range(2)]
    void = path.kernel(nothing)
    yield [void(x) for _ in range(3)]


def numbers(path):
    """Numbers by value where dynamic, in the key elsewhere; 1, 1.0 and True are three things."""
    x = path.new(4)
    scaled = path.kernel(new_output(path), [True, True], ["alpha"])
    for value in (2, 3, 2.0, -0.5, True, False, 1, 1.0, float("inf"), 2**62, -(2**63)):
        scaled(x, value)
        scaled(x, 1, alpha=value)
        scaled(x, 1, beta=value)
    fixed = path.kernel(nothing)
    for value in (1, 1.0, True, 2, 2.5, 1, 1.0, True, 0.0, 0, False):
        fixed(x, value)
    yield fixed(x, 2j)
    wrapped = path.kernel(nothing, [True, False])
    for value in (1.5, 7, True, 2.5, 8, False):
        wrapped(x, torch.tensor(value, dtype={float: torch.float64, int: torch.int64, bool: torch.bool}[type(value)]))
        wrapped(x, torch.tensor(value, dtype=torch.float32))
        wrapped(x, torch.tensor([value]))


def others(path):
    """Texts, types, formats, layouts, devices, None, and what has no key."""
    x = path.new(2, 2)
    kernel = path.kernel(nothing)
    for value in ("mean", "sum", "mean", "", "ä", None, torch.float32, torch.float16, torch.float32, torch.strided):
        kernel(x, value)
    for value in (torch.channels_last, torch.contiguous_format, torch.channels_last):
        kernel(x, memory_format=value)
    for name in ("mps", "mps:0", "cpu", "mps:0", "mps"):
        kernel(x, device=torch.device(name))
    kernel(None, x)
    kernel(x, None)
    subclass = torch.nn.Parameter.__new__(type("Sub", (torch.nn.Parameter,), {}), path.new(2, 2))
    for value in (subclass, torch.Generator(), 1j, object(), (1, 2), torch.empty(2), torch.empty(2, device="meta"), {}):
        kernel(x, value)
        kernel(x, value)
        kernel(x, keyword=value)
    parameter = torch.nn.Parameter(path.new(2, 2))
    kernel(parameter, x)
    kernel(x, parameter)
    never = path.kernel(lambda *args: (None, (next(SIGNATURES), "v", [])), never=True)
    never(x)
    never(x)


def lists(path):
    """Lists of tensors, numbers and None, empty ones, and keywords in either order."""
    x, y = path.new(3), path.new(3)
    kernel = path.kernel(nothing, [True, False])
    for value in ([x, y], [y, x], [x], [], [x, None], [None, x], [1, 2], [1.0, 2.0], [2.0, 1.0], [1, 2.0]):
        kernel(value, value)
        kernel(value, [1])
    kernel([x, object()], 1)
    kernel(x, a=1, b=2)
    kernel(x, b=2, a=1)
    kernel(x, 1, 2)
    kernel(x, [1, 2])
    kernel(x, [[1], [2]])


def memory(path):
    """FREE before the next message, and numbers that come again."""
    x = path.new(8)
    add = path.kernel(new_output(path), [True])
    add(x)
    kept = []
    for turn in range(6):
        kept.append(add(x))
        if turn % 2:
            del kept[0]
    yield path.hot.free_count() > 0
    yield [path.hot.number(entry) for entry in kept]
    kept.clear()
    yield path.hot.free_count() > 0
    path.hot.append(b"\x03")
    yield path.hot.free_count() > 0
    empty = path.new(0, 4)
    yield path.hot.address(empty), path.hot.number(empty)
    in_place = path.kernel(returns(lambda args, _: args[0], "s", [0]))
    for _ in range(3):
        in_place(empty)
    view = path.hot.as_strided(x, [2], [3], 1)
    del x
    yield path.hot.free_count() > 0, path.hot.address(view) & 0xFFFF
    in_place(view)
    in_place(view)
    del view
    yield path.hot.free_count() > 0


def bits(path):
    """Tensors whose conjugation or negation is still to be done have no key where the kernel would see that."""
    z = path.new(4, code=9)
    lazy, plain = path.kernel(nothing, lazy=True), path.kernel(nothing)
    for kernel in (lazy, plain):
        for value in (z, torch._conj(z), torch._neg_view(z), z, path.new(4), [z], [torch._conj(z)]):
            kernel(value)
            kernel(value)


def forgetting(path):
    """Plans are gone after `forget_plans`, and errors of `miss` come out."""
    x = path.new(2)
    kernel = path.kernel(nothing)
    kernel(x)
    kernel(x)
    path.hot.forget_plans()
    kernel(x)
    kernel(x)

    def fails(*args):
        raise KeyError("from miss")

    failing = path.kernel(fails)
    for _ in range(2):
        try:
            failing(x)
        except KeyError as error:
            yield str(error)
    yield path.hot.counters()["calls"]


def main():
    path = HotPath(sys.argv[1], maker=(sys.argv + [None])[2])
    report = {}
    for scenario in (outputs, numbers, others, lists, memory, bits, forgetting):
        path.misses.clear()
        results = [list(entry) if isinstance(entry, tuple) else entry for entry in scenario(path) or ()]
        report[scenario.__name__] = {"results": results, "misses": list(path.misses)}
    path.hot.flush()
    report["pending"] = path.hot.pending()
    report["stream"] = path.everything_sent().hex()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()

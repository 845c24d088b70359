# SPDX-License-Identifier: MIT OR Apache-2.0
"""Local rules: each one's prediction against what torch gives on the processor, and doubtful calls that a rule must leave."""

import unittest

import torch
from ondevice import assert_same

import lighter_mps
from lighter_mps import rules, signatures

aten = torch.ops.aten
F32, I64 = torch.float32, torch.int64


def tensor(*sizes, dtype=F32, order=None):
    count = torch.Size(sizes).numel()
    values = torch.arange(count, dtype=F32).remainder(7).sub(3).div(4)
    made = (values.mul(4).abs() if not dtype.is_floating_point else values).to(dtype).reshape(sizes)
    return made if order is None else made.permute(order)


def samples():
    """(operator, arguments) for every rule; tensors are the processor's."""
    a, b, row = tensor(3, 4), tensor(3, 4) + 1, tensor(4)
    whole, mask = tensor(3, 4, dtype=I64), tensor(3, 4) > 0
    flipped, half = tensor(4, 3, order=(1, 0)), tensor(3, 4, dtype=torch.float16)
    zero_dim = torch.tensor(2.0)
    for name in sorted(rules.RULES):
        overload = name[len("aten::") :].partition(".")
        op = getattr(getattr(aten, overload[0]), overload[2] or "default")
        arguments = [str(argument.type) for argument in op._schema.arguments]
        if name in SPECIAL:
            yield from ((name, op, call) for call in SPECIAL[name])
        elif name.endswith("_backward"):
            rest = {"threshold_backward": [0.5]}.get(overload[0], [])
            yield from ((name, op, [*pair, *rest]) for pair in ((a, b), (flipped, flipped)))
        elif overload[0] in ("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"):
            yield name, op, [whole, whole][: arguments.count("Tensor")]
            yield name, op, [mask, whole][: arguments.count("Tensor")]
        elif arguments.count("Tensor") == 1 and not any("number" in kind for kind in arguments[1:2]):
            for x in (a, flipped, half, whole, mask, zero_dim):
                yield name, op, [x]
        elif arguments.count("Tensor") == 1:
            for x in (a, half, whole):
                for number in (2, 0.5):
                    yield name, op, [x, number]
        elif arguments.count("Tensor") == 2:
            for x, y in ((a, b), (a, row), (flipped, flipped), (half, a), (whole, a), (whole, mask), (a, zero_dim), (half, zero_dim)):
                yield name, op, [x, y]
        else:
            yield name, op, [a, b, b]


def calls(*lists):
    return [list(entry) for entry in lists]


A, B = tensor(3, 4), tensor(4, 5)
BATCH = tensor(2, 3, 4)
SPECIAL = {
    "aten::" + name: entry
    for name, entry in {
        "mm": calls((A, B), (A, tensor(5, 4, order=(1, 0)))),
        "addmm": calls((tensor(5), A, B), (tensor(3, 5), A, B)),
        "bmm": calls((BATCH, tensor(2, 4, 5))),
        "baddbmm": calls((tensor(2, 3, 5), BATCH, tensor(2, 4, 5)), (tensor(5), BATCH, tensor(2, 4, 5))),
        "mv": calls((A, tensor(4))),
        "dot": calls((tensor(4), tensor(4))),
        "cat": calls(([A, A],), ([A, tensor(3, 2)], 1), ([A, tensor(3, 4, dtype=I64)], -1), ([tensor(0), A],)),
        "stack": calls(([A, A],), ([A, A, A], -1), ([A, A], 1)),
        "repeat": calls((A, [2, 1]), (A, [2, 3, 1])),
        "where.self": calls((A > 0, A, A), (A > 0, A, tensor(4)), (A > 0, A, tensor(3, 4, dtype=torch.float16))),
        "addcmul": calls((A, A, A), (A, A, tensor(4))),
        "addcdiv": calls((A, A, A + 2),),
        "lerp.Tensor": calls((A, A, A)),
        "lerp.Scalar": calls((A, A, 0.3)),
        "masked_fill.Scalar": calls((A, A > 0, 2.0), (A, tensor(4) > 0, 1)),
        "masked_fill_.Scalar": calls((A, A > 0, 2.0)),
        "clamp": calls((A, 0, 0.5), (A, None, 0.5), (tensor(3, dtype=I64), 0, None), (tensor(3, dtype=I64), 0.5)),
        "clamp.Tensor": calls((A, tensor(4), None)),
        "clamp_": calls((A, 0, 0.5)),
        "native_dropout": calls((A, 0.5, True), (A, 0.5, False)),
        "_softmax": calls((A, 1, False), (BATCH, -1, False)),
        "_log_softmax": calls((A, 0, False)),
        "_softmax_backward_data": calls((A, A, 1, F32)),
        "_log_softmax_backward_data": calls((A, A, 1, F32)),
        "cumsum": calls((A, 1), (tensor(3, dtype=I64), 0), (A > 0, 0)),
        "cumprod": calls((A, 1)),
        "sum.dim_IntList": calls((A, [1]), (A, [0, 1], True), (A > 0, [0]), (A, None), (A, [])),
        "mean.dim": calls((A, [1]), (BATCH, [0, 2], True), (A, None)),
        "amax": calls((A, [1]), (A,), (A, [0], True)),
        "amin": calls((A, [1]), (A,)),
        "max.dim": calls((A, 1), (A, 0, True)),
        "min.dim": calls((A, 1)),
        "argmax": calls((A,), (A, 1), (A, 1, True)),
        "argmin": calls((A, 0)),
        "any.dim": calls((A, 1), (A, 0, True)),
        "all.dim": calls((A, 1)),
        "logsumexp": calls((A, [1]), (A, [0, 1], True)),
        "var.correction": calls((A, [1]), (A, None)),
        "std.correction": calls((A, [1])),
        "var_mean.correction": calls((A, [1])),
        "std_mean.correction": calls((A, [1])),
        "sort": calls((A,), (A, 0, True)),
        "sort.stable": [],
        "topk": calls((A, 2), (A, 2, 0)),
        "native_layer_norm": calls((BATCH, [4], None, None, 1e-5), (BATCH, [3, 4], tensor(3, 4), tensor(3, 4), 1e-5)),
        "native_layer_norm_backward": calls(
            (BATCH, BATCH, [4], tensor(2, 3, 1), tensor(2, 3, 1), tensor(4), tensor(4), [True, True, True]),
            (BATCH, BATCH, [4], tensor(2, 3, 1), tensor(2, 3, 1), tensor(4), tensor(4), [True, False, True]),
        ),
        "embedding": calls((B, tensor(2, 3, dtype=I64))),
        "embedding_dense_backward": calls((BATCH, tensor(2, 3, dtype=I64), 9, -1, False)),
        "index.Tensor": calls((B, [torch.tensor([0, 2])]), (B, [torch.tensor([[0], [1]]), torch.tensor([1, 2])])),
        "index_select": calls((B, 1, torch.tensor([0, 2]))),
        "index_add": calls((B, 0, torch.tensor([0, 2]), tensor(2, 5))),
        "index_copy": calls((B, 0, torch.tensor([0, 2]), tensor(2, 5))),
        "index_put": calls((B, [torch.tensor([0, 2])], tensor(2, 5))),
        "gather": calls((B, 1, torch.tensor([[0, 2], [1, 1]]))),
        "scatter.src": calls((B, 1, torch.tensor([[0, 2]]), tensor(1, 2))),
        "scatter.value": calls((B, 1, torch.tensor([[0, 2]]), 1.5)),
        "scatter_add": calls((B, 1, torch.tensor([[0, 2]]), tensor(1, 2))),
        "slice_backward": calls((tensor(2, 5), [4, 5], 0, 1, 3, 1)),
        "select_backward": calls((tensor(5), [4, 5], 0, 1)),
        "lerp_.Scalar": calls((A, A, 0.3)),
        "threshold": calls((A, 0.5, 0.1)),
        "copy_": calls((A, tensor(4)), (A, tensor(3, 4, dtype=I64))),
        "random_.from": calls((A, 1, 5)),
        "random_.to": calls((A, 5)),
        "gelu": calls((A,), (A[:, ::2],)),
    }.items()
}


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.preserve_format).to("mps")
    return [on_device(entry) for entry in value] if isinstance(value, list) else value


def mine(value):
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.preserve_format)
    return [mine(entry) for entry in value] if isinstance(value, list) else value


class Predictions(unittest.TestCase):
    def test_each_rule_against_the_processor(self):
        predicted = 0
        seen = set()
        for name, op, arguments in samples():
            here = mine(arguments)
            there = on_device(arguments)
            keywords = {"rounding_mode": "floor"} if name.endswith("_mode") else {}
            guess = rules.predict(name, there, keywords)
            try:
                results = op(*here, **keywords)
            except (RuntimeError, NotImplementedError, IndexError) as error:
                with self.subTest(operator=name, refused=str(error)[:80]):
                    # What only the data or the processor's build decides comes late; all else at the user's line.
                    self.assertTrue(guess is None or "not implemented" in str(error) or "ZeroDivision" in str(error))
                continue
            if guess is None:
                continue
            predicted += 1
            seen.add(name)
            shape, entries = guess
            results = list(results) if isinstance(results, (tuple, list)) else [results]
            with self.subTest(operator=name, arguments=[getattr(entry, "shape", entry) for entry in arguments]):
                self.assertEqual(len(entries), len(results))
                for entry, result in zip(entries, results):
                    if entry is None or type(entry) is int:
                        self.assertTrue(result is None if entry is None else result is here[entry])
                        continue
                    sizes, strides, code = entry
                    self.assertEqual(sizes, tuple(result.shape))
                    self.assertEqual(code, signatures._codes[result.dtype])
                    if result.numel():
                        self.assertEqual(torch.empty_strided(sizes, strides).is_contiguous(), result.is_contiguous())
        unused = {name for name in rules.RULES if name not in seen} - {"aten::sort.stable"}
        self.assertEqual(unused, set())
        self.assertGreater(predicted, 250)

    def test_predicted_calls_give_the_processors_values(self):
        random = ("normal", "uniform", "random", "exponential", "bernoulli", "dropout")
        for name, op, arguments in samples():
            there = on_device(arguments)
            if any(part in name for part in random) or rules.predict(name, there, {}) is None:
                continue
            try:
                expected = op(*mine(arguments))
            except (RuntimeError, NotImplementedError, IndexError):
                continue
            before = lighter_mps.statistics()["round_trips"]
            found = op(*there)
            waited = lighter_mps.statistics()["round_trips"] - before
            with self.subTest(operator=name):
                self.assertEqual(waited, 0)
                assert_same(self, expected, found)


if __name__ == "__main__":
    unittest.main()

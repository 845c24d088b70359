#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs every operator of torch's own list with samples of float32 on the device, and holds it against the processor.

usage: op_db.py [--smoke N] [--samples N] [--part I/N] [--only NAME,…] [--versions-differ] [--list]

Run by tools/op-db, with LIGHTER_MPS naming a host. Each sample is run forward and backward, and twice: the first time
the host tells what an operator returns, the second time the client knows. Each operator ends as one of

    pass       equal to the processor
    random     equal in shape and type; the processor does not agree with itself either
    factory    makes its tensors on the processor, since torch's list does not say where
    float64    refused with MPS's own error: the device has no float64
    sparse     takes or makes sparse tensors, which the device refuses to hold
    differs    the host's torch has another version of it, and says so (with --versions-differ)
    unsupported  the processor itself refuses every sample
    wrong      another value, shape, type or device
    missing    any other error

and the last two fail the run. It refuses nothing else; torch's list belongs to the torch that is installed.
"""

import argparse
import collections
import contextlib
import re
import sys
import time
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
warnings.simplefilter("ignore")

import torch  # noqa: E402

torch.set_num_threads(1)

import lighter_mps  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map  # noqa: E402

DEVICE = "mps"
FAILURES = ("wrong", "missing")
# The host may be another build of torch, with other sums of the same numbers.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
NO_FLOAT64 = "Cannot convert a MPS Tensor to float64"
# What these return was never written, and need not differ from one call to the next.
UNWRITTEN = ("empty", "new_empty")
# How the host names an operator that its torch has not, or not with these arguments.
REFUSED = re.compile(r"the host's (torch )?\S+ (has no|knows no|needs)|in the host's \S+")
# Operators that want their indices on the processor, where torch's list leaves them.
INDICES_STAY = {"tensor_split"}
# A random operator may draw the same few numbers twice.
DRAWS = 4


class Wrong(Exception):
    """A result that is not the processor's."""


class Elsewhere(Exception):
    """A result on the processor of a call that named no device."""


class Sparse(Exception):
    """A tensor that the device refuses to hold."""


class Mover:
    """Copies a sample to a device as it is: what shares memory still does, with its offsets, strides and lazy bits."""

    def __init__(self, device: str, indices_stay: bool = False):
        self.device = device
        self.indices_stay = indices_stay
        self.moved = {}
        self.placed = False

    def storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole storage that a tensor lies in, copied once."""
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes(), tensor.dtype)
        if key not in self.moved:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            self.moved[key] = flat.clone() if self.device == "cpu" else flat.to(self.device)
        return self.moved[key]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self.placed = True
        if tensor.layout is not torch.strided:
            try:
                copy = tensor.detach().to(self.device, copy=True)
            except NotImplementedError:
                raise Sparse from None
        else:
            copy = self.storage(tensor.detach()).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            copy = torch._conj(copy) if tensor.is_conj() else copy
            copy = torch._neg_view(copy) if tensor.is_neg() else copy
        return copy.detach().requires_grad_(tensor.requires_grad)

    def leaf(self, value):
        if isinstance(value, torch.Tensor):
            stays = self.indices_stay and not value.is_floating_point()
            return value.clone() if stays else self.tensor(value)
        # The list itself names the device where it finds one.
        if isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", DEVICE)):
            self.placed = True
            return torch.device(self.device)
        return value

    def sample(self, sample) -> tuple:
        return tree_map(self.leaf, (sample.input, tuple(sample.args), dict(sample.kwargs)))


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def compare(name: str, expected, found, placed: bool, values: bool) -> None:
    """Raises Wrong where they differ; without `values`, only in what a random result must have too."""
    expected, found = tree_flatten(expected)[0], tree_flatten(found)[0]
    if len(expected) != len(found):
        raise Wrong(f"{name}: {len(found)} results for {len(expected)}")
    for one, other in zip(expected, found):
        if not isinstance(one, torch.Tensor):
            if values and one != other and one == one:
                raise Wrong(f"{name}: {other!r} for {one!r}")
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise Wrong(f"{name}: {other.dtype} {tuple(other.shape)} for {one.dtype} {tuple(one.shape)}")
        if other.device.type != DEVICE:
            raise Wrong(f"{name}: a result on {other.device}") if placed else Elsewhere
        if values:
            try:
                torch.testing.assert_close(plain(other.detach().cpu()), plain(one.detach()), equal_nan=True, **TOLERANCE)
            except AssertionError as error:
                raise Wrong(f"{name}: {' '.join(str(error).split())}") from None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def forward(operator, sample, copied: tuple):
    given, positional, named = copied
    result = operator(given, *positional, **named)
    return sample.output_process_fn_grad(result) if sample.output_process_fn_grad else result


def gradients(result, copied: tuple):
    """The gradients of all inputs, for seeds that are the same numbers on every device; None where there are none."""
    outputs = [tensor for tensor in tensors(result) if tensor.requires_grad]
    inputs = [tensor for tensor in tensors(copied) if tensor.requires_grad]
    if not outputs or not inputs:
        return None
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(output.shape, dtype=output.dtype, generator=generator).to(output.device) for output in outputs]
    return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)


def expect(operator, sample):
    """What the processor makes of a sample: results and gradients, each None where it refuses."""
    copied = Mover("cpu").sample(sample)
    try:
        result = forward(operator, sample, copied)
    except Exception:  # what torch itself refuses is no case
        return None, None
    try:
        return (result,), gradients(result, copied) if operator.supports_autograd else None
    except Exception:
        return (result,), None


@contextlib.contextmanager
def other_seeds(offset: int):
    """torch's list seeds its random operators; two versions of torch draw other numbers from one seed."""
    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(number + offset)
    try:
        yield
    finally:
        torch.manual_seed = seed


def is_random(operator, sample, expected, versions_differ: bool) -> bool:
    """Whether the processor answers the same question in different ways."""
    for draw in range(DRAWS):
        with other_seeds(draw + 1 if versions_differ else 0):
            again = expect(operator, sample)
        for one, other in zip(tensors(expected), tensors(again)):
            if one.shape != other.shape or not torch.equal(plain(one.detach()).nan_to_num(), plain(other.detach()).nan_to_num()):
                return True
    return False


def run_sample(operator, sample, expected, values: bool) -> None:
    """One pass on the device, against what the processor answered."""
    mover = Mover(DEVICE, operator.name in INDICES_STAY)
    copied = mover.sample(sample)
    try:
        result = forward(operator, sample, copied)
    except NotImplementedError:
        if makes_sparse(operator, sample):
            raise Sparse from None
        raise
    compare("forward", expected[0], (result,), mover.placed, values)
    if expected[1] is not None:
        found = gradients(result, copied)
        if found is None:
            raise Wrong("backward: no gradients")
        used = [(one, other) for one, other in zip(expected[1], found) if one is not None]
        compare("backward", [one for one, _ in used], [other for _, other in used], True, values)


def makes_sparse(operator, sample) -> bool:
    given, positional, named = Mover("cpu").sample(sample)
    return any(tensor.layout is not torch.strided for tensor in tensors(operator(given, *positional, **named)))


def check_sample(operator, sample, versions_differ: bool) -> str:
    expected = expect(operator, sample)
    if expected[0] is None:
        return "unsupported"
    outcome = "random" if operator.name.startswith(UNWRITTEN) else "pass"
    for turn in ("learned", "known"):
        try:
            run_sample(operator, sample, expected, outcome == "pass")
        except Wrong as error:
            if outcome == "pass" and is_random(operator, sample, expected, versions_differ):
                run_sample(operator, sample, expected, False)
                outcome = "random"
            else:
                raise Wrong(f"{turn}, {error}") from None
    return outcome


def check(operator, most: int, versions_differ: bool) -> tuple[str, str]:
    """How an operator ends, and why."""
    outcomes = collections.Counter()
    for sample in list(operator.sample_inputs("cpu", torch.float32, requires_grad=operator.supports_autograd))[:most]:
        try:
            outcomes[check_sample(operator, sample, versions_differ)] += 1
        except Elsewhere:
            outcomes["factory"] += 1
        except Sparse:
            outcomes["sparse"] += 1
        except Wrong as error:
            return "wrong", f"{error}; {shortly(sample)}"
        except Exception as error:  # whatever it is, it is this operator's
            if isinstance(error, TypeError) and NO_FLOAT64 in str(error):
                outcomes["float64"] += 1
                continue
            if versions_differ and REFUSED.search(str(error)):
                outcomes["differs"] += 1
                continue
            return "missing", f"{type(error).__name__}: {shortly(error)}; {shortly(sample)}"
    for outcome in ("differs", "float64", "sparse", "factory", "random", "pass"):
        if outcomes[outcome]:
            return outcome, ""
    return "unsupported", ""


def stream_is_lost() -> bool:
    """Whether an operator ended the stream: all that follow would take the blame."""
    try:
        return torch.ones(1, device=DEVICE).item() != 1
    except Exception:
        return True


def shortly(thing) -> str:
    return " ".join(str(thing).split())[:300]


def full_name(operator) -> str:
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else operator.name


def chosen(options) -> list:
    operators = [operator for operator in op_db if torch.float32 in operator.supported_dtypes("cpu")]
    if options.only:
        operators = [operator for operator in operators if full_name(operator) in options.only.split(",")]
    if options.smoke:
        operators = operators[:: max(1, len(operators) // options.smoke)]
    if options.part:
        index, parts = map(int, options.part.split("/"))
        operators = operators[index - 1 :: parts]
    return operators


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", type=int, help="about this many operators, spread over the list")
    parser.add_argument("--samples", type=int, default=1000, help="the most samples of each operator")
    parser.add_argument("--part", help="the I-th of N parts")
    parser.add_argument("--only", help="these operators")
    parser.add_argument("--versions-differ", action="store_true", help="the host has another torch: let it refuse by name")
    parser.add_argument("--list", action="store_true", help="also name the operators that are none of pass and failure")
    options = parser.parse_args()
    operators, started, names = chosen(options), time.monotonic(), collections.defaultdict(list)
    if not operators:
        parser.error(f"no operator of float32 is chosen by {' '.join(sys.argv[1:])}")
    for operator in operators:
        outcome, reason = check(operator, options.samples, options.versions_differ)
        names[outcome].append(full_name(operator))
        if outcome in FAILURES:
            print(f"{outcome}: {full_name(operator)}: {reason}", flush=True)
            if stream_is_lost():
                print(f"the host is lost with {full_name(operator)}: what follows is not run", flush=True)
                break
    if options.list:
        for outcome in sorted(names.keys() - {"pass", *FAILURES}):
            print(f"{outcome}: {' '.join(names[outcome])}")
    counts = ", ".join(f"{len(found)} {outcome}" for outcome, found in sorted(names.items()))
    path = "core" if type(lighter_mps._hot).__name__ == "module" and lighter_mps._hot.__name__.endswith("_core") else "pure"
    print(f"torch {torch.__version__}, {path}: {len(operators)} operators in {time.monotonic() - started:.0f} s: {counts}")
    return 1 if any(names[outcome] for outcome in FAILURES) else 0


if __name__ == "__main__":
    sys.exit(main())

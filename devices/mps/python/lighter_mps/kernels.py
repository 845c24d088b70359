# SPDX-License-Identifier: MIT OR Apache-2.0
"""Registers a kernel on the MPS key for every operator that torch expects a backend to have.

Called once at import, after the takeover and before `surface`. Which operator is done where:
- `local.table()`: here, without the host;
- operators that torch puts together from others (composites), views and operators on shapes: left to torch;
- kinds of tensors that this device does not have (sparse, quantized, nested, mkldnn): left without a kernel;
- all others: a `kernel` of the hot path each, also the functional forms that torch could take apart, since one message
  is less than the three that the parts would be.
"""

import functools
import re
import warnings

import torch

from . import copies, local, signatures, versions

_falls_through = torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough

# Beginnings of names of operators that get no kernel: foreign kinds of tensors, metadata, and what composites do better.
_LEFT = (
    "sparse_", "_sparse", "_to_sparse", "to_sparse", "copy_sparse", "resize_as_sparse", "_nested", "nested_", "mkldnn", "_mkldnn",
    "to_mkldnn", "quantize", "_quantize", "dequantize", "q_", "qscheme", "int_repr", "_empty_", "empty_quantized",
    "_make_per_", "_coalesce", "_dimI", "_dimV", "_nnz", "hspmm", "to_padded_tensor", "_to_dense", "_spsolve",
    "lift", "_unsafe_view", "unsafe_split", "is_same_size", "dense_dim", "is_coalesced", "_has_same_storage",
    "_new_zeros_with_same_feature_meta", "_pack_padded_sequence", "_lazy_clone", "shallow_copy_data_", "_pin_memory",
    "set", "resize", "_resize", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_",
    "rename", "_fused_sdp_choice", "_functional_sym", "_functional_assert", "sym_", "from_file", "_make_dep_token",
    "_cudnn_init_dropout_state", "_print", "_assert_scalar", "new_empty", "empty_like", "record_stream", "_test_",
    "_copy_from", "_local_scalar_dense", "is_pinned",
)  # fmt: skip
# These are whole names; all others are the beginning of a name.
_WHOLE = ("t_", "squeeze_", "unsqueeze_", "transpose_", "detach_", "as_strided_", "swapaxes_", "set", "lift")
_left = re.compile(
    r"(?!quantile)(?:"
    + "|".join(name + (r"(?:\.|$)" if name in _WHOLE else "") for name in map(re.escape, _LEFT))
    + ")"
)

# Operators whose results' shape depends on data. Torch tags them, but older ones not all.
_NEVER_CACHED = frozenset(
    (
        "nonzero", "nonzero.out", "masked_select", "masked_select.out", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "unique_dim_consecutive", "bincount", "repeat_interleave.Tensor", "linalg_lstsq",
        "_ctc_loss.Tensor", "equal", "allclose", "linalg_lstsq.out",
    )
)  # fmt: skip
# Floats are not part of a signature, except where sizes come from them.
_SIZED_BY_NUMBERS = ("arange", "range", "linspace", "logspace")
_DYNAMIC_TYPES = frozenset(
    ("number", "Tensor", "float", "Optional[number]", "Optional[Tensor]", "Optional[float]", "List[number]",
     "List[float]", "Optional[List[float]]", "List[Tensor]", "List[Optional[Tensor]]")
)  # fmt: skip

_libraries = []


@functools.lru_cache(maxsize=None)
def _registered(key: str) -> frozenset:
    """Names of all operators that have a kernel on a dispatch key."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


@functools.lru_cache(maxsize=1)
def _lazy_names() -> frozenset:
    """Operators that see a tensor's conj or neg bit, because those keys fall through to the backend."""
    return frozenset(
        full for key in ("Conjugate", "Negative") for full in _registered(key) if _falls_through(full, key)
    )


def _wanted(base: str, schema) -> bool:
    """Whether the host does this operator."""
    full = "aten::" + base
    if full in _registered("CompositeImplicitAutograd") or _left.match(base):
        return False
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return False
    arguments = schema.arguments
    if any(argument.name == "device" for argument in arguments):
        # `zeros_like(x, device="cpu")` comes here too: only torch's own composite makes it on the right device.
        return full not in _registered("CompositeExplicitAutograd")
    if not any("Tensor" in str(argument.type) for argument in arguments):
        return False
    return True


def _dynamic(base: str, schema) -> list:
    if base.startswith(_SIZED_BY_NUMBERS):
        return [False] * len(schema.arguments)
    return [str(argument.real_type) in _DYNAMIC_TYPES for argument in schema.arguments]


def make(hot, full: str, schema):
    """A kernel of the hot path for one overload."""
    base = full[len("aten::") :]
    dynamic = _dynamic(base, schema)
    index = len(signatures.operators)
    operator = signatures.Operator(index, full, schema, dynamic)
    signatures.operators.append(operator)
    names = [argument.name for argument, is_dynamic in zip(schema.arguments, dynamic) if is_dynamic]
    operator.kernel = hot.kernel(index, dynamic, names, base in _NEVER_CACHED, full in _lazy_names())
    return operator.kernel


def _schemas() -> dict:
    return {
        schema.name + ("." + schema.overload_name if schema.overload_name else ""): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
    }


def install(hot) -> int:
    """Registers everything; gives the number of operators that the host does."""
    schemas = _schemas()
    copies.install(hot, make(hot, "aten::copy_", schemas["aten::copy_"]), make(hot, "aten::fill_.Scalar", schemas["aten::fill_.Scalar"]))
    library = torch.library.Library("aten", "IMPL", "MPS")
    _libraries.append(library)
    with warnings.catch_warnings():
        # Some versions of torch take an operator's kernel for the processor for one of this device.
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        return _register_all(hot, _registrar(library), schemas)


def _register_all(hot, register, schemas: dict) -> int:
    table = local.table()
    for base, function in table.items():
        if "aten::" + base in schemas:
            register(base, function)
    count = 0
    for full in torch._C._dispatch_get_all_op_names():
        schema = schemas.get(full)
        base = full[len("aten::") :]
        if schema is not None and base not in table and _wanted(base, schema):
            register(base, versions.adapted(base, make(hot, full, schema)))
            count += 1
    return count


def _registrar(library):
    """`Library.impl` checks each name in Python, which is half of the time of an import; the binding below it is
    called directly, with the arguments that this torch wants."""
    binding = library.m
    rest = []

    def register(base: str, function) -> None:
        try:
            binding.impl(base, "MPS", function, *rest)
        except TypeError:
            # Some torch versions have no default for the last argument, which asks for the dispatch keys.
            rest.append(False)
            binding.impl(base, "MPS", function, *rest)

    return register

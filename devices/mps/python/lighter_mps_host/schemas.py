# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which of torch's operators a client may run, and whether the client's torch means the same by them.

An overload is found by its name among those that this torch registered, never by following a stranger's words through
Python objects. Refuses, by name: what does not exist here, views, what touches files, storages, pinned memory or streams,
sparse, quantized, nested and named tensors, and arguments that the two versions of torch do not share.
"""

import re
from functools import lru_cache
from keyword import iskeyword

import torch

from .errors import Refusal

NAME = re.compile(r"aten::([A-Za-z_][A-Za-z0-9_]*)(?:\.([A-Za-z_][A-Za-z0-9_]*))?\Z")
# Beginnings of operators' names that are refused, whatever their arguments.
DENIED = (
    "from_file",
    "set_",
    "resize",
    "_resize",
    "pin_memory",
    "_pin_memory",
    "is_pinned",
    "record_stream",
    "sparse",
    "_sparse",
    "to_sparse",
    "_to_sparse",
    "_coalesce",
    "quantize",
    "_quantize",
    "dequantize",
    "q_",
    "int_repr",
    "_nested",
    "nested",
    "_make_dual",
    "_fw_primal",
    "_print",
    "_test_",
    "_assert_async",
    "_async_error",
    "requires_grad_",
    "retain_grad",
    "_backward",
    "set_data",
    "_share",
    "_new_shared",
    "_storage",
)
ARGUMENT_TYPES = frozenset(
    ["Tensor", "number", "int", "float", "bool", "str", "complex", "Device", "ScalarType", "Layout", "MemoryFormat"]
    + ["Generator", "List[Tensor]", "List[number]", "List[int]", "List[float]", "List[bool]", "List[Optional[Tensor]]"]
)


class Operator:
    """One overload that may run."""

    __slots__ = ("arguments", "call", "name", "overload", "positional", "returns", "written")

    def __init__(self, name: str, overload):
        schema = overload._schema
        self.name, self.overload = name, overload
        # The callable below the OpOverload object saves a Python frame each call.
        self.call = getattr(overload, "_op", overload)
        self.arguments = {argument.name: argument for argument in schema.arguments}
        self.positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        self.written = frozenset(
            argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
        )
        self.returns = schema.returns


@lru_cache(maxsize=1)
def registered() -> frozenset:
    """All operators of this torch."""
    return frozenset(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))


@lru_cache(maxsize=8192)
def find(name: str) -> Operator:
    """The operator of that name, or a Refusal that says why not."""
    matched = NAME.match(name)
    if matched is None:
        raise Refusal(f"{name[:100]!r} is no name of an operator of torch")
    packet, overload = matched.groups()
    plain = f"aten::{packet}.{overload}" if overload and overload != "default" else f"aten::{packet}"
    if plain not in registered():
        raise Refusal(f"the host's torch {torch.__version__} has no operator {plain}")
    if packet.startswith(DENIED):
        raise Refusal(f"operator {plain} is not carried to the host")
    found = getattr(getattr(torch.ops.aten, packet), overload or "default")
    schema = found._schema
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        raise Refusal(f"operator {plain} makes views, which never cross the wire")
    if getattr(torch.Tag, "inplace_view", None) in found.tags:
        raise Refusal(f"operator {plain} changes how a tensor looks, which never crosses the wire")
    for argument in schema.arguments:
        if plain_type(argument.real_type) not in ARGUMENT_TYPES:
            raise Refusal(f"operator {plain}: argument {argument.name} of type {argument.real_type} is not carried")
    return Operator(plain, found)


def plain_type(real_type) -> str:
    """A type's name without what does not matter here: whether it may be None, and whether an int is symbolic."""
    text = str(real_type).replace("SymInt", "int")
    while text.startswith("Optional[") and text.endswith("]"):
        text = text[len("Optional[") : -1]
    return text


# torch shows these as int when asked for an argument's type, and by their own names as its real type.
SHOWN_AS_INT = {"ScalarType": "int", "Layout": "int", "MemoryFormat": "int", "SymInt": "int"}


def same_type(theirs: str, argument) -> bool:
    """Whether the client's torch gives an argument the type that this one gives it."""
    if theirs in (str(argument.type), str(argument.real_type)):
        return True
    ours = plain_type(argument.real_type)
    return plain_type(theirs) in (ours, SHOWN_AS_INT.get(ours, ours))


def check_kinds(operator: Operator, kinds: str, positional: int, keywords: list) -> list:
    """The names of the positional arguments sent; refuses arguments that this torch does not have as the client does."""
    entries = kinds.split(",") if kinds else []
    if len(entries) != positional + len(keywords):
        raise Refusal(
            f"operator {operator.name}: {len(entries)} argument types, {positional + len(keywords)} arguments"
        )
    names = []
    seen = set()
    for index, entry in enumerate(entries):
        name, _, theirs = entry.partition(":")
        by_keyword = name.startswith("*")
        name = name.removeprefix("*")
        argument = operator.arguments.get(name)
        if argument is None:
            raise Refusal(
                f"operator {operator.name}: the host's torch {torch.__version__} knows no argument {name[:60]!r}"
            )
        if not same_type(theirs, argument):
            raise Refusal(
                f"operator {operator.name}: argument {name} is {theirs[:60]} in the client's torch and "
                f"{argument.real_type} in the host's {torch.__version__}"
            )
        if by_keyword != (index >= positional) or (by_keyword and name not in keywords) or name in seen:
            raise Refusal(f"operator {operator.name}: argument {name} is not sent as its type says")
        seen.add(name)
        names.append(name)
    for name, argument in operator.arguments.items():
        if name not in seen and not argument.has_default_value() and argument.real_type.kind() != "OptionalType":
            raise Refusal(f"operator {operator.name}: the host's torch {torch.__version__} needs argument {name}")
    return names[:positional]


def safe_keyword(name: str) -> bool:
    """Whether a schema's argument name can stand in a call."""
    return name.isidentifier() and not iskeyword(name)

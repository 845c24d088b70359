# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operators on mps tensors that draw from a generator of the container's own processor.

The host has no such generator. The numbers are drawn here, on copies of the tensors, and put on the device: the same
numbers as on the processor, and the generator moves on as it would there. A sampler that shuffles with
`torch.Generator()` under `torch.set_default_device("mps")` comes this way.
"""

import torch


def draws_here(args, kwargs) -> bool:
    """Whether one of an operator's arguments is a generator of the container's processor."""
    from .generator import number_of

    return any(
        isinstance(value, torch._C.Generator) and number_of(value) is None for value in (*args, *kwargs.values())
    )


def run(op, args, kwargs):
    """Runs the overload `op` on copies here; what it wrote and what it returns is on the device again."""
    copies = {}

    def here(value):
        if isinstance(value, torch.Tensor) and value.is_mps:
            if id(value) not in copies:
                copies[id(value)] = (value, value.cpu())
            return copies[id(value)][1]
        if isinstance(value, (list, tuple)):
            return type(value)(here(entry) for entry in value)
        if isinstance(value, torch.device) and value.type == "mps":
            return torch.device("cpu")
        return value

    there = {}
    arguments = [here(value) for value in args]
    keywords = {name: here(value) for name, value in kwargs.items()}
    result = op(*arguments, **keywords)
    for original, copy in copies.values():
        there[id(copy)] = original
    for value in _written(op, args, kwargs):
        copy = copies[id(value)][1]
        if value.shape != copy.shape:
            value.resize_(copy.shape)
        value.copy_(copy)

    def back(value):
        if isinstance(value, torch.Tensor):
            return there[id(value)] if id(value) in there else value.to("mps")
        if isinstance(value, (list, tuple)):
            return type(value)(back(entry) for entry in value)
        return value

    return back(result)


def _written(op, args, kwargs):
    """The mps tensors among the arguments that the operator's schema says it writes."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if isinstance(value, torch.Tensor) and value.is_mps:
            yield value

# SPDX-License-Identifier: MIT OR Apache-2.0
"""`torch.compile` on mps: the backend `lighter`, and what the default backend does with a graph on mps.

Inductor writes Metal shaders for this process, where there is no Metal. So a graph that touches mps is given to
`lighter` whatever the mode, with one warning; other graphs go to inductor as ever. `lighter` captures the graph with
its backward and runs it operator by operator.

Dynamo takes seconds to import, so nothing here imports it before somebody compiles.
"""

import functools
import warnings

import torch

NAME = "lighter"
_warned = False


def lighter(graph, inputs, **_options):
    """The backend; modes and options of inductor mean nothing to it."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(graph, inputs)


def register() -> None:
    """Makes `backend="lighter"` known to dynamo."""
    from torch._dynamo.backends import registry

    if NAME not in registry._COMPILER_FNS:
        registry.register_backend(compiler_fn=lighter, name=NAME)


def _on_mps(graph, inputs) -> bool:
    """Whether any input, parameter or intermediate result of the graph is on mps."""

    def is_mps(value):
        if isinstance(value, (list, tuple)):
            return any(is_mps(entry) for entry in value)
        return isinstance(value, torch.Tensor) and value.device.type == "mps"

    if is_mps(list(inputs)):
        return True
    if isinstance(graph, torch.nn.Module) and is_mps([*graph.parameters(), *graph.buffers()]):
        return True
    nodes = getattr(getattr(graph, "graph", None), "nodes", ())
    return any(is_mps(node.meta.get("example_value", node.meta.get("val"))) for node in nodes)


def _warn_once() -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        'torch.compile: inductor writes no code for the mps device of a container; the graph runs with backend="lighter", '
        "operator by operator (name that backend to be rid of this warning)",
        stacklevel=2,
    )


def _instead_of_inductor(original):
    @functools.wraps(original)
    def __call__(self, model_, inputs_, **keywords):
        if not _on_mps(model_, inputs_):
            return original(self, model_, inputs_, **keywords)
        _warn_once()
        return lighter(model_, inputs_)

    return __call__


def _register_first(original):
    @functools.wraps(original)
    def __init__(self, backend, *args, **keywords):
        if backend == NAME:
            register()
        return original(self, backend, *args, **keywords)

    return __init__


def install() -> None:
    """Hooks the two classes between `torch.compile` and the backends."""
    inductor, other = torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper
    inductor.__call__ = _instead_of_inductor(inductor.__call__)
    other.__init__ = _register_first(other.__init__)

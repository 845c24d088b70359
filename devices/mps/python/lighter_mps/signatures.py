# SPDX-License-Identifier: MIT OR Apache-2.0
"""What happens when a call has no plan: arguments are put in order, the call is predicted or run, a plan is given back.

`miss` is called by the hot path (`hot` or the Rust core). A signature is an operator with the metadata of its tensors
and its static arguments. Where `rules` knows the results, DEFINE and CALL are sent and nobody waits; else the host runs
the call once (RUN) and its answer becomes the prediction for the next ones. Operators whose result depends on data are
always run. Nothing here decides what a result *is*: the host checks each result against the prediction.
"""

import torch
from lighter_mps_wire import frames, protocol
from lighter_mps_wire import values as wire
from lighter_mps_wire.dtypes import DEVICE_CPU, DEVICE_MPS, tables

from . import errors, link, rules

BY_VALUE = {torch.float64: "f", torch.int64: "i", torch.bool: "b"}
_SLOT_KINDS = {float: "f", int: "i", bool: "b"}
# Operators that take index tensors from the CPU too, as torch's own backends do.
_CPU_TENSORS_MOVE = {
    "aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index.Tensor",
    "aten::_unsafe_index_put", "aten::_ctc_loss.Tensor", "aten::_ctc_loss_backward.Tensor", "aten::repeat_interleave.Tensor",
}  # fmt: skip
_MASKS = (torch.bool, torch.uint8)
# The shape of what these give depends on data only where an index is a mask.
_MASK_DEPENDENT = {"aten::index.Tensor", "aten::_unsafe_index.Tensor", "aten::index.Tensor_out"}
_REFUSED_DTYPES = (torch.float64, torch.complex128)

_tensor, _parameter = torch.Tensor, torch.nn.Parameter
_codes = tables().codes
_format_codes = tables().format_codes


class Operator:
    """One overload: what its schema says, found when it is first missed."""

    def __init__(self, index: int, name: str, schema, dynamic):
        self.index, self.name, self.schema = index, name, schema
        self.dynamic = dynamic
        self.kernel = None
        # Sizes that `out=` tensors got, by the encoded call.
        self.out_sizes: dict = {}
        # Plans of calls that the hot path cannot key (a generator among the arguments), by the encoded call.
        self.plans: dict = {}
        self._facts = None

    def facts(self):
        """Names, types, dynamic names, written arguments and the data-dependence of this operator."""
        if self._facts is None:
            self._facts = _Facts(self)
        return self._facts


class _Facts:
    def __init__(self, operator: Operator):
        arguments = operator.schema.arguments
        self.names = [argument.name for argument in arguments]
        self.types = {argument.name: kind_of(argument) for argument in arguments}
        self.dynamic = dict(zip(self.names, operator.dynamic))
        written = [argument for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]
        self.written = {argument.name for argument in written}
        self.outs = [argument.name for argument in written if argument.kwarg_only]
        namespace, _, rest = operator.name.partition("::")
        packet, _, overload = rest.partition(".")
        self.op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        tags = self.op.tags
        self.data_dependent = operator.name not in _MASK_DEPENDENT and (
            torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        )
        self.masks = operator.name in _MASK_DEPENDENT
        self.kind = "v" if not operator.schema.returns else None


def kind_of(argument) -> str:
    """A schema type in the form both sides compare; sizes are plain numbers whether or not a torch calls them symbolic."""
    return str(argument.real_type).replace("SymInt", "int").replace("SymBool", "bool")


operators: list = []


class _State:
    hot = None
    resize = None
    number_of = draws_here = run_here = None
    # Grows whenever all plans are forgotten.
    generation = 0
    count = 0
    first = 1
    limit = 1 << 15
    defined = 0


def install(hot, resize, number_of, draws_here, run_here) -> None:
    """`resize(tensor, sizes, strides)` gives a tensor a new storage; the others are the surface's for generators: a
    generator's number on the host, whether a call draws from one of the container's own, and running such a call."""
    _State.hot, _State.resize = hot, resize
    _State.number_of, _State.draws_here, _State.run_here = number_of, draws_here, run_here


def statistics() -> dict:
    """Signatures made so far."""
    return {"signatures": _State.defined}


def _next_signature() -> int:
    """A number for a new signature. Two halves of the numbers take turns: what the other half meant is forgotten by
    every plan long before a number comes again."""
    if _State.count == 0 and _State.defined == 0:
        _State.limit = max(2, min(int(link.limits().get("max_signatures", 1 << 16)), 1 << 31) // 2)
    if _State.count == _State.limit:
        _State.hot.forget_plans()
        _State.generation += 1
        errors.forget_lines()
        _State.first = 1 if _State.first > 1 else 1 + _State.limit
        _State.count = 0
    _State.count += 1
    _State.defined += 1
    return _State.first + _State.count - 1


class Call:
    """One call in the form of the wire."""

    def __init__(self, operator: Operator, args, kwargs):
        facts = operator.facts()
        self.facts = facts
        self.slot_kinds, self.slots, self.places, self.tensors = [], [], [], []
        # Slots that hold a tensor, in order: the wire counts tensors by these.
        self.tensor_slots = []
        self.kinds = []
        self.args = []
        self.kwargs = {}
        for position, argument in enumerate(args):
            name = facts.names[position]
            self.kinds.append(f"{name}:{facts.types[name]}")
            self.args.append(self._encode(argument, facts.dynamic[name], position, name))
        for name, argument in kwargs.items():
            self.kinds.append(f"*{name}:{facts.types[name]}")
            self.kwargs[name] = self._encode(argument, facts.dynamic[name], name, name)

    def _slot(self, kind: str, value, place, tensor=None) -> int:
        if tensor is not None:
            self.tensor_slots.append(len(self.slots))
        self.slot_kinds.append(kind)
        self.slots.append(value)
        self.places.append(place)
        self.tensors.append(tensor)
        return len(self.slots) - 1

    def _encode(self, argument, dynamic: bool, place, name: str):
        kind = type(argument)
        if isinstance(argument, _tensor):
            return self._encode_tensor(argument, place, name)
        if dynamic and kind in _SLOT_KINDS:
            return wire.ScalarSlot(self._slot(_SLOT_KINDS[kind], argument, None))
        if kind in (type(None), bool, int, float, complex, str):
            return argument
        if kind is list or kind is tuple:
            return [self._encode(entry, dynamic, None, name) for entry in argument]
        if kind is torch.dtype:
            if argument in _REFUSED_DTYPES:
                errors.refuse_float64()
            if argument not in _codes:
                raise TypeError(f"lighter-mps: {argument} does not exist on this device")
            return wire.Dtype(_codes[argument])
        if kind is torch.device:
            return wire.Device(DEVICE_MPS if argument.type == "mps" else DEVICE_CPU)
        if kind is torch.memory_format:
            return wire.MemoryFormat(_format_codes[argument])
        if kind is torch.layout and argument is torch.strided:
            return wire.Layout()
        if isinstance(argument, torch._C.Generator):
            return wire.Generator(_State.number_of(argument))
        raise NotImplementedError(f"lighter-mps: argument {name!r} is {argument!r}, which this device does not have")

    def _encode_tensor(self, tensor, place, name: str):
        if not tensor.is_mps:
            value = tensor.item()
            if type(value) is complex:
                return value
            return wire.ScalarSlot(self._slot(_SLOT_KINDS[type(value)], value, None))
        address = tensor.data_ptr()
        if address == 0:
            # Torch gives no address for a tensor without elements; the host has to know which storage may grow.
            address = tensor.untyped_storage().data_ptr()
        slot = self._slot("T", address, place, tensor)
        return wire.TensorSlot(slot, _codes[tensor.dtype], tuple(tensor.shape), tensor.stride())

    def tensor(self, index: int):
        """The tensor that the wire counts as this one."""
        return self.tensors[self.tensor_slots[index]]

    def described(self, name: str, signature: int) -> list:
        """The head that RUN and DEFINE have in common."""
        return [signature, name, ",".join(self.kinds), self.args, self.kwargs, "".join(self.slot_kinds)]


def miss(index: int, args, kwargs, cacheable: bool):
    """The result of a call that has no plan, and the plan to keep for its key, or None."""
    link.check()
    operator = operators[index]
    facts = operator.facts()
    if not cacheable:
        if _State.draws_here(args, kwargs):
            return _State.run_here(facts.op, args, kwargs), None
        changes = _Changes(operator)
        new_args, new_kwargs = changes.apply(args, kwargs)
        if changes.made:
            return changes.restore(operator.kernel(*new_args, **new_kwargs)), None
    call = Call(operator, args, kwargs)
    if facts.outs and (known := operator.out_sizes.get(_out_key(call))) is not None and cacheable:
        for name, sizes, strides in known:
            _State.resize(kwargs[name], sizes, strides)
        return operator.kernel(*args, **kwargs), None
    keep = not facts.data_dependent and not (facts.masks and _has_mask(args))
    if not cacheable and keep:
        return _miss_unkeyed(operator, call), None
    if keep and (predicted := rules.predict(operator.name, args, kwargs)) is not None:
        return _define(operator, call, predicted)
    return _run(operator, call, keep)


def _miss_unkeyed(operator: Operator, call: Call):
    """As the hot path, with the encoded call as the key."""
    key = _out_key(call), "".join(call.slot_kinds)
    generation, plan = operator.plans.get(key, (None, None))
    if plan is not None and generation == _State.generation:
        return _call(call, plan)
    result, plan = _run(operator, call, True)
    if plan is not None:
        operator.plans[key] = (_State.generation, plan)
    return result


def _call(call: Call, plan):
    """A CALL of a signature that the host has."""
    signature, shape, entries = plan
    hot = _State.hot
    results, numbers = [], []
    for entry in entries:
        if type(entry) is tuple:
            results.append(hot.new_tensor(*entry))
            numbers.append(hot.number(results[-1]))
        else:
            results.append(None if entry is None else call.tensors[call.places.index(entry)])
    slots = "".join(call.slot_kinds)
    hot.append(frames.call_struct(slots, len(numbers)).pack(protocol.CALL, signature, *call.slots, *numbers))
    return _together(shape, results)


def _has_mask(args) -> bool:
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def _out_key(call: Call) -> bytes:
    return wire.encode([call.args, call.kwargs])


def _define(operator: Operator, call: Call, predicted):
    """Sends the signature with its predicted results and the first call of it."""
    hot = _State.hot
    shape, entries = predicted
    signature = _next_signature()
    errors.remember_line(signature)
    described = [
        None
        if entry is None
        else ["n", list(entry[0]), list(entry[1]), entry[2]]
        if type(entry) is tuple
        else ["a", call.tensor_slots.index(call.places.index(entry))]
        for entry in entries
    ]
    body = wire.encode([*call.described(operator.name, signature), shape, described])
    hot.append(frames.message(protocol.DEFINE, body=body))
    plan = signature, shape, entries
    return _call(call, plan), plan


def _run(operator: Operator, call: Call, keep: bool):
    """Has the host run the call, and makes its results ours."""
    hot = _State.hot
    signature = _next_signature() if keep else 0
    if keep:
        errors.remember_line(signature)
    body = wire.encode([*call.described(operator.name, signature), call.slots])
    with link.lock:
        shape, entries, resized = link.request(frames.message(protocol.RUN, body=body))
        fresh = []
        results = [_received(hot, call, entry, fresh) for entry in entries or ()]
        if fresh:
            hot.append(frames.numbers(protocol.BIND, [hot.number(tensor) for tensor in fresh]))
    if resized:
        _adopt(operator, call, resized)
    for tensor in fresh:
        if tensor.dtype in _REFUSED_DTYPES:
            errors.refuse_float64()
    plan = None
    if keep and not resized:
        outputs = [_planned(call, entry) for entry in entries or ()]
        if _NO_PLAN not in outputs:
            plan = (signature, shape, outputs)
    return _together(shape, results), plan


_NO_PLAN = object()


def _received(hot, call: Call, entry, fresh: list):
    """One result of a RUN's reply; new tensors are also noted in reading order."""
    if entry is None:
        return None
    kind, *rest = entry
    if kind == "n":
        fresh.append(hot.new_tensor(*rest))
        return fresh[-1]
    if kind == "a":
        return call.tensor(rest[0])
    if kind == "l":
        return [_received(hot, call, inner, fresh) for inner in rest[0]]
    return rest[0]


def _planned(call: Call, entry):
    """One result of a RUN's reply as a plan has it."""
    if entry is None:
        return None
    kind, *rest = entry
    if kind == "n":
        return tuple(rest[0]), tuple(rest[1]), rest[2]
    place = call.places[call.tensor_slots[rest[0]]] if kind == "a" else None
    return _NO_PLAN if place is None else place


def _adopt(operator: Operator, call: Call, resized) -> None:
    """Gives `out=` tensors that the host resized a storage of that size, and remembers the sizes for the next call.

    The host resized its own storage in place. A storage here never changes its size, so the data goes into a new one.
    """
    known = []
    for index, sizes, strides in resized:
        slot = call.tensor_slots[index]
        tensor = call.tensors[slot]
        # Held, so that its FREE does not come before the copy.
        storage, old = tensor.untyped_storage(), call.slots[slot]
        _State.resize(tensor, sizes, strides)
        code = _codes[tensor.dtype]
        shapes = tuple(sizes), tuple(strides)
        places = [wire.TensorSlot(0, code, *shapes), wire.TensorSlot(1, code, *shapes)]
        if tensor.numel():
            copy = [0, "aten::copy_", "self:Tensor,src:Tensor", places, {}, "TT", [tensor.data_ptr(), old]]
            link.request(frames.message(protocol.RUN, body=wire.encode(copy)))
        del storage
        known.append((call.places[slot], sizes, strides))
    if all(type(name) is str for name, _, _ in known) and not operator.facts().data_dependent:
        operator.out_sizes[_out_key(call)] = known


def _together(shape: str, results):
    if shape == "s":
        return results[0]
    if shape == "v":
        return None
    return tuple(results) if shape == "t" else results


class _Changes:
    """Arguments that the fast path cannot take, put in a form that it can: subclasses, lazy bits, CPU tensors."""

    def __init__(self, operator: Operator):
        self.operator = operator
        self.facts = operator.facts()
        self.made = False
        # id of what stands in -> (the user's own tensor, whether its data has to be copied back)
        self.stand_ins: dict = {}
        self.kept: list = []

    def apply(self, args, kwargs):
        """The arguments to use instead; `made` says whether there is any difference."""
        names = self.facts.names
        return (
            [self._change(argument, names[position]) for position, argument in enumerate(args)],
            {name: self._change(argument, name) for name, argument in kwargs.items()},
        )

    def _change(self, argument, name: str):
        if isinstance(argument, _tensor):
            return self._change_tensor(argument, name)
        if type(argument) is list or type(argument) is tuple:
            return [self._change(entry, name) for entry in argument]
        return argument

    def _change_tensor(self, tensor, name: str):
        changed, copied = tensor, False
        if type(tensor) is not _tensor and type(tensor) is not _parameter:
            changed = tensor.as_subclass(_tensor)
        if changed.is_mps:
            if changed.is_conj() or changed.is_neg():
                changed, copied = resolve_lazy(changed), True
        elif changed.dim() or changed.dtype not in BY_VALUE:
            changed = self._move(changed, name)
        if changed is not tensor:
            self.made = True
            self.stand_ins[id(changed)] = (tensor, copied and name in self.facts.written)
            self.kept.append(changed)
        return changed

    def _move(self, tensor, name: str):
        if tensor.device.type != "cpu":
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, mps:0 and {tensor.device}!"
            )
        if tensor.dim() == 0 and tensor.is_complex() and name not in self.facts.written:
            return tensor
        if (tensor.dim() and self.operator.name not in _CPU_TENSORS_MOVE) or name in self.facts.written:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu! "
                f"(argument {name!r} of {self.operator.name})"
            )
        return tensor.to("mps")

    def restore(self, result):
        """The user's own tensors where a stand-in came back, with their data where that had to be a copy."""
        for stand_in in self.kept:
            original, write_back = self.stand_ins[id(stand_in)]
            if write_back:
                original.copy_(stand_in)
        if isinstance(result, (tuple, list)):
            return type(result)(self._original(entry) for entry in result)
        return self._original(result)

    def _original(self, entry):
        return self.stand_ins[id(entry)][0] if id(entry) in self.stand_ins else entry


def resolve_lazy(tensor):
    """The same numbers without conj or neg bit."""
    if tensor.is_conj():
        tensor = torch.ops.aten.conj_physical.default(torch._conj(tensor))
    if tensor.is_neg():
        tensor = torch.ops.aten.neg.default(torch._neg_view(tensor))
    return tensor

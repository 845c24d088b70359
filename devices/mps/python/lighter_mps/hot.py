# SPDX-License-Identifier: MIT OR Apache-2.0
"""The hot path in Python: what runs for every operator. The Rust core (`_core`) has the same names and the same order.

`kernels` registers what `kernel()` makes on the MPS key; `link` owns the socket and calls `append` and `flush`;
`signatures.miss` is called for every call that has no plan. A call is: key from the arguments' metadata, look up the
plan, put FREEs and one CALL on the stream, make the outputs. Nothing here waits for the host.
"""

import os
import threading
from struct import Struct

import torch
from lighter_mps_wire import protocol

from . import signals, tensors

OWN_FLUSHER = False
MAX_PENDING_BYTES = 32 << 20

# Guards the buffer, the pool and the counters; never held while a reply is awaited.
lock = threading.RLock()
_buffer = bytearray()
# Bytes at the buffer's head that are written already, a count for each write.
_written: list = []
_pool = tensors.Pool()
_plans = []
_layouts: dict = {}
_by_value = frozenset((torch.float64, torch.int64, torch.bool))
_plain = frozenset((type(None), torch.dtype, torch.memory_format, torch.layout, torch.device, str))


class _State:
    """What `configure` was given, and the counters."""

    socket = -1
    tensor = parameter = miss = sync_call = no_socket = make = None
    arm = staticmethod(lambda: None)
    flush_bytes = 2048
    calls = bytes_sent = flushes = pending_bytes = 0


def configure(torch_lib_dir, tensor_type, parameter_type, miss, sync_call, no_socket, flush_bytes=2048) -> None:
    """Takes what the hot path needs; called once, before the first `kernel`."""
    global as_strided
    _State.tensor, _State.parameter, _State.miss = tensor_type, parameter_type, miss
    _State.sync_call, _State.no_socket, _State.flush_bytes = sync_call, no_socket, flush_bytes
    if tensors.torch_version() >= (2, 9):
        _State.make = tensors.dlpack_maker(_pool)
    else:
        library = tensors.shim_library(torch_lib_dir)
        _State.make = tensors.shim_maker(_pool, library)
        as_strided = tensors.shim_as_strided(library)


def set_socket(descriptor: int) -> None:
    """The descriptor to write to; -1 for none."""
    _State.socket = descriptor


def set_arm(arm) -> None:
    """`arm()` is called when bytes wait in a buffer that was empty; a flusher thread uses it."""
    _State.arm = arm


def append(data) -> None:
    """Puts bytes of one or several whole messages on the stream."""
    with lock:
        if _pool.flag[0]:
            _pool.drain(_buffer)
        if not _buffer:
            _State.arm()
        _buffer.extend(data)


def pending() -> int:
    """Bytes that are not written yet."""
    return len(_buffer) - sum(_written)


def flush() -> None:
    """Writes the buffer. A signal's exception (KeyboardInterrupt) at any point leaves the stream in order."""
    with lock:
        if _written:
            _trim()
        if _pool.flag[0]:
            _pool.drain(_buffer)
        _State.pending_bytes = 0
        if not _buffer:
            return
        if _State.socket < 0:
            _State.no_socket(0)
        data = memoryview(bytes(_buffer))
        try:
            # An exception may come between a call's return and the use of its result; `extend(map())` stores the
            # count inside one call, so that it is never lost.
            while (sent := sum(_written)) < len(data):
                _written.extend(map(os.write, (_State.socket,), (data[sent:],)))
        except OSError as error:
            # One without a number is raised by a signal's handler (TimeoutError).
            if error.errno is not None:
                _State.no_socket(error.errno)
            raise
        _State.bytes_sent += len(data)
        _State.flushes += 1
        _trim()


def _trim() -> None:
    """Drops what is written; no signal's exception may come between the two steps."""
    mask = signals.block()
    try:
        del _buffer[: sum(_written)]
        _written.clear()
    finally:
        signals.restore(mask)


def _layout(sizes, strides, code):
    key = (tuple(sizes), tuple(strides), code)
    layout = _layouts.get(key)
    if layout is None:
        layout = _layouts[key] = tensors.Layout(*key)
    return layout


def new_tensor(sizes, strides, dtype_code: int):
    """A tensor with a fresh number; the host has to be told by BIND, ALLOC or a CALL's outputs."""
    with lock:
        if _pool.flag[0] and not _pool.free:
            _pool.drain(_buffer)
        layout = _layout(sizes, strides, dtype_code)
        _State.pending_bytes += layout.bytes
        return _State.make(layout)[0]


def address(tensor) -> int:
    """Where the host finds the first element; 0 for a tensor without elements."""
    return tensor.data_ptr()


def number(tensor) -> int:
    """The storage's number, also of a tensor without elements."""
    return tensor.untyped_storage().data_ptr() >> protocol.ADDRESS_BITS


_cpu_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_cpu_as_strided = torch.ops.aten.as_strided.default.redispatch


def as_strided(tensor, size, stride, storage_offset=None):
    """A view; nothing crosses the wire."""
    return _cpu_as_strided(_cpu_keys, tensor, size, stride, storage_offset)


def free_count() -> int:
    """Not 0 where tensors are gone whose FREE is not on the stream yet."""
    return int(_pool.flag[0] != 0)


def counters() -> dict:
    """Totals since the start."""
    return {"calls": _State.calls, "bytes_sent": _State.bytes_sent, "flushes": _State.flushes}


def forget_plans() -> None:
    """Every later call comes to `miss` again."""
    with lock:
        for plans in _plans:
            plans.clear()
        _layouts.clear()


def after_fork() -> None:
    """In a forked child: no plan, no socket; the next call of any kernel comes to `miss`, which raises."""
    lock._at_fork_reinit()
    set_socket(-1)
    forget_plans()


def close() -> None:
    """At exit; nothing to do, since the deleter is machine code that needs no interpreter."""


class _Plan:
    """What a call with a known key does."""

    __slots__ = ("pack", "signature", "layout", "place", "kind", "outputs", "bytes")

    def __init__(self, plan, slots):
        self.signature, self.kind, outputs = plan
        self.outputs = [_layout(*entry) if type(entry) is tuple else entry for entry in outputs]
        layouts = [entry for entry in self.outputs if type(entry) is tensors.Layout]
        # The two common forms: one new tensor, or the argument at this place.
        self.layout = self.outputs[0] if self.kind == "s" and layouts else None
        self.place = self.outputs[0] if self.kind == "s" and type(self.outputs[0]) is int else None
        self.bytes = sum(layout.bytes for layout in layouts)
        kinds = "".join("d" if type(slot) is float else "q" for slot in slots)
        self.pack = Struct("<BI" + kinds + "q" * len(layouts)).pack

    def results(self, args, kwargs, slots):
        """The packed message and the results, for every form but a single new tensor."""
        results = []
        numbers = []
        for entry in self.outputs:
            if type(entry) is tensors.Layout:
                tensor, number = _State.make(entry)
                numbers.append(number)
                results.append(tensor)
            elif entry is None:
                results.append(None)
            else:
                results.append(kwargs[entry] if type(entry) is str else args[entry])
        message = self.pack(protocol.CALL, self.signature, *slots, *numbers)
        if self.kind == "s":
            return message, results[0]
        return message, None if self.kind == "v" else results if self.kind == "l" else tuple(results)


def kernel(index, dynamic_positions, dynamic_keywords, never_cache, lazy):
    """The callable for one operator overload; `lazy`: this operator sees tensors whose conj or neg bit is set."""
    plans: dict = {}
    _plans.append(plans)
    tensor_type, parameter_type, state = _State.tensor, _State.parameter, _State
    dynamic_names = frozenset(dynamic_keywords)
    by_value, plain, numbers = _by_value, _plain, (int, bool)
    acquire, release, extend, find = lock.acquire, lock.release, _buffer.extend, plans.get
    gone, drain, buffer = _pool.flag, _pool.drain, _buffer
    call_code, flush_bytes, make = protocol.CALL, _State.flush_bytes, _State.make

    def encode(argument, dynamic, key, slots):
        """Adds an argument that is no plain device tensor to the key and the slots; False where no plan may be kept."""
        kind = type(argument)
        if kind is tensor_type or kind is parameter_type:
            if argument.is_mps:
                if lazy and (argument.is_neg() or argument.is_conj()):
                    return False
                slots.append(argument.data_ptr())
                key += (argument.shape, argument.stride(), argument.dtype)
                return True
            # Older torch hands a Python number over as a CPU tensor without dimensions.
            if argument.dim() or argument.dtype not in by_value or argument.device.type != "cpu":
                return False
            value = argument.item()
            slots.append(value)
            key.append(type(value))
            return True
        if kind is int or kind is float or kind is bool:
            # 1, 1.0 and True are equal as keys and promote differently.
            key.append(kind)
            (slots if dynamic else key).append(argument)
            return True
        if kind is list:
            if argument and not dynamic and type(argument[0]) in numbers:
                key.append(tuple(argument))
                return True
            key.append(len(argument))
            for entry in argument:
                if not encode(entry, dynamic, key, slots):
                    return False
            return True
        if kind in plain:
            key.append(argument)
            return True
        return False

    def missed(key, slots, args, kwargs):
        result, plan = state.miss(index, args, kwargs, key is not None)
        if plan is not None and key is not None:
            plans[key] = _Plan(plan, slots)
        if state.sync_call is not None:
            state.sync_call()
        return result

    def call(*args, **kwargs):
        key = []
        slots = []
        for argument, dynamic in zip(args, dynamic_positions):
            kind = type(argument)
            if (kind is tensor_type or kind is parameter_type) and not lazy and argument.is_mps:
                slots.append(argument.data_ptr())
                key += (argument.shape, argument.stride(), argument.dtype)
            elif not encode(argument, dynamic, key, slots):
                return missed(None, slots, args, kwargs)
        for name, argument in kwargs.items():
            key.append(name)
            if not encode(argument, name in dynamic_names, key, slots):
                return missed(None, slots, args, kwargs)
        key = tuple(key)
        plan = find(key)
        if plan is None:
            return missed(key, slots, args, kwargs)
        acquire()
        try:
            if gone[0]:
                drain(buffer)
            if not buffer:
                state.arm()
            if plan.layout is not None:
                result, number = make(plan.layout)
                extend(plan.pack(call_code, plan.signature, *slots, number))
            elif plan.place is not None:
                result = args[plan.place]
                extend(plan.pack(call_code, plan.signature, *slots))
            else:
                message, result = plan.results(args, kwargs, slots)
                extend(message)
            state.calls += 1
            state.pending_bytes += plan.bytes
            if len(buffer) > flush_bytes or state.pending_bytes > MAX_PENDING_BYTES:
                flush()
        finally:
            release()
        if state.sync_call is not None:
            state.sync_call()
        return result

    def never(*args, **kwargs):
        return missed(None, (), args, kwargs)

    return never if never_cache else call

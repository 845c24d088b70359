# SPDX-License-Identifier: MIT OR Apache-2.0
"""The self-test's own process: takes torch over as `install()` does and uses what was taken over, with tensors that have no memory.

Run by `selftest` as a program, which gives it the layout on its standard input. Prints `step …` before each step, so that a crash has
a place, and at the end `ok` or `failed …`. It needs no host and opens no connection.
"""

import ctypes
import json
import os
import resource
import sys
import threading

_NO_INDEX = 0xFF00  # the second byte of a Device without an index: -1
_META = 14


def step(name: str) -> None:
    """Says what comes next; unbuffered, for the process may be about to crash."""
    os.write(1, f"step {name}\n".encode())


def main() -> None:
    """The whole trial."""
    # A crash is an answer here, not something to be kept.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    task = json.load(sys.stdin)
    sys.path[:] = task["path"]
    step("import torch")
    import torch

    torch.set_num_threads(1)
    # The folder stands in for the package: importing lighter_mps itself would install it.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from takeover import layouts

    run(torch, layouts.Layout(task["guard"], task["accelerator"], task["mps"], "the headers"), _core(task["core"]))
    os.write(1, b"ok\n")


def run(torch, layout, core=None) -> None:
    """Takes torch over and uses it; raises at the first thing that is not as it should be."""
    from takeover import native, prepare_and_write

    step("the guard of the meta device")
    libraries = native.Libraries(torch._C.__file__)
    meta_guard(libraries, layout.guard)
    step("take over")
    prepare_and_write(torch, libraries, layout, core)
    step("accelerator")
    accelerator(torch)
    step("device and streams")
    streams(torch)
    step("tensors")
    tensors = Tensors(torch, libraries)
    step("autograd")
    autograd(torch, tensors)
    step("autograd in a thread")
    failures: list = []
    thread = threading.Thread(target=_collect, args=(failures, autograd, torch, tensors))
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def meta_guard(libraries, slots: "list[str]") -> None:
    """The compiled guard of a device without memory has known answers; it gives them where the layout says that these methods are."""
    registry = libraries.address("_ZN3c104impl26device_guard_impl_registryE")
    guard = ctypes.c_uint64.from_address(registry + 8 * _META).value
    table = ctypes.c_uint64.from_address(guard).value
    device = _META | _NO_INDEX
    # Everything by value fits into registers; a method that takes fewer arguments does not look at the rest.
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
    for name, mask, expected in (
        ("type", 0xFF, _META), ("deviceCount", 0xFF, 1), ("queryStream", 0xFF, 1), ("getDevice", 0xFFFF, device),
        ("exchangeDevice", 0xFFFF, device), ("getStream", 0xFFFF, device), ("exchangeStream", 0xFFFF, device),
        ("getNewStream", 0xFFFF, device),
    ):
        method = ctypes.c_uint64.from_address(table + 8 * slots.index(name)).value
        answer = kind(method)(guard, device, 0) & mask
        expect(answer == expected, f"the meta device's {name} answers {answer:#x} and not {expected:#x}")


def accelerator(torch) -> None:
    """torch says that mps is there, and it only."""
    current = torch._C._accelerator_getAccelerator()
    expect(current.type == "mps", f"the accelerator is {current}")
    expect(torch._C._mps_is_available() is True, "mps is not available")
    expect(torch.cuda.is_available() is False, "cuda is available too")
    expect(torch._C._mps_is_on_macos_or_newer(14, 0) is True, "the version of macOS is refused")


def streams(torch) -> None:
    """The device guard by way of torch's own functions."""
    expect(torch._C._accelerator_getDeviceIndex() == 0, "the current device is not mps:0")
    torch._C._accelerator_setDeviceIndex(0)
    torch._C._accelerator_synchronizeDevice(0)
    current = torch._C._accelerator_getStream(0)
    expect(str(current.device) == "mps:0" and current.stream_id == 0, f"the current stream is {current}")
    torch._C._accelerator_setStream(current)
    made = torch.Stream(device="mps:0")
    expect(str(made.device) == "mps:0" and made.stream_id == 0, f"a new stream is {made}")
    expect(made.query() is True, "a stream is busy")
    made.synchronize()
    event = torch.Event(device="mps:0")
    made.record_event(event)
    made.wait_event(event)
    expect(event.query() is True, "an event is not over")
    event.synchronize()


class Tensors:
    """Makes tensors on mps without memory, and kernels for the few operators of the trial that return such tensors."""

    def __init__(self, torch, libraries):
        self._steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
        void = ctypes.c_void_p
        number = ctypes.c_int64
        self._make = ctypes.CFUNCTYPE(
            ctypes.c_int, void, number, void, void, number, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, void
        )(libraries.address("aoti_torch_create_tensor_from_blob"))
        self._capsule = ctypes.pythonapi.PyCapsule_New
        self._capsule.restype, self._capsule.argtypes = ctypes.py_object, (void, ctypes.c_char_p, void)
        self.calls = 0
        self._library = torch.library.Library("aten", "IMPL", "MPS")
        for operator in ("mul.Tensor", "add.Tensor", "empty.memory_format", "empty_strided"):
            self._library.impl(operator, self._kernel)
        for operator in ("copy_", "fill_.Scalar"):
            self._library.impl(operator, self._in_place)

    def new(self):
        """A tensor of one float at an address that nobody reads."""
        sizes, strides, made = (ctypes.c_int64 * 1)(1), (ctypes.c_int64 * 1)(1), ctypes.c_void_p()
        code = self._make(1 << 40, 1, ctypes.addressof(sizes), ctypes.addressof(strides), 0, 6, 13, 0, ctypes.addressof(made))
        expect(code == 0, f"no tensor was made (error {code})")
        return self._steal(self._capsule(made, None, None))

    def _kernel(self, *_, **__):
        self.calls += 1
        return self.new()

    def _in_place(self, target, *_, **__):
        self.calls += 1
        return target


def autograd(torch, tensors: Tensors) -> None:
    """Backward runs in the engine's thread for the device, which asks the guard for device and stream."""
    leaf = tensors.new()
    expect(str(leaf.device) == "mps:0" and leaf.data_ptr() == 1 << 40, f"a tensor is on {leaf.device} at {leaf.data_ptr():#x}")
    leaf.requires_grad_()
    before = tensors.calls
    # A result of one element: a gradient given for more makes torch import all of sympy first.
    (leaf * leaf + leaf).backward()
    gradient = leaf.grad
    expect(gradient is not None and str(gradient.device) == "mps:0" and gradient.shape == (1,), "the gradient is not on mps:0")
    expect(tensors.calls - before >= 4, "backward did not run")


def expect(truth: bool, otherwise: str) -> None:
    """Fails with the given text."""
    if not truth:
        raise AssertionError(otherwise)


def _collect(failures: list, function, *arguments) -> None:
    try:
        function(*arguments)
    except BaseException as error:  # told by the main thread
        failures.append(error)


def _core(file: "str | None"):
    if file is None:
        return None
    import importlib.util

    spec = importlib.util.spec_from_file_location("_core", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        os.write(1, f"failed {type(error).__name__}: {text}\n".encode())
        sys.exit(1)
    # torch's own end is no part of the trial.
    os._exit(0)

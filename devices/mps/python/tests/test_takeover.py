# SPDX-License-Identifier: MIT OR Apache-2.0
"""The takeover of the installed torch: what it gives, what it refuses, and that a refusal leaves torch as it was."""

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import sysconfig
import threading
import types
import unittest
from unittest import mock

import torch

from takeover_support import PACKAGE, in_child, takeover

package = takeover()
guard, hooks, layouts, native, selftest, thunks, trial = map(
    takeover, ("guard", "hooks", "layouts", "native", "selftest", "thunks", "trial")
)
TakeoverError = package.TakeoverError

VERSION = package.torch_version(torch.__version__)
FOLDER = os.path.dirname(torch.__file__)
MPS_HOOKS = "_ZN2at6detail11getMPSHooksEv"

torch.set_num_threads(1)
trial.step = lambda name: None


def libraries():
    return native.Libraries(torch._C.__file__)


def layout():
    return layouts.find(FOLDER, torch.__version__, VERSION)


def state():
    """All words of torch that the takeover may write."""
    found = libraries()
    pointers = native.read_words(found.address(guard.REGISTRY), found.size(guard.REGISTRY) // 8)
    for getter in (MPS_HOOKS, "_ZN2at6detail12getCUDAHooksEv", "_ZN2at6detail11getXPUHooksEv"):
        pointers += native.read_words(found.call(getter), 1)
    return pointers


class Installed(unittest.TestCase):
    """Each case in a process of its own."""

    def case(self, function, *arguments):
        return in_child(function, *arguments)

    def test_mps_is_the_accelerator_and_the_only_one(self):
        def case():
            package.install()
            return [
                str(torch.accelerator.current_accelerator()), torch.backends.mps.is_available(),
                torch._C._mps_is_on_macos_or_newer(14, 0), torch.cuda.is_available(), torch.cuda.device_count(),
            ]

        self.assertEqual(self.case(case), ["mps", True, True, False, 0])

    def test_devices_streams_and_events(self):
        def case():
            package.install()
            trial.streams(torch)
            with torch.device("mps"):
                stream = torch.accelerator.current_stream()
            torch.accelerator.synchronize()
            return [torch.accelerator.current_device_index(), str(stream.device), stream.stream_id]

        self.assertEqual(self.case(case), [0, "mps:0", 0])

    def test_tensors_views_and_backward(self):
        def case():
            package.install()
            tensors = trial.Tensors(torch, libraries())
            trial.autograd(torch, tensors)
            tensor = tensors.new()
            detached = tensor.detach()
            return [type(tensor) is torch.Tensor, tensor.is_mps, str(tensor.device), detached.data_ptr() == tensor.data_ptr()]

        self.assertEqual(self.case(case), [True, True, "mps:0", True])

    def test_backward_on_the_cpu_still_runs(self):
        def case():
            package.install()
            leaf = torch.ones(3, requires_grad=True)
            (leaf * 2).sum().backward()
            return leaf.grad.tolist()

        self.assertEqual(self.case(case), [2, 2, 2])

    def test_tensor_of_the_cpu_is_not_pinned_and_seeds_work(self):
        def case():
            package.install()
            torch.manual_seed(3)
            first = torch.rand(2)
            torch.manual_seed(3)
            return [torch.equal(first, torch.rand(2)), torch.ones(1).is_pinned()]

        self.assertEqual(self.case(case), [True, False])

    def test_the_second_call_does_nothing(self):
        def case():
            package.install()
            before = state()
            package.install()
            return before == state()

        self.assertTrue(self.case(case))

    def test_another_copy_of_the_package_does_nothing(self):
        def case():
            package.install()
            before = state()
            spec = importlib.util.spec_from_file_location(
                "other", os.path.join(PACKAGE, "takeover", "__init__.py"), submodule_search_locations=[os.path.join(PACKAGE, "takeover")]
            )
            other = importlib.util.module_from_spec(spec)
            sys.modules["other"] = other
            spec.loader.exec_module(other)
            other.install()
            return other.guard is not guard and before == state()

        self.assertTrue(self.case(case))

    def test_threads_that_install_at_once(self):
        def case():
            real, made, failures = native.Write.perform, [], []

            def perform(write):
                made.append(write.address)
                real(write)

            def one():
                try:
                    start.wait()
                    package.install()
                except Exception as error:
                    failures.append(str(error))

            start = threading.Barrier(8)
            with mock.patch.object(native.Write, "perform", perform):
                threads = [threading.Thread(target=one) for _ in range(8)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            return [failures, len(made) == len(set(made)) and len(made) >= 2]

        self.assertEqual(self.case(case), [[], True])

    def test_a_fork_has_it_too(self):
        def case():
            package.install()
            return in_child(lambda: str(torch.accelerator.current_accelerator()))

        self.assertEqual(self.case(case), "mps")

    def test_without_headers(self):
        def case():
            found = layouts.find("/nowhere", torch.__version__, VERSION)
            package.prepare_and_write(torch, libraries(), found)
            trial.accelerator(torch)
            return found.source

        if layouts.known_layout(VERSION) is None:
            self.skipTest("this release is not in the table")
        self.assertEqual(self.case(case), "the table of lighter-mps")

    def test_only_what_differs_is_written(self):
        def case():
            before = state()
            package.install()
            return sum(old != new for old, new in zip(before, state()))

        # Guard and mps hooks, and the hooks of an accelerator that torch is linked with, if it is.
        self.assertEqual(self.case(case), 3 if hooks.absent_accelerator(torch) else 2)


class Ends(unittest.TestCase):
    """Processes that end as any Python program does, while torch still holds what the takeover made."""

    def test_with_tensors_alive(self):
        script = f"""
import sys, threading
sys.path.append({PACKAGE!r})
import torch, takeover
from takeover import trial, native
takeover.install()
tensors = trial.Tensors(torch, native.Libraries(torch._C.__file__))
trial.autograd(torch, tensors)
kept = [tensors.new() for _ in range(10)]
torch.kept = kept
sys.modules["kept"] = kept
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


class Refused(unittest.TestCase):
    """One sentence each, and torch as it was."""

    def refused(self, reason: str, **patches):
        def case():
            before = state()
            with contextlib.ExitStack() as patched:
                for target, (name, value) in patches.items():
                    of = {"torch_cuda": torch.cuda, "torch_c": torch._C}.get(target) or globals()[target]
                    patched.enter_context(mock.patch.object(of, name, value))
                try:
                    package.install()
                    text = "not refused"
                except TakeoverError as error:
                    text = str(error)
            return [text, before == state()]

        text, is_untouched = in_child(case)
        self.assertRegex(text, reason)
        self.assertNotIn("\n", text)
        self.assertTrue(is_untouched)

    def test_an_old_torch(self):
        for text in ("1.13.1", "2.5.1+cpu", "git", ""):
            with self.assertRaisesRegex(TakeoverError, "too old .* install torch 2.6 or newer"):
                package.torch_version(text)
        self.assertEqual(package.torch_version("2.16.0.dev20270101+cpu"), (2, 16))
        self.assertEqual(package.torch_version("3.0a0"), (3, 0))
        self.refused("torch 2.5.1 is too old", torch=("__version__", "2.5.1"))

    def test_another_system(self):
        self.refused("this is darwin; a Mac", sys=("platform", "darwin"))

    def test_a_free_threaded_python(self):
        real = sysconfig.get_config_var
        self.refused("free-threaded", sysconfig=("get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else real(name)))

    def test_a_32_bit_python(self):
        self.refused("64-bit", sys=("maxsize", (1 << 31) - 1))

    def test_an_accelerator_that_is_there(self):
        self.refused(
            "already has the accelerator cuda .* CUDA_VISIBLE_DEVICES= ",
            torch_c=("_accelerator_getAccelerator", lambda: torch.device("cuda")), torch_cuda=("device_count", lambda: 2),
        )
        self.refused(
            "already has the accelerator hpu .* use a torch without it",
            torch_c=("_accelerator_getAccelerator", lambda: torch.device("hpu")),
        )

    def test_a_symbol_that_is_missing(self):
        self.refused("export no _ZN3xyz.* use a torch wheel", guard=("REGISTRY", "_ZN3xyz"))

    def test_a_failing_self_test(self):
        def failing(*_):
            raise TakeoverError("torch fails the self-test")

        self.refused("fails the self-test", selftest=("check", failing))

    def test_headers_of_another_version(self):
        right = layout()
        with_one_more = layouts.Layout(right.guard, right.accelerator, right.mps + ["new"], right.source)
        self.refused(
            f"have {len(right.mps)} methods, and by {right.source} they should have {len(right.mps) + 1}: .* (reinstall|libtorch-dev)",
            layouts=("find", lambda *_: with_one_more),
        )
        longer = layouts.Layout(right.guard + ["new"] * 9, right.accelerator, right.mps, "torch's headers")
        self.refused("device guard ends after .* of different versions; reinstall", layouts=("find", lambda *_: longer))

    def test_a_guard_of_another_package(self):
        def case():
            found = libraries()
            other = native.lasting_words([native.read_words(found.address(guard.REGISTRY), 1)[0], 0])
            native.Write(found.address(guard.REGISTRY) + 8 * thunks.MPS, other).perform()
            before = state()
            try:
                package.install()
            except TakeoverError as error:
                return [str(error), before == state()]

        text, is_untouched = in_child(case)
        self.assertRegex(text, "already belongs to another package; uninstall")
        self.assertTrue(is_untouched)

    def test_hooks_of_another_package(self):
        def case():
            found = libraries()
            hooks_object = found.call(MPS_HOOKS)
            table, = native.read_words(hooks_object, 1)
            native.Write(hooks_object, native.lasting_words(native.read_words(table - 16, len(layout().mps) + 2)) + 16).perform()
            before = state()
            try:
                package.install()
            except TakeoverError as error:
                return [str(error), before == state()]

        text, is_untouched = in_child(case)
        self.assertRegex(text, "another package has replaced them")
        self.assertTrue(is_untouched)

    def test_no_proc(self):
        real = open

        def without(path, *arguments, **keywords):
            if path == "/proc/self/maps":
                raise FileNotFoundError(2, "No such file or directory", path)
            return real(path, *arguments, **keywords)

        with mock.patch("builtins.open", without), self.assertRaisesRegex(TakeoverError, "mount /proc"):
            libraries()

    def test_a_subinterpreter(self):
        interpreters = _interpreters()
        if interpreters is None:
            self.skipTest("this Python has no interpreter with a shared lock")
        create, run = interpreters
        # In a child: CPython never checks a thread's state again once there was a second interpreter, which torch notices.
        self.assertRegex(in_child(self._in_another, *interpreters), "does not work in a subinterpreter")

    @staticmethod
    def _in_another(create, run):
        reader, writer = os.pipe()
        code = f"""
import os, sys
sys.path.append({PACKAGE!r})
import takeover
try:
    takeover.check_interpreter()
    text = "not refused"
except takeover.TakeoverError as error:
    text = str(error)
os.write({writer}, text.encode())
"""
        run(create(), code)
        os.close(writer)
        with open(reader, encoding="utf-8") as file:
            return file.read()


def _interpreters():
    try:
        import _xxsubinterpreters as module  # up to Python 3.12

        return (lambda: module.create(isolated=False)), module.run_string
    except ImportError:
        pass
    try:
        import _interpreters as module

        return (lambda: module.create("legacy")), module.run_string
    except ImportError:
        return None


class WrongOrder(unittest.TestCase):
    """The self-test finds an order that is not the libraries'."""

    def outcome(self, changed):
        try:
            in_child(lambda: trial.run(torch, changed))
        except AssertionError as error:
            return str(error).strip()
        return "passed"

    def changed(self, **orders):
        right = layout()
        return layouts.Layout(orders.get("guard", right.guard), right.accelerator, orders.get("mps", right.mps), "a wrong order")

    def test_the_right_one_passes(self):
        self.assertEqual(self.outcome(layout()), "passed")

    def test_a_method_more_or_less_in_the_guard(self):
        slots = layout().guard
        # What comes after it are methods that do nothing in ours: an order that is wrong only there does no harm.
        last = slots.index("queryStream")
        for at in range(last + 1):
            self.assertNotEqual(self.outcome(self.changed(guard=slots[:at] + ["new"] + slots[at:])), "passed", f"one more at {at}")
            if at < last:
                self.assertNotEqual(self.outcome(self.changed(guard=slots[:at] + slots[at + 1:])), "passed", f"{slots[at]} is missing")

    def test_two_methods_the_wrong_way_round(self):
        slots = layout().guard
        for one, other in (("type", "exchangeDevice"), ("getDevice", "setDevice"), ("getDevice", "deviceCount"), ("getStream", "uncheckedSetDevice"),
                           ("exchangeStream", "record"), ("queryEvent", "deviceCount"), ("queryStream", "synchronizeStream")):
            swapped = [{one: other, other: one}.get(slot, slot) for slot in slots]
            self.assertNotEqual(self.outcome(self.changed(guard=swapped)), "passed", f"{one} and {other}")

    def test_the_hooks_wrong_by_one(self):
        slots = layout().mps
        for order in (slots + ["new"], slots[:-1], slots[:2] + ["new"] + slots[2:]):
            self.assertIn("they should have", self.outcome(self.changed(mps=order)))
        # The number is right, and the methods are not.
        self.assertNotEqual(self.outcome(self.changed(mps=slots[:2] + ["new"] + slots[2:-1])), "passed")

    def test_in_a_process_of_its_own(self):
        self.assertIsNone(selftest.run(torch.__version__, layout()))
        slots = list(layout().guard)
        at, other = slots.index("getDevice"), slots.index("setDevice")
        slots[at], slots[other] = slots[other], slots[at]
        with self.assertRaisesRegex(TakeoverError, f'^torch {VERSION[0]}.{VERSION[1]}.* fails lighter-mps\'s self-test at the step "'):
            selftest.run(torch.__version__, self.changed(guard=slots))


class Numbers(unittest.TestCase):
    """The facts about the libraries that the takeover rests on."""

    def test_sizes_and_counts(self):
        found = libraries()
        right = layout()
        self.assertEqual(found.size("_ZTVN2at17MPSHooksInterfaceE"), 8 * (len(right.mps) + 2))
        self.assertTrue(guard.counts_agree(found, right))
        for wrong in (right.guard[:-1], right.guard + ["new"]):
            self.assertFalse(guard.counts_agree(found, layouts.Layout(wrong, [], [], "")))

    def test_addresses(self):
        found = libraries()
        function = found.address(MPS_HOOKS)
        self.assertTrue(found.is_code(function))
        self.assertIn("torch", found.file(function))
        registry = found.address(guard.REGISTRY)
        self.assertFalse(found.is_code(registry))
        for address in (0, 1, (1 << 64) - 1, ctypes.addressof(ctypes.c_uint64())):
            self.assertFalse(found.is_code(address))
            self.assertEqual(found.file(address), "")
        with self.assertRaisesRegex(TakeoverError, "export no nothing"):
            found.address("nothing")

    def test_memory_outlives_its_python_object(self):
        address = native.lasting_words([1, 2, (1 << 64) - 1])
        self.assertEqual(native.read_words(address, 3), [1, 2, (1 << 64) - 1])


class WithACore(unittest.TestCase):
    def test_its_functions_are_used_and_no_page_is_made(self):
        def case():
            made = thunks.addresses(os.uname().machine)
            core = types.SimpleNamespace(thunk_addresses=lambda: made)
            with mock.patch.object(thunks, "_page", side_effect=AssertionError("a page was made")):
                package.install(core)
            trial.accelerator(torch)
            place = libraries().address(guard.REGISTRY) + 8 * thunks.MPS
            vtable = native.read_words(native.read_words(place, 1)[0], 1)[0]
            return native.read_words(vtable, 1)[0] == made[13]

        self.assertTrue(in_child(case))


if __name__ == "__main__":
    unittest.main()

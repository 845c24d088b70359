# SPDX-License-Identifier: MIT OR Apache-2.0
"""torch.mps, torch.accelerator, torch.backends.mps, streams, events, printing, and what is refused."""

import gc
import unittest

import torch
from ondevice import VERSION, assert_as_on_cpu, run_program


class Presence(unittest.TestCase):
    def test_the_device_is_there_by_every_name(self):
        self.assertTrue(torch.backends.mps.is_built())
        self.assertTrue(torch.backends.mps.is_available())
        self.assertTrue(torch.mps.is_available())
        self.assertEqual(torch.mps.device_count(), 1)
        self.assertTrue(torch.backends.mps.is_macos13_or_newer())
        if hasattr(torch.backends.mps, "get_name"):
            self.assertTrue(torch.backends.mps.get_name())

    def test_module_of_the_device(self):
        self.assertIs(torch.get_device_module("mps"), torch.mps)
        self.assertIs(torch.get_device_module(torch.device("mps")), torch.mps)
        self.assertIs(torch.get_device_module(), torch.mps)

    @unittest.skipUnless(hasattr(torch, "accelerator"), "this torch has no torch.accelerator")
    def test_it_is_the_accelerator(self):
        self.assertEqual(torch.accelerator.current_accelerator().type, "mps")
        self.assertTrue(torch.accelerator.is_available())
        self.assertEqual(torch.accelerator.device_count(), 1)
        torch.accelerator.synchronize()
        self.assertEqual(torch.accelerator.current_stream().device, torch.device("mps:0"))

    def test_there_is_no_cuda(self):
        self.assertFalse(torch.cuda.is_available())
        self.assertEqual(torch.cuda.device_count(), 0)
        with self.assertRaises((RuntimeError, AssertionError)):
            torch.ones(1).cuda()

    def test_tensors_are_plain(self):
        tensor = torch.ones(2, device="mps")
        self.assertIs(type(tensor), torch.Tensor)
        self.assertTrue(tensor.is_mps)
        self.assertEqual(tensor.device, torch.device("mps:0"))
        self.assertEqual(tensor.get_device(), 0)
        self.assertEqual(tensor.type(), "torch.mps.FloatTensor")

    def test_default_device(self):
        torch.set_default_device("mps")
        try:
            self.assertEqual(torch.get_default_device().type, "mps")
            self.assertTrue(torch.zeros(2).is_mps)
            self.assertTrue(torch.nn.Linear(2, 2).weight.is_mps)
        finally:
            torch.set_default_device(None)
        with torch.device("mps"):
            self.assertTrue(torch.arange(3).is_mps)


class Memory(unittest.TestCase):
    def test_figures_follow_tensors(self):
        gc.collect()
        torch.mps.synchronize()
        before = torch.mps.current_allocated_memory()
        tensor = torch.zeros(1 << 20, device="mps")
        held = torch.mps.current_allocated_memory()
        self.assertEqual(held - before, 4 << 20)
        self.assertGreaterEqual(torch.mps.driver_allocated_memory(), held)
        del tensor
        self.assertEqual(torch.mps.current_allocated_memory(), before)
        torch.mps.empty_cache()

    def test_limits(self):
        self.assertGreater(torch.mps.recommended_max_memory(), 0)
        torch.mps.set_per_process_memory_fraction(0.5)
        with self.assertRaises(ValueError):
            torch.mps.set_per_process_memory_fraction(3.0)

    @unittest.skipUnless(hasattr(torch, "accelerator") and hasattr(torch.accelerator, "memory_allocated"), "older torch")
    def test_accelerator_figures(self):
        tensor = torch.zeros(1 << 18, device="mps")
        self.assertEqual(torch.accelerator.memory_allocated(), torch.mps.current_allocated_memory())
        self.assertGreaterEqual(torch.accelerator.max_memory_allocated(), tensor.nbytes)
        self.assertIn("allocated_bytes.all.current", torch.accelerator.memory_stats())
        torch.accelerator.reset_peak_memory_stats()
        torch.accelerator.empty_cache()
        if hasattr(torch.accelerator, "get_memory_info"):
            free, total = torch.accelerator.get_memory_info()
            self.assertGreaterEqual(total, free)


class EventsAndStreams(unittest.TestCase):
    def test_events_measure(self):
        start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
        start.record()
        tensor = torch.ones(256, 256, device="mps")
        for _ in range(20):
            tensor = tensor @ tensor / 256
        end.record()
        end.synchronize()
        self.assertTrue(end.query())
        self.assertGreater(start.elapsed_time(end), 0.0)
        end.wait()
        self.assertEqual(tensor[0, 0].item(), 1.0)

    def test_event_module(self):
        from torch.mps import event

        self.assertIs(event.Event, torch.mps.Event)

    def test_classes_that_every_accelerator_has(self):
        start, end = torch.Event(device="mps", enable_timing=True), torch.Event(enable_timing=True)
        start.record()
        tensor = torch.ones(64, 64, device="mps") @ torch.ones(64, 64, device="mps")
        end.record()
        end.synchronize()
        self.assertTrue(end.query())
        self.assertGreater(start.elapsed_time(end), 0.0)
        self.assertEqual(end.device.type, "mps")
        self.assertIsInstance(start, torch.Event)
        stream = torch.accelerator.current_stream()
        self.assertIsInstance(stream, torch.Stream)
        self.assertEqual(torch.Stream(device="mps"), stream)
        stream.wait_event(stream.record_event())
        stream.synchronize()
        with stream if hasattr(stream, "__enter__") else torch.device("mps"):
            self.assertEqual(tensor[0, 0].item(), 64.0)

    @unittest.skipUnless(hasattr(torch.mps, "Stream"), "this torch has no torch.mps.Stream")
    def test_streams_are_names_of_one_queue(self):
        other = torch.mps.Stream()
        self.assertNotEqual(other, torch.mps.default_stream())
        with torch.mps.stream(other):
            self.assertEqual(torch.mps.current_stream(), other)
            tensor = torch.ones(3, device="mps") * 2
        self.assertEqual(torch.mps.current_stream(), torch.mps.default_stream())
        other.synchronize()
        self.assertEqual(tensor.sum().item(), 6.0)


class Refusals(unittest.TestCase):
    def refused(self, function, *args, **kwargs):
        with self.assertRaises((RuntimeError, BufferError)) as caught:
            function(*args, **kwargs)
        text = str(caught.exception)
        self.assertRegex(text, "mps")
        self.assertNotIn("please report a bug", text)
        return text

    def test_what_needs_metal_in_this_process(self):
        self.assertIn("host", self.refused(torch.mps.profiler.start))
        if hasattr(torch.mps.profiler, "is_capturing_metal"):
            self.assertFalse(torch.mps.profiler.is_capturing_metal())
            self.assertFalse(torch.mps.profiler.is_metal_capture_enabled())
        if hasattr(torch.mps, "compile_shader"):
            source = "kernel void f(device float* o, uint i [[thread_position_in_grid]]) { o[i] = 1; }"
            self.assertIn("compile_shader", self.refused(torch.mps.compile_shader, source))

    def test_dlpack(self):
        tensor = torch.ones(2, device="mps")
        self.assertIn("cpu()", self.refused(tensor.__dlpack__))
        self.assertIn("cpu()", self.refused(torch.utils.dlpack.to_dlpack, tensor))
        torch.from_dlpack(tensor.cpu())

    def test_numpy_has_torchs_own_text(self):
        tensor = torch.ones(2, device="mps")
        with self.assertRaisesRegex(TypeError, "can't convert mps:0 device type tensor to numpy"):
            tensor.numpy()

    def test_a_second_device(self):
        with self.assertRaises(RuntimeError):
            torch.mps.device(1)

    def test_without_a_service_there_is_one_sentence(self):
        program = "import torch, lighter_mps\ntorch.manual_seed(1)\nprint('seeded')\ntorch.ones(2, device='mps')"
        result = run_program(program, LIGHTER_MPS="unix:/nonexistent/lighter/socket")
        self.assertIn("seeded", result.stdout)
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(result.stderr.strip().splitlines()[-1], "lighter")


class Printing(unittest.TestCase):
    def test_text_is_the_processors_with_the_device(self):
        for tensor in (
            torch.arange(12.0).reshape(3, 4) / 7,
            torch.tensor(2.5),
            torch.tensor([1, 2, 3]),
            torch.tensor([True, False]),
            torch.tensor([1e-9, 1e9, float("nan"), float("inf")]),
            torch.arange(2000.0),
            torch.empty(0),
            torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        ):
            expected = repr(tensor)
            found = repr(tensor.to("mps"))
            self.assertIn("device='mps:0'", found)
            squeezed = found.replace("device='mps:0'", "").replace(" ", "").replace("\n", "").replace(",,", ",")
            self.assertEqual(squeezed.rstrip(",)"), expected.replace(" ", "").replace("\n", "").rstrip(",)"))

    def test_parameter_and_gradient(self):
        parameter = torch.nn.Parameter(torch.ones(2, device="mps"))
        self.assertIn("requires_grad=True", repr(parameter))
        self.assertIn("grad_fn=<MulBackward0>", repr(parameter * 2))


class Making(unittest.TestCase):
    def test_tensor_from_data(self):
        for data in (3, 2.5, True, [1, 2], [[1.0, 2.0], [3.0, 4.0]], []):
            with self.subTest(data=data):
                assert_as_on_cpu(self, lambda device, data=data: torch.tensor(data, device=device))
                assert_as_on_cpu(self, lambda device, data=data: torch.as_tensor(data, device=device))

    def test_float64_is_refused_with_torchs_text(self):
        for make in (
            lambda: torch.tensor([1.0], dtype=torch.float64, device="mps"),
            lambda: torch.zeros(2, dtype=torch.float64).to("mps"),
            lambda: torch.ones(1, device="mps").double(),
        ):
            with self.assertRaisesRegex(TypeError, "doesn't support float64"):
                make()

    def test_pin_memory(self):
        tensor = torch.arange(6.0)
        try:
            pinned = tensor.pin_memory()
        except RuntimeError as error:
            self.assertIn("pin", str(error).lower())
        else:
            self.assertTrue(torch.equal(pinned.to("mps", non_blocking=True).cpu(), tensor))


if __name__ == "__main__":
    print("torch", VERSION)
    unittest.main()

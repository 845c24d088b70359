# SPDX-License-Identifier: MIT OR Apache-2.0
"""Public reports about torch's mps device and about remote devices, one test each, named after what was reported.

The numbers are of the pytorch/pytorch issue tracker unless another project is named.
"""

import gc
import io
import os
import threading
import unittest

import torch
import torch.nn.functional as F
from ondevice import HOST, assert_as_on_cpu, assert_same, run_program
from torch.utils.data import DataLoader, TensorDataset

FLOAT64 = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"


def ramp(device, *sizes):
    count = torch.Size(sizes).numel()
    return torch.linspace(-1, 1, count, device=device).reshape(sizes)


def messages_of(function):
    """What the client puts on the stream during a call, in bytes, flushed before and after."""
    from lighter_mps import link

    torch.mps.synchronize()
    sent = []
    original = link._State.hot.append

    def append(data):
        sent.append(bytes(data))
        return original(data)

    link._State.hot.append = append
    try:
        function()
        waiting = link._State.hot.pending()
    finally:
        link._State.hot.append = original
    return sent, waiting


class Reports(unittest.TestCase):
    def test_01_a_second_accelerator_breaks_backward(self):
        """#161129: with two accelerators the autograd engine asserts `opt_ready_stream && opt_parent_stream`."""
        self.assertEqual(torch._C._get_accelerator().type, "mps")
        self.assertFalse(torch.cuda.is_available())
        x = torch.ones(3, device="mps", requires_grad=True)
        y = torch.ones(3, requires_grad=True)
        ((x * 2).cpu() * y).sum().backward()
        self.assertEqual(x.grad.tolist(), [2.0, 2.0, 2.0])

    def test_02_two_threads_crash_the_process(self):
        """#197805, #100285: threads that use mps at the same time."""
        results, errors = {}, []

        def work(number):
            try:
                torch_generator = torch.Generator("mps").manual_seed(number)
                x = torch.randn(16, 16, device="mps", generator=torch_generator)
                w = torch.eye(16, device="mps").requires_grad_()
                for _ in range(30):
                    loss = (x @ w).square().mean()
                    (grad,) = torch.autograd.grad(loss, w)
                    w = (w - 0.1 * grad).detach().requires_grad_()
                results[number] = w.detach().cpu()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        together = dict(results)
        for number in range(4):
            work(number)
            assert_same(self, results[number], together[number])

    def test_03_upload_reads_a_source_that_changed(self):
        """#189690, #139550, huggingface/lerobot#702: `non_blocking=True` takes the bytes later."""
        for count in (7, 5_000, 3_000_000):
            source = torch.ones(count)
            there = source.to("mps", non_blocking=True)
            source.fill_(9)
            other = torch.empty(count, device="mps").copy_(source, non_blocking=True)
            del source
            self.assertEqual((there.sum().item(), other.sum().item()), (count, 9 * count))

    def test_04_download_is_not_there_yet(self):
        """#193845: `non_blocking=True` returns before the data is."""
        for count in (7, 3_000_000):
            there = torch.arange(count, device="mps")
            self.assertTrue(torch.equal(there.to("cpu", non_blocking=True), torch.arange(count)))
            here = torch.zeros(count, dtype=torch.int64)
            here.copy_(there, non_blocking=True)
            self.assertEqual(here[-1].item(), count - 1)

    def test_05_float64(self):
        """#79019, #122602: the error is at the line that asks for float64, and nothing is sent."""
        half = torch.ones(2, device="mps")
        for ask in (
            lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
            lambda: torch.zeros(2, dtype=torch.float64).to("mps"),
            lambda: half.double(),
            lambda: half.to(torch.float64),
            lambda: torch.nn.Linear(2, 2).double().to("mps"),
            lambda: torch.arange(3.0, dtype=torch.float64, device="mps"),
        ):

            def refused(ask=ask):
                with self.assertRaisesRegex(TypeError, FLOAT64):
                    ask()

            sent, waiting = messages_of(refused)
            self.assertEqual((sent, waiting), ([], 0))
        self.assertEqual((half + torch.tensor(1.0, dtype=torch.float64)).dtype, torch.float32)

    def test_06_operands_that_are_not_contiguous(self):
        """#118115, #150967, #181133, #163597, #197636, #78043: wrong results on strided operands and outputs."""

        def run(device):
            a, b, c = ramp(device, 4, 6).t(), ramp(device, 6, 8)[:, ::2], ramp(device, 1, 4).expand(6, 4)
            out = torch.zeros(4, 6, device=device).t()
            torch.add(a, b, out=out)
            buffer = torch.zeros(6, 8, device=device)
            buffer[:, 1::2].addcdiv_(a, b + 2)
            x, y = ramp(device, 3, 4, 5).transpose(1, 2), ramp(device, 4, 3, 5).transpose(0, 1)
            q = ramp(device, 2, 5, 3, 4).transpose(1, 2)
            with torch.no_grad():
                attended = F.scaled_dot_product_attention(q, q, q)
            return [
                torch.addcdiv(a, b, c + 2), torch.where(a > 0, b, c), torch.bmm(x, y.transpose(1, 2)[:, :, :5].mT[:, :4].mT.mT),
                torch.cat([a, b, c], 1), torch.cat([a.t(), b.t()], 0), out, buffer, attended, a.sum(0), b.cumsum(1),
                F.linear(a, b), torch.addmm(c, a, ramp(device, 4, 4).t()),
            ]  # fmt: skip

        assert_as_on_cpu(self, run)

    def test_07_strides_of_results(self):
        """#110120, #170175: the strides are those of the kernel that ran, not of a guess."""
        x = ramp("cpu", 2, 3, 4, 4).to(memory_format=torch.channels_last)
        weight = ramp("cpu", 5, 3, 2, 2)
        for function in (
            lambda device: F.conv2d(x.to(device), weight.to(device)),
            lambda device: (x.to(device) > 0).nonzero(),
            lambda device: x.to(device).permute(3, 1, 0, 2) * 2,
            lambda device: torch.empty_like(x.to(device)),
            lambda device: x.to(device).sum(1, keepdim=True),
            lambda device: torch.linalg.svd(ramp(device, 3, 4)).U,
            lambda device: torch.fft.rfft(ramp(device, 6)),
            lambda device: torch.nn.functional.interpolate(x.to(device), scale_factor=2),
        ):
            for _ in range(2):
                expected, found = function("cpu"), function("mps")
                self.assertEqual((found.shape, found.stride()), (expected.shape, expected.stride()))

    def test_08_upload_of_strided_tensors(self):
        """#79383, #80859, #86056: processor to mps scrambled what was not contiguous."""
        base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
        sources = [
            base, base.permute(3, 0, 2, 1), base[:, 1:, ::2], base[0, 0, 0, 0], base[1:1], base[:1].expand(4, 3, 4, 5),
            base.to(memory_format=torch.channels_last), base.t() if base.ndim == 2 else base[0, 0].t(), base[..., 2],
            base.unfold(3, 2, 1), base.bool(), base.to(torch.complex64), base.half(), base.long()[:, :, ::3],
        ]  # fmt: skip
        for number, source in enumerate(sources):
            with self.subTest(source=number):
                there = source.to("mps")
                self.assertEqual(there.stride() if source.numel() else None, source.to("cpu", copy=True).stride() if source.numel() else None)
                assert_same(self, source, there)
                target = torch.zeros(*source.shape, 2, dtype=source.dtype, device="mps")[..., 1]
                target.copy_(source)
                assert_same(self, source, target)
                back = torch.zeros(*source.shape, 2, dtype=source.dtype)[..., 0]
                back.copy_(there)
                assert_same(self, source, back)

    def test_09_writes_through_views(self):
        """#122016: `x[1] = 1; x[2] = 3` wrote elsewhere."""

        def run(device):
            x = torch.zeros(4, device=device)
            x[1] = 1
            x[2] = 3
            y = torch.zeros(3, 4, device=device)
            y[1:, 1:][0, 2] = 5
            y.t()[0] = 7
            y[torch.tensor([0, 2], device=device), 2] = 9
            y.diagonal().add_(0.5)
            return [x, y]

        assert_as_on_cpu(self, run)

    def test_10_seeds(self):
        """#84288, #84516, #78009, #130613: seeds are ignored, generators' states are lost."""
        torch.manual_seed(42)
        first = torch.rand(5, device="mps").cpu()
        torch.manual_seed(42)
        assert_same(self, first, torch.rand(5, device="mps"))
        generator = torch.Generator(device="mps").manual_seed(3)
        state = generator.get_state()
        first = torch.rand(5, device="mps", generator=generator).cpu()
        generator.set_state(state)
        assert_same(self, first, torch.rand(5, device="mps", generator=generator))
        # Another client's draws change nothing here.
        torch.manual_seed(42)
        result = run_program("import torch, lighter_mps; torch.manual_seed(1); print(torch.rand(3, device='mps').tolist())")
        self.assertEqual(result.returncode, 0, result.stderr)
        torch.manual_seed(42)
        assert_same(self, torch.rand(5, device="mps"), _after_seed(42))

    def test_11_shuffle_with_mps_as_default_device(self):
        """#110820: `Expected a 'mps:0' generator device but found 'cpu'`."""
        torch.set_default_device("mps")
        try:
            generator = torch.Generator().manual_seed(1)
            order = torch.randperm(10, generator=generator)
            loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4, shuffle=True)
            seen = sorted(torch.cat([batch for (batch,) in loader]).tolist())
        finally:
            torch.set_default_device(None)
        self.assertTrue(order.is_mps)
        self.assertEqual(order.tolist(), torch.randperm(10, generator=torch.Generator().manual_seed(1)).tolist())
        self.assertEqual(seen, list(range(10)))

    def test_12_memory_grows(self):
        """#77753, #81610, #121113, #164299: bytes on the device return to where they were."""
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to("mps")
        optimizer = torch.optim.Adam(model.parameters())

        def step():
            x = torch.randn(64, 32, device="mps")
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        for _ in range(3):
            step()
        gc.collect()
        base = torch.mps.current_allocated_memory()
        for _ in range(40):
            step()
        self.assertEqual(torch.mps.current_allocated_memory(), base)
        big = [torch.zeros(1 << 20, device="mps") for _ in range(8)]
        self.assertEqual(torch.mps.current_allocated_memory(), base + (8 << 22))
        del big
        torch.mps.empty_cache()
        self.assertEqual(torch.mps.current_allocated_memory(), base)

    def test_13_sharing_and_forked_children(self):
        """#87688, pytorch/examples#1105: `_share_filename_: only available on CPU`; workers; forks."""
        tensor = torch.ones(3, device="mps")
        with self.assertRaisesRegex(RuntimeError, "cannot be shared"):
            tensor.share_memory_()
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2)
        self.assertEqual(sum(batch.to("mps").sum().item() for (batch,) in loader), 28.0)

        class OnDevice(torch.utils.data.Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return torch.ones(2).to("mps")

        with self.assertRaisesRegex(RuntimeError, "fork"):
            list(DataLoader(OnDevice(), num_workers=1))
        self.assertEqual(tensor.sum().item(), 3.0)

    def test_14_an_operator_that_the_host_lacks(self):
        """#77764: the error names the operator; the fallback variable reaches the host."""
        from lighter_mps import link

        with self.assertRaisesRegex((RuntimeError, NotImplementedError), "sparse"):
            torch.ones(2, 2, device="mps").to_sparse()
        self.assertEqual(torch.ones(2, device="mps").sum().item(), 2.0)
        program = (
            "import torch, lighter_mps\n"
            "from lighter_mps_wire import frames\n"
            "kept = frames.hello\n"
            "def hello(flags, body):\n    print(body['env'])\n    return kept(flags, body)\n"
            "frames.hello = hello\n"
            "torch.ones(2, device='mps')\n"
        )
        result = run_program(program, PYTORCH_ENABLE_MPS_FALLBACK="1")
        self.assertIn("{'PYTORCH_ENABLE_MPS_FALLBACK': '1'}", result.stdout, result.stderr)
        self.assertTrue(link.connected())

    def test_15_tags_are_matched_by_prefix(self):
        """#165455: the reader takes every tag that begins with a device's name."""
        buffer = io.BytesIO()
        torch.save(torch.ones(3, device="mps"), buffer)
        for place in ("mps", "mps:0"):
            buffer.seek(0)
            self.assertTrue(torch.load(buffer, map_location=place).is_mps)
        buffer.seek(0)
        with self.assertRaises(RuntimeError):
            torch.load(buffer, map_location={"mps": "mps_something"})

    def test_16_a_view_through_the_wire(self):
        """intel/torch-xpu-ops#77: a view operator that runs elsewhere loses the aliasing."""
        x = torch.arange(12.0, device="mps").reshape(3, 4)

        def views():
            x.t(), x[1], x[:, 1:3], x.view(2, 6), x.unfold(1, 2, 1), x.expand(2, 3, 4), x.diagonal(), x.split(2, 1)
            x.unsqueeze(0), x.permute(1, 0), x.narrow(0, 1, 2), x.chunk(2), x.as_strided((2,), (3,), 1), x.detach()
            x.view(torch.int32), x.real, x.flatten(), x.movedim(0, 1), x.swapaxes(0, 1), x.unbind(), x.select(0, 1)

        sent, waiting = messages_of(views)
        self.assertEqual((sent, waiting), ([], 0))

    def test_17_numbers_of_the_processor(self):
        """alyxya/mycelya-torch: CPU scalars mixed with device tensors; `expand` must stay here."""

        def run(device):
            x = torch.arange(4, device=device)
            f = ramp(device, 4)
            return [
                x * 2.0, x + True, x / 2, f + 1, f * torch.tensor(2.0), f + torch.tensor(3), x + torch.tensor(1.5),
                torch.tensor(2.0) - f, torch.where(f > 0, f, 0.0), f.masked_fill(f > 0, torch.tensor(9.0)),
                f.half() * torch.tensor(2.0, dtype=torch.float64), 1 - f, 2**x, f.clamp(min=0), torch.tensor(3) // (x + 1),
            ]  # fmt: skip

        assert_as_on_cpu(self, run)
        x = torch.ones(1, 3, device="mps")
        self.assertEqual(messages_of(lambda: x.expand(5, 3)), ([], 0))

    def test_18_storages_say_their_size(self):
        """rgpu's design notes: storages of size 0 break the bounds checks of views."""
        x = torch.ones(3, 4, device="mps")
        self.assertEqual(x.untyped_storage().nbytes(), 48)
        self.assertEqual((x + 1).untyped_storage().nbytes(), 48)
        self.assertEqual(x[1:, 2:].untyped_storage().nbytes(), 48)
        self.assertEqual(torch.empty(0, device="mps").untyped_storage().nbytes(), 0)
        with self.assertRaisesRegex(RuntimeError, "out of bounds"):
            x.as_strided((5, 5), (5, 1))

    def test_19_attention_reads_out_of_bounds(self):
        """#174861: scaled_dot_product_attention on odd sizes, with masks and expanded keys."""
        for queries, keys, width in ((1, 1, 1), (1, 7, 8), (5, 3, 4), (17, 33, 5), (3, 129, 64)):

            def run(device, queries=queries, keys=keys, width=width):
                q = ramp(device, 2, 2, queries, width)
                k = ramp(device, 2, 1, keys, width).expand(2, 2, keys, width)
                mask = ramp(device, keys).gt(-0.5).expand(queries, keys)
                with torch.no_grad():
                    return [F.scaled_dot_product_attention(q, k, k), F.scaled_dot_product_attention(q, k, k, mask)]

            assert_as_on_cpu(self, run, rtol=1e-4, atol=1e-5)

    def test_20a_generators_are_dropped(self):
        """fieldwork-ai/lighter: a generator argument is sent as None."""
        torch.manual_seed(0)
        draws = [torch.rand(4, device="mps", generator=torch.Generator("mps").manual_seed(5)).cpu() for _ in range(2)]
        assert_same(self, *draws)
        draws = [torch.rand(4, device="mps", generator=torch.Generator().manual_seed(5)).cpu() for _ in range(2)]
        assert_same(self, *draws)

    def test_20b_wrapped_numbers_as_float64_tensors(self):
        """fieldwork-ai/lighter: `int * 2.0` becomes float64 and fails."""
        product = torch.arange(3, device="mps") * 2.0
        self.assertEqual((product.dtype, product.tolist()), (torch.float32, [0.0, 2.0, 4.0]))

    def test_20c_shape_of_a_resized_out(self):
        """fieldwork-ai/lighter: `out=` that the operator resizes keeps its old shape here."""

        def run(device):
            results = []
            for function in (torch.abs, torch.sort, torch.nonzero, torch.cumsum):
                out = torch.empty(0, device=device)
                x = ramp(device, 4)
                if function is torch.sort:
                    indices = torch.empty(0, dtype=torch.int64, device=device)
                    torch.sort(x, out=(out, indices))
                    results += [out, indices]
                elif function is torch.nonzero:
                    out = torch.empty(0, dtype=torch.int64, device=device)
                    results.append(torch.nonzero(x > 0, out=out))
                    self.assertIs(results[-1], out)
                elif function is torch.cumsum:
                    results.append(torch.cumsum(x, 0, out=out))
                else:
                    results.append(function(x, out=out))
            results.append(torch.arange(5, out=torch.empty(0, device=device)))
            return results

        assert_as_on_cpu(self, run)

    def test_20d_views_do_not_alias(self):
        """fieldwork-ai/lighter: each output has a storage of its own."""
        x = torch.zeros(2, 4, device="mps")
        for view in (x.view(-1), x[0], x.reshape(4, 2), x.chunk(2, 1)[0], x.detach(), x.unflatten(1, (2, 2)), x.squeeze()):
            self.assertEqual(view.untyped_storage().data_ptr(), x.untyped_storage().data_ptr())
            view.add_(1)
        self.assertEqual(x[0, 0].item(), 7.0)
        self.assertEqual(x[1, 3].item(), 5.0)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork here")
    def test_20e_no_check_after_a_fork(self):
        """fieldwork-ai/lighter: a forked child writes into its parent's connection."""
        x = torch.ones(3, device="mps")
        torch.mps.synchronize()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                x + 1
                text = "no error"
            except BaseException as error:
                text = str(error)
            try:
                torch.manual_seed(0)
            except BaseException as error:
                text = f"manual_seed: {error}"
            os.write(writing, text.encode())
            os._exit(0)
        os.close(writing)
        text = os.read(reading, 4096).decode()
        os.close(reading)
        os.waitpid(child, 0)
        self.assertRegex(text, "fork.*spawn")
        self.assertEqual((x + 1).tolist(), [2.0, 2.0, 2.0])


def _after_seed(seed):
    torch.manual_seed(seed)
    return torch.rand(5, device="mps")


class OneClientsCrash(unittest.TestCase):
    @unittest.skipIf(HOST is None, "the host is not this test's own")
    def test_02_hurts_that_client_only(self):
        """#197805: what brings one client's process down leaves the others alone."""
        x = torch.ones(3, device="mps")
        torch.mps.synchronize()
        program = (
            "import torch, lighter_mps\n"
            "x = torch.ones(3, device='mps'); torch.mps.synchronize()\n"
            "print('ready', flush=True)\n"
            "input()\n"
            "try:\n    print((x + 1).tolist())\n"
            "except RuntimeError as error:\n    print('lost:', error)\n"
        )
        import subprocess
        import sys

        from ondevice import ROOT, TORCH_FOLDER

        before = len(HOST.workers)
        other = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), TORCH_FOLDER])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.assertEqual(other.stdout.readline().strip(), "ready")
        worker = HOST.worker(before)
        worker.process.kill()
        worker.wait_ended()
        output, _ = other.communicate("\n", timeout=60)
        self.assertIn("lost:", output)
        self.assertEqual((x + 1).tolist(), [2.0, 2.0, 2.0])


if __name__ == "__main__":
    unittest.main()

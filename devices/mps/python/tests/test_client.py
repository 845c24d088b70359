# SPDX-License-Identifier: MIT OR Apache-2.0
"""The client's hot path and stream: signatures, storages' numbers, round trips, errors, a lost host, threads, interrupts."""

import gc
import os
import signal
import sys
import threading
import unittest

import torch
from ondevice import HOST, assert_as_on_cpu, run_program

import lighter_mps
from lighter_mps import link, settings, signatures


def spent(function):
    """What a call adds to the statistics."""
    before = lighter_mps.statistics()
    function()
    after = lighter_mps.statistics()
    return {name: after[name] - before[name] for name in after}


class Signatures(unittest.TestCase):
    def test_a_steady_training_step_waits_for_nothing(self):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to("mps")
        optimizer = torch.optim.Adam(model.parameters())
        x, y = torch.randn(32, 8).to("mps"), torch.randn(32, 1).to("mps")

        def step():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        for _ in range(3):
            step()
        used = spent(step)
        self.assertEqual(used["round_trips"], 0)
        self.assertEqual(used["signatures"], 0)
        self.assertGreater(used["calls"], 20)

    def test_shapes_that_grow_wait_for_nothing(self):
        query = torch.randn(1, 4, 1, 8).to("mps")
        cache = torch.randn(1, 4, 1, 8).to("mps")
        fresh = torch.randn(1, 4, 1, 8).to("mps")

        def token():
            nonlocal cache
            cache = torch.cat([cache, fresh], dim=2)
            scores = (query @ cache.transpose(-1, -2)) * 0.35 + 1
            return torch.softmax(scores, dim=-1) @ cache

        for _ in range(3):
            token()
        self.assertEqual(spent(lambda: [token() for _ in range(5)])["round_trips"], 0)

    def test_numbers_that_are_equal_and_differ_in_type(self):
        whole = torch.ones(2, dtype=torch.int64, device="mps")
        for _ in range(2):
            self.assertEqual((whole * 1).dtype, torch.int64)
            self.assertEqual((whole * 1.0).dtype, torch.float32)
            self.assertEqual((whole * True).dtype, torch.int64)
            self.assertEqual((whole.bool() * 1).dtype, torch.int64)
            self.assertEqual((whole.bool() * True).dtype, torch.bool)

    def test_numbers_go_by_value_under_one_signature(self):
        x = torch.ones(4, device="mps")
        x * 0.5
        used = spent(lambda: [self.assertEqual((x * (n / 8)).tolist(), [n / 8] * 4) for n in range(5)])
        self.assertEqual(used["signatures"], 0)

    def test_sizes_that_come_from_numbers(self):
        for end in (3.0, 5.0, 7.5, 5.0):
            self.assertEqual(torch.arange(0.0, end, 1.5, device="mps").tolist(), torch.arange(0.0, end, 1.5).tolist())
        for steps in (2, 5, 2):
            self.assertEqual(torch.linspace(0, 1, steps, device="mps").shape, (steps,))

    def test_results_that_depend_on_data_are_never_learned(self):
        for values in ([0, 1, 2], [0, 0, 3], [1, 2, 3]):
            x = torch.tensor(values, device="mps")
            self.assertEqual(torch.nonzero(x).shape[0], sum(value != 0 for value in values))
            self.assertEqual(x[x > 1].tolist(), [value for value in values if value > 1])
            self.assertEqual(torch.unique(x).tolist(), sorted(set(values)))

    def test_results_given_by_the_caller(self):
        a = torch.arange(6.0, device="mps").reshape(2, 3)
        for _ in range(3):
            out = torch.empty(0, device="mps")
            kept = torch.add(a, 1, out=out)
            self.assertIs(kept, out)
            self.assertEqual(out.tolist(), (a.cpu() + 1).tolist())
        held = torch.empty(2, 3, device="mps")
        torch.mul(a, 2, out=held)
        self.assertEqual(held.tolist(), (a.cpu() * 2).tolist())

    def test_signatures_run_out(self):
        limit, count = signatures._State.limit, signatures._State.count
        x = torch.ones(64, device="mps")
        try:
            signatures._State.limit = count + 3
            for size in range(1, 12):
                self.assertEqual((x[:size] + 1).sum().item(), 2 * size)
                self.assertEqual((x[:size] + 1).sum().item(), 2 * size)
        finally:
            signatures._State.limit = limit

    def test_conj_and_neg_bits(self):
        def products(device):
            a = torch.randn(3, 3, dtype=torch.complex64).to(device)
            b = torch.randn(3, 3).to(device)
            flipped = a.conj().imag
            target = torch.zeros(3, 3, dtype=torch.complex64, device=device)
            target.conj().copy_(a)
            return [a.conj() @ a, a.conj().clone(), flipped.clone(), flipped @ b, a.conj().imag @ b, target, a.conj().cpu()]

        for _ in range(2):
            assert_as_on_cpu(self, products)

    def test_subclasses_and_parameters(self):
        class Own(torch.Tensor):
            pass

        x = torch.arange(3.0).to("mps").as_subclass(Own)
        y = x + 1
        self.assertIs(type(y), Own)
        self.assertEqual(y.tolist(), [1.0, 2.0, 3.0])
        x.add_(1)
        self.assertEqual(x.tolist(), [1.0, 2.0, 3.0])
        self.assertIs(type(torch.nn.Linear(2, 2).to("mps").weight), torch.nn.Parameter)


class Storages(unittest.TestCase):
    def held(self):
        gc.collect()
        return torch.mps.current_allocated_memory()

    def test_memory_comes_back(self):
        before = self.held()
        for _ in range(50):
            x = torch.randn(100, 100, device="mps")
            y = (x @ x).relu_().sum(0)
            del x, y
        self.assertEqual(self.held(), before)

    def test_numbers_are_used_again_and_do_not_mix(self):
        kept = torch.full((8,), 3.0, device="mps")
        for value in range(200):
            x = torch.full((8,), float(value), device="mps")
            self.assertIsNot(x, kept)
            if value % 50 == 0:
                self.assertEqual(x.tolist(), [float(value)] * 8)
        self.assertEqual(kept.tolist(), [3.0] * 8)

    def test_freed_while_an_exception_is_on_its_way(self):
        before = self.held()

        class Failing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x * 2)
                return x * 3

            @staticmethod
            def backward(ctx, gradient):
                raise KeyError("mine")

        for _ in range(20):
            x = torch.ones(1000, device="mps", requires_grad=True)
            with self.assertRaisesRegex(KeyError, "mine"):
                Failing.apply(x).sum().backward()
            del x
        self.assertEqual(self.held(), before)

    def test_storages_that_grow(self):
        x = torch.arange(4.0, device="mps")
        x.resize_(2, 3)
        self.assertEqual(x.flatten()[:4].tolist(), [0.0, 1.0, 2.0, 3.0])
        x.resize_(2)
        self.assertEqual(x.tolist(), [0.0, 1.0])
        y = torch.empty(0, device="mps").set_(x)
        y.add_(1)
        self.assertEqual(x.tolist(), [1.0, 2.0])


class Errors(unittest.TestCase):
    def tearDown(self):
        link.wait()

    def test_late_error_names_operator_and_line(self):
        x = torch.zeros(4, device="mps")
        index = torch.tensor([1], device="mps")
        x[index]
        bad = torch.tensor([100], device="mps")
        line = sys._getframe().f_lineno + 1
        x.index_select(0, index), x.index_select(0, bad)
        with self.assertRaises((IndexError, RuntimeError)) as caught:
            torch.mps.synchronize()
        self.assertIn(f"{__file__}:{line}", str(caught.exception))
        self.assertIn("index_select", str(caught.exception))
        self.assertEqual((x + 1).tolist(), [1.0] * 4)

    def test_wrong_shapes_are_errors_at_the_line(self):
        a, b = torch.ones(2, 3, device="mps"), torch.ones(2, 4, device="mps")
        for wrong in (lambda: a + b, lambda: a @ b, lambda: torch.cat([a, b]), lambda: a.add_(b), lambda: a.sum(5)):
            with self.assertRaises((RuntimeError, IndexError)):
                wrong()

    def test_devices_do_not_mix(self):
        with self.assertRaisesRegex(RuntimeError, "same device"):
            torch.ones(2, device="mps") + torch.ones(2)
        self.assertEqual((torch.ones(2, device="mps") + torch.tensor(2.0)).tolist(), [3.0, 3.0])
        self.assertEqual(torch.arange(4, device="mps")[torch.tensor([1, 3])].tolist(), [1, 3])

    def test_float64(self):
        text = "Cannot convert a MPS Tensor to float64"
        x = torch.ones(2, device="mps")
        for wrong in (
            lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
            lambda: torch.zeros(2, dtype=torch.float64).to("mps"),
            lambda: x.double(),
            lambda: x.sum(dtype=torch.float64),
        ):
            with self.assertRaisesRegex(TypeError, text):
                wrong()

    def test_sync_mode_raises_at_the_operator(self):
        text = (
            "import torch, lighter_mps\n"
            "x = torch.zeros(4, device='mps'); i = torch.tensor([1], device='mps'); b = torch.tensor([9], device='mps')\n"
            "x.index_select(0, i)\n"
            "try: x.index_select(0, b)\n"
            "except Exception as error: print('at the operator', type(error).__name__)\n"
        )
        done = run_program(text, LIGHTER_MPS_SYNC="1")
        self.assertIn("at the operator", done.stdout, done.stderr)

    def test_settings_are_checked(self):
        self.assertTrue(settings.read({"LIGHTER_MPS_SYNC": "1"}).sync)
        for bad in ({"LIGHTER_MPS_SYNC": "yes"}, {"LIGHTER_MPS": "tcp:1"}, {"LIGHTER_MPS_RING": "2"}):
            with self.assertRaisesRegex(ValueError, next(iter(bad))):
                settings.read(bad)


class TheHostGoes(unittest.TestCase):
    @unittest.skipUnless(HOST, "needs a host of its own")
    def test_one_clear_error_and_the_next_process_works(self):
        text = (
            "import os, signal, torch, lighter_mps\n"
            "x = torch.ones(4, device='mps'); x.sum().item()\n"
            "print('ready', flush=True); input()\n"
            "for use in (lambda: x + 1, lambda: x.sum().item(), lambda: torch.ones(2, device='mps'), lambda: x.cpu()):\n"
            "    for attempt in range(3):\n"
            "        try: use(); torch.mps.synchronize()\n"
            "        except RuntimeError as error: print('told:', error, flush=True); break\n"
            "print(torch.ones(2).sum().item())\n"
        )
        import subprocess

        from ondevice import ROOT, TORCH_FOLDER

        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), TORCH_FOLDER])}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        known = len(HOST.workers)
        child = subprocess.Popen([sys.executable, "-c", text], env=environment, text=True, **streams)
        self.assertEqual(child.stdout.readline().strip(), "ready")
        os.kill(HOST.worker(known).process.pid, signal.SIGKILL)
        out, err = child.communicate("\n", timeout=120)
        self.assertEqual(child.returncode, 0, err)
        told = [line for line in out.splitlines() if line.startswith("told:")]
        self.assertEqual(len(told), 4, out + err)
        self.assertTrue(all("the connection to the host is lost" in line for line in told), out)
        self.assertEqual(len(set(told)), 1, out)
        self.assertIn("3.0", run_program("import torch, lighter_mps; print(torch.ones(3, device='mps').sum().item())").stdout)

    def test_exit_with_work_and_tensors_pending(self):
        text = (
            "import torch, lighter_mps, atexit\n"
            "x = torch.ones(100, 100, device='mps'); m = torch.nn.Linear(100, 100).to('mps')\n"
            "atexit.register(lambda: print('late', (m(x) * 0).sum().item()))\n"
            "for _ in range(100): y = m(x)\n"
            "import builtins; builtins.keep = [x + i for i in range(50)]; x.me = x\n"
        )
        done = run_program(text)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "late 0.0"), done.stderr)


class Threads(unittest.TestCase):
    def test_many_threads_with_new_signatures_and_replies(self):
        wrong = []

        def work(seed):
            try:
                for round_ in range(10):
                    size = 3 + seed * 10 + round_
                    x = torch.full((size,), float(seed), device="mps")
                    if (x * 2 + 1).sum().item() != size * (2 * seed + 1):
                        wrong.append((seed, round_))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_an_interrupted_wait_leaves_the_stream_in_order(self):
        class Interrupt(Exception):
            pass

        def interrupt(*_):
            raise Interrupt

        x = torch.randn(400, 400).to("mps")
        expected = x.cpu().sum().item()
        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            for attempt in range(20):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 * (attempt + 1))
                    for size in range(attempt * 20 + 1, attempt * 20 + 21):
                        y = x
                        for _ in range(3):
                            y = y @ x * 0
                        y[:1, :size].sum().item()
                        torch.nonzero(x[0, :size] > 0)
                except Interrupt:
                    pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                self.assertAlmostEqual(x.sum().item(), expected, delta=1e-2)
        finally:
            signal.signal(signal.SIGALRM, previous)


if __name__ == "__main__":
    unittest.main()

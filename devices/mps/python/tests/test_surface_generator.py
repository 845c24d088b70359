# SPDX-License-Identifier: MIT OR Apache-2.0
"""Seeds, states and generators: the default one, torch.Generator(device="mps"), and the processor's on the device."""

import copy
import pickle
import unittest

import torch
from ondevice import assert_as_on_cpu, assert_same
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def draw(generator=None, device="mps"):
    return torch.randn(5, device=device, generator=generator).cpu()


class Seeds(unittest.TestCase):
    def test_manual_seed_reaches_the_host(self):
        def numbers(device):
            return [
                torch.rand(4, device=device),
                torch.randint(0, 100, (5,), device=device),
                torch.randperm(7, device=device),
                torch.nn.functional.dropout(torch.ones(20, device=device)),
                torch.multinomial(torch.tensor([0.1, 0.2, 0.7], device=device), 4, replacement=True),
                torch.bernoulli(torch.full((6,), 0.5, device=device)),
            ]

        assert_as_on_cpu(self, numbers)

    def test_seed_of_the_device_alone(self):
        torch.mps.manual_seed(11)
        first = draw()
        torch.mps.manual_seed(11)
        assert_same(self, first, draw())
        torch.mps.seed()
        self.assertFalse(torch.equal(first, draw()))

    def test_state_round_trip(self):
        torch.manual_seed(3)
        draw()
        state = torch.mps.get_rng_state()
        self.assertEqual((state.dtype, state.device.type), (torch.uint8, "cpu"))
        first = draw()
        torch.mps.set_rng_state(state)
        assert_same(self, first, draw())
        with self.assertRaises(RuntimeError):
            torch.mps.set_rng_state(state[:5])
        draw()

    def test_fork_rng(self):
        torch.manual_seed(4)
        with torch.random.fork_rng(device_type="mps"):
            torch.manual_seed(99)
            draw()
        first = draw()
        torch.manual_seed(4)
        assert_same(self, first, draw())

    def test_seeds_of_any_size(self):
        for seed in (0, -1, 2**63, 2**64 - 1):
            torch.manual_seed(seed)
            first = draw()
            torch.manual_seed(seed)
            assert_same(self, first, draw())

    @unittest.skipUnless(hasattr(torch, "accelerator") and hasattr(torch.accelerator, "random"), "older torch")
    def test_accelerators_random(self):
        torch.manual_seed(5)
        self.assertEqual(torch.accelerator.random.initial_seed(), 5)
        self.assertTrue(torch.equal(torch.accelerator.random.get_rng_state(), torch.mps.get_rng_state()))


class Generators(unittest.TestCase):
    def test_class_stays_torchs(self):
        generator = torch.Generator(device="mps")
        self.assertIsInstance(generator, torch.Generator)
        self.assertIsInstance(generator, torch._C.Generator)
        self.assertIsInstance(torch.Generator(), torch.Generator)
        self.assertIsInstance(torch.default_generator, torch.Generator)
        self.assertTrue(issubclass(torch._C.Generator, torch.Generator))
        self.assertNotIsInstance(3, torch.Generator)
        self.assertEqual(generator.device, torch.device("mps:0"))
        self.assertEqual(torch.Generator().device, torch.device("cpu"))

    def test_draws_as_the_processors_with_the_same_seed(self):
        assert_as_on_cpu(self, lambda device: draw(torch.Generator(device).manual_seed(7), device))

    def test_is_apart_from_the_default_one(self):
        torch.manual_seed(1)
        generator = torch.Generator("mps").manual_seed(2)
        expected = draw()
        torch.manual_seed(1)
        draw(generator)
        assert_same(self, expected, draw())

    def test_goes_on_from_call_to_call(self):
        generator = torch.Generator("mps").manual_seed(2)
        first, second = draw(generator), draw(generator)
        self.assertFalse(torch.equal(first, second))
        generator.manual_seed(2)
        assert_same(self, [first, second], [draw(generator), draw(generator)])

    def test_unseeded_is_torchs_default_seed(self):
        self.assertEqual(torch.Generator("mps").initial_seed(), torch.Generator().initial_seed())
        self.assertEqual(torch.Generator("mps").manual_seed(12).initial_seed(), 12)
        assert_as_on_cpu(self, lambda device: draw(torch.Generator(device), device))

    def test_state(self):
        generator = torch.Generator("mps").manual_seed(9)
        state = generator.get_state()
        first = draw(generator)
        other = torch.Generator("mps").set_state(state)
        assert_same(self, first, draw(other))
        generator.set_state(state)
        clone = generator.clone_state()
        assert_same(self, first, draw(clone))
        assert_same(self, first, draw(generator))
        with self.assertRaises(TypeError):
            generator.set_state([1, 2])
        self.assertIsInstance(generator.seed(), int)

    def test_copies(self):
        generator = torch.Generator("mps").manual_seed(9)
        for other in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
            self.assertEqual(other.device.type, "mps")
            expected = draw(generator.clone_state())
            assert_same(self, expected, draw(other))

    def test_offsets_are_refused(self):
        with self.assertRaisesRegex(RuntimeError, "get_state"):
            torch.Generator("mps").get_offset()

    def test_in_place_operators(self):
        def numbers(device):
            generator = torch.Generator(device).manual_seed(5)
            tensor = torch.empty(8, device=device)
            return [
                tensor.normal_(generator=generator).clone(),
                tensor.uniform_(generator=generator).clone(),
                tensor.exponential_(generator=generator).clone(),
                tensor.bernoulli_(0.5, generator=generator).clone(),
                torch.randint(9, (4,), generator=generator, device=device),
                torch.randperm(9, generator=generator, device=device),
                torch.multinomial(torch.ones(4, device=device), 2, generator=generator),
                torch.nn.init.xavier_uniform_(torch.empty(3, 3, device=device)),
            ]

        assert_as_on_cpu(self, numbers)

    def test_many_come_and_go(self):
        for seed in range(50):
            draw(torch.Generator("mps").manual_seed(seed))
        torch.mps.synchronize()


class ProcessorsGenerator(unittest.TestCase):
    def test_draws_the_processors_numbers_and_moves_on(self):
        def numbers(device):
            generator = torch.Generator().manual_seed(6)
            tensor = torch.empty(6, device=device)
            return [
                torch.randn(4, device=device, generator=generator),
                torch.rand(4, device=device, generator=generator),
                torch.randperm(8, device=device, generator=generator),
                tensor.uniform_(generator=generator),
                torch.multinomial(torch.ones(4, device=device), 2, generator=generator),
                torch.rand(3, generator=generator),
            ]

        assert_as_on_cpu(self, numbers)


class Samplers(unittest.TestCase):
    def setUp(self):
        torch.set_default_device("mps")

    def tearDown(self):
        torch.set_default_device(None)

    def test_shuffle_with_the_device_as_default(self):
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=5, shuffle=True)
        seen = torch.cat([batch[0] for batch in loader])
        self.assertTrue(seen.is_mps)
        self.assertEqual(sorted(seen.tolist()), list(range(10)))

    def test_generators_of_either_device(self):
        for device in ("cpu", "mps"):
            orders = []
            for _ in range(2):
                generator = torch.Generator(device).manual_seed(4)
                orders.append(list(RandomSampler(range(9), generator=generator)))
            self.assertEqual(*orders)
            self.assertEqual(sorted(orders[0]), list(range(9)))

    def test_random_split(self):
        parts = torch.utils.data.random_split(range(10), [6, 4], generator=torch.Generator("mps").manual_seed(1))
        self.assertEqual(sorted(parts[0].indices + parts[1].indices), list(range(10)))


if __name__ == "__main__":
    unittest.main()

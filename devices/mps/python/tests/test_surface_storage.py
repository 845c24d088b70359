# SPDX-License-Identifier: MIT OR Apache-2.0
"""Storages, saving and loading, copying and pickling, and what cannot be shared with another process."""

import copy
import io
import os
import pickle
import tempfile
import unittest
import warnings

import torch
from ondevice import VERSION, assert_same


def saved(value, **keywords):
    buffer = io.BytesIO()
    torch.save(value, buffer, **keywords)
    return buffer.getvalue()


def loaded(data, **keywords):
    return torch.load(io.BytesIO(data), **keywords)


class Storages(unittest.TestCase):
    def setUp(self):
        self.tensor = torch.arange(6.0, device="mps")
        self.storage = self.tensor.untyped_storage()

    def test_what_it_says_of_itself(self):
        self.assertEqual(self.storage.device, torch.device("mps:0"))
        self.assertEqual(self.storage.nbytes(), 24)
        self.assertEqual(self.tensor[2:].untyped_storage().nbytes(), 24)
        self.assertEqual(self.tensor[2:].untyped_storage().data_ptr(), self.storage.data_ptr())
        self.assertFalse(self.storage.is_cuda)
        self.assertFalse(self.storage.is_pinned())

    def test_reading(self):
        there = torch.arange(6.0).untyped_storage()
        self.assertEqual(self.storage.tolist(), there.tolist())
        self.assertEqual(self.storage[6], there[6])
        self.assertEqual(self.storage.cpu().tolist(), there.tolist())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.assertEqual(self.tensor.storage().tolist(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
            self.assertEqual(self.tensor.storage()[4], 4.0)

    def test_writing(self):
        self.storage.copy_(torch.ones(6).untyped_storage())
        self.assertEqual(self.tensor.tolist(), [1.0] * 6)
        self.storage.fill_(0)
        self.assertEqual(self.tensor.tolist(), [0.0] * 6)
        there = torch.zeros(6)
        there.untyped_storage().copy_(torch.arange(6.0, device="mps").untyped_storage())
        self.assertEqual(there.tolist(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        with self.assertRaises(RuntimeError):
            self.storage.copy_(torch.ones(5).untyped_storage())
        with self.assertRaisesRegex(RuntimeError, "keeps its size"):
            self.storage.resize_(0)

    def test_making(self):
        storage = torch.UntypedStorage(16, device="mps")
        self.assertEqual((storage.nbytes(), storage.device.type), (16, "mps"))
        self.assertEqual(torch.UntypedStorage([1, 2, 3], device="mps").tolist(), [1, 2, 3])
        self.assertEqual(torch.UntypedStorage(4).device.type, "cpu")
        self.assertEqual(torch.UntypedStorage([1, 2]).mps().tolist(), [1, 2])
        clone = self.storage.clone()
        self.assertNotEqual(clone.data_ptr(), self.storage.data_ptr())
        self.assertEqual(clone.tolist(), self.storage.tolist())

    def test_set_shares_the_storage(self):
        other = torch.empty(0, device="mps").set_(self.storage)
        other[0] = 7
        self.assertEqual(self.tensor[0].item(), 7.0)
        part = torch.empty(0, device="mps").set_(self.storage, 2, (2,), (1,))
        self.assertEqual(part.tolist(), [2.0, 3.0])


class SaveAndLoad(unittest.TestCase):
    def test_round_trip_in_every_format(self):
        value = {"a": torch.randn(3, 4, device="mps"), "b": [torch.arange(5, device="mps")], "c": torch.ones(2)}
        for keywords in ({}, {"_use_new_zipfile_serialization": False}):
            with self.subTest(**keywords):
                back = loaded(saved(value, **keywords))
                self.assertEqual([back["a"].device.type, back["b"][0].device.type, back["c"].device.type], ["mps", "mps", "cpu"])
                assert_same(self, value, back)

    def test_map_location(self):
        here, there = torch.arange(4.0), torch.arange(4.0, device="mps")
        for place in ("mps", "mps:0", torch.device("mps"), {"cpu": "mps"}, lambda storage, _tag: storage.mps()):
            self.assertEqual(loaded(saved(here), map_location=place).device.type, "mps", place)
        for place in ("cpu", torch.device("cpu"), {"mps": "cpu"}):
            self.assertEqual(loaded(saved(there), map_location=place).device.type, "cpu", place)
        self.assertEqual(loaded(saved(there), map_location="meta").device.type, "meta")

    def test_only_the_devices_own_tags(self):
        data = saved(torch.arange(4.0))
        with self.assertRaisesRegex(RuntimeError, "index 0 only"):
            loaded(data, map_location={"cpu": "mps:3"})
        with self.assertRaises(RuntimeError):
            loaded(data, map_location={"cpu": "mpsx"})

    def test_views_stay_views(self):
        base = torch.arange(6.0, device="mps")
        back = loaded(saved([base, base[2:4]]))
        back[0][2] = 9
        self.assertEqual(back[1].tolist(), [9.0, 3.0])

    def test_files_and_mmap(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.pt")
            model = torch.nn.Linear(4, 3).to("mps")
            torch.save(model.state_dict(), path)
            back = torch.load(path, map_location="mps", mmap=True, weights_only=True)
            self.assertEqual(back["weight"].device.type, "mps")
            assert_same(self, model.state_dict(), back)

    def test_state_dict_of_a_model_and_its_optimizer(self):
        model = torch.nn.Linear(3, 2).to("mps")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3, device="mps")).sum().backward()
        optimizer.step()
        state = loaded(saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        other = torch.nn.Linear(3, 2).to("mps")
        other.load_state_dict(state["model"])
        again = torch.optim.Adam(other.parameters())
        again.load_state_dict(state["optimizer"])
        assert_same(self, model.state_dict(), other.state_dict())
        assert_same(self, optimizer.state_dict()["state"], again.state_dict()["state"])
        here = torch.nn.Linear(3, 2)
        here.load_state_dict(state["model"])
        self.assertEqual(here.weight.device.type, "cpu")

    def test_pickle_and_copies(self):
        tensor = torch.randn(3, device="mps")
        parameter = torch.nn.Parameter(torch.randn(2, device="mps"))
        for value in (tensor, parameter, tensor[1:], torch.empty(0, device="mps")):
            for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
                self.assertIs(type(other), type(value))
                self.assertEqual(other.device, value.device)
                self.assertEqual(other.requires_grad, value.requires_grad)
                assert_same(self, value, other)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to("mps")
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[0].weight.zero_()
        self.assertNotEqual(model[0].weight.abs().sum().item(), 0.0)


class Sharing(unittest.TestCase):
    def test_a_tensor_of_the_device_cannot_be_shared(self):
        tensor = torch.ones(3, device="mps")
        for share in (tensor.share_memory_, tensor.untyped_storage().share_memory_):
            with self.assertRaisesRegex(RuntimeError, r"cannot be shared.*cpu\(\)"):
                share()
        with self.assertRaisesRegex(RuntimeError, "cannot be shared"):
            torch.nn.Linear(2, 2).to("mps").share_memory()

    def test_nor_sent_through_a_queue(self):
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing  # noqa: F401  (registers how tensors are sent)

        with self.assertRaisesRegex(RuntimeError, "cannot be shared"):
            ForkingPickler.dumps(torch.ones(3, device="mps"))
        ForkingPickler.dumps(torch.ones(3))

    def test_the_processors_tensors_still_are(self):
        self.assertTrue(torch.ones(3).share_memory_().is_shared())


if __name__ == "__main__":
    print("torch", VERSION)
    unittest.main()

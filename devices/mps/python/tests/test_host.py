# SPDX-License-Identifier: MIT OR Apache-2.0
"""A real worker over its real socket: operators, predictions, errors, views, memory, generators, events, bulk data.

Needs a torch for the host: LIGHTER_TEST_TORCH names its folder, or this Python has one.
"""

import json
import struct
import subprocess
import sys
import unittest

from harness import HOST_PROGRAM, Host
from hostile_client import F32, I64, Client, HostError, descriptor, new, tensor
from lighter_mps_wire import frames, protocol
from lighter_mps_wire.protocol import address
from lighter_mps_wire.values import Device, Dtype, Generator, Layout, ScalarSlot, encode

ADD = ("aten::add.Tensor", "self:Tensor,other:Tensor,*alpha:number")
ADD_ = ("aten::add_.Tensor", "self:Tensor,other:Tensor")
MUL = ("aten::mul.Tensor", "self:Tensor,other:Tensor")


class HostCase(unittest.TestCase):
    limits = None

    @classmethod
    def setUpClass(cls):
        cls.host = cls.enterClassContext(Host(limits=cls.limits)) if hasattr(cls, "enterClassContext") else None
        if cls.host is None:
            cls.host = Host(limits=cls.limits).__enter__()
            cls.addClassCleanup(cls.host.__exit__)

        # A worker takes seconds to start, so that the tests of a class share one; each uses numbers of its own.
        cls.client = Client(cls.host, ring_bytes=1 << 20)
        cls.addClassCleanup(cls.client.close)


class Operators(HostCase):
    def test_the_hello_names_the_hosts_torch(self):
        facts = self.client.facts
        self.assertEqual(facts["device"], "cpu")
        self.assertRegex(facts["torch"], r"^\d+\.\d+")
        self.assertEqual(facts["max_storages"], 1 << 20)

    def test_a_run_learns_and_its_calls_need_no_reply(self):
        client = self.client
        a, b = client.upload([1, 2, 3]), client.upload([10, 20, 30])
        signature = client.next_signature()
        arguments = [tensor(0, [3]), tensor(1, [3])], {"alpha": ScalarSlot(2)}
        values = [address(a), address(b), 0.5]
        shape, results, resized, numbers = client.run(*ADD, *arguments, "TTf", values, keep=signature)
        self.assertEqual((shape, results, resized), ("s", [["n", [3], [1], F32]], []))
        self.assertEqual(client.floats(numbers[0], [3]), [6, 12, 18])
        for alpha in (1.0, 2.0, 3.0):
            number = client.next_number()
            client.call(signature, "TTf", [address(a), address(b), alpha], [number])
            self.assertEqual(client.floats(number, [3]), [1 + 10 * alpha, 2 + 20 * alpha, 3 + 30 * alpha])

    def test_a_definition_may_be_called_at_once_and_many_times(self):
        client = self.client
        a = client.upload([1, 2])
        signature = client.define(*ADD_, [tensor(0, [2]), tensor(1, [2])], slots="TT", results=[["a", 0]])
        for _ in range(5):
            client.call(signature, "TT", [address(a), address(a)])
        self.assertEqual(client.floats(a, [2]), [32, 64])

    def test_every_shape_of_results(self):
        client = self.client
        a = client.upload([3, 1, 2, 6, 5, 4], [2, 3])
        shape, results, _, numbers = client.run(
            "aten::sort",
            "self:Tensor,dim:int,descending:bool",
            [tensor(0, [2, 3]), 1, False],
            slots="T",
            values=[address(a)],
            keep=(kept := client.next_signature()),
        )
        self.assertEqual((shape, [result[3] for result in results]), ("t", [F32, I64]))
        numbers = [client.next_number(), client.next_number()]
        client.call(kept, "T", [address(a)], numbers)
        self.assertEqual(client.floats(numbers[0], [2, 3]), [1, 2, 3, 4, 5, 6])
        shape, results, _, numbers = client.run(
            "aten::_foreach_add.Scalar",
            "self:List[Tensor],scalar:number",
            [[tensor(0, [3]), tensor(1, [3])], 1],
            slots="TT",
            values=[address(a), address(a, 12)],
            keep=(kept := client.next_signature()),
        )
        self.assertEqual((shape, len(results)), ("l", 2))
        numbers = [client.next_number(), client.next_number()]
        client.call(kept, "TT", [address(a, 12), address(a)], numbers)
        self.assertEqual(client.floats(numbers[0], [3]), [7, 6, 5])
        shape, results, _, _ = client.run(
            "aten::_foreach_add_.Scalar",
            "self:List[Tensor],scalar:number",
            [[tensor(0, [3])], 1],
            slots="T",
            values=[address(a)],
            keep=(kept := client.next_signature()),
        )
        self.assertEqual((shape, results), ("v", []))
        client.call(kept, "T", [address(a)])
        self.assertEqual(client.floats(a, [2, 3]), [5, 3, 4, 6, 5, 4])
        shape, results, _, _ = client.run(
            "aten::equal",
            "self:Tensor,other:Tensor",
            [tensor(0, [3]), tensor(1, [3])],
            slots="TT",
            values=[address(a)] * 2,
        )
        self.assertEqual((shape, results), ("s", [["v", True]]))

    def test_many_tensors_in_one_call(self):
        client = self.client
        count = 300
        a = client.upload(range(count))
        slots = [tensor(index, [1]) for index in range(count)]
        values = [address(a, 4 * index) for index in range(count)]
        client.run(
            "aten::_foreach_mul.Scalar",
            "self:List[Tensor],scalar:number",
            [slots, 2],
            slots="T" * count,
            values=values,
            keep=(kept := client.next_signature()),
        )
        numbers = [client.next_number() for _ in range(count)]
        client.call(kept, "T" * count, values, numbers)
        self.assertEqual(client.floats(numbers[299], [1]), [598])
        self.assertEqual(client.floats(numbers[0], [1]), [0])
        client.free(*numbers)
        self.assertEqual(client.wait(), None)

    def test_results_without_numbers_wait_and_go_with_the_next_run(self):
        client = self.client
        a = client.upload([1, 2])
        before = client.query(protocol.QUERY_MEMORY)
        body = encode([0, *MUL, [tensor(0, [2]), tensor(1, [2])], {}, "TT", [address(a), address(a)]])
        for _ in range(2):
            client.ask(protocol.RUN, body=body)
            # Another thread's tensors come and go meanwhile; a number that was never used may be freed.
            other = client.alloc(8)
            client.free(other, 7_000_000)
            client.wait()
        number = client.next_number()
        client.send(frames.numbers(protocol.BIND, [number]))
        self.assertEqual(client.floats(number, [2]), [1, 4])
        client.free(number)
        self.assertEqual(client.query(protocol.QUERY_MEMORY), before)

    def test_a_signature_may_be_defined_anew(self):
        client = self.client
        a = client.upload([1, 2])
        kept = client.define(*MUL, [tensor(0, [2]), tensor(1, [2])], slots="TT", results=[new([2])])
        for expected in ([1, 4], [2, 4]):
            number = client.next_number()
            client.call(kept, "TT", [address(a), address(a)], [number])
            self.assertEqual(client.floats(number, [2]), expected)
            client.define(
                ADD[0],
                "self:Tensor,other:Tensor",
                [tensor(0, [2]), tensor(1, [2])],
                slots="TT",
                results=[new([2])],
                signature=kept,
            )

    def test_factories_are_made_on_the_device(self):
        keywords = {"dtype": Dtype(F32), "layout": Layout(), "device": Device(1), "pin_memory": False}
        kinds = "size:List[int],*dtype:Optional[int],*layout:Optional[int],*device:Optional[Device],*pin_memory:Optional[bool]"
        _, results, _, numbers = self.client.run("aten::ones", kinds, [[2, 2]], keywords)
        self.assertEqual(results, [["n", [2, 2], [2, 1], F32]])
        self.assertEqual(self.client.floats(numbers[0], [2, 2]), [1] * 4)

    def test_an_argument_may_have_a_keywords_name(self):
        # `from` cannot stand in a call as it is.
        a = self.client.upload([0] * 64)
        arguments = [tensor(0, [64])], {"from": 5, "to": 6, "generator": Generator(0)}
        kept = self.client.define(
            "aten::random_.from",
            "self:Tensor,*from:int,*to:Optional[int],*generator:Optional[Generator]",
            *arguments,
            "T",
            "s",
            [["a", 0]],
        )
        self.client.call(kept, "T", [address(a)])
        self.client.call(kept, "T", [address(a)])
        self.assertEqual(self.client.floats(a, [64]), [5] * 64)

    def test_slots_are_numbers_of_their_kind(self):
        client = self.client
        a = client.upload([1, 2], code=F32)
        signature = client.define(
            "aten::add.Scalar",
            "self:Tensor,other:number,alpha:number",
            [tensor(0, [2]), ScalarSlot(1), ScalarSlot(2)],
            slots="Tib",
            results=[new([2])],
        )
        for value, factor in ((-(2**40), True), (2**62, False)):
            number = client.next_number()
            client.call(signature, "Tib", [address(a), value, factor], [number])
            with self.assertRaises(HostError) as caught:
                client.wait()
            # torch itself refuses a bool as alpha of a float tensor; what matters is that it arrived as one.
            self.assertIn("Boolean alpha only supported for Boolean results", str(caught.exception))

    def test_views_see_each_others_writes(self):
        client = self.client
        a = client.upload(range(6), [2, 3])
        column = tensor(0, [2], [3])
        signature = client.define(
            "aten::add_.Scalar", "self:Tensor,other:number", [column, 100], slots="T", results=[["a", 0]]
        )
        client.call(signature, "T", [address(a, 4)])
        client.call(signature, "T", [address(a, 8)])
        self.assertEqual(client.floats(a, [2, 3]), [0, 101, 102, 3, 104, 105])
        self.assertEqual(client.floats(a, [3, 2], [1, 3]), [0, 3, 101, 104, 102, 105])
        raw = client.download(descriptor(a, [2], [1], 0, 3))
        self.assertEqual(struct.unpack("<2i", raw), struct.unpack("<2i", struct.pack("<2f", 0, 101)))

    def test_a_result_that_is_an_argument_or_shares_its_memory(self):
        client = self.client
        a = client.upload([1, 2, 3, 4])
        # Without training dropout gives its argument back; _unsafe_view a view, which must become a tensor of its own.
        kinds = "input:Tensor,p:float,train:bool"
        _, results, _, _ = client.run(
            "aten::dropout", kinds, [tensor(0, [4]), 0.5, False], slots="T", values=[address(a)]
        )
        self.assertEqual(results, [["a", 0]])
        _, results, _, numbers = client.run(
            "aten::_unsafe_view",
            "self:Tensor,size:List[int]",
            [tensor(0, [4]), [2, 2]],
            slots="T",
            values=[address(a)],
            keep=(kept := client.next_signature()),
        )
        self.assertEqual(results, [["n", [2, 2], [2, 1], F32]])
        client.run(*ADD_, [tensor(0, [4]), tensor(1, [4])], slots="TT", values=[address(a)] * 2)
        self.assertEqual(client.floats(numbers[0], [2, 2]), [1, 2, 3, 4])
        number = client.next_number()
        client.call(kept, "T", [address(a)], [number])
        client.run(*ADD_, [tensor(0, [4]), tensor(1, [4])], slots="TT", values=[address(a)] * 2)
        self.assertEqual(client.floats(number, [2, 2]), [2, 4, 6, 8])

    def test_a_result_given_by_the_client_is_resized_and_told(self):
        client = self.client
        before = client.query(protocol.QUERY_MEMORY)["held_bytes"]
        a, out = client.upload([1, -2, 3]), client.alloc(0)
        _, results, resized, _ = client.run(
            "aten::abs.out",
            "self:Tensor,*out:Tensor",
            [tensor(0, [3])],
            {"out": tensor(1, [0], [1])},
            "TT",
            [address(a), address(out)],
        )
        self.assertEqual((results, resized), ([["a", 1]], [[1, [3], [1]]]))
        self.assertEqual(client.floats(out, [3]), [1, 2, 3])
        self.assertEqual(client.query(protocol.QUERY_MEMORY)["held_bytes"], before + 24)
        signature = client.define(
            "aten::abs.out",
            "self:Tensor,*out:Tensor",
            [tensor(0, [3])],
            {"out": tensor(1, [0], [1])},
            "TT",
            "s",
            [["a", 1]],
        )
        other = client.alloc(0)
        client.call(signature, "TT", [address(a), address(other)])
        with self.assertRaisesRegex(HostError, "was resized"):
            client.wait()

    def test_strides_are_as_predicted_and_shapes_and_types_must_be(self):
        client = self.client
        a = client.upload(range(6), [2, 3])
        relu = ("aten::relu", "self:Tensor", [tensor(0, [2, 3])])
        signature = client.define(*relu, slots="T", results=[new([2, 3], [1, 2])])
        for _ in range(3):
            number = client.next_number()
            client.call(signature, "T", [address(a)], [number])
            self.assertEqual(client.floats(number, [2, 3], [1, 2]), [0, 1, 2, 3, 4, 5])
            self.assertEqual(client.floats(number, [6], [1]), [0, 3, 1, 4, 2, 5])
        for wrong in (new([3, 2]), new([2, 3], code=I64), ["a", 0]):
            signature = client.define(*relu, slots="T", results=[wrong])
            client.call(signature, "T", [address(a)], [client.next_number()] if wrong[0] == "n" else [])
            with self.assertRaisesRegex(HostError, "not as predicted"):
                client.wait()

    def test_data_that_changes_a_results_size_is_an_error_not_wrong_data(self):
        client = self.client
        a = client.upload([1, 0, 3])
        _, results, _, _ = client.run(
            "aten::nonzero",
            "self:Tensor",
            [tensor(0, [3])],
            slots="T",
            values=[address(a)],
            keep=(kept := client.next_signature()),
        )
        self.assertEqual(results[0][1], [2, 1])
        b, number = client.upload([1, 1, 1]), client.next_number()
        client.call(kept, "T", [address(b)], [number])
        with self.assertRaisesRegex(HostError, "not as predicted"):
            client.wait()


class Errors(HostCase):
    def test_the_first_error_waits_and_its_results_are_poisoned(self):
        client = self.client
        a, b = client.upload([1, 2]), client.upload([1, 2, 3])
        bad = client.define(
            *ADD[:1], "self:Tensor,other:Tensor", [tensor(0, [2]), tensor(1, [3])], slots="TT", results=[new([2])]
        )
        good = client.define(*MUL, [tensor(0, [2]), tensor(1, [2])], slots="TT", results=[new([2])])
        wrong, later = client.next_number(), client.next_number()
        client.call(bad, "TT", [address(a), address(b)], [wrong])
        client.call(good, "TT", [address(wrong), address(a)], [later])
        with self.assertRaises(HostError) as caught:
            client.wait()
        body = caught.exception.body
        self.assertEqual((body["op"], body["kind"], body["signature"]), ("aten::add.Tensor", "RuntimeError", bad))
        self.assertIn("must match the size", body["message"])
        self.assertIsNone(client.wait())
        for use in (
            lambda: client.floats(later, [2]),
            lambda: client.ask(protocol.ITEM, body=encode(descriptor(wrong, [1]))),
        ):
            with self.assertRaises(HostError) as caught:
                use()
            self.assertEqual(caught.exception.body["signature"], bad)
        client.free(wrong, later)
        self.assertEqual(client.floats(a, [2]), [1, 2])

    def test_a_runs_error_is_its_reply_and_keeps_torchs_kind(self):
        client = self.client
        a = client.upload([1, 2])
        for operator, kinds, arguments, kind in (
            ("aten::select_copy.int", "self:Tensor,dim:int,index:int", [tensor(0, [2]), 0, 5], "IndexError"),
            ("aten::linalg_inv_ex", "A:Tensor", [tensor(0, [2])], "RuntimeError"),
            ("aten::add.Tensor", "self:Tensor,other:Tensor", [tensor(0, [2]), "text"], "RuntimeError"),
        ):
            with self.subTest(operator=operator), self.assertRaises(HostError) as caught:
                client.run(operator, kinds, arguments, slots="T", values=[address(a)])
            self.assertEqual(caught.exception.body["kind"], kind)
        self.assertEqual(client.floats(a, [2]), [1, 2])

    def test_refused_operators_are_named_and_only_they_fail(self):
        client = self.client
        a = client.upload([1, 2])
        for operator, words in (
            ("aten::no_such_thing", "has no operator aten::no_such_thing"),
            ("aten::add.NoSuch", "has no operator aten::add.NoSuch"),
            ("aten::__class__", "has no operator"),
            ("prims::add", "no name of an operator"),
            ("aten::add.Tensor.x", "no name of an operator"),
            ("aten::t", "makes views"),
            ("aten::t_", "changes how a tensor looks"),
            ("aten::from_file", "is not carried"),
            ("aten::set_.source_Tensor", "is not carried"),
            ("aten::resize_", "is not carried"),
            ("aten::record_stream", "is not carried"),
            ("aten::_pin_memory", "is not carried"),
            ("aten::to_sparse", "is not carried"),
            ("aten::quantize_per_tensor", "is not carried"),
        ):
            with self.subTest(operator=operator), self.assertRaises(HostError) as caught:
                client.run(operator, "self:Tensor", [tensor(0, [2])], slots="T", values=[address(a)])
            self.assertEqual(caught.exception.body["kind"], "NotImplementedError")
            self.assertIn(words, caught.exception.body["message"])

    def test_arguments_that_the_two_torches_do_not_share_are_named(self):
        client = self.client
        a = client.upload([1, 2])
        two = [tensor(0, [2]), tensor(1, [2])]
        for kinds, arguments, words in (
            ("self:Tensor,rest:Tensor", two, "knows no argument 'rest'"),
            ("self:Tensor,other:List[Tensor]", two, "argument other is List"),
            ("self:Tensor", two, "1 argument types, 2 arguments"),
            ("self:Tensor,self:Tensor", two, "not sent as its type says"),
            ("self:Tensor,*other:Tensor", two, "not sent as its type says"),
        ):
            with self.subTest(kinds=kinds), self.assertRaisesRegex(HostError, words.replace("[", r"\[")):
                client.run("aten::add.Tensor", kinds, arguments, slots="TT", values=[address(a)] * 2)
        with self.assertRaisesRegex(HostError, "needs argument other"):
            client.run("aten::add.Tensor", "self:Tensor", [tensor(0, [2])], slots="T", values=[address(a)])
        signature = client.define("aten::add.Tensor", "self:Tensor,rest:Tensor", two, slots="TT", results=[new([2])])
        client.call(signature, "TT", [address(a)] * 2, [client.next_number()])
        with self.assertRaisesRegex(HostError, "knows no argument"):
            client.wait()


class Memory(HostCase):
    limits = {"max_bytes": 1 << 20}

    def test_bytes_come_and_go(self):
        client = self.client
        before = client.query(protocol.QUERY_MEMORY)
        a = client.alloc(4096)
        b = client.alloc(1000, code=F32)
        held = before["held_bytes"] + 5096
        now = {"held_bytes": held, "driver_bytes": held, "storages": before["storages"] + 2}
        self.assertEqual(client.query(protocol.QUERY_MEMORY), now)
        one = client.define(*MUL, [tensor(0, [16])] * 2, slots="T", results=[new([16])])
        for _ in range(100):
            number = client.next_number()
            client.call(one, "T", [address(a)], [number])
            client.free(number)
        self.assertEqual(client.query(protocol.QUERY_MEMORY), now)
        client.free(a, b)
        self.assertEqual(client.query(protocol.QUERY_MEMORY), before)

    def test_more_than_allowed_is_out_of_memory_and_the_stream_goes_on(self):
        client = self.client
        before = client.query(protocol.QUERY_MEMORY)["held_bytes"]
        a = client.upload([1.0])
        wide = [1 << 19]
        expand = client.define(
            "aten::add.Scalar", "self:Tensor,other:number", [tensor(0, wide, [0]), 1], slots="T", results=[new(wide)]
        )
        for message in (
            lambda: client.alloc(2 << 20),
            lambda: client.alloc((1 << 63) + 5),
            lambda: client.call(expand, "T", [address(a)], [client.next_number()]),
        ):
            message()
            with self.assertRaises(HostError) as caught:
                client.wait()
            self.assertEqual(caught.exception.body["kind"], "OutOfMemoryError")
            self.assertRegex(caught.exception.body["message"], "MPS backend out of memory .*max allowed: 1.00 MiB")
        with self.assertRaisesRegex(HostError, "out of memory"):
            client.run(
                "aten::add.Scalar",
                "self:Tensor,other:number",
                [tensor(0, wide, [0]), 1],
                slots="T",
                values=[address(a)],
            )
        self.assertEqual(client.floats(a, [1]), [1])
        self.assertEqual(client.query(protocol.QUERY_MEMORY)["held_bytes"], before + 4)

    def test_an_operator_that_wants_more_than_the_machine_is_an_error(self):
        a = self.client.upload([1.0])
        wide = [1 << 40]
        with self.assertRaises(HostError) as caught:
            self.client.run("aten::relu", "self:Tensor", [tensor(0, wide, [0])], slots="T", values=[address(a)])
        self.assertEqual(caught.exception.body["kind"], "OutOfMemoryError")
        self.assertEqual(self.client.floats(a, [1]), [1])


class Bulk(HostCase):
    def test_uploads_and_downloads_by_stream_and_by_ring(self):
        client = self.client
        values = [float(value) for value in range(60_000)]
        data = struct.pack("<60000f", *values)
        a = client.upload(values)
        self.assertEqual(client.floats(a, [60_000]), values)
        b = client.alloc(len(data))
        client.ring[4096 : 4096 + len(data)] = data
        client.send(
            frames.message(protocol.UPLOAD_RING, 4096, len(data), body=encode(descriptor(b, [300, 200], [1, 300])))
        )
        client.ask(protocol.DOWNLOAD_RING, 524_288, body=encode(descriptor(b, [60_000])))
        got = struct.unpack("<60000f", client.ring[524_288 : 524_288 + len(data)])
        self.assertEqual(got[:3], (0, 200, 400))
        self.assertEqual(client.floats(b, [300, 200], [1, 300]), values)

    def test_strided_and_empty_uploads(self):
        client = self.client
        a = client.upload([0] * 6)
        client.send_upload(descriptor(a, [3], [2], 4), struct.pack("<3f", 1, 2, 3))
        client.send_upload(descriptor(a, [0]), b"")
        self.assertEqual(client.floats(a, [6]), [0, 1, 0, 2, 0, 3])
        self.assertEqual(client.floats(a, [0]), [])

    def test_item_of_each_kind(self):
        client = self.client
        a = client.upload([5, 1], code=I64, form="q")
        self.assertEqual(client.ask(protocol.ITEM, body=encode(descriptor(a, [], offset=0, code=I64))), 5)
        self.assertIs(client.ask(protocol.ITEM, body=encode(descriptor(a, [], offset=8, code=11))), True)
        with self.assertRaisesRegex(HostError, "cannot be converted to Scalar"):
            client.ask(protocol.ITEM, body=encode(descriptor(a, [2], code=I64)))

    def test_an_upload_into_poison_is_taken_and_the_stream_goes_on(self):
        client = self.client
        bad = client.alloc(1 << 50)
        client.send_upload(descriptor(bad, [1000]), bytes(4000))
        with self.assertRaisesRegex(HostError, "out of memory"):
            client.wait()
        a = client.upload([7])
        client.send_upload(descriptor(a, [3], [0]), bytes(12))
        with self.assertRaisesRegex(HostError, "upload of 12 bytes into a storage of 4"):
            client.wait()
        self.assertEqual(client.floats(a, [1]), [7])


class Things(HostCase):
    def random(self, generator):
        kinds = "size:List[int],*generator:Optional[Generator],*device:Optional[Device]"
        keywords = {"generator": Generator(generator), "device": Device(1)}
        _, _, _, numbers = self.client.run("aten::rand.generator", kinds, [[3]], keywords)
        return self.client.floats(numbers[0], [3])

    def test_generators_seed_save_and_restore(self):
        client = self.client
        seed = lambda number, what, value: client.send(
            frames.message(protocol.GENERATOR, number, what) + struct.pack("<Q", value)
        )  # noqa: E731
        seed(0, protocol.GENERATOR_SEED, 5)
        first = self.random(0)
        seed(9, protocol.GENERATOR_NEW, 5)
        self.assertEqual(self.random(9), first)
        state = client.ask(protocol.GENERATOR, 9, protocol.GENERATOR_GET_STATE, raw=True)
        second = self.random(9)
        client.send(
            frames.message(protocol.GENERATOR, 9, protocol.GENERATOR_SET_STATE) + struct.pack("<I", len(state)) + state
        )
        client.reply()
        self.assertEqual(self.random(9), second)
        self.assertNotEqual(first, second)
        self.assertEqual(client.ask(protocol.GENERATOR, 9, protocol.GENERATOR_INITIAL_SEED), 5)
        client.send(frames.message(protocol.GENERATOR, 9, protocol.GENERATOR_SET_STATE) + struct.pack("<I", 3) + b"abc")
        with self.assertRaises(HostError):
            client.reply()
        client.send(frames.message(protocol.GENERATOR, 9, protocol.GENERATOR_FREE))
        self.assertIsNone(client.wait())

    def test_two_clients_have_generators_of_their_own(self):
        with Client(self.host) as other:
            for client in (self.client, other):
                client.send(frames.message(protocol.GENERATOR, 0, protocol.GENERATOR_SEED) + struct.pack("<Q", 5))
            first = self.random(0)
            self.client = other
            self.addCleanup(delattr, self, "client")
            self.assertEqual(self.random(0), first)

    def test_events(self):
        client = self.client
        for number in (1, 2):
            client.send(frames.message(protocol.EVENT, number, protocol.EVENT_NEW))
            client.send(frames.message(protocol.EVENT, number, protocol.EVENT_RECORD))
        client.send(frames.message(protocol.EVENT, 1, protocol.EVENT_ELAPSED) + struct.pack("<I", 2))
        self.assertGreaterEqual(client.reply(), 0.0)
        self.assertIsNone(client.ask(protocol.EVENT, 1, protocol.EVENT_WAIT))
        self.assertIs(client.ask(protocol.EVENT, 1, protocol.EVENT_QUERY), True)
        client.send(frames.message(protocol.EVENT, 1, protocol.EVENT_FREE))
        self.assertIsNone(client.wait())

    def test_queries_and_the_services_report(self):
        client = Client(self.host)
        self.addCleanup(client.close)
        a = client.upload([1, 2])
        signature = client.define(*ADD_, [tensor(0, [2]), tensor(0, [2])], slots="T", results=[["a", 0]])
        for _ in range(3):
            client.call(signature, "T", [address(a)])
        self.assertIn("max_bytes", client.query(protocol.QUERY_DEVICE))
        self.assertGreater(client.query(protocol.QUERY_CPU_SECONDS), 0)
        self.assertIsNone(client.query(protocol.QUERY_EMPTY_CACHE))
        self.assertEqual(client.query(protocol.QUERY_COUNTERS)["storages"], 1)
        worker = self.host.worker(-1)
        client.wait()
        counters = worker.report(1)
        self.assertEqual((counters["calls"], counters["held_bytes"], counters["errors"]), (3, 8, 0))
        client.close()
        self.assertEqual(worker.wait_ended()["reason"], None)
        self.assertEqual(worker.process.wait(10), 0)


class Program(unittest.TestCase):
    def test_the_probe_says_what_this_python_has(self):
        with Host(spare=False) as host:
            paths = [part for path in host.torch_path for part in ("--path", path)]
            asked = [host.python, "-I", "-B", str(HOST_PROGRAM), "probe"]
            facts = json.loads(subprocess.run([*asked, *paths], capture_output=True, check=True, text=True).stdout)
            self.assertEqual(facts["devices"][-1]["name"], "cpu")
            self.assertTrue(facts["paths"] and facts["torch"])
            # Without the packages that the Python has of its own.
            asked.insert(1, "-S")
            facts = json.loads(subprocess.run(asked, capture_output=True, check=True, text=True).stdout)
            self.assertEqual(facts["missing"], "torch")
            self.assertIn("torch", facts["reason"])

    def test_a_worker_that_cannot_start_says_why(self):
        with Host(device="cuda:0", spare=False) as host, self.assertRaises(RuntimeError) as caught:
            worker = host.start_worker()
            self.addCleanup(worker.stop)
            worker.wait_ready()
        self.assertIn("failed", str(caught.exception))


if __name__ == "__main__":
    sys.exit(unittest.main())

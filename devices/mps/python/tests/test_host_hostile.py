# SPDX-License-Identifier: MIT OR Apache-2.0
"""Clients that break the rules: each gets a clear refusal and loses its own stream alone, and the worker never hangs.

Most cases end a worker, and a worker takes seconds to start; what only makes one operator fail shares a worker.
"""

import fcntl
import os
import random
import socket
import struct
import unittest

from harness import Host
from hostile_client import F32, I64, Client, HostError, descriptor, new, tensor
from lighter_mps_wire import frames, protocol
from lighter_mps_wire.protocol import address
from lighter_mps_wire.values import Dtype, Generator, ScalarSlot, TensorSlot, WireError, encode

MESSAGES = int(os.environ.get("LIGHTER_FUZZ_MESSAGES", "1000"))
SEED = int(os.environ.get("LIGHTER_FUZZ_SEED", "1"))
RELU = ("aten::relu", "self:Tensor")


def raw(kind, *fields, body=b""):
    return bytes((kind,)) + frames.HEADS[kind].pack(*fields) + body


def body_message(kind, value):
    return frames.message(kind, body=encode(value))


def relu(number=5, slots="T", arguments=None, name="aten::relu", kinds="self:Tensor", shape="s", results=None):
    arguments = [tensor(0, [2])] if arguments is None else arguments
    results = [new([2])] if results is None else results
    return body_message(protocol.DEFINE, [number, name, kinds, arguments, {}, slots, shape, results])


# What the bytes do, the bytes, and the words of the refusal.
BROKEN = {
    "unknown kind": (b"\x63" + bytes(8), "unknown message kind 99"),
    "signature never defined": (raw(protocol.CALL, 77) + bytes(16), "signature 77 is called but was never defined"),
    "free of 2^32 - 1 numbers": (raw(protocol.FREE, 2**32 - 1), "4294967295 storages are freed at once"),
    "number 0": (raw(protocol.ALLOC, 0, 4, F32), "storage number 0 is out of range"),
    "number over the cap": (raw(protocol.ALLOC, 1 << 23, 4, F32), "storage number 8388608 is out of range"),
    "number in use": (raw(protocol.ALLOC, 1, 4, F32), "storage number 1 is in use already"),
    "huge body": (raw(protocol.DEFINE, 1 << 31), "a body of 2147483648 bytes is over the limit"),
    "body that is no value": (frames.message(protocol.DEFINE, body=b"\xff\xff"), "unknown tag 255"),
    "nested body": (frames.message(protocol.DEFINE, body=b"\x08\x01\0\0\0" * 1000), "nested more than 8 deep"),
    "definition of the wrong form": (body_message(protocol.DEFINE, [1, 2]), "a DEFINE has the wrong form"),
    "fields of the wrong types": (body_message(protocol.DEFINE, [1, 2, 3, 4, 5, 6, 7, 8]), "the wrong form"),
    "signature 0": (relu(number=0), "signature 0 is defined, which no CALL can name"),
    "signature below 0": (relu(number=-1), "signature number -1 is out of range"),
    "unknown kind of slot": (relu(slots="X"), "of unknown kinds"),
    "slot of another kind": (relu(slots="f"), "slot 0 of a signature is missing or of another kind"),
    "slot that is missing": (relu(arguments=[TensorSlot(3, F32, (2,), (1,))]), "slot 3 of a signature is missing"),
    "slot that is never used": (relu(slots="TT"), "has 2 slots and uses 1 of them"),
    "number in a tensor's slot": (relu(arguments=[ScalarSlot(0)]), "of another kind"),
    "unknown generator": (relu(arguments=[tensor(0, [2]), Generator(5)], kinds="self:Tensor,x:int"), None),
    "result of no argument": (relu(results=[["a", 1]]), "a predicted result has the wrong form"),
    "result of negative size": (relu(results=[new([-2], [1])]), "sizes or strides that are no numbers"),
    "two results of one": (relu(results=[new([2]), new([2])]), "2 predicted results do not fit shape 's'"),
    "unknown shape": (relu(shape="z"), "predicted results have the wrong form"),
    "run of the wrong form": (body_message(protocol.RUN, [1]), "a RUN has the wrong form"),
    "too few slot values": (
        body_message(protocol.RUN, [0, *RELU, [tensor(0, [2])], {}, "T", []]),
        "0 values came for 1 slots",
    ),
    "float for an address": (
        body_message(protocol.RUN, [0, *RELU, [tensor(0, [2])], {}, "T", [1.5]]),
        "a slot of kind T got 1.5",
    ),
    "negative address": (body_message(protocol.RUN, [0, *RELU, [tensor(0, [2])], {}, "T", [-1]]), "kind T got -1"),
    "another client's storage": (
        body_message(protocol.RUN, [0, *RELU, [tensor(0, [2])], {}, "T", [address(4)]]),
        "storage 4 is used but does not exist",
    ),
    "bind of too many": (
        body_message(protocol.RUN, [0, *RELU, [tensor(0, [2])], {}, "T", [address(1)]])
        + frames.numbers(protocol.BIND, [8, 9]),
        "a BIND of 2 numbers follows a RUN that made 1 results",
    ),
    "bind of nothing": (frames.numbers(protocol.BIND, [3]), "a BIND of 1 numbers follows a RUN that made 0 results"),
    "upload of another size": (
        frames.message(protocol.UPLOAD, 3, body=encode(descriptor(1, [2])), data=b"abc"),
        "an upload of 3 bytes for a tensor of 8",
    ),
    "descriptor of the wrong form": (body_message(protocol.ITEM, ["x"]), "a tensor's descriptor has the wrong form"),
    "descriptor out of range": (body_message(protocol.ITEM, [-1, [], [], F32]), "numbers out of range"),
    "download of nothing": (
        body_message(protocol.DOWNLOAD, descriptor(99, [2])),
        "storage 99 is used but does not exist",
    ),
    "ring out of bounds": (
        frames.message(protocol.DOWNLOAD_RING, 1 << 63, body=encode(descriptor(1, [2]))),
        "8 bytes at 9223372036854775808 of a ring",
    ),
    "ring not aligned": (
        frames.message(protocol.UPLOAD_RING, 8, 8, body=encode(descriptor(1, [2]))),
        "not a multiple of 16",
    ),
    "generator of nothing": (
        raw(protocol.GENERATOR, 5, protocol.GENERATOR_GET_STATE),
        "generator 5 is used but does not exist",
    ),
    "default generator freed": (raw(protocol.GENERATOR, 0, protocol.GENERATOR_FREE), "generator 0 is freed"),
    "huge generator state": (
        raw(protocol.GENERATOR, 0, protocol.GENERATOR_SET_STATE, body=struct.pack("<I", 2**32 - 1)),
        "state of 4294967295 bytes",
    ),
    "unknown wish of a generator": (raw(protocol.GENERATOR, 0, 9), "unknown wish 9"),
    "event of nothing": (raw(protocol.EVENT, 5, protocol.EVENT_WAIT), "event 5 is used but does not exist"),
    "unknown wish of an event": (raw(protocol.EVENT, 5, 77), "unknown wish 77"),
    "unknown query": (raw(protocol.QUERY, 99), "unknown query 99"),
}


class Streams(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # A worker that never hears from its client is not harmed by what the others do.
        cls.host = Host(spare=True, limits={"max_signatures": 50, "max_storages": 1000}).__enter__()
        cls.addClassCleanup(cls.host.__exit__)
        cls.innocent = Client(cls.host)
        cls.kept = cls.innocent.upload([1, 2])

    def ended(self):
        return self.host.worker(-1).wait_ended()["reason"]

    def test_each_broken_message_ends_its_stream_with_words(self):
        names = sorted(BROKEN)
        if "LIGHTER_FUZZ_MESSAGES" not in os.environ:
            # Each takes a worker; a run of a few seconds each is for the long run, and a third of them for every run.
            names = names[SEED % 3 :: 3]
        for name in names:
            data, words = BROKEN[name]
            if words is None:
                continue
            with self.subTest(name), Client(self.host, ring_bytes=1 << 16) as client:
                client.upload([1, 2])
                client.wait()
                client.send(data)
                refusal = None
                try:
                    while True:
                        client.reply(raw=True)
                except HostError as error:
                    refusal = error.body
                except (EOFError, ConnectionResetError):
                    pass
                self.assertIn(words, self.ended())
                if refusal:
                    self.assertEqual(refusal["kind"], "ProtocolError")
                    self.assertIn(words, refusal["message"])
                self.assertEqual(self.host.worker(-1).process.wait(20), 0)
        self.assertEqual(self.innocent.floats(self.kept, [2]), [1, 2])

    def test_truncated_messages_end_the_stream(self):
        for data in (
            relu()[:-3],
            raw(protocol.CALL, 5)[:3],
            frames.message(protocol.UPLOAD, 8, body=encode(descriptor(1, [2])), data=b"abc"),
        ):
            with self.subTest(data=data[:6]), Client(self.host) as client:
                client.upload([1, 2])
                client.send(data)
                client.socket.shutdown(socket.SHUT_WR)
                self.assertIn("ended inside a message", self.ended())

    def test_floods_end_at_their_limits(self):
        def storages(client):
            for number in range(1, 40_000):
                client.send(raw(protocol.ALLOC, number, 0, F32))

        def signatures(client):
            for number in range(1, 60):
                client.send(relu(number=number))

        for flood, words in (
            (storages, "storages are over the limit of 1000"),
            (signatures, "more than 50 signatures"),
        ):
            with self.subTest(words), Client(self.host) as client:
                try:
                    flood(client)
                    client.socket.shutdown(socket.SHUT_WR)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                self.assertIn(words, self.ended())

    def test_hellos_that_are_refused(self):
        def ring(client, **settings):
            return lambda: client.hello(1 << 20, **settings)

        def stranger(client):
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            return client.take_hello()

        def other_version(client):
            client.send(frames.HELLO.pack(protocol.MAGIC, 9, 0, 5) + encode({}))
            return client.take_hello()

        def no_ring(client):
            client.send(frames.HELLO.pack(protocol.MAGIC, 1, protocol.FLAG_RING, 5) + encode({}))
            return client.take_hello()

        cases = (
            (lambda client: client.hello(1 << 20, seals=fcntl.F_SEAL_GROW), "not sealed against shrinking"),
            (lambda client: client.hello(1 << 20, real_bytes=1 << 16), "has 65536 bytes, 1048576 were announced"),
            (lambda client: client.hello(4096), "a ring of 4096 bytes"),
            (stranger, "no lighter mps"),
            (other_version, "speaks version 9"),
            (no_ring, "0 descriptors came"),
        )
        for hello, words in cases:
            with self.subTest(words), Client(self.host, hello=False) as client:
                with self.assertRaisesRegex(HostError, words):
                    hello(client)
                self.assertRegex(self.ended(), words)


class Survived(unittest.TestCase):
    """What fails alone: the same stream goes on."""

    @classmethod
    def setUpClass(cls):
        cls.host = Host(limits={"max_bytes": 64 << 20}).__enter__()
        cls.addClassCleanup(cls.host.__exit__)

    def test_absurd_numbers(self):
        client = Client(self.host)
        self.addCleanup(client.close)
        a = client.upload([1, 2])
        big = (1 << 63) - 1
        for look in (
            tensor(0, [big, big], [0, 0]),
            tensor(0, [2], [big]),
            tensor(0, [3]),
            tensor(0, [1] * 200, [1] * 200),
            tensor(0, [1 << 40], [1]),
            TensorSlot(0, 29, (2,), (1,)),
        ):
            with self.subTest(look=str(look)[:60]), self.assertRaises(HostError) as caught:
                client.run(*RELU, [look], slots="T", values=[address(a)])
            self.assertNotEqual(caught.exception.body["kind"], "ProtocolError")
        with self.assertRaises(HostError):
            client.run(*RELU, [tensor(0, [1])], slots="T", values=[address(a, 3)])
        kinds = "size:List[int],fill_value:number,*dtype:Optional[int]"
        for sizes in ([big], [big, big], [-1], [1 << 45]):
            with self.subTest(sizes=sizes), self.assertRaises(HostError):
                client.run("aten::full", kinds, [sizes, 1.0], {"dtype": Dtype(F32)})
        with self.assertRaises(HostError):
            client.run(
                "aten::add.Scalar", "self:Tensor,other:number", [tensor(0, [2]), "x"], slots="T", values=[address(a)]
            )
        nan = float("nan")
        signature = client.define(
            "aten::mul.Scalar",
            "self:Tensor,other:number",
            [tensor(0, [2]), ScalarSlot(1)],
            slots="Tf",
            results=[new([2])],
        )
        number = client.next_number()
        client.call(signature, "Tf", [address(a), nan], [number])
        self.assertTrue(all(value != value for value in client.floats(number, [2])))
        self.assertEqual(client.floats(a, [2]), [1, 2])

    def test_a_client_that_dies_leaves_nothing(self):
        client = Client(self.host)
        client.upload([1, 2])
        client.wait()
        worker = self.host.worker(-1)
        client.close()
        self.assertIsNone(worker.wait_ended()["reason"])
        self.assertEqual(worker.process.wait(20), 0)

    def test_an_end_of_the_control_socket_ends_the_worker_at_once(self):
        worker = self.host.start_worker()
        worker.wait_ready()
        worker.control.shutdown(socket.SHUT_RDWR)
        worker.control.close()
        self.assertEqual(worker.process.wait(20), 0)


class Fuzz(unittest.TestCase):
    """Messages that are nearly right, against real workers."""

    OPERATORS = (
        ("aten::relu", "self:Tensor"),
        ("aten::add.Tensor", "self:Tensor,other:Tensor"),
        ("aten::mul_.Tensor", "self:Tensor,other:Tensor"),
        ("aten::sum", "self:Tensor"),
        ("aten::cat", "tensors:List[Tensor],dim:int"),
        ("aten::mm", "self:Tensor,mat2:Tensor"),
        ("aten::sort", "self:Tensor,dim:int"),
        ("aten::full", "size:List[int],fill_value:number"),
        ("aten::gather", "self:Tensor,dim:int,index:Tensor"),
        ("aten::abs.out", "self:Tensor,*out:Tensor"),
        ("aten::_foreach_add_.Scalar", "self:List[Tensor],scalar:number"),
        ("aten::view", "self:Tensor"),
        ("aten::nonsense", ""),
    )

    def setUp(self):
        self.dice = random.Random(SEED)

    def look(self, slot):
        dice = self.dice
        sizes = [dice.choice([0, 1, 2, 2, 3]) for _ in range(dice.randrange(3))]
        strides = None if dice.random() < 0.7 else [dice.randrange(4) for _ in sizes]
        return tensor(slot, sizes, strides, dice.choice([F32, F32, F32, I64, 11, 5]))

    def signature(self):
        """Operator, kinds, arguments, keywords and slots that mostly fit."""
        dice = self.dice
        name, kinds = dice.choice(self.OPERATORS)
        slots, arguments, keywords = "", [], {}

        def place(value, kind):
            nonlocal slots
            slots += kind
            return value

        for entry in kinds.split(",") if kinds else []:
            argument, _, kind = entry.partition(":")
            if kind == "Tensor":
                value = place(self.look(len(slots)), "T")
            elif kind == "List[Tensor]":
                value = [place(self.look(len(slots)), "T") for _ in range(dice.randrange(1, 4))]
            elif kind == "number":
                value = place(ScalarSlot(len(slots)), dice.choice("ifb")) if dice.random() < 0.5 else 2.5
            elif kind == "List[int]":
                value = [dice.randrange(4) for _ in range(dice.randrange(3))]
            else:
                value = dice.randrange(-1, 2)
            if dice.random() < 0.02:
                value = dice.choice([None, "text", [], 2**62, Dtype(F32)])
            if argument.startswith("*"):
                keywords[argument[1:]] = value
            else:
                arguments.append(value)
        return name, kinds, arguments, keywords, slots

    def values(self, slots, numbers):
        dice = self.dice
        out = []
        for kind in slots:
            if kind == "T":
                out.append(address(dice.choice(numbers), dice.choice([0, 0, 0, 4, 8, 3])) if numbers else 0)
            elif kind == "f":
                out.append(dice.choice([0.5, float("nan"), 1e300]))
            else:
                out.append(dice.choice([0, 1, 1 if kind == "b" else -5]))
        return out

    def step(self, client, live, defined):
        """One message, mostly right; gives it to a client whose storages are `live`."""
        dice = self.dice
        match dice.randrange(8):
            case 0:
                client.number += 1
                client.send(raw(protocol.ALLOC, client.number, dice.choice([0, 4, 64, 64, 1 << 62]), F32))
                live.append(client.number)
            case 1 if len(live) > 4:
                number = live.pop(dice.randrange(len(live)))
                client.free(number)
            case 2 | 3:
                name, kinds, arguments, keywords, slots = self.signature()
                keep = client.next_signature() if dice.random() < 0.6 else 0
                before = client.number
                shape, results, resized, _ = client.run(
                    name, kinds, arguments, keywords, slots, self.values(slots, live), keep
                )
                live.extend(range(before + 1, client.number + 1))
                if keep and not resized and all(result is None or result[0] in "an" for result in results):
                    defined.append((keep, slots, sum(result is not None and result[0] == "n" for result in results)))
            case 4:
                name, kinds, arguments, keywords, slots = self.signature()
                number = client.define(name, kinds, arguments, keywords, slots, results=[new([dice.randrange(3)])])
                defined.append((number, slots, 1))
            case 5 | 6 if defined:
                number, slots, outputs = dice.choice(defined)
                made = [client.next_number() for _ in range(outputs)]
                client.call(number, slots, self.values(slots, live), made)
                live.extend(made)
            case 7:
                client.wait()

    def test_random_messages_harm_only_their_own_stream(self):
        with Host(spare=True) as host:
            innocent = Client(host)
            kept = innocent.upload([1, 2])
            sent = ended = refused = done = 0
            while sent < MESSAGES:
                client, live, defined = Client(host), [], []
                # Without storages nearly every message would end its stream, and a worker takes seconds to start.
                live += [client.upload([1, 2, 3, 4]) for _ in range(4)]
                reason = None
                while sent < MESSAGES and reason is None:
                    sent += 1
                    try:
                        if self.dice.random() < 0.0005:
                            client.send(self.dice.randbytes(40))
                        self.step(client, live, defined)
                        done += 1
                    except HostError as error:
                        refused += 1
                        if error.body["kind"] == "ProtocolError":
                            reason = error.body["message"]
                    except (EOFError, ConnectionError, WireError):
                        reason = "closed"
                client.close()
                worker = host.worker(-1)
                told = worker.wait_ended()["reason"]
                self.assertEqual(worker.process.wait(20), 0, told)
                self.assertNotIn("worker failed", told or "")
                ended += reason is not None
            self.assertEqual(innocent.floats(kept, [2]), [1, 2])
            innocent.close()
            self.assertGreater(done, refused)


if __name__ == "__main__":
    unittest.main()

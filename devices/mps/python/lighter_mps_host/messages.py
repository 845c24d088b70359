# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the messages other than CALL and FREE do. Mixed into `Session`, which has the state that they work on.

Each method is called with the reader standing behind the message's kind, takes the whole message, and only then acts,
so that an operator's error never loses the place in the stream.
"""

import time

from lighter_mps_wire import frames, protocol
from lighter_mps_wire.values import decode

from .bulk import Descriptor, download, download_to_ring, upload, upload_from_ring
from .errors import Refusal, Violation, failure_of
from .reader import tensor_bytes
from .results import slot_values
from .signatures import New, parse, parse_results


class Messages:
    """The rare messages."""

    def message(self, kind: int) -> None:
        """Does one message."""
        does = HANDLERS.get(kind)
        if does is None:
            raise Violation(f"unknown message kind {kind}")
        self.reader.at += 1
        does(self, *self.head(kind))

    def head(self, kind: int) -> tuple:
        """The fixed fields of a message."""
        head = frames.HEADS[kind]
        self.reader.fill(head.size)
        fields = head.unpack_from(self.reader.buffer, self.reader.at)
        self.reader.at += head.size
        return fields

    def body(self, size: int):
        """A message's value."""
        if size > protocol.MAX_BODY_BYTES:
            raise Violation(f"a body of {size} bytes is over the limit of {protocol.MAX_BODY_BYTES}")
        return decode(self.reader.take(size))

    def answer(self, operator: str, produce, send=None) -> None:
        """Replies with what `produce` gives, or with the error that waited, or with the one that it raises."""
        failure, self.sticky = self.sticky, None
        if failure is None:
            try:
                value = produce()
            except Violation:
                raise
            except Exception as error:
                failure = failure_of(error, operator)
                self.note(failure)
        if failure is not None:
            self.reply_failure(failure)
        else:
            (send or self.reply)(value)

    def attempt(self, operator: str, act) -> None:
        """Does what has no reply; its error waits for a message that has one."""
        try:
            act()
        except Violation:
            raise
        except Exception as error:
            self.keep_failure(failure_of(error, operator))

    def wait(self) -> None:
        """WAIT."""
        self.answer("synchronize", self.engine.synchronize)

    def define(self, size: int) -> None:
        """DEFINE."""
        fields = self.body(size)
        if type(fields) is not list or len(fields) != 8:
            raise Violation("a DEFINE has the wrong form")
        signature = parse(fields, self.generators)
        parse_results(signature, *fields[6:], self.storages)
        self.keep(signature, size, self.define_and_call)

    def run(self, size: int) -> None:
        """RUN; its new results wait for a BIND, or go with the next RUN: the client was interrupted between the two."""
        self.unbound = []
        fields = self.body(size)
        if type(fields) is not list or len(fields) != 7 or type(fields[6]) is not list:
            raise Violation("a RUN has the wrong form")
        signature = parse(fields, self.generators)
        values = slot_values(signature.slots, fields[6])
        made = []

        def produce():
            if signature.failure is not None:
                raise Refusal(signature.failure.message)
            outcome = self.execute(signature, values)
            sizes = [tensor.untyped_storage().nbytes() for tensor in outcome.new]
            self.storages.check_room(sum(sizes))
            if signature.number and outcome.predictable():
                self.learn(signature, outcome, size)
            made.extend(zip(outcome.new, sizes, strict=True))
            return [outcome.shape, outcome.results, outcome.resized]

        self.answer(signature.name, produce)
        self.unbound = made

    def learn(self, signature, outcome, size: int) -> None:
        """Keeps what a RUN gave as the prediction for CALLs."""
        predicted = []
        for result in outcome.results:
            if result is None or result[0] == "a":
                predicted.append(None if result is None else result[1])
            else:
                _, sizes, strides, code = result
                predicted.append(New(self.storages.layout(tuple(sizes), tuple(strides), code)))
        signature.predict(outcome.shape, predicted)
        self.keep(signature, size, self.compile_and_call)

    def bind(self, count: int) -> None:
        """BIND: the numbers of a RUN's new results. Other threads' messages may come between the two."""
        made, self.unbound = self.unbound, []
        if count != len(made):
            raise Violation(f"a BIND of {count} numbers follows a RUN that made {len(made)} results")
        for (tensor, size), number in zip(made, self.numbers(count), strict=True):
            self.storages.put(number, tensor, size)

    def numbers(self, count: int) -> list:
        """So many numbers."""
        data = self.reader.take(8 * count)
        return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]

    def allocate(self, number: int, size: int, code: int) -> None:
        """ALLOC."""
        try:
            self.storages.allocate(number, size, code)
        except Violation:
            raise
        except Exception as error:
            failure = failure_of(error, "aten::empty.memory_format")
            self.keep_failure(failure)
            self.storages.poison(number, failure)

    def upload(self, body_bytes: int, size: int) -> None:
        """UPLOAD."""
        body = self.body(body_bytes)
        self.attempt("aten::copy_", lambda: upload(self.reader, Descriptor(body, self.storages), size))

    def upload_from_ring(self, body_bytes: int, offset: int, size: int) -> None:
        """UPLOAD_RING."""
        body = self.body(body_bytes)
        ring = self.need_ring()
        self.attempt("aten::copy_", lambda: upload_from_ring(ring, Descriptor(body, self.storages), offset, size))

    def need_ring(self):
        """The ring; a client that has none must not speak of it."""
        if self.ring is None:
            raise Violation("a message uses the ring, but no ring came with the hello")
        return self.ring

    def download(self, body_bytes: int) -> None:
        """DOWNLOAD."""
        body = self.body(body_bytes)

        def produce():
            descriptor = Descriptor(body, self.storages)
            return download(descriptor), descriptor.bytes

        def send(value):
            tensor, size = value
            self.reply_raw(tensor_bytes(tensor, size) if size else b"")

        self.answer("aten::_to_copy", produce, send)

    def download_to_ring(self, body_bytes: int, offset: int) -> None:
        """DOWNLOAD_RING."""
        body = self.body(body_bytes)
        ring = self.need_ring()
        self.answer("aten::_to_copy", lambda: download_to_ring(ring, Descriptor(body, self.storages), offset))

    def item(self, body_bytes: int) -> None:
        """ITEM."""
        body = self.body(body_bytes)
        self.answer("aten::item", lambda: Descriptor(body, self.storages).tensor().item())

    def generator(self, number: int, what: int) -> None:
        """GENERATOR."""
        known = self.generators
        if what in (protocol.GENERATOR_NEW, protocol.GENERATOR_SEED):
            seed = int.from_bytes(self.reader.take(8), "little")
            if what == protocol.GENERATOR_NEW:
                known.new(number, seed)
            else:
                known.get(number).manual_seed(seed)
        elif what == protocol.GENERATOR_GET_STATE:
            self.answer("Generator.get_state", lambda: known.state(number), self.reply_raw)
        elif what == protocol.GENERATOR_SET_STATE:
            size = int.from_bytes(self.reader.take(4), "little")
            if size > protocol.MAX_GENERATOR_STATE_BYTES:
                raise Violation(f"a generator's state of {size} bytes")
            state = self.reader.take(size)
            self.answer("Generator.set_state", lambda: known.set_state(number, state))
        elif what == protocol.GENERATOR_FREE:
            known.free(number)
        elif what == protocol.GENERATOR_INITIAL_SEED:
            self.answer("Generator.initial_seed", lambda: signed(known.get(number).initial_seed()))
        else:
            raise Violation(f"unknown wish {what} of a generator")

    def query(self, what: int) -> None:
        """QUERY."""
        produce = QUERIES.get(what)
        if produce is None:
            raise Violation(f"unknown query {what}")
        self.answer("query", lambda: produce(self))

    def memory(self) -> dict:
        driver = self.engine.driver_bytes()
        held = self.storages.held[0]
        return {
            "held_bytes": held,
            "driver_bytes": held if driver is None else driver,
            "storages": len(self.storages.heap),
        }

    def event(self, number: int, what: int) -> None:
        """EVENT."""
        events = self.events
        if what == protocol.EVENT_NEW:
            events.new(number)
        elif what == protocol.EVENT_RECORD:
            event = events.get(number)
            self.attempt("Event.record", event.record)
        elif what == protocol.EVENT_ELAPSED:
            other = events.get(int.from_bytes(self.reader.take(4), "little"))
            event = events.get(number)
            self.answer("Event.elapsed_time", lambda: float(event.elapsed_time(other)))
        elif what == protocol.EVENT_WAIT:
            self.answer("Event.synchronize", events.get(number).synchronize)
        elif what == protocol.EVENT_QUERY:
            event = events.get(number)
            self.answer("Event.query", lambda: bool(event.query()))
        elif what == protocol.EVENT_FREE:
            events.free(number)
        else:
            raise Violation(f"unknown wish {what} of an event")


def signed(number: int) -> int:
    """A seed of 64 bits as the signed number that values carry."""
    return number - (1 << 64) if number >> 63 else number


def counters(session: Messages) -> dict:
    """What the service would be told."""
    session.count(0)
    return dict(vars(session.counters))


def empty_cache(session: Messages) -> None:
    """Gives unused memory back."""
    session.engine.empty_cache()


QUERIES = {
    protocol.QUERY_MEMORY: Messages.memory,
    protocol.QUERY_COUNTERS: counters,
    protocol.QUERY_EMPTY_CACHE: empty_cache,
    protocol.QUERY_DEVICE: lambda session: {
        "name": session.engine.description(),
        "max_bytes": session.limits.max_bytes,
    },
    protocol.QUERY_CPU_SECONDS: lambda session: time.process_time(),
}
HANDLERS = {
    protocol.WAIT: Messages.wait,
    protocol.DEFINE: Messages.define,
    protocol.RUN: Messages.run,
    protocol.BIND: Messages.bind,
    protocol.ALLOC: Messages.allocate,
    protocol.UPLOAD: Messages.upload,
    protocol.UPLOAD_RING: Messages.upload_from_ring,
    protocol.DOWNLOAD: Messages.download,
    protocol.DOWNLOAD_RING: Messages.download_to_ring,
    protocol.ITEM: Messages.item,
    protocol.GENERATOR: Messages.generator,
    protocol.QUERY: Messages.query,
    protocol.EVENT: Messages.event,
}

# SPDX-License-Identifier: MIT OR Apache-2.0
"""One client's stream, from its hello to its end: reads messages in order and does what they say.

CALL and FREE are nearly all of the traffic and are handled in `loop`; `messages` has the rest. An operator's error in
a message without a reply is kept, the first wins, and is the answer of the next message that has one. A Violation ends
the stream after a last reply that says why.
"""

import contextlib
import socket
from struct import Struct
from typing import NamedTuple

import torch

from lighter_mps_wire import frames, protocol
from lighter_mps_wire.values import WireError, decode, encode

from .bindings import quick
from .bulk import Ring
from .callers import caller
from .errors import Failed, Failure, Violation, failure_of
from .messages import Messages
from .quirks import on_processor, wrapped
from .reader import Reader
from .results import Run, compare, laid_out
from .signatures import New, Signature, mismatch
from .storages import Storages
from .things import Events, Generators

# All bodies of one client's signatures together.
MAX_SIGNATURE_BYTES = 64 << 20
# A client that does not read the last reply is not waited for.
LAST_REPLY_SECONDS = 1.0
# Most signatures are called a few times, or very often.
CALLS_BEFORE_QUICK = 8
HEAD = Struct("<BI")
U64S = {}


class Limits(NamedTuple):
    """What one client may hold."""

    max_bytes: int
    max_storages: int
    max_signatures: int


class Session(Messages):
    """One client."""

    def __init__(self, connection: socket.socket, engine, limits: Limits, counters):
        self.reader = Reader(connection)
        self.engine, self.limits, self.counters = engine, limits, counters
        self.storages = Storages(engine.device, limits.max_bytes, limits.max_storages)
        self.generators, self.events = Generators(engine), Events(engine)
        self.callers, self.signatures = {}, {}
        # Results of the last RUN that wait for their BIND.
        self.unbound = []
        self.signature_bytes = 0
        self.sticky = None
        self.ring = None
        self.fallback = False

    def serve(self) -> None:
        """Runs to the end of the stream; raises the Violation that ended it."""
        try:
            self.hello()
            with torch.inference_mode():
                self.loop()
        except (Violation, WireError) as error:
            self.say_last(Failure("", "ProtocolError", str(error)))
            raise Violation(str(error)) from error
        finally:
            self.count(0)
            self.reader.connection.close()

    def say_last(self, failure: Failure) -> None:
        """Tells a client that may be waiting why its stream ends."""
        with contextlib.suppress(OSError):
            self.reader.connection.settimeout(LAST_REPLY_SECONDS)
            self.reply_failure(failure)
            self.reader.connection.shutdown(socket.SHUT_WR)

    def hello(self) -> None:
        """Takes the client's hello, with the ring where it has one, and answers it."""
        reader = self.reader
        first, descriptors, flags, _ = socket.recv_fds(reader.connection, len(reader.buffer) // 2, 4)
        try:
            reader.buffer[: len(first)] = first
            reader.end = reader.received = len(first)
            if not first and not descriptors:
                raise Violation("the client left without a word")
            version, wants, size = frames.parse_hello(reader.take(frames.HELLO.size))
            body = decode(reader.take(size), protocol.MAX_HELLO_BYTES)
            if type(body) is not dict or type(body.get("env", {})) is not dict:
                raise Violation("the client's hello has the wrong form")
            if flags & socket.MSG_CTRUNC or len(descriptors) != wants & protocol.FLAG_RING:
                raise Violation(f"{len(descriptors)} descriptors came with the hello, which announced {wants & 1}")
            if version != protocol.VERSION:
                raise Violation(
                    f"the client speaks version {version} of the mps protocol, this host {protocol.VERSION}: "
                    "install the lighter-mps that this host's lighter carries"
                )
            if descriptors:
                self.ring = Ring(descriptors[0], body.get("ring_bytes"))
        except (Violation, WireError) as error:
            with contextlib.suppress(OSError):
                reader.send(frames.hello(protocol.REFUSED, {"reason": str(error)[:4096]}))
            raise
        finally:
            for descriptor in descriptors:
                socket.close(descriptor)
        self.fallback = body.get("env", {}).get("PYTORCH_ENABLE_MPS_FALLBACK") == "1"
        reader.send(frames.hello(protocol.OK, {**self.engine.facts(), **self.limits._asdict()}))

    def loop(self) -> None:
        """Reads and does messages until the stream ends."""
        reader, callers, storages = self.reader, self.callers, self.storages
        head, call_kind, free_kind = HEAD.unpack_from, protocol.CALL, protocol.FREE
        calls = 0
        while True:
            self.count(calls)
            storages.check_count()
            if not reader.fill(1, inside=False):
                return
            buffer, at, end = reader.buffer, reader.at, reader.end
            while at < end:
                # What lies behind the end is old; it is looked at, never used.
                kind, number = head(buffer, at)
                if kind == call_kind:
                    after = at + 5
                    if after <= end:
                        entry = callers.get(number)
                        if entry is None:
                            raise Violation(f"signature {number} is called but was never defined")
                        after = at + entry[0]
                    if after > end:
                        reader.at = at
                        reader.fill(after - at)
                        buffer, at, end = reader.buffer, reader.at, reader.end
                        continue
                    try:
                        entry[1](buffer, at)
                    except Violation:
                        raise
                    except Exception as error:
                        self.failed(number, buffer, at, error)
                    at = after
                    calls += 1
                elif kind == free_kind:
                    after = at + 5 + 8 * number
                    if after > end:
                        reader.at = at
                        self.count(calls)
                        if at + 5 > end:
                            reader.fill(5)
                        elif number > protocol.MAX_STORAGE_NUMBER:
                            raise Violation(f"{number} storages are freed at once")
                        else:
                            reader.fill(5 + 8 * number)
                        buffer, at, end = reader.buffer, reader.at, reader.end
                        continue
                    storages.free(u64s(number).unpack_from(buffer, at + 5))
                    at = after
                else:
                    reader.at = at
                    self.message(kind)
                    buffer, at, end = reader.buffer, reader.at, reader.end
            reader.at = at

    def count(self, calls: int) -> None:
        """Passes on what the other thread may be asked for."""
        counters = self.counters
        counters.calls = calls or counters.calls
        counters.bytes_in, counters.bytes_out = self.reader.received, self.reader.sent
        counters.held_bytes, counters.storages = self.storages.held[0], len(self.storages.heap)

    def failed(self, number: int, buffer, at: int, error: Exception) -> None:
        """Keeps the error of a CALL, and its results as poisoned."""
        signature = self.signatures[number]
        failure = failure_of(error, signature.name, number)
        self.keep_failure(failure)
        fields = signature.struct.unpack_from(buffer, at)
        for output in fields[2 + len(signature.slots) :]:
            self.storages.poison(output, failure)

    def keep_failure(self, failure: Failure) -> None:
        """The first error of messages without a reply waits for a message that has one."""
        self.note(failure)
        if self.sticky is None:
            self.sticky = failure

    def note(self, failure: Failure) -> None:
        """For the service's counters."""
        self.counters.errors += 1
        self.counters.last_error = f"{failure.operator}: {failure.message}"[:500]

    def keep(self, signature: Signature, body_bytes: int, first) -> None:
        """Lets a signature be called, in the place of an older one with its number, if any.

        `first` runs its first CALL and puts the compiled caller in its place.
        """
        number = signature.number
        if number == 0:
            raise Violation("signature 0 is defined, which no CALL can name")
        older = self.signatures.pop(number, None)
        if len(self.signatures) >= self.limits.max_signatures:
            raise Violation(f"more than {self.limits.max_signatures} signatures")
        signature.body_bytes = body_bytes
        self.signature_bytes += body_bytes - (older.body_bytes if older else 0)
        if self.signature_bytes > MAX_SIGNATURE_BYTES:
            raise Violation(f"signatures of more than {MAX_SIGNATURE_BYTES} bytes together")
        self.signatures[number] = signature
        self.callers[number] = (signature.struct.size, lambda buffer, at: first(signature, buffer, at))

    def compile_and_call(self, signature: Signature, buffer, at: int) -> None:
        """The first CALL of a signature that ran before; after some more a quicker way to call it is looked for."""
        call = caller(signature, self.storages, signature.call)
        left = CALLS_BEFORE_QUICK

        def counted(buffer, at):
            nonlocal left
            left -= 1
            if left:
                call(buffer, at)
            else:
                self.quicken(signature, call, buffer, at)

        self.callers[signature.number] = (signature.struct.size, counted)
        call(buffer, at)

    def quicken(self, signature: Signature, call, buffer, at: int) -> None:
        """Replaces a caller by one with torch's quick function for the operator, where there is one."""
        if signature.call is signature.operator.call:
            fields = signature.struct.unpack_from(buffer, at)
            run = Run(signature, fields[2 : 2 + len(signature.slots)], self.storages)
            function = quick(signature.operator, *run.fill_all())
            if function is not None:
                call = caller(signature, self.storages, function)
        self.callers[signature.number] = (signature.struct.size, call)
        call(buffer, at)

    def define_and_call(self, signature: Signature, buffer, at: int) -> None:
        """The first CALL of a signature that never ran: nothing of its prediction is taken for granted."""
        if signature.failure is not None:
            raise Failed(signature.failure)
        fields = signature.struct.unpack_from(buffer, at)
        slots = len(signature.slots)
        self.storages.check_room(sum(result.bytes for result in signature.results if type(result) is New))
        outcome = self.execute(signature, fields[2 : 2 + slots])
        wrong = compare(signature, outcome)
        if wrong:
            raise Failed(mismatch(signature, wrong))
        new = [result for result in signature.results if type(result) is New]
        for tensor, result, number in zip(outcome.new, new, fields[2 + slots :], strict=True):
            self.storages.put(number, laid_out(tensor, result.layout), result.bytes)
        size = signature.struct.size
        self.callers[signature.number] = (size, lambda buffer, at: self.compile_and_call(signature, buffer, at))

    def execute(self, signature: Signature, values):
        """Runs a signature the careful way, on the processor where this device cannot and the client allows it."""
        signature.call = wrapped(signature.operator, self.engine.device)
        try:
            outcome = Run(signature, values, self.storages).execute(signature.call)
        except NotImplementedError:
            if not self.fallback or self.engine.device.type == "cpu":
                raise
            signature.call = on_processor(signature.operator, self.engine.device)
            outcome = Run(signature, values, self.storages).execute(signature.call)
        signature.copied = outcome.copied
        return outcome

    def reply(self, value) -> None:
        """A reply whose body is a value."""
        self.reply_raw(encode(value))

    def reply_raw(self, body) -> None:
        """A reply whose body is bytes."""
        head = frames.REPLY.pack(protocol.OK, len(body))
        if len(body) <= 1 << 16:
            self.reader.send(head + body)
        else:
            self.reader.send(head, body)

    def reply_failure(self, failure: Failure) -> None:
        """A reply that is an error."""
        body = encode(failure.body())
        self.reader.send(frames.REPLY.pack(protocol.ERROR, len(body)) + body)


def u64s(count: int) -> Struct:
    """The struct of so many numbers; small ones are kept."""
    made = U64S.get(count)
    if made is None:
        made = Struct(f"<{count}Q")
        if count <= 1024:
            U64S[count] = made
    return made

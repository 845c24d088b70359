# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plays the host's ane service for one test: an independent reading of the frames, with any ONNX Runtime behind it.

usage: host.py SOCKET LOG [MISCHIEF]

Writes a line of JSON into LOG for every model and every run, so that a test can count what ran here. MISCHIEF is one of
  die-in-run      ends itself in the middle of the first run
  wrong-type      answers with another element type than the model's
  beyond          answers with outputs beyond the shared memory
  again           says "again" to every other run
  not-these       says that it cannot run with these inputs
  refuse          refuses every model
  other-version   speaks another version of the frames
  bind            no mischief: makes a session for each shape; its optimiser may then choose other kernels
  other-ort       says that its ONNX Runtime is another one
"""

import array
import ctypes
import json
import mmap
import os
import select
import socket
import struct
import sys
import threading

import ml_dtypes
import numpy
import onnx
import onnxruntime

HELLO, HELLO_OK, MODEL, HAVE, WANT, SENDING, LOADED, REFUSED, RING, RUN, ANSWER, FAILED, GROW, BELL = range(1, 15)
SHARED, STREAM = 1, 2
HEAD, DATA = 4096, 4096 + (256 << 10)
REQUEST_AT, ANSWER_AT, HOST_AT, CONTAINER_AT = 0, 64, 128, 192
AWAKE, WAITING, ASLEEP = 0, 1, 2
ELEMENTS = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 16: ml_dtypes.bfloat16,
}
NUMBERS = {numpy.dtype(name): number for number, name in ELEMENTS.items()}
FREE = 2**64 - 1
F_GET_SEALS, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE = 1034, 2, 4, 8
FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)


def futex_wake(memory, offset):
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
    libc.syscall(FUTEX, ctypes.c_void_p(address), 1, 1, None, None, 0)


class Reader:
    def __init__(self, body):
        self.body, self.at = body, 0

    def take(self, form):
        values = struct.unpack_from("<" + form, self.body, self.at)
        self.at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def bytes(self, count):
        self.at += count
        return self.body[self.at - count : self.at]

    def text(self):
        return self.bytes(self.take("H")).decode()

    def tensors(self):
        def one():
            element, rank = self.take("BB")
            return element, [self.take("Q") for _ in range(rank)]

        return [one() for _ in range(self.take("H"))]

    def ports(self):
        def one():
            name, (element, rank) = self.text(), self.take("BB")
            dims = None if rank == 255 else [self.take("Q") for _ in range(rank)]
            return name, element, dims

        return [one() for _ in range(self.take("H"))]


def frame(kind, body=b"", version=1):
    return b"LtAn" + struct.pack("<HHII", version, kind, len(body), 0) + body


def tensors(arrays):
    body = struct.pack("<H", len(arrays))
    for value in arrays:
        body += struct.pack("<BB", NUMBERS[value.dtype], value.ndim) + struct.pack(f"<{value.ndim}Q", *value.shape)
    return body


def text(value):
    return struct.pack("<H", len(value.encode())) + value.encode()


def align(offset):
    return offset + 63 & ~63


class Models:
    """What all connections share: the models' bytes, and their sessions, of free shapes unless told to bind them."""

    def __init__(self, log, is_binding):
        self.is_binding = is_binding
        self.lock, self.files, self.sessions, self.log = threading.Lock(), {}, {}, open(log, "a", buffering=1)

    def say(self, **what):
        with self.lock:
            self.log.write(json.dumps(what) + "\n")

    def session(self, model, inputs):
        shapes = tuple(tuple(dims) for _, dims in inputs) if self.is_binding else ()
        # Models of equal bytes may differ in what goes in.
        key = (model["hash"], str(model["inputs"]), shapes)
        with self.lock:
            if key not in self.sessions:
                self.sessions[key] = self.make(model, shapes)
            return self.sessions[key]

    def make(self, model, shapes):
        data = self.files[model["hash"]]
        proto, weights = data[: model["proto"]], data[-(-model["proto"] // 4096) * 4096 :]
        tail = onnx.ModelProto()
        for place, (name, element, dims) in enumerate(model["inputs"]):
            if self.is_binding:
                dims = shapes[place]
            elif dims is not None:
                dims = [None if dim == FREE else dim for dim in dims]
            tail.graph.input.append(onnx.helper.make_tensor_value_info(name, element, dims))
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        if weights:
            options.add_external_initializers_from_files_in_memory(["w"], [weights], [len(weights)])
        whole = proto + tail.SerializeToString()
        return onnxruntime.InferenceSession(whole, options, providers=["CPUExecutionProvider"])


class Connection:
    # Over all connections, for mischief that comes in turns.
    runs = 0

    def __init__(self, models, peer, mischief):
        self.models, self.peer, self.mischief = models, peer, mischief
        self.descriptors, self.ring, self.model = [], None, None

    def receive(self, count):
        data = b""
        while len(data) < count:
            room = socket.CMSG_SPACE(4)
            got, ancillary, _, _ = self.peer.recvmsg(min(count - len(data), 1 << 20), room)
            if not got:
                raise EOFError
            for _, _, rights in ancillary:
                self.descriptors += array.array("i", rights[: len(rights) // 4 * 4])
            data += got
        return data

    def message(self):
        magic, version, kind, length, reserved = struct.unpack("<4sHHII", self.receive(16))
        assert (magic, version, reserved) == (b"LtAn", 1, 0), (magic, version, reserved)
        return kind, Reader(self.receive(length))

    def descriptor(self, seals):
        (number,), self.descriptors = self.descriptors, []
        have = libc.fcntl(number, F_GET_SEALS)
        assert have & seals == seals, f"seals {have}"
        return number

    def serve(self):
        try:
            self.greet()
            while True:
                self.next()
        except (EOFError, ConnectionError):
            pass
        finally:
            self.peer.close()

    def greet(self):
        kind, body = self.message()
        assert kind == HELLO, kind
        version, self.transport = body.take("HHH"), body.take("B")
        self.models.say(event="hello", ort=version, transport=self.transport, units=body.text())
        if self.mischief == "other-version":
            self.peer.sendall(frame(HELLO_OK, b"", version=2))
            raise EOFError
        own = [int(part) for part in onnxruntime.__version__.split(".")[:3]]
        if self.mischief == "other-ort":
            own[1] += 1
        self.peer.sendall(frame(HELLO_OK, struct.pack("<HHHBQQ", *own, self.transport, 1 << 40, 1 << 35)))

    def next(self):
        if self.ring is not None:
            return self.next_in_ring()
        kind, body = self.message()
        if kind == MODEL:
            self.load(body)
        elif kind == RING:
            self.take_ring(body)
        elif kind == RUN:
            run, _, inputs = body.take("I"), body.take("Q"), body.tensors()
            arrays = [self.array(one, self.receive(self.size(one))) for one in inputs]
            self.answer_in_stream(run, inputs, arrays)
        else:
            raise AssertionError(f"kind {kind}")

    @staticmethod
    def size(tensor):
        element, dims = tensor
        return numpy.dtype(ELEMENTS[element]).itemsize * int(numpy.prod(dims, dtype=numpy.int64))

    @staticmethod
    def array(tensor, data):
        element, dims = tensor
        return numpy.frombuffer(bytes(data), ELEMENTS[element]).reshape(dims)

    def load(self, body):
        model = {"hash": body.bytes(32).hex(), "proto": body.take("Q"), "weights": body.take("Q")}
        model["inputs"], model["outputs"], model["label"] = body.ports(), body.ports(), body.text()
        total = -(-model["proto"] // 4096) * 4096 + model["weights"]
        if self.mischief == "refuse":
            self.peer.sendall(frame(REFUSED, b"\1" + text("this host has no engine for it")))
            raise EOFError
        has = model["hash"] in self.models.files
        self.peer.sendall(frame(HAVE if has else WANT))
        if not has:
            kind, _ = self.message()
            assert kind == SENDING, kind
            if self.transport == SHARED:
                number = self.descriptor(SEAL_SHRINK | SEAL_GROW | SEAL_WRITE)
                assert os.fstat(number).st_size == total, (os.fstat(number).st_size, total)
                with mmap.mmap(number, total, prot=mmap.PROT_READ) as mapping:
                    self.models.files[model["hash"]] = bytes(mapping)
                os.close(number)
            else:
                self.models.files[model["hash"]] = self.receive(total)
        self.model = model
        self.models.say(event="model", hash=model["hash"][:8], sent=not has, weights=model["weights"], label=model["label"])
        self.peer.sendall(frame(LOADED, bytes.fromhex(model["hash"])))

    def take_ring(self, body):
        length = body.take("Q")
        number = self.descriptor(SEAL_SHRINK | SEAL_GROW)
        assert os.fstat(number).st_size == length
        self.ring = mmap.mmap(number, length)
        os.close(number)

    def word(self, offset):
        return struct.unpack_from("<I", self.ring, offset)[0]

    def next_in_ring(self):
        while self.word(REQUEST_AT) == self.word(ANSWER_AT):
            struct.pack_into("<I", self.ring, HOST_AT, ASLEEP)
            if self.word(REQUEST_AT) != self.word(ANSWER_AT):
                break
            select.select([self.peer], [], [])
            struct.pack_into("<I", self.ring, HOST_AT, AWAKE)
            kind, body = self.message()
            if kind == RING:
                self.take_ring(body)
            else:
                assert kind == BELL, kind
        magic, version, kind, length, _ = struct.unpack_from("<4sHHII", self.ring, HEAD)
        assert (magic, version, kind) == (b"LtAn", 1, RUN), (magic, version, kind)
        body = Reader(bytes(self.ring[HEAD + 16 : HEAD + 16 + length]))
        run, offset, inputs = body.take("I"), body.take("Q"), body.tensors()
        assert run == self.word(REQUEST_AT)
        arrays = []
        for one in inputs:
            offset = align(offset)
            arrays.append(self.array(one, self.ring[DATA + offset : DATA + offset + self.size(one)]))
            offset += self.size(one)
        self.answer_in_ring(run, *self.compute(run, inputs, arrays))

    def compute(self, run, inputs, arrays):
        """The frame of an answer without its data, and the data; no data for a failure."""
        Connection.runs += 1
        if self.mischief == "die-in-run":
            os._exit(9)
        if self.mischief == "again" and Connection.runs % 2 == 1:
            return frame(FAILED, struct.pack("<IB", run, 3) + text("the engine has gone")), None
        if self.mischief == "not-these":
            return frame(FAILED, struct.pack("<IB", run, 1) + text("these shapes are not for this engine")), None
        session = self.models.session(self.model, inputs)
        feed = {name: array for (name, _, _), array in zip(self.model["inputs"], arrays)}
        try:
            outputs = session.run([name for name, _, _ in self.model["outputs"]], feed)
        except Exception as error:  # the engine's own error
            self.models.say(event="failed", text=str(error)[:200])
            return frame(FAILED, struct.pack("<IB", run, 1) + text(str(error)[:300])), None
        outputs = [numpy.ascontiguousarray(output).reshape(output.shape) for output in outputs]
        if self.mischief == "wrong-type":
            outputs = [output.astype("float64") for output in outputs]
        self.models.say(event="run", hash=self.model["hash"][:8], shapes=[dims for _, dims in inputs])
        return None, outputs

    def answer_in_stream(self, run, inputs, arrays):
        failure, outputs = self.compute(run, inputs, arrays)
        if failure:
            return self.peer.sendall(failure)
        self.peer.sendall(frame(ANSWER, struct.pack("<IQ", run, 0) + tensors(outputs)))
        for output in outputs:
            self.peer.sendall(output.tobytes())

    def answer_in_ring(self, run, head, outputs):
        if outputs is not None:
            end, offsets = 0, []
            for output in outputs:
                offsets.append(align(end))
                end = align(end) + output.nbytes
            if DATA + end > len(self.ring):
                self.post(run, frame(GROW, struct.pack("<IQ", run, end)))
                kind, body = self.message()
                assert kind == RING, kind
                self.take_ring(body)
                self.models.say(event="grown", bytes=end)
            first = 1 << 30 if self.mischief == "beyond" else 0
            for output, offset in zip(outputs, offsets):
                self.ring[DATA + offset : DATA + offset + output.nbytes] = output.tobytes()
            head = frame(ANSWER, struct.pack("<IQ", run, first) + tensors(outputs))
        self.post(run, head)

    def post(self, run, head):
        self.ring[HEAD : HEAD + len(head)] = head
        struct.pack_into("<I", self.ring, ANSWER_AT, run)
        if self.word(CONTAINER_AT) == WAITING:
            futex_wake(self.ring, ANSWER_AT)


def main():
    path, log, mischief = sys.argv[1], sys.argv[2], (sys.argv[3:] or [None])[0]
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(path):
        os.unlink(path)
    listener.bind(path)
    listener.listen(64)
    models = Models(log, mischief == "bind")
    models.say(event="ready", ort=onnxruntime.__version__)
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=Connection(models, peer, mischief).serve, daemon=True).start()


if __name__ == "__main__":
    main()

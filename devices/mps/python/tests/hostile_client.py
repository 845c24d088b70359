# SPDX-License-Identifier: MIT OR Apache-2.0
"""A client of the host's worker without torch: sends whatever a test wants, right or wrong. Used by test_host*.py."""

import fcntl
import mmap
import os
import socket
import struct

import harness  # noqa: F401  (puts the packages on the path)
from lighter_mps_wire import frames, protocol
from lighter_mps_wire.values import TensorSlot, decode, encode

F32, I64 = 6, 4
MISSING = object()


class HostError(Exception):
    """An error reply; `body` is what the host said."""

    def __init__(self, body):
        super().__init__(f"{body['op']}: {body['kind']}: {body['message']}")
        self.body = body


class Client:
    """One connection. Numbers of storages and signatures count up; tests may choose their own."""

    def __init__(self, host, ring_bytes=0, env=None, hello=True):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(300)
        self.socket.connect(host.path)
        self.number = self.signature = 0
        self.ring = None
        if hello:
            self.facts = self.hello(ring_bytes, env or {})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()

    def hello(self, ring_bytes=0, env=None, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, real_bytes=None):
        body = {"torch": "none", "python": "none", "pid": os.getpid(), "program": "test", "env": env or {}}
        body["ring_bytes"] = ring_bytes
        descriptors = []
        if ring_bytes:
            descriptor = os.memfd_create("ring", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
            os.ftruncate(descriptor, ring_bytes if real_bytes is None else real_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            self.ring = mmap.mmap(descriptor, ring_bytes) if real_bytes is None else None
            descriptors = [descriptor]
        data = frames.hello(protocol.FLAG_RING if descriptors else 0, body)
        if descriptors:
            socket.send_fds(self.socket, [data], descriptors)
            os.close(descriptors[0])
        else:
            self.socket.sendall(data)
        return self.take_hello()

    def take_hello(self):
        _, status, size = frames.parse_hello(self.receive(frames.HELLO.size))
        body = decode(self.receive(size))
        if status != protocol.OK:
            raise HostError({"op": "hello", "kind": "Refused", "message": body["reason"]})
        return body

    def receive(self, size):
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise EOFError("the host closed the stream")
            data += part
        return bytes(data)

    def send(self, data):
        self.socket.sendall(data)

    def reply(self, raw=False):
        status, size = frames.REPLY.unpack(self.receive(frames.REPLY.size))
        body = self.receive(size)
        if status != protocol.OK:
            raise HostError(decode(body))
        return body if raw else decode(body)

    def ask(self, *message, raw=False, **parts):
        self.send(frames.message(*message, **parts))
        return self.reply(raw)

    def next_number(self):
        self.number += 1
        return self.number

    def next_signature(self):
        self.signature += 1
        return self.signature

    def alloc(self, size, code=F32, number=None):
        number = self.next_number() if number is None else number
        self.send(frames.message(protocol.ALLOC, number, size, code))
        return number

    def upload(self, values, sizes=None, code=F32, form="f"):
        """A new storage with these values."""
        data = struct.pack(f"<{len(values)}{form}", *values)
        sizes = [len(values)] if sizes is None else list(sizes)
        number = self.alloc(len(data), code)
        self.send_upload(descriptor(number, sizes, code=code), data)
        return number

    def send_upload(self, body, data):
        self.send(frames.message(protocol.UPLOAD, len(data), body=encode(body), data=data))

    def download(self, body):
        return self.ask(protocol.DOWNLOAD, body=encode(body), raw=True)

    def floats(self, number, sizes, strides=None, offset=0):
        data = self.download(descriptor(number, sizes, strides, offset))
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    def wait(self):
        return self.ask(protocol.WAIT)

    def free(self, *numbers):
        self.send(frames.numbers(protocol.FREE, numbers))

    def run(self, operator, kinds, arguments, keywords=None, slots="", values=(), keep=0):
        """RUN and BIND; gives shape, results, resized, and the numbers of the new results."""
        body = [keep, operator, kinds, arguments, keywords or {}, slots, list(values)]
        shape, results, resized = self.ask(protocol.RUN, body=encode(body))
        numbers = [self.next_number() for _ in range(count_new(results))]
        if numbers:
            self.send(frames.numbers(protocol.BIND, numbers))
        return shape, results, resized, numbers

    def define(self, operator, kinds, arguments, keywords=None, slots="", shape="s", results=(), signature=None):
        signature = self.next_signature() if signature is None else signature
        body = [signature, operator, kinds, arguments, keywords or {}, slots, shape, list(results)]
        self.send(frames.message(protocol.DEFINE, body=encode(body)))
        return signature

    def call(self, signature, slots="", values=(), outputs=()):
        made = frames.call_struct(slots, len(outputs))
        self.send(made.pack(protocol.CALL, signature, *values, *outputs))

    def query(self, what):
        return self.ask(protocol.QUERY, what)


def count_new(results):
    """New tensors among a reply's results, lists of them included."""
    total = 0
    for result in results:
        if result is not None and result[0] == "n":
            total += 1
        elif result is not None and result[0] == "l":
            total += count_new(result[1])
    return total


def dense(sizes):
    """Contiguous strides."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    return strides


def tensor(slot, sizes, strides=None, code=F32):
    """A tensor's slot in a signature."""
    return TensorSlot(slot, code, tuple(sizes), tuple(dense(sizes) if strides is None else strides))


def descriptor(number, sizes, strides=None, offset=0, code=F32):
    """How UPLOAD, DOWNLOAD and ITEM name a tensor."""
    return [protocol.address(number, offset), list(sizes), list(dense(sizes) if strides is None else strides), code]


def new(sizes, strides=None, code=F32):
    """A predicted new result."""
    return ["n", list(sizes), list(dense(sizes) if strides is None else strides), code]

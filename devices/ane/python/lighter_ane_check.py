# SPDX-License-Identifier: MIT OR Apache-2.0
"""Says whether ONNX models of this container run on the host's engine, and if not, why. Run by lighter-ane-check.

Asks step by step: the library, the service behind the socket, onnxruntime, then a run of a small model or of the models
named. Each run is in a process of its own, whose last words say what ran where.
"""

import os
import re
import socket
import struct
import subprocess
import sys

LIBRARY = os.environ.get("LIGHTER_ANE_EP") or "/usr/lib/lighter/ane/liblighter_ane_ep.so"
SOCKET = os.environ.get("LIGHTER_ANE") or "/run/lighter/ane/socket"
WITHOUT = "start the container with --device lighter.sh/ane=all"
FRAME, FRAMES_VERSION, HELLO, HELLO_OK, REFUSED = "<4sHHII", 1, 1, 2, 8
SHARED_MEMORY = 1
TRY = "--try"


class Wrong(Exception):
    """Something is missing; the text says what to do."""


def ok(text):
    print("ok       " + text)


def check_library():
    if not os.path.exists(LIBRARY):
        raise Wrong(f"{LIBRARY} is not there: {WITHOUT}")
    ok(f"library {LIBRARY}")


def receive(peer, count):
    data = b""
    while len(data) < count:
        got = peer.recv(count - len(data))
        if not got:
            raise Wrong("the service closed the connection: `lighter status` on the host may say why")
        data += got
    return data


def check_service():
    """Greets as the library does."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(10)
    try:
        peer.connect(SOCKET)
        hello = struct.pack("<HHHBH", 1, 24, 0, SHARED_MEMORY, 0)
        peer.sendall(struct.pack(FRAME, b"LtAn", FRAMES_VERSION, HELLO, len(hello), 0) + hello)
        magic, version, kind, length, _ = struct.unpack(FRAME, receive(peer, 16))
        body = receive(peer, length)
    except FileNotFoundError:
        raise Wrong(f"{SOCKET} is not there: {WITHOUT}, and see that the daemon runs on the host (`lighter status`)") from None
    except OSError as error:
        raise Wrong(f"the service at {SOCKET} does not answer ({error}): see `lighter status` on the host") from None
    finally:
        peer.close()
    if kind == REFUSED:
        raise Wrong(f"the service refuses: {body[3:].decode(errors='replace')}")
    if (magic, kind, version) != (b"LtAn", HELLO_OK, FRAMES_VERSION):
        raise Wrong(f"the service speaks version {version} of the frames, this container's helpers {FRAMES_VERSION}: start the container anew")
    major, minor, patch, transport = struct.unpack_from("<HHHB", body)
    name = "an ONNX Runtime that it does not tell" if major == 0 else f"ONNX Runtime {major}.{minor}.{patch}"
    way = "shared memory" if transport == SHARED_MEMORY else "the stream"
    ok(f"service {SOCKET}: {name}, data through {way}")


def check_onnxruntime():
    try:
        import onnxruntime
    except ImportError as error:
        raise Wrong(f"no onnxruntime for {sys.executable} ({error}): pip install onnxruntime, or name another Python with LIGHTER_ANE_PYTHON") from None
    try:
        onnxruntime.register_execution_provider_library("lighter-ane-check", LIBRARY)
    except AttributeError:
        raise Wrong(f"onnxruntime {onnxruntime.__version__} is too old: LighterANE needs 1.24 or newer") from None
    except Exception as error:
        raise Wrong(f"onnxruntime {onnxruntime.__version__} does not take the library: {error}") from None
    ok(f"onnxruntime {onnxruntime.__version__} for {sys.executable}")


def field(number, value):
    """A field of a protobuf message: a number, or bytes of less than 128."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


def small_model():
    """y = x · x, four by four."""
    shape = field(1, field(1, 4)) * 2
    kind = field(2, field(1, field(1, 1) + field(2, shape)))
    node = field(1, b"x") * 2 + field(2, b"y") + field(4, b"MatMul")
    graph = field(1, node) + field(2, b"check") + field(11, field(1, b"x") + kind) + field(12, field(1, b"y") + kind)
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


def try_model(path):
    """In a process of its own: one session, one run."""
    import numpy
    import onnxruntime

    onnxruntime.register_execution_provider_library("lighter-ane-check", LIBRARY)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "LighterANE"]
    options = onnxruntime.SessionOptions()
    settings = {"socket": SOCKET, "report": "1"}
    if not path:
        settings["min_work"] = "0"
    options.add_provider_for_devices(devices, settings)
    session = onnxruntime.InferenceSession(path or small_model(), options)
    kinds = {"float": "float32", "double": "float64"}
    inputs = {}
    for one in session.get_inputs():
        kind = re.fullmatch(r"tensor\((.*)\)", one.type)
        dims = [dim if isinstance(dim, int) else 1 for dim in one.shape]
        inputs[one.name] = numpy.zeros(dims, kinds.get(kind[1], kind[1]) if kind else "float32")
    session.run(None, inputs)


def check_model(path):
    name = path or "a small model"
    command = [sys.executable, os.path.abspath(__file__), TRY, path]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    said = [line.split(": ", 1)[1] for line in child.stdout.splitlines() if line.startswith("lighter-ane: ")]
    for line in said:
        print("         " + line)
    runs = [int(count) for line in said for count in re.findall(r"(\d+) runs on the host", line)]
    if child.returncode != 0:
        last = (child.stdout.strip().splitlines() or ["it does not say why"])[-1]
        raise Wrong(f"{name} did not run: {last}")
    if not path and sum(runs) == 0:
        raise Wrong("a small model ran in the container, not on the host")
    where = "on the host" if sum(runs) else "in the container alone: too little work, or nothing that the host can run"
    ok(f"{name} ran {where}")


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == [TRY]:
        return try_model(arguments[1])
    if any(argument.startswith("-") for argument in arguments):
        sys.exit("usage: lighter-ane-check [MODEL.onnx…]")
    try:
        for check in (check_library, check_service, check_onnxruntime):
            check()
        check_model("")
        for path in arguments:
            check_model(path)
    except Wrong as wrong:
        print(f"WRONG    {wrong}")
        sys.exit(1)
    print("The device works.")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT OR Apache-2.0
"""Stands for lighter's package in the host's Python and misbehaves as it is asked to. It has no torch.

The variable START says how it starts; the first line of a stream says what it does with the stream.
"""

import json
import os
import socket
import sys
import time

START = os.environ.get("START", "")
PACKET = 1 << 20


def probe():
    if START == "no torch":
        print(json.dumps({"missing": "torch", "reason": "ModuleNotFoundError: No module named 'torch'"}))
        return
    if START == "broken torch":
        print("Importing …", file=sys.stderr)
        print("ImportError: libtorch.so: cannot open shared object file", file=sys.stderr)
        sys.exit(1)
    if START == "hanging torch":
        time.sleep(600)
    with open(os.environ["PROBED"], "ab") if "PROBED" in os.environ else open(os.devnull, "ab") as count:
        count.write(b"x")
    devices = [{"name": "cpu", "description": "a bad worker"}, {"name": "cuda:0", "description": "no GPU"}]
    paths = [*sys.path, sys.prefix, sys.base_prefix]
    facts = {"torch": "9.9.9", "python": "3", "executable": sys.executable, "devices": devices, "paths": paths}
    print(json.dumps(facts))


def say(control, message):
    control.send(json.dumps(message).encode())


def worker():
    control = socket.socket(fileno=os.dup(0))
    settings = json.loads(control.recv(PACKET))["configure"]
    if START == "never":
        time.sleep(600)
    if START == "abort":
        os.abort()
    if START == "failed":
        say(control, {"failed": {"reason": "no such engine"}})
        return
    if START == "rubbish":
        control.send(b'{"fine":1}')
        time.sleep(600)
    if START == "old":
        settings["version"] = 77
    ready = {"version": settings["version"], "torch": "9.9.9", "python": "3", "device": settings["device"]}
    say(control, {"ready": ready})
    calls = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, PACKET, 8)
        if not data:
            os._exit(0)
        message = json.loads(data)
        if "report" in message:
            say(control, counters(message["report"]["seq"], calls))
            continue
        stream = message["stream"]["stream"]
        connection = socket.socket(fileno=descriptors[0])
        calls += 1
        serve(control, connection, stream, settings, connection.makefile().readline().split())


def counters(seq, calls):
    return {"counters": {"seq": seq, "calls": calls, "held_bytes": 77, "storages": 3, "errors": 0, "last_error": None}}


def end(control, stream, reason=None):
    say(control, counters(0, 5))
    say(control, {"ended": {"stream": stream, "reason": reason}})
    os._exit(0)


def serve(control, connection, stream, settings, words):
    say_to_client = lambda text: connection.sendall(f"{text}\n".encode())  # noqa: E731
    match words:
        case ["hello"]:
            say_to_client(f"{settings['device']} {os.getpid()}")
            connection.close()
            end(control, stream)
        case ["settings"]:
            say_to_client(json.dumps(settings))
            connection.close()
            end(control, stream)
        case ["stay"]:
            say_to_client(os.getpid())
        case ["complain"]:
            connection.close()
            end(control, stream, "tensor of \x1b[31m0 bytes")
        case ["crash"]:
            raise MemoryError("a shard of the container")
        case ["close"]:
            control.shutdown(socket.SHUT_RDWR)
            time.sleep(600)
        case ["wrong"]:
            say(control, {"ended": {"stream": stream + 1000, "reason": None}})
            time.sleep(600)
        case ["flood"]:
            for _ in range(20_000):
                say(control, counters(0, 1))
            say_to_client("flooded")
        case ["linger"]:
            connection.close()
            say(control, {"ended": {"stream": stream, "reason": None}})
            control.shutdown(socket.SHUT_RDWR)
            time.sleep(600)
        case ["sandbox"]:
            say_to_client("worked:" + ",".join(name for name, attempt in ATTEMPTS.items() if works(attempt)))
            connection.close()
            end(control, stream)


ATTEMPTS = {
    "socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "unix": socket.socketpair,
    "passwd": lambda: open("/etc/passwd").close(),
    "list": lambda: os.listdir("/"),
    "create": lambda: open("/tmp/lighter-bad-host", "w").close(),
    "processes": lambda: open("/proc/1/cmdline").close(),
    "chroot": lambda: os.chroot("/"),
}


def works(attempt):
    try:
        attempt()
    except OSError:
        return False
    return True


probe() if sys.argv[1] == "probe" else worker()

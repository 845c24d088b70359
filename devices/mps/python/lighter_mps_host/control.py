# SPDX-License-Identifier: MIT OR Apache-2.0
"""The worker's talk with lighter's mps service over descriptor 0, and the life of the process.

A second thread reads the control socket and answers reports; it never touches torch, so it answers also while the main
thread, which alone runs torch, is inside a long operator. The end of the control socket ends the process at once.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import warnings

from lighter_mps_wire.protocol import VERSION

MAX_PACKET_BYTES = 1 << 20
MAX_REASON_CHARACTERS = 4096


class Counters:
    """What the worker did; the executing thread writes, the control thread reads."""

    def __init__(self):
        self.calls = self.bytes_in = self.bytes_out = self.held_bytes = self.storages = self.errors = 0
        self.last_error = None


class Control:
    """The control socket; sending is shared by both threads."""

    def __init__(self, descriptor: int):
        self.socket = socket.socket(fileno=descriptor)
        self.orders = queue.SimpleQueue()
        self.counters = Counters()
        self.lock = threading.Lock()

    def send(self, message: dict) -> None:
        with self.lock:
            self.socket.send(json.dumps(message).encode())

    def listen(self) -> None:
        """The second thread: passes orders on and answers reports; ends the process with the socket."""
        try:
            while True:
                data, descriptors, flags, _ = socket.recv_fds(self.socket, MAX_PACKET_BYTES, 8)
                if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    break
                message = json.loads(data)
                if report := message.get("report"):
                    self.send({"counters": {"seq": report["seq"], **vars(self.counters)}})
                else:
                    self.orders.put((message, descriptors))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            sys.stderr.write(f"lighter mps worker: control socket: {error}\n")
        finally:
            os._exit(0)


def worker() -> int:
    """Waits for the configuration, then for the stream, serves it, and ends."""
    # Descriptor 0 must not be inherited as standard input by anything that torch starts.
    descriptor = os.dup(0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    # The service ends workers by their control sockets; a Ctrl-C in its terminal is not for them. Torch's warnings
    # about a client's program would only fill the host's log.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    control = Control(descriptor)
    threading.Thread(target=control.listen, name="control", daemon=True).start()
    configured, _ = control.orders.get()
    try:
        engine, limits = configure(configured["configure"])
    except Exception as error:
        control.send({"failed": {"reason": short(error)}})
        return 1
    control.send({"ready": {"version": VERSION, **engine.facts()}})
    order, descriptors = control.orders.get()
    stream = order["stream"]["stream"]
    reason = serve(descriptors, engine, limits, control.counters)
    # Nobody can ask any more once the stream has ended.
    control.send({"counters": {"seq": 0, **vars(control.counters)}})
    control.send({"ended": {"stream": stream, "reason": reason}})
    # No clean-up: whatever torch or a driver would do at exit is of no use to anybody any more.
    sys.stderr.flush()
    os._exit(0)


def configure(settings: dict):
    """Imports torch and starts the device; raises what keeps it from working."""
    if settings.get("version") != VERSION:
        raise RuntimeError(f"the service speaks version {settings.get('version')}, this worker {VERSION}")
    from .engines import engine_for
    from .session import Limits

    limits = Limits(settings["max_bytes"], settings["max_storages"], settings["max_signatures"])
    return engine_for(settings["device"], settings["threads"], limits.max_bytes), limits


def serve(descriptors: list, engine, limits, counters):
    """Serves the one stream to its end; gives the reason where it did not end well."""
    from .errors import Violation
    from .session import Session

    if len(descriptors) != 1:
        return f"{len(descriptors)} descriptors came with the stream, not one"
    connection = socket.socket(fileno=descriptors[0])
    try:
        Session(connection, engine, limits, counters).serve()
    except Violation as error:
        return short(error)
    except (ConnectionError, BrokenPipeError) as error:
        return f"connection: {error}"
    except BaseException as error:
        # A fault of ours or of torch: the service must learn of it, and this process ends in any case.
        import traceback

        traceback.print_exc()
        return f"worker failed: {type(error).__name__}: {short(error)}"
    return None


def short(error: BaseException) -> str:
    """An error's text, of bounded length."""
    return (str(error) or type(error).__name__)[:MAX_REASON_CHARACTERS]

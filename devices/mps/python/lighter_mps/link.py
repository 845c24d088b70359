# SPDX-License-Identifier: MIT OR Apache-2.0
"""The one connection of this process to its worker on the host: connecting, requests with replies, and losing it.

`send` puts messages on the stream, `request` waits for an answer, `request_into` receives raw bytes into memory. The
connection is made by the first tensor on the device, not by the import. Two threads' requests are kept apart by `lock`;
messages without a reply need it not. An exception of a signal handler (KeyboardInterrupt) while a reply is awaited
leaves the stream in order: the next request reads what is left of the old reply first. A lost host and a forked child
are final: every later use raises the same one sentence.
"""

import errno
import os
import socket
import sys
import threading
import time
from array import array

import torch
from lighter_mps_wire import frames, protocol
from lighter_mps_wire.values import WireError, decode

from . import errors, signals

lock = threading.RLock()
IDLE_SECONDS = 150e-6
FLUSH_FROM_BYTES = 64 << 10
MAX_REPLY_BYTES = 64 << 20


class _State:
    """The link's state; `hot` is the module of the hot path, set by `install`."""

    hot = None
    endpoint = ""
    socket = None
    ring = None
    ring_descriptor = -1
    # Why nothing can be used any more, once that is so.
    lost = None
    host: dict = {}
    round_trips = 0
    # Replies that were asked for and are not read: an interrupted one first, then those of `post`.
    unread: list = []
    # Messages of the time before the connection (seeds).
    early = bytearray()


def install(hot, settings, make_ring) -> None:
    """Called once at import; nothing is connected yet. `make_ring()` gives (descriptor, object with `.bytes`) or None."""
    _State.hot, _State.endpoint = hot, settings.endpoint
    _State.make_ring = make_ring if settings.ring else lambda: None
    os.register_at_fork(after_in_child=_forked)


def connected() -> bool:
    """Whether there is a worker already."""
    return _State.socket is not None and _State.lost is None


def check() -> None:
    """Connects at first use; raises where the host is lost or this is a forked child."""
    if _State.lost is not None:
        raise _lost_again()
    if _State.socket is None:
        _connect()


def _connect() -> None:
    with lock:
        if _State.socket is not None:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _State.host = _greet(connection)
        except OSError as error:
            connection.close()
            raise RuntimeError(_unreachable(error)) from None
        except BaseException:
            connection.close()
            raise
        _State.socket = connection
        _State.hot.set_socket(connection.fileno())
        if _State.early:
            _State.hot.append(bytes(_State.early))
            _State.early.clear()
        if not getattr(_State.hot, "OWN_FLUSHER", True):
            _start_flusher()


def _unreachable(error: OSError) -> str:
    return (
        f"lighter-mps: no mps device here: {_State.endpoint}: {error.strerror or error}. Is the mps device granted to "
        "this container, and lighter's service running on the host? (`lighter doctor` on the host says)"
    )


def _greet(connection) -> dict:
    connection.connect(_State.endpoint)
    ring = _State.make_ring()
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    body = {
        "torch": str(torch.__version__),
        "python": ".".join(map(str, sys.version_info[:3])),
        "pid": os.getpid(),
        "program": program,
        "ring_bytes": ring[1].bytes if ring else 0,
        "env": {name: os.environ[name] for name in ("PYTORCH_ENABLE_MPS_FALLBACK",) if name in os.environ},
    }
    hello = frames.hello(protocol.FLAG_RING if ring else 0, body)
    if ring:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [ring[0]]))]
        sent = connection.sendmsg([hello], passed)
        os.close(ring[0])
        connection.sendall(hello[sent:])
    else:
        connection.sendall(hello)
    head = _receive_all(connection, frames.HELLO.size)
    if head is None:
        raise RuntimeError(
            f"lighter-mps: the host closed {_State.endpoint} without a word: the mps device is not granted to this "
            "container, or lighter's service could start no worker (`lighter doctor` on the host says)"
        )
    version, status, size = frames.parse_hello(head)
    answer = decode(_receive_all(connection, size) or b"", protocol.MAX_HELLO_BYTES)
    if status != protocol.OK:
        raise RuntimeError(f"lighter-mps: the host refused: {answer.get('reason', 'no reason given')}")
    if version != protocol.VERSION:
        raise RuntimeError(
            f"lighter-mps: the host speaks version {version} of the protocol, this package version {protocol.VERSION}; "
            "install the lighter-mps that came with the host's lighter"
        )
    _State.ring = ring[1] if ring else None
    return answer


def _receive_all(connection, size: int):
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


class _Reply:
    """One reply that is on its way; `finish` may be called again after an interrupt and goes on where it stopped."""

    def __init__(self, into=None):
        self.head = memoryview(bytearray(frames.REPLY.size))
        self.into = into
        self.body = None
        self.got = [0]
        self.status = None

    def _fill(self, view) -> None:
        # See `hot.flush`: the count must be stored inside one call.
        while (got := sum(self.got)) < len(view):
            self.got.extend(map(_State.socket.recv_into, (view[got:],)))
            if self.got[-1] == 0 and sum(self.got) < len(view):
                raise ConnectionResetError(errno.ECONNRESET, "the host's worker ended")

    def finish(self) -> None:
        """Reads what is left."""
        if self.status is None:
            self._fill(self.head)
            status, size = frames.REPLY.unpack(self.head)
            if status == protocol.OK and self.into is not None:
                if size != len(self.into):
                    raise WireError(f"reply of {size} bytes where {len(self.into)} were asked for")
                body = self.into
            elif size > MAX_REPLY_BYTES:
                raise WireError(f"reply of {size} bytes is over the limit of {MAX_REPLY_BYTES}")
            else:
                body = memoryview(bytearray(size))
            self.body, self.got, self.status = body, [0], status
        self._fill(self.body)


    def result(self):
        """The body; raises the host's error."""
        if self.status != protocol.OK:
            raise errors.from_reply(decode(self.body, MAX_REPLY_BYTES))
        return self.body


def _await(reply: _Reply):
    """Reads older replies, then this one; the caller holds `lock` and has put `reply` into `unread`.

    Only `finish` may be interrupted, and it is called again then; an older reply's error is raised after all is read.
    """
    finished = []
    while reply in _State.unread:
        oldest = _State.unread[0]
        try:
            oldest.finish()
        except OSError as error:
            # An OSError without a number is one that a signal's handler raises (TimeoutError).
            if error.errno is None:
                raise
            _lose(error)
        except WireError as error:
            _lose(error)
        finished.append(oldest)
        del _State.unread[0]
    for older in finished:
        if older is not reply:
            older.result()
    return reply.result()


def _put(message, into=None) -> _Reply:
    """Puts a message and the promise of its reply on record; one without the other would lose the stream's order, so
    no signal's exception may come between. (`pthread_sigmask` raises what is pending before it returns.)"""
    check()
    reply = _Reply(into)
    mask = signals.block()
    try:
        _State.hot.append(message)
        _State.unread.append(reply)
    finally:
        signals.restore(mask)
    return reply


def _ask(message, into=None):
    with lock:
        reply = _put(message, into)
        _State.round_trips += 1
        _State.hot.flush()
        return _await(reply)


def send(message: bytes) -> None:
    """Puts whole messages on the stream; before the first connection they are kept for it."""
    if _State.lost is not None:
        raise _lost_again()
    if _State.socket is None:
        _State.early += message
    else:
        _State.hot.append(message)
        if len(message) > FLUSH_FROM_BYTES:
            _State.hot.flush()


def request(message: bytes):
    """Sends a message that is answered with a value, and waits; raises the host's error."""
    return decode(_ask(message), MAX_REPLY_BYTES)


def request_bytes(message: bytes) -> bytes:
    """As `request`, for a reply of raw bytes."""
    return bytes(_ask(message))


def request_into(message: bytes, into: memoryview) -> None:
    """As `request_bytes`, into memory of exactly the reply's size."""
    _ask(message, into)


def post(message: bytes):
    """Sends a message whose (empty) reply is read later, by `collect` or before any later reply; gives its ticket."""
    with lock:
        reply = _put(message)
        _State.hot.flush()
        return reply


def collect(ticket) -> None:
    """Waits until a ticket's reply is there."""
    with lock:
        if ticket in _State.unread:
            _await(ticket)


def wait() -> None:
    """Waits for everything sent so far; raises the first error that came of it."""
    if _State.socket is not None or _State.lost is not None:
        _ask(bytes((protocol.WAIT,)))


def no_socket(error_number: int) -> None:
    """The hot path found no socket, or writing failed."""
    if _State.lost is not None:
        raise _lost_again()
    if error_number:
        _lose(OSError(error_number, os.strerror(error_number)))
    _connect()


def _lost_again() -> Exception:
    """A new exception each time, since a raised one collects tracebacks."""
    return type(_State.lost)(str(_State.lost))


def _lose(error: Exception) -> None:
    what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    _State.lost = errors.HostLost(
        f"lighter-mps: the connection to the host is lost ({what}); what was on the mps device is gone. "
        "Start this program again"
    )
    _State.unread.clear()
    _State.hot.set_socket(-1)
    _State.hot.forget_plans()
    raise _lost_again() from None


def _forked() -> None:
    """In a forked child: the parent's stream must not be touched, not even by a late FREE."""
    # Another thread may have held it when the process was copied.
    lock._at_fork_reinit()
    if _State.socket is None and _State.lost is None:
        return
    _State.lost = RuntimeError(
        "lighter-mps: mps tensors cannot be used in a forked child process; "
        "use multiprocessing with the start method 'spawn', or keep the mps device to the parent"
    )
    if hasattr(_State.hot, "after_fork"):
        _State.hot.after_fork()
    else:
        _State.hot.set_socket(-1)
        _State.hot.forget_plans()
    if _State.socket is not None:
        _State.socket.close()


def _start_flusher() -> None:
    """A thread that writes what waits once no call has come for a moment; it sleeps while there is nothing."""
    wake = threading.Lock()
    wake.acquire()

    def arm() -> None:
        if wake.locked():
            try:
                wake.release()
            except RuntimeError:
                pass

    def loop() -> None:
        hot = _State.hot
        while True:
            wake.acquire()
            seen = -1
            while (waiting := hot.pending()) and waiting != seen and _State.lost is None:
                seen = waiting
                time.sleep(IDLE_SECONDS)
            if waiting and _State.lost is None:
                try:
                    hot.flush()
                except Exception:
                    # The state says so; the next use in the user's own thread raises it.
                    pass

    _State.hot.set_arm(arm)
    threading.Thread(target=loop, name="lighter-mps-flusher", daemon=True).start()


def ring():
    """The shared memory for bulk data, or None."""
    return _State.ring


def limits() -> dict:
    """What the host said in its hello."""
    return dict(_State.host)


def statistics() -> dict:
    """Round trips so far."""
    return {"round_trips": _State.round_trips}

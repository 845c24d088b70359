# SPDX-License-Identifier: MIT OR Apache-2.0
"""A stand-in for lighter's mps service: real workers behind a real socket, for the tests of the client and the host.

`Host(...)` listens on a unix socket in a folder of its own, starts one worker for each connection and hands it the
socket over the control protocol, as the service does. As a program it runs a command with LIGHTER_MPS set:

    python3 harness.py --torch FOLDER [--device cpu] [--threads 1] -- COMMAND…
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
HOST_PROGRAM = ROOT / "lighter_mps_host"
MAX_PACKET_BYTES = 1 << 20
LIMITS = {"max_bytes": 4 << 30, "max_storages": 1 << 20, "max_signatures": 1 << 16}


class Worker:
    """One worker process and the service's end of its control socket."""

    def __init__(self, python, program, torch_path, device="cpu", threads=1, limits=None, environment=None):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [part for path in torch_path for part in ("--path", str(path))]
        self.process = subprocess.Popen(
            [str(python), "-I", "-B", str(program), "worker", *paths], stdin=theirs, env=environment
        )
        theirs.close()
        self.lock = threading.Lock()
        self.answered = threading.Condition(self.lock)
        self.counters = {}
        self.ended = None
        configure = {"version": 1, "device": device, "threads": threads, **LIMITS, **(limits or {})}
        self.send({"configure": configure})
        self.ready = None

    def send(self, message, descriptors=()):
        data = json.dumps(message).encode()
        if descriptors:
            socket.send_fds(self.control, [data], list(descriptors))
        else:
            self.control.send(data)

    def take(self):
        """The next message of the worker, or None at its end."""
        try:
            data = self.control.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            return None
        return json.loads(data) if data else None

    def wait_ready(self):
        """What the worker says of itself; raises what it failed with."""
        if self.ready is None:
            answer = self.take()
            if answer is None:
                raise RuntimeError(f"worker ended with {self.process.wait()} before it was ready")
            if "ready" not in answer:
                raise RuntimeError(f"worker failed: {answer}")
            self.ready = answer["ready"]
        return self.ready

    def serve(self, connection, number=1):
        """Hands a connection over and follows the worker to its end; other threads may ask for a report meanwhile."""
        self.wait_ready()
        self.send({"stream": {"stream": number}}, [connection.fileno()])
        connection.close()
        while (answer := self.take()) is not None:
            with self.lock:
                if "counters" in answer:
                    self.counters[answer["counters"]["seq"]] = answer["counters"]
                elif "ended" in answer:
                    self.ended = answer["ended"]
                self.answered.notify_all()
        status = self.process.wait()
        with self.lock:
            if self.ended is None:
                self.ended = {"stream": number, "reason": f"worker ended with {status}"}
            self.answered.notify_all()

    def report(self, number, timeout=20):
        """The worker's counters, asked while its stream goes on."""
        self.send({"report": {"seq": number}})
        with self.lock:
            if not self.answered.wait_for(lambda: number in self.counters or self.ended, timeout):
                raise TimeoutError("the worker did not report")
            return self.counters.get(number)

    def wait_ended(self, timeout=300):
        """How the stream ended: {"stream": …, "reason": …}."""
        with self.lock:
            if not self.answered.wait_for(lambda: self.ended is not None, timeout):
                raise TimeoutError("the worker did not end")
            return self.ended

    def stop(self):
        self.control.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Host:
    """Listens; each connection gets a worker of its own. `workers` holds them in the order of connections."""

    def __init__(self, torch_path=None, python=None, device="cpu", threads=1, spare=False, limits=None, program=None):
        found = torch_path or os.environ.get("LIGHTER_TEST_HOST_TORCH") or os.environ.get("LIGHTER_TEST_TORCH")
        self.torch_path = [found] if isinstance(found, (str, Path)) else list(found or ())
        self.python = python or os.environ.get("LIGHTER_TEST_HOST_PYTHON") or sys.executable
        self.settings = {"device": device, "threads": threads, "limits": limits}
        self.program = program or HOST_PROGRAM
        self.keep_spare = spare
        self.spare = None
        self.workers = []
        self.threads = []
        self.changed = threading.Condition()
        self.stopping = False

    def start_worker(self):
        return Worker(self.python, self.program, self.torch_path, **self.settings)

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="lighter-mps-")
        self.path = os.path.join(self.folder, "socket")
        self.address = f"unix:{self.path}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(64)
        if self.keep_spare:
            self.spare = self.start_worker()
        self.acceptor = threading.Thread(target=self.accept, daemon=True)
        self.acceptor.start()
        return self

    def __exit__(self, *_):
        self.stopping = True
        self.listener.shutdown(socket.SHUT_RDWR)
        self.acceptor.join()
        self.listener.close()
        for worker in [*self.workers, *([self.spare] if self.spare else [])]:
            worker.stop()
        for thread in self.threads:
            thread.join()
        shutil.rmtree(self.folder)

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            worker, self.spare = self.spare or self.start_worker(), None
            with self.changed:
                self.workers.append(worker)
                self.changed.notify_all()
            thread = threading.Thread(target=self.follow, args=(worker, connection), daemon=True)
            self.threads.append(thread)
            thread.start()
            if self.keep_spare:
                self.spare = self.start_worker()

    def follow(self, worker, connection):
        try:
            worker.serve(connection, len(self.workers))
        except (OSError, RuntimeError) as error:
            if not self.stopping:
                sys.stderr.write(f"harness: {error}\n")
            connection.close()
            with worker.lock:
                worker.ended = {"stream": 0, "reason": str(error)}
                worker.answered.notify_all()

    def worker(self, index, timeout=30):
        """The worker of the n-th connection, which may not have come yet."""
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.workers) > index, timeout):
                raise TimeoutError(f"no connection {index} came")
            return self.workers[index]

    def environment(self, **more):
        """An environment for a client's process."""
        return {**os.environ, "LIGHTER_MPS": self.address, **more}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", default=[], help="folder of the host's torch")
    parser.add_argument("--python", help="the host's Python (this one)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with Host(options.torch or None, options.python, options.device, options.threads) as host:
        status = subprocess.run(options.command, env=host.environment(), check=False).returncode
        with contextlib.suppress(TimeoutError):
            for worker in host.workers:
                if reason := worker.wait_ended(5)["reason"]:
                    sys.stderr.write(f"harness: stream ended: {reason}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())

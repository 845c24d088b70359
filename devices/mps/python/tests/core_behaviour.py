# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the compiled core must do besides the right bytes: each function is one program that asserts, for `test_core.py`.

usage: core_behaviour.py FUNCTION
"""

import errno
import gc
import os
import signal
import socket
import struct
import sys
import threading
import time
import weakref

import torch
from core_scenarios import new_output, nothing, returns
from core_support import ALLOC, CALL, FREE, HotPath, Peer, messages

CALLS = 100_000


def resident_kib() -> int:
    """Memory of this process that is in use."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def calls_leak_nothing():
    """A hundred thousand calls of each form leave references and memory as they were."""
    path = HotPath("core", peer=Peer(keep=False))
    x, y = path.new(4, 4), path.new(4, 4)
    none, name = None, "mean"
    forms = [
        (path.kernel(new_output(path)), (x, y, 2.5, None, name), {}),
        (path.kernel(returns(lambda args, _: args[0], "s", [0])), (x, [x, y], torch.float32), {"dim": [1, 2]}),
        (path.kernel(new_output(path, 2, "t")), (x, torch.strided, torch.device("mps")), {}),
        (path.kernel(returns(lambda args, _: [args[1], None], "l", [1, None])), (x, y), {"memory_format": torch.channels_last}),
        (path.kernel(nothing, lazy=True), (x,), {"a": True}),
        (path.kernel(lambda *args: (None, None), never=True), (x, y), {}),
        (path.hot.as_strided, (x, [2, 2], [4, 1], 1), {}),
        (path.hot.view, (x, [2, -1]), {}),
    ]
    watched = [x, y, none, name, torch.float32, torch.strided, torch.channels_last, True]
    for turn in range(2):
        for call, args, kwargs in forms:
            for _ in range(2_000):
                call(*args, **kwargs)
        gc.collect()
        path.misses.clear()
        if turn == 0:
            before = [sys.getrefcount(entry) for entry in watched]
            memory = resident_kib()
    for call, args, kwargs in forms:
        for _ in range(CALLS // len(forms)):
            call(*args, **kwargs)
        path.misses.clear()
    gc.collect()
    after = [sys.getrefcount(entry) for entry in watched]
    grown = [now - then for now, then in zip(after, before)]
    assert all(abs(growth) < 50 for growth in grown), grown
    assert resident_kib() - memory < 2048, resident_kib() - memory


def failing_calls_leak_nothing():
    """The same for calls that raise."""
    path = HotPath("core", peer=Peer(keep=False))
    x = path.new(4)

    def fails(*_):
        raise KeyError("again")

    wrong = [("no plan",), None, (1, "s", [None, None]), (1, "s", [7]), (1, "x", []), (2**40, "v", []), (1, "t", ["out"])]
    plans = [path.kernel(lambda *_, plan=plan: (None, plan)) for plan in wrong]
    failing = path.kernel(fails)

    def one_round():
        path.misses.clear()
        for kernel in plans:
            try:
                kernel(x)
            except TypeError as error:
                assert "plan" in str(error), error
            else:
                assert kernel is plans[1], "a wrong plan was taken"
        try:
            failing(x)
        except KeyError:
            return
        raise AssertionError("the error of miss() did not come out")

    for _ in range(500):
        one_round()
    references, memory = sys.getrefcount(x), resident_kib()
    for _ in range(5_000):
        one_round()
    assert sys.getrefcount(x) == references
    assert resident_kib() - memory < 1024, resident_kib() - memory


def tensors_end():
    """Tensors and views go when the last name does, and their storage is freed once, with the last of them."""
    path = HotPath("core")
    freed = []
    tensor = path.new(4, 4)
    number = path.hot.number(tensor)
    view = path.hot.as_strided(tensor, [4], [4], 2)
    part = path.hot.as_strided(view, [3], [4], 6)
    assert path.hot.address(part) == (number << 40) + 24
    watch = weakref.ref(tensor, freed.append)
    del tensor
    assert freed and watch() is None and path.hot.free_count() == 0
    del view
    assert path.hot.free_count() == 0
    del part
    assert path.hot.free_count() == 1
    path.hot.flush()
    assert path.everything_sent() == struct.pack("<BIQ", FREE, 1, number)


def views_are_torchs():
    """`view` and `as_strided` agree with torch on shapes, strides, offsets and refusals."""
    path = HotPath("core", peer=Peer(keep=False))
    cases = [
        ((2, 3, 4), None, (6, 4)), ((2, 3, 4), None, (-1,)), ((2, 3, 4), (1, 2, 6), (24,)), ((4, 6), (6, 1), (2, 2, 6)),
        ((4, 6), (12, 2), (4, 2, 3)), ((4, 6), (12, 2), (24,)), ((1, 6), (99, 1), (3, 2)), ((), None, (1, 1)), ((1,), (7,), ()),
        ((0, 3), None, (3, 0)), ((0, 3), None, (0, -1)), ((0,), None, (-1, 0)), ((2, 2), None, (3,)), ((2, 2), None, (-1, -1)),
        ((6,), (0,), (2, 3)), ((2, 3), (0, 0), (6,)), ((2, 3), (0, 0), (2, 3, 1)), ((2, 3), None, (-2, 3)), ((4,), None, (2, 2, 1, 1)),
    ]  # fmt: skip
    for sizes, strides, asked in cases:
        local = torch.empty(400).as_strided(sizes, strides) if strides else torch.empty(sizes)
        remote = path.hot.as_strided(path.new(400), list(local.shape), list(local.stride()), 0)
        assert remote.shape == local.shape and remote.stride() == local.stride()
        try:
            expected = local.view(asked)
        except RuntimeError as error:
            expected = str(error)
        try:
            found = path.hot.view(remote, list(asked))
        except RuntimeError as error:
            found = str(error)
        if isinstance(expected, str):
            assert isinstance(found, str), (sizes, strides, asked, expected)
        else:
            assert (found.shape, found.stride()) == (expected.shape, expected.stride()), (sizes, strides, asked, found)
            assert found.storage_offset() == expected.storage_offset()
    x = path.new(10)
    for size, stride, offset in [([11], [1], 0), ([5], [3], 0), ([1], [1], 10), ([2, 2], [1], 0), ([-1], [1], 0), ([1], [-1], 0)]:
        try:
            path.hot.as_strided(x, size, stride, storage_offset=offset)
        except RuntimeError:
            continue
        raise AssertionError(f"{size} {stride} {offset} is not within ten elements")


def factories_allocate():
    """`empty` and `empty_strided` tell the host of frequent cases, and leave the others, and the time before a connection."""
    path = HotPath("core")
    given = []

    def fallback(*args, **kwargs):
        given.append((args, kwargs))
        return "fallback"

    empty, empty_strided = path.hot.empty(fallback), path.hot.empty_strided(fallback)
    a = empty([2, 3], dtype=torch.float16, device=torch.device("mps"))
    b = empty([2, 0], memory_format=torch.contiguous_format)
    c = empty_strided([2, 3], [1, 2], dtype=torch.int64, layout=torch.strided, pin_memory=False)
    assert (a.dtype, a.shape, b.dtype, c.stride()) == (torch.float16, (2, 3), torch.float32, (1, 2))
    assert not given
    others = [
        {"dtype": torch.float64}, {"dtype": torch.complex128}, {"pin_memory": True}, {"layout": torch.sparse_coo},
        {"memory_format": torch.channels_last},
    ]  # fmt: skip
    for options in others:
        assert empty([2, 2], **options) == "fallback"
    assert empty([-1]) == "fallback" and empty([2**62, 2**62]) == "fallback" and empty_strided([2], [1, 1]) == "fallback"
    assert given[0] == (([2, 2],), {"dtype": torch.float64}) and len(given) == len(others) + 3
    torch.set_default_dtype(torch.float16)
    assert empty([2]).dtype is torch.float16
    numbers = [path.hot.number(entry) for entry in (a, b, c)]
    path.hot.flush()
    sent = [entry for entry in messages(path.everything_sent(), {}) if entry[0] == ALLOC]
    assert sent[:3] == [(ALLOC, numbers[0], 12, 5), (ALLOC, numbers[1], 0, 6), (ALLOC, numbers[2], 48, 4)], sent
    path.hot.set_socket(-1)
    assert empty([2]) == "fallback"


def copies_choose():
    """`copy` calls the kernel for two plain tensors on the device, and the fallback for all else."""
    path = HotPath("core")
    kernel = path.kernel(lambda *args: (args[0], None), lazy=True)
    fallbacks = []
    copy = path.hot.copy(lambda *args, **kwargs: fallbacks.append((args, kwargs)), kernel)
    x, y, z = path.new(3), path.new(3), path.new(3, code=9)
    assert copy(x, y) is x and copy(x, y, False) is x and copy(z, x) is z and not fallbacks
    for pair in ((x, torch.empty(3)), (torch.empty(3), x), (z, torch._conj(z)), (torch._neg_view(x), y)):
        copy(*pair, non_blocking=True)
        assert fallbacks.pop()[1] == {"non_blocking": True}
    assert [cacheable for _, cacheable in path.misses] == [True, True, True]


def flushes_by_itself():
    """Bytes leave when the buffer is full, when no call has come for a moment, and when new tensors take much memory."""
    path = HotPath("core", flush_bytes=500)
    kernel = path.kernel(nothing)
    x = path.new(2)
    kernel(x)
    for _ in range(9):
        kernel(x)
    path.hot.append(b"\x03")
    assert path.peer.wait_for(9 * 13 + 1), "what was left over was not written"
    assert path.hot.counters()["calls"] == 9
    # The thread that wrote it has to be done, or it is its part to write what comes now.
    path.hot.flush()
    large, data = path.kernel(new_output(path)), path.new(9 << 20)
    large(data)
    # Nothing waits right after a call of much memory, which is too soon for the flusher.
    assert any([large(data) is None or path.hot.pending() == 0 for _ in range(20)])


def slow_peers_get_everything():
    """A peer that reads little at a time gets the same bytes, over a blocking and over a non-blocking socket."""
    for blocking in (True, False):
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(blocking)
        peer = type("Slow", (), {"ours": ours})()
        path = HotPath("core", peer=peer) if blocking else path
        path.hot.set_socket(ours.fileno())
        data = os.urandom(1 << 20)
        received = bytearray()

        def read():
            while len(received) < len(data):
                received.extend(theirs.recv(7777))

        thread = threading.Thread(target=read)
        thread.start()
        for start in range(0, len(data), 100_000):
            path.hot.append(data[start : start + 100_000])
            if start % 300_000 == 0:
                path.hot.flush()
        path.hot.flush()
        assert path.hot.pending() == 0
        thread.join(60)
        assert bytes(received) == data
        path.hot.set_socket(-1)


def interrupts_lose_nothing():
    """A signal's exception comes out of a flush that waits, and what was not written goes with the next one."""
    ours, theirs = socket.socketpair()
    path = HotPath("core", peer=type("Stuck", (), {"ours": ours})())
    data = os.urandom(4 << 20)

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    path.hot.append(data)
    try:
        path.hot.flush()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the flush was not interrupted")
    path.hot.append(b"the end")
    received = bytearray()

    def read():
        while part := theirs.recv(1 << 16):
            received.extend(part)

    thread = threading.Thread(target=read)
    thread.start()
    path.hot.flush()
    path.hot.set_socket(-1)
    ours.close()
    thread.join(60)
    assert bytes(received) == data + b"the end"


def lost_peers_are_told():
    """Writing to a peer that is gone asks `no_socket` with the reason, whoever finds out first."""
    asked = []

    def no_socket(error):
        asked.append(error)
        path.hot.set_socket(-1)
        raise RuntimeError(f"lost: {error}")

    path = HotPath("core", no_socket=no_socket)
    kernel, x = path.kernel(nothing), path.new(2)
    kernel(x)
    path.hot.flush()
    path.peer.theirs.shutdown(socket.SHUT_RDWR)
    path.peer.theirs.close()
    kernel(x)
    time.sleep(0.2)
    for expected in (errno.EPIPE, 0):
        try:
            path.hot.append(b"\x03")
            path.hot.flush()
        except RuntimeError as error:
            assert asked.pop() in (expected, errno.ECONNRESET), (asked, error)
        else:
            raise AssertionError("nothing was said")


def sockets_come_late():
    """Without a socket `no_socket(0)` connects, and a flush then goes on."""

    def no_socket(error):
        assert error == 0
        path.hot.set_socket(path.peer.ours.fileno())

    path = HotPath("core", no_socket=no_socket)
    path.hot.set_socket(-1)
    path.hot.append(b"early")
    assert path.hot.pending() == 5
    path.hot.flush()
    assert path.everything_sent() == b"early"


def sync_calls_follow():
    """Where every operator waits, the wait follows hits and misses, and its error is the operator's."""
    seen = []

    def sync_call():
        seen.append(len(path.misses))
        if len(seen) == 4:
            raise ValueError("from the host")

    path = HotPath("core", sync_call=sync_call)
    kernel, x = path.kernel(new_output(path)), path.new(2)
    for _ in range(3):
        kernel(x)
    assert seen == [1, 1, 1], seen
    references = sys.getrefcount(x)
    try:
        kernel(x)
    except ValueError as error:
        assert "host" in str(error)
    else:
        raise AssertionError("the error of sync_call did not come out")
    assert sys.getrefcount(x) == references
    path.hot.flush()


def threads_share_one_stream():
    """Calls of many threads: every message is whole, no number names two storages, each is freed once."""
    path = HotPath("core")
    kernels = [path.kernel(new_output(path)) for _ in range(4)]
    tensors = [path.new(8) for _ in range(4)]
    signatures = set()
    for kernel, tensor in zip(kernels, tensors):
        kernel(tensor)
    failures = []

    def work(kernel, tensor):
        try:
            kept = [kernel(tensor) for _ in range(50)]
            for turn in range(5_000):
                kept[turn % 50] = kernel(tensor)
                if turn % 500 == 0:
                    path.hot.flush()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(kernels, tensors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    own = {path.hot.number(tensor) for tensor in tensors}
    alive = set()
    calls = 0
    for kind, *rest in messages(path.everything_sent(), dict.fromkeys(range(1, 100), 2)):
        if kind == CALL:
            signature, (address, number) = rest
            signatures.add(signature)
            calls += 1
            assert address >> 40 in own, address
            assert number not in alive and number not in own, number
            alive.add(number)
        else:
            for number in rest[0]:
                # The results of the four misses were never announced here.
                assert number in alive or calls < 8, number
                alive.discard(number)
    assert calls == 4 * 5_050 and len(signatures) == 4, (calls, signatures)


def reentrant_calls_keep_order():
    """Python code that runs while a tensor is made (the collector's) may call kernels itself."""
    path = HotPath("core")
    outer, inner = path.kernel(new_output(path)), path.kernel(new_output(path))
    x = path.new(2)
    inner(x)
    outer(x)

    class Calls:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            inner(x)

    gc.set_threshold(1)
    for _ in range(2_000):
        Calls()
        outer(x)
    gc.set_threshold(700)
    stream = list(messages(path.everything_sent(), dict.fromkeys(range(1, 9), 2)))
    assert sum(entry[0] == CALL for entry in stream) > 2_000


def forked_children_stay_away():
    """A child of a fork gets an error from every way to the stream; the parent does not notice."""

    def no_socket(error):
        raise RuntimeError("this is a forked child")

    path = HotPath("core", no_socket=no_socket)
    kernel, x = path.kernel(new_output(path)), path.new(2)
    kept = [kernel(x) for _ in range(3)]
    path.hot.append(b"\x03")
    child = os.fork()
    if child == 0:
        path.hot.set_socket(-1)
        path.hot.append(b"from the child")
        kept.clear()
        raised = 0
        for call in (lambda: kernel(x), path.hot.flush, lambda: path.new(3)):
            try:
                call()
            except RuntimeError as error:
                raised += "fork" in str(error)
        os._exit(0 if raised == 3 and path.hot.pending() == 0 and path.hot.free_count() == 0 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    kernel(x)
    stream = path.everything_sent()
    assert b"child" not in stream and stream.count(b"\x01") >= 3


def exits_quietly():
    """Tensors, views, a thread and unsent bytes at the interpreter's end, without `close`."""
    path = HotPath("core")
    kernel, x = path.kernel(new_output(path)), path.new(2)
    keep = [kernel(x) for _ in range(100)]
    sys.modules["keep"] = (keep, path.hot.as_strided(x, [1], [1], 1))
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


def exits_quietly_closed():
    """The same after `close`, with tensors that go after it."""
    path = HotPath("core")
    kernel, x = path.kernel(new_output(path)), path.new(2)
    keep = [kernel(x) for _ in range(100)]
    path.hot.flush()
    path.hot.close()
    del keep[:50]
    assert path.hot.free_count() == 0
    sys.modules["keep"] = keep


def refuses():
    """What is wrong is refused by name."""
    from core_support import load_core

    core = load_core()
    for call, wanted in (
        (lambda: core.kernel(0, [], [], False, False), "configure"),
        (lambda: core.flush(), "configure"),
        (lambda: core.configure(), "torch_lib_dir"),
        (lambda: core.append("text"), "bytes"),
        (lambda: core.set_socket(2**40), "descriptor"),
    ):
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            assert wanted in str(error), error
        else:
            raise AssertionError(f"not refused: {wanted}")
    path = HotPath("core")
    for call, wanted in (
        (lambda: HotPath("core"), "before"),
        (lambda: path.new(2, code=77), "no tensor"),
        (lambda: path.hot.new_tensor([2], [1, 1], 6), "no tensor"),
        (lambda: path.hot.address(3), "tensor"),
    ):
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            assert wanted in str(error), error
        else:
            raise AssertionError(f"not refused: {wanted}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done", sys.argv[1])

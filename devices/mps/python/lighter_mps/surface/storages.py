# SPDX-License-Identifier: MIT OR Apache-2.0
"""`torch.UntypedStorage` on mps, as far as torch's C++ cannot do it in a Linux build.

C++ makes, resizes and reads storages through an allocator and a pointer; here the bytes are on the host and the
pointer is an address of the stream. So what touches bytes goes through a byte tensor on the same storage, and what
would hand the pointer to somebody else (shared memory, a file descriptor) is refused.
"""

import torch

_Storage = torch.UntypedStorage


def bytes_of(storage):
    """A byte tensor that is the whole storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def on_device(nbytes: int):
    """A fresh storage on the device."""
    return torch.empty(nbytes, dtype=torch.uint8, device="mps").untyped_storage()


def _is_mps(storage) -> bool:
    return storage.device.type == "mps"


def _from_bytes(data):
    """A storage with a sequence's bytes; the processor's storage takes the sequence as torch would."""
    return _mps(_Storage(data, device="cpu"))


def _new(original):
    """`torch.UntypedStorage(...)`, with `device="mps"` answered here."""

    def __new__(cls, *args, device=None, **kwargs):
        if device is None or torch.device(device).type != "mps":
            if device is not None:
                kwargs["device"] = device
            return original(cls, *args, **kwargs)
        if kwargs or len(args) > 1:
            raise TypeError("torch.UntypedStorage on mps takes a size in bytes or a sequence of them")
        if not args:
            return on_device(0)
        return on_device(args[0]) if isinstance(args[0], int) else _from_bytes(args[0])

    return __new__


def _cpu(storage):
    return bytes_of(storage).cpu().untyped_storage() if storage.nbytes() else _Storage(0)


def _mps(storage):
    return storage if _is_mps(storage) else on_device(storage.nbytes()).copy_(storage, False)


def _copy(storage, source, non_blocking=False):
    if isinstance(source, torch.storage.TypedStorage):
        source = source.untyped()
    if storage.nbytes() != source.nbytes():
        raise RuntimeError(f"size does not match, self was {storage.nbytes()} bytes but src was {source.nbytes()} bytes")
    if storage.nbytes():
        bytes_of(storage).copy_(bytes_of(source), non_blocking)
    return storage


def _fill(storage, value):
    bytes_of(storage).fill_(int(value))
    return storage


def _resize(storage, nbytes):
    raise RuntimeError(
        f"an mps storage of {storage.nbytes()} bytes keeps its size: the host holds it, and tensors on it know its "
        "length; resize a tensor instead (torch.Tensor.resize_)"
    )


def _clone(storage):
    return bytes_of(storage).clone().untyped_storage() if storage.nbytes() else on_device(0)


def _deepcopy(storage, memo):
    """As torch's own, which would make the copy with C++'s allocator."""
    known = memo.setdefault("torch", {})
    if storage._cdata not in known:
        known[storage._cdata] = _clone(storage)
    return known[storage._cdata]


def _tolist(storage):
    return _cpu(storage).tolist()


def _refuse_sharing(storage, *args, **kwargs):
    raise RuntimeError(
        "a tensor on mps cannot be shared with another process: its bytes are on the host and belong to this process's "
        "connection; send a copy instead (tensor.cpu()), and let the other process put it on its own mps device"
    )


# What a method becomes for storages on mps; every other storage keeps torch's own.
_METHODS = {
    "cpu": _cpu,
    "mps": _mps,
    "copy_": _copy,
    "fill_": _fill,
    "resize_": _resize,
    "clone": _clone,
    "__copy__": _clone,
    "__deepcopy__": _deepcopy,
    "tolist": _tolist,
    "share_memory_": _refuse_sharing,
    "_share_fd_cpu_": _refuse_sharing,
    "_share_filename_cpu_": _refuse_sharing,
}


def _choose(name, ours):
    theirs = getattr(_Storage, name)

    def method(storage, *args, **kwargs):
        return (ours if _is_mps(storage) else theirs)(storage, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = theirs.__doc__
    return method


def _mps_or_moved(storage):
    """`storage.mps()` is ours for every storage, as torch's own asks C++ for a storage on mps."""
    return _mps(storage)


def _copy_either(theirs):
    """`copy_` between the processor and the device, in either direction."""

    def copy_(storage, source, non_blocking=False):
        if _is_mps(storage) or source.device.type == "mps":
            return _copy(storage, source, bool(non_blocking))
        return theirs(storage, source, non_blocking)

    copy_.__doc__ = theirs.__doc__
    return copy_


def install() -> None:
    """Puts the methods on torch's class."""
    originals = {"copy_": _Storage.copy_}
    for name, ours in _METHODS.items():
        setattr(_Storage, name, _choose(name, ours))
    _Storage.mps = _mps_or_moved
    _Storage.copy_ = _copy_either(originals["copy_"])
    _Storage.__new__ = _new(_Storage.__new__)

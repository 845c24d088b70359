# SPDX-License-Identifier: MIT OR Apache-2.0
"""What computes: torch's cpu, cuda (ROCm too), xpu or mps device, behind one set of calls.

Torch is imported here, once, with one executing thread in mind. What a device cannot tell is None, never 0.
"""

import contextlib
import gc
import platform
import resource
import time

import torch


class Engine:
    """The processor; the other engines differ in what their torch module offers."""

    def __init__(self, device: torch.device):
        self.device = device

    def facts(self) -> dict:
        """For the service and for the client's hello."""
        return {"torch": str(torch.__version__), "python": platform.python_version(), "device": str(self.device)}

    def limit(self, max_bytes: int) -> None:
        """Keeps this process from taking much more than the client may hold: temporaries count here too."""
        try:
            with open("/proc/self/statm", encoding="ascii") as statm:
                data = int(statm.read().split()[5]) * resource.getpagesize()
        except OSError:
            # A worker that lighter restricts sees nothing of /proc, and has been given such a limit already.
            return
        most = data + 2 * max_bytes + (1 << 30)
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard == resource.RLIM_INFINITY or hard > most:
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))

    def synchronize(self) -> None:
        """Waits for all work that was given to the device; raises what went wrong in it."""

    def empty_cache(self) -> None:
        gc.collect()

    def driver_bytes(self):
        """Bytes that the device's driver holds for this process."""
        return None

    def description(self) -> str:
        return platform.processor() or platform.machine()

    def default_generator(self) -> torch.Generator:
        return torch.default_generator

    def new_generator(self) -> torch.Generator:
        return torch.Generator(device=self.device)

    def new_event(self):
        return ClockEvent()


class ClockEvent:
    """An event of a device that is never behind."""

    def __init__(self):
        self.at = None

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """All work before the event is done when it is recorded."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "ClockEvent") -> float:
        if self.at is None or other.at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (other.at - self.at) * 1000.0


class ModuleEngine(Engine):
    """A device whose calls are in a module of torch with CUDA's names."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.module = getattr(torch, device.type)

    def synchronize(self) -> None:
        self.module.synchronize()

    def empty_cache(self) -> None:
        gc.collect()
        self.module.empty_cache()

    def driver_bytes(self):
        return self.module.memory_reserved(self.device)

    def total_bytes(self) -> int:
        return self.module.get_device_properties(self.device).total_memory

    def limit(self, max_bytes: int) -> None:
        if hasattr(self.module, "set_per_process_memory_fraction"):
            share = min(1.0, (max_bytes + max_bytes // 4) / self.total_bytes())
            self.module.set_per_process_memory_fraction(share, self.device)

    def description(self) -> str:
        return self.module.get_device_name(self.device)

    def default_generator(self) -> torch.Generator:
        return self.module.default_generators[self.device.index or 0]

    def new_event(self):
        return self.module.Event(enable_timing=True)


class MpsEngine(ModuleEngine):
    """Apple's GPU."""

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def driver_bytes(self):
        return torch.mps.driver_allocated_memory()

    def total_bytes(self) -> int:
        return torch.mps.recommended_max_memory()

    def limit(self, max_bytes: int) -> None:
        torch.mps.set_per_process_memory_fraction(min(2.0, 1.25 * max_bytes / self.total_bytes()))

    def description(self) -> str:
        with contextlib.suppress(AttributeError, RuntimeError):
            return torch._C._mps_get_name()
        return f"Apple GPU of {platform.machine()}"

    def default_generator(self) -> torch.Generator:
        return torch.mps._get_default_mps_generator()


ENGINES = {"cpu": Engine, "cuda": ModuleEngine, "xpu": ModuleEngine, "mps": MpsEngine}


def engine_for(name: str, threads: int, max_bytes: int) -> Engine:
    """Starts the device, so that the first operator of a client finds it warm; raises why it does not work."""
    device = torch.device(name)
    if device.type not in ENGINES:
        raise RuntimeError(f"device {name}: no engine of the mps device; known are {', '.join(ENGINES)}")
    if device.type in ("cuda", "xpu"):
        device = torch.device(device.type, device.index or 0)
        getattr(torch, device.type).set_device(device)
    torch.set_num_threads(max(1, threads))
    engine = ENGINES[device.type](device)
    engine.limit(max_bytes)
    with torch.inference_mode():
        one = torch.ones(8, device=device)
        if float((one + one).sum()) != 16.0:
            raise RuntimeError(f"device {name}: 8 times 1 + 1 is not 16 there")
    engine.synchronize()
    # What exists by now lives as long as the process; looking through it again and again would cost each client.
    gc.collect()
    gc.freeze()
    gc.disable()
    return engine

"""The accelerator under a rank: the only module that knows cpu, cuda and rocm apart.

ROCm presents itself through ``torch.cuda``; its collective library answers to the name "nccl" (it is RCCL).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch

Kind = Literal["cpu", "cuda", "rocm"]


@dataclass(frozen=True)
class Device:
    """One rank's device. ``kind`` is what the machine has; ``type`` is torch's name for it."""

    kind: Kind

    @property
    def type(self) -> str:
        return "cpu" if self.kind == "cpu" else "cuda"

    @property
    def backend(self) -> str:
        """The collective backend for tensors on this device ("nccl" is RCCL on ROCm)."""
        return "gloo" if self.kind == "cpu" else "nccl"

    @property
    def module(self) -> ModuleType:
        """What ``torch.cuda`` is for a GPU; on CPU a module of the same shape that does nothing."""
        return _CpuModule() if self.kind == "cpu" else torch.cuda

    @property
    def pins_memory(self) -> bool:
        return self.kind != "cpu"


def detect() -> Device:
    """The device of this process: rocm or cuda where torch sees one, else cpu."""
    if not torch.cuda.is_available():
        return Device("cpu")
    return Device("rocm" if torch.version.hip else "cuda")


def page_lock(address: int, size: int) -> None:
    """Page-lock host memory of this process, whole pages, so that an accelerator copies from and to it at full speed.

    Raises:
        RuntimeError: the accelerator's driver refuses it, or there is none.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no accelerator")
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failure = int(runtime.cudaHostRegister(address, size, 0))
    if failure:
        with suppress(RuntimeError):
            # It stays with this thread until a launch reports it, which must be none that matters.
            torch.zeros(1, device="cuda")
    torch.cuda.check_error(failure)


@contextmanager
def side_stream(device: torch.device, *, after_main: bool = True) -> Iterator[None]:
    """Work of a thread on ``device`` beside what its main thread does there; nothing special on the CPU.

    A new thread has the first accelerator as its own. On the way out what was begun inside is finished.

    Args:
        after_main: what the main thread began before is waited for; not needed for memory that it has never used.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    if after_main:
        stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class _CpuModule(ModuleType):
    """The part of ``torch.cuda``'s interface that trainers call, for a machine without an accelerator.

    Memory figures are those of the process: peak resident size, and the machine's memory as the total.
    """

    def __init__(self) -> None:
        super().__init__("elastic_train.cpu_device")
        self.memory = SimpleNamespace(_record_memory_history=lambda **_: None, _snapshot=dict)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        return None

    def synchronize(self, device: object = None) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def reset_peak_memory_stats(self, device: object = None) -> None:
        return None

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(name="CPU", total_memory=host_memory())

    def memory_stats(self, device: object = None) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

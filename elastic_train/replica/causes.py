"""Why a replica failed: from an exception, or from what its supervisor says, to the causes of the event log."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic_train.config import ConfigError, EnvironmentProblem
from elastic_train.diloco.engine import NoPeerState, SyncFailed
from elastic_train.peer_ckpt.shards import StateMismatch

_COMM_WORDS = re.compile(
    r"gloo|nccl|rccl|connection (closed|reset|refused)|process group|timed out waiting|socket|broken pipe|"
    r"aborted|communicator",
    re.IGNORECASE,
)
_DEVICE_WORDS = re.compile(r"cuda error|hip error|device-side assert|uncorrectable ecc", re.IGNORECASE)
_KILLED = re.compile(r"Killed\(sig=(\d+)\)")
_CRASHED = re.compile(r"crashed_ranks=\[([\d, ]*)\]")
_EXITED = re.compile(r"exited with non-zero code (-?\d+)")


def of_exception(error: BaseException) -> str:
    """The cause (an entry of ``elastic_train.events.CAUSES``) that an exception in a rank stands for."""
    if isinstance(error, ConfigError | EnvironmentProblem | StateMismatch):
        return "config_error"
    if isinstance(error, NoPeerState):
        return "heal_failed"
    if isinstance(error, SyncFailed | dist.DistError):
        return "comm_error"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.AcceleratorError) or _DEVICE_WORDS.search(text):
        return "device_error"
    if isinstance(error, RuntimeError) and "Loss is not finite" in text:
        return "non_finite"
    if isinstance(error, RuntimeError | TimeoutError | OSError) and _COMM_WORDS.search(text):
        return "comm_error"
    if type(error).__module__.split(".")[0] in ("datasets", "pyarrow", "huggingface_hub"):
        return "data_error"
    return "exception"


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How a process ended, as its supervisor reported it."""

    cause: str
    """``signal`` or ``proc_exit``."""
    signal: str | None = None
    """Name of the signal, such as SIGKILL."""
    error: str


def crashed_ranks(report: str) -> list[int]:
    """The ranks that a report of Monarch's supervision speaks of."""
    found = _CRASHED.search(report)
    return [int(rank) for rank in found[1].split(",") if rank.strip()] if found else []


def of_process(report: str) -> ProcessEnd | None:
    """How a process ended according to Monarch's supervision; None if the report speaks of no process's end."""
    if killed := _KILLED.search(report):
        number = int(killed[1])
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return ProcessEnd(cause="signal", signal=name, error=f"killed by {name}")
    if exited := _EXITED.search(report):
        return ProcessEnd(cause="proc_exit", error=f"exited with code {exited[1]}")
    if "process exited cleanly" in report:
        return ProcessEnd(cause="proc_exit", error="exited with code 0 before it had trained to the end")
    return None

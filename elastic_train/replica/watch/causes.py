"""Why a rank failed: from the exception that ends it to the causes of the event log."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from elastic_train.config import ConfigError, EnvironmentProblem
from elastic_train.diloco.control import ReplicaBroken
from elastic_train.diloco.engine import Diverged, ForeignReplica, NonFinite, NoPeerState, SyncFailed
from elastic_train.peer_ckpt.directory import RegistryUnreachable
from elastic_train.peer_ckpt.shards import StateMismatch
from elastic_train.replica.data.sources import DataError

_DATA_LIBRARIES = ("datasets", "pyarrow", "huggingface_hub")
_COMM_WORDS = re.compile(
    r"gloo|nccl|rccl|connection (closed|reset|refused)|process group|timed out waiting|socket|broken pipe|"
    r"aborted|communicator",
    re.IGNORECASE,
)
_DEVICE_WORDS = re.compile(r"cuda error|hip error|device-side assert|uncorrectable ecc", re.IGNORECASE)


def of_exception(error: BaseException, *, proven: bool = False) -> str:
    """The cause (an entry of ``elastic_train.events.CAUSES``) that an exception in a rank stands for.

    Args:
        proven: the config has already trained in this run, so it cannot be what is wrong: a mount that is away for
            a moment must not end a run that others carry on.
    """
    if isinstance(error, ConfigError | EnvironmentProblem):
        return "exception" if proven else "config_error"
    if isinstance(error, NoPeerState | StateMismatch):
        return "heal_failed"
    if isinstance(error, SyncFailed | ReplicaBroken | RegistryUnreachable | dist.DistError):
        return "comm_error"
    if isinstance(error, Diverged | ForeignReplica):
        return "diverged"
    if isinstance(error, NonFinite):
        return "non_finite"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.AcceleratorError) or _DEVICE_WORDS.search(text):
        return "device_error"
    if isinstance(error, RuntimeError) and "Loss is not finite" in text:
        return "non_finite"
    if isinstance(error, RuntimeError | TimeoutError | OSError) and _COMM_WORDS.search(text):
        return "comm_error"
    if isinstance(error, DataError) or type(error).__module__.partition(".")[0] in _DATA_LIBRARIES:
        return "data_error"
    return "exception"

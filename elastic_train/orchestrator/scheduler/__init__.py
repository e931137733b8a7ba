"""Where hosts come from, one module for each scheduler. The rest of the orchestrator knows only what is named here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elastic_train.config import RunConfig
from elastic_train.orchestrator.scheduler.interface import Allocation, Scheduler

__all__ = ["Allocation", "Scheduler", "make_scheduler"]


def make_scheduler(config: RunConfig, logs: Path, note: Callable[[str], object]) -> Scheduler:
    """The scheduler that the config names. Imports Monarch, which reads its environment then.

    Args:
        logs: folder for what hosts print.
        note: told what a person should know, in a line.
    """
    match config.scheduler.kind:
        case "local":
            from elastic_train.orchestrator.scheduler.local import LocalScheduler

            return LocalScheduler(config.peer_ckpt.advertise_host or config.orchestrator.advertise_host)
        case "ssh":
            from elastic_train.orchestrator.scheduler.ssh import SshScheduler

            return SshScheduler(config, logs, note)

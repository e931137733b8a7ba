"""Why an incarnation of a replica failed, as its supervisor tells it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PREEMPTED = "a process of it was told to end, by SIGTERM"
"""What the error of a replica with the cause ``preempted`` begins with."""


@dataclass(frozen=True, kw_only=True)
class ReplicaFailure:
    """Why an incarnation ended before it had trained to the end."""

    cause: str
    rank: int | None
    step: int
    error: str
    """One line."""
    signal: str | None = None
    traceback: str | None = None
    detect_s: float = 0.0
    """Seconds from the last sign of life to the detection."""
    stacks: str | None = None
    """Folder in the run folder that tells where the threads of all ranks stood."""

    def fields(self) -> dict[str, Any]:
        """The fields of the event ``failure_detected``."""
        return asdict(self)

"""How a run ended, and the exit code that stands for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a run, as its event log and its exit code tell it."""

    status: Literal["succeeded", "failed", "interrupted"]
    cause: str | None = None
    """An entry of ``elastic_train.events.CAUSES``; None unless the run failed."""
    reason: str | None = None
    """One line for people."""

    @property
    def exit_code(self) -> int:
        """0 trained to the last step, 1 failed, 2 the config turned out to be wrong, 130 interrupted."""
        if self.status == "failed":
            return 2 if self.cause == "config_error" else 1
        return 0 if self.status == "succeeded" else 130

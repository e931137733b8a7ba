"""The tokens of a run that count: those that have come into its global model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.events import Record


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What came into the global model, and in what time."""

    tokens: int
    seconds: float

    @property
    def per_minute(self) -> float:
        """Tokens a minute; 0 where no time has passed."""
        return 60 * self.tokens / self.seconds if self.seconds > 0 else 0.0


def goodput(events: Sequence[Record], seconds: float) -> Goodput:
    """From the first inner step of any replica, for so many seconds.

    What a replica gave before it ended without a word of it is not counted, and what a restored run goes back behind is
    taken away again.
    """
    began = next((event["t"] for event in events if event["event"] == "first_step"), None)
    if began is None:
        return Goodput(tokens=0, seconds=seconds)
    told: dict[int, int] = {}
    for event in events:
        if event["t"] > began + seconds:
            continue
        if event["event"] == "run_restored":
            told = {step: tokens for step, tokens in told.items() if step <= event["outer_step"]}
        elif event["event"] in ("sync_committed", "caught_up"):
            step = event["outer_step"]
            told[step] = told.get(step, 0) + event.get("tokens", 0)
    return Goodput(tokens=sum(told.values()), seconds=seconds)

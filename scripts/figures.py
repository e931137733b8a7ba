"""Medians and worst cases over many recoveries."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.verdict import Strike


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How long something takes mostly, and at worst; None where nothing was measured."""

    median_s: float | None
    worst_s: float | None


def spread(values: Iterable[float | None]) -> Spread:
    """The spread of those values that there are."""
    measured = [value for value in values if value is not None]
    if not measured:
        return Spread(median_s=None, worst_s=None)
    return Spread(median_s=round(statistics.median(measured), 3), worst_s=round(max(measured), 3))


def phases(strikes: Sequence[Strike]) -> dict[str, Spread]:
    """Seconds from the fault to each milestone, over the recoveries that reached it, the earliest milestone first."""
    names = dict.fromkeys(name for strike in strikes for name in strike.phases)
    spreads = {name: spread(strike.phases.get(name) for strike in strikes) for name in names}
    return dict(sorted(spreads.items(), key=lambda item: item[1].median_s or 0.0))


def by_kind(strikes: Sequence[Strike]) -> dict[str, dict[str, Any]]:
    """For each kind of fault: how many there were, how many were recovered from, and in what time."""
    figures: dict[str, dict[str, Any]] = {}
    for kind in sorted({strike.kind for strike in strikes}):
        those = [strike for strike in strikes if strike.kind == kind]
        figures[kind] = {
            "count": len(those),
            "recovered": sum(strike.recovered_s is not None for strike in those),
            **asdict(spread(strike.recovered_s for strike in those)),
            "phases": {name: measured.median_s for name, measured in phases(those).items()},
        }
    return figures


def recovery_figures(strikes: Sequence[Strike]) -> dict[str, Any]:
    """What the recoveries took, and what they cost the replicas that lived on."""
    at_return = spread(strike.survivor_wait_s for strike in strikes)
    in_outage = spread(strike.outage_wait_s for strike in strikes)
    return {
        **asdict(spread(strike.recovered_s for strike in strikes)),
        "survivor_wait_median_s": at_return.median_s,
        "survivor_wait_worst_s": at_return.worst_s,
        "survivor_outage_wait_worst_s": in_outage.worst_s,
        "phases": {name: asdict(measured) for name, measured in phases(strikes).items()},
    }

"""What a join costs the joiner and those that it joins, read from the events and the metrics of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from math import inf
from typing import Any

from elastic_train.events import Record
from scripts.figures import spread

Life = tuple[int, int]
"""A replica and its incarnation."""

STEPS_BEFORE = 50
"""As many steps of a survivor tell how fast it was before the transfer."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """One incarnation that took its state from peers. Durations are seconds, None where there was nothing to see."""

    replica: int
    incarnation: int
    heal_s: float
    donors: int
    """Slots that gave bytes of the state; 0 where it came from the memory of its own host."""
    steps_before_sync: int | None
    """Inner steps whose tokens are in its first commit; None if it had none."""
    intervals_skipped: int
    """Outer steps that others agreed upon after it had its state, and committed before it committed any."""
    wait_beyond_step_s: float | None
    """The longest that a survivor waited in the sync in which it came in, once it had its state, less its median inner
    step; below 0 if the wait was shorter than that. Before, survivors wait for a replica that is away."""
    step_ratios: tuple[float, ...] = ()
    """For each survivor that made a whole step during the transfer: its median step then, to that before."""
    touched_step_ratios: tuple[float, ...] = ()
    """The same for the steps that lie partly or wholly in the transfer."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """From one logged step to the next of the same interval: no sync lies between them."""

    began: float
    ended: float
    step_s: float
    step_tokens: float


def joins(events: Iterable[Record], metrics: Iterable[Record]) -> list[Join]:
    """Every join of a run, in the order in which the states had come.

    A replica that was kept out of the average and took a peer's state in place is none: it has committed before.

    Args:
        events, metrics: The records of events.jsonl and metrics.jsonl. Their times are compared, so all replicas must
            have run under one clock.
    """
    log = sorted(events, key=lambda event: float(event["t"]))
    lives = _by_life(log)
    paces = {life: _paces(records) for life, records in _by_life(metrics).items()}
    commits = [event for event in log if event["event"] == "sync_committed"]
    heals = {life: heal for life, own in lives.items() if (heal := _heal(own)) is not None}
    entries = {life: entry for life in heals if (entry := _first(lives[life], "sync_committed")) is not None}

    def join(life: Life, heal: Record) -> Join:
        entry = entries.get(life)
        began = _first(lives[life], "heal_started")
        start = began["t"] if began else heal["t"] - heal["duration_s"]
        ratios = [_step_ratios(theirs, start, heal["t"]) for other, theirs in paces.items() if other[0] != life[0]]
        return Join(
            replica=life[0],
            incarnation=life[1],
            heal_s=heal["duration_s"],
            donors=_givers(heal),
            steps_before_sync=_steps(entry, chain.from_iterable(paces.values())),
            intervals_skipped=_skipped(heal, entry, commits, until=_end(lives[life])),
            wait_beyond_step_s=_beyond_step(_survivors(entry, commits, entries), paces.get(life, []), heal["t"]),
            step_ratios=tuple(whole for whole, _ in ratios if whole is not None),
            touched_step_ratios=tuple(touched for _, touched in ratios if touched is not None),
        )

    return [join(life, heal) for life, heal in sorted(heals.items(), key=lambda item: float(item[1]["t"]))]


def join_figures(found: Sequence[Join]) -> dict[str, Any]:
    """The figures over all joins; None where no join had any."""
    steps = [join.steps_before_sync for join in found if join.steps_before_sync is not None]
    ratios = [ratio for join in found for ratio in join.step_ratios]
    touched = [ratio for join in found for ratio in join.touched_step_ratios]
    return {
        "joiner_steps_before_sync": {
            "median": statistics.median(steps) if steps else None,
            "least": min(steps, default=None),
        },
        "intervals_skipped": sum(join.intervals_skipped for join in found),
        "survivor_join_wait_beyond_step_s": asdict(spread(join.wait_beyond_step_s for join in found)),
        "survivor_step_ratio": round(statistics.median(ratios), 3) if ratios else None,
        "survivor_step_ratios": len(ratios),
        "survivor_touched_step_ratio": round(statistics.median(touched), 3) if touched else None,
        "donors": [join.donors for join in found],
        "heal_s": asdict(spread(join.heal_s for join in found)),
    }


def _heal(own: Sequence[Record]) -> Record | None:
    """The state that a life began with, if it was a peer's."""
    heal, commit = _first(own, "heal_finished"), _first(own, "sync_committed")
    return heal if heal and (commit is None or heal["t"] < commit["t"]) else None


def _givers(heal: Record) -> int:
    given: Mapping[str, int] | None = heal.get("donor_bytes")
    return len(set(heal["donors"])) if given is None else sum(size > 0 for size in given.values())


def _steps(entry: Record | None, paces: Iterable[Pace]) -> int | None:
    """A commit moves the nominal step on, so only the tokens tell how many steps there were. All replicas of a run
    train the same number of them in a step."""
    of_a_step = [pace.step_tokens for pace in paces]
    return round(float(entry["tokens"]) / statistics.median(of_a_step)) if entry and of_a_step else None


def _skipped(heal: Record, entry: Record | None, commits: Sequence[Record], *, until: float) -> int:
    """A sync whose quorum had come before the state cannot have the joiner in it, so it is not counted."""
    agreed: dict[int, float] = {}
    for commit in commits:
        outer_step, t = commit["outer_step"], commit["t"] - commit["reduce_s"]
        agreed[outer_step] = min(t, agreed.get(outer_step, inf))
    last = inf if entry is None else entry["outer_step"]
    return sum(heal["t"] < t < until and outer_step < last for outer_step, t in agreed.items())


def _survivors(entry: Record | None, commits: Iterable[Record], entries: Mapping[Life, Record]) -> list[Record]:
    """The parts in the sync in which a joiner came in of those that did not come in with it."""
    if entry is None:
        return []
    same_sync = [commit for commit in commits if commit["outer_step"] == entry["outer_step"]]
    return [commit for commit in same_sync if commit != entries.get(_life(commit))]


def _beyond_step(survivors: Sequence[Record], own: Sequence[Pace], healed: float) -> float | None:
    if not survivors or not own:
        return None
    step_s = statistics.median(pace.step_s for pace in own)
    return round(max(_wait_since(healed, commit) for commit in survivors) - step_s, 4)


def _wait_since(t: float, commit: Record) -> float:
    """What is left of a wait for a quorum from then on."""
    quorum = float(commit["t"]) - float(commit["reduce_s"])
    return max(0.0, min(float(commit["wait_s"]), quorum - t))


def _step_ratios(paces: Sequence[Pace], began: float, ended: float) -> tuple[float | None, float | None]:
    """How much slower a survivor was from ``began`` to ``ended``: by the steps that lie in that time, and by all that
    it has a part of. None where there is no such step, or none before."""
    before = [pace.step_s for pace in paces if pace.ended <= began][-STEPS_BEFORE:]
    whole = [pace.step_s for pace in paces if pace.began >= began and pace.ended <= ended]
    touched = [pace.step_s for pace in paces if pace.ended > began and pace.began < ended]

    def ratio(steps: Sequence[float]) -> float | None:
        return round(statistics.median(steps) / statistics.median(before), 3) if steps and before else None

    return ratio(whole), ratio(touched)


def _paces(records: Sequence[Record]) -> list[Pace]:
    """How long the steps of one life took, as far as two of the same interval were logged one after the other."""
    return [
        Pace(
            began=one["t"],
            ended=other["t"],
            step_s=(other["t"] - one["t"]) / steps,
            step_tokens=(other["tokens"] - one["tokens"]) / steps,
        )
        for one, other in pairwise(records)
        if (steps := other["step"] - one["step"]) > 0 and one["outer_step"] == other["outer_step"]
    ]


def _end(own: Sequence[Record]) -> float:
    failure = _first(own, "failure_detected")
    return inf if failure is None else float(failure["t"])


def _first(own: Sequence[Record], name: str) -> Record | None:
    return next((event for event in own if event["event"] == name), None)


def _by_life(records: Iterable[Record]) -> dict[Life, list[Record]]:
    lives: dict[Life, list[Record]] = {}
    for record in records:
        if "replica" in record:
            lives.setdefault(_life(record), []).append(record)
    return lives


def _life(record: Record) -> Life:
    return record["replica"], record.get("incarnation", 0)

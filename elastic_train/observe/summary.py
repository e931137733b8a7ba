"""What a person wants to know when a run is over: did it learn, what died, what did that cost."""

from __future__ import annotations

import statistics
from pathlib import Path

from elastic_train.metrics import BUCKETS, Recovery, RunFold
from elastic_train.observe import words

# More than these and the end of a long run would scroll away what it says first.
_RECOVERIES_TOLD = 10


def summary_lines(fold: RunFold) -> list[str]:
    """The run in a few sentences, one a line."""
    return [*_outcome(fold), *_recoveries(fold), *_retired(fold), *_places(fold)]


def recovery_lines(recovery: Recovery, fold: RunFold) -> list[str]:
    """One failure: what died, who gave the state, how long each phase took, what it cost."""
    injected = f" (injected: {recovery.fault})" if recovery.fault else ""
    lines = [f"{words.victim(recovery)}{injected}"]
    if recovery.stacks:
        lines.append(f"  where its threads stood: {Path(fold.run_dir) / recovery.stacks}")
    if recovery.t_healed is not None:
        lines.append(f"  state from {words.origin(recovery.source, recovery.donors)}{_transfer(recovery)}")
    reached = ", ".join(f"{name} {words.seconds(after)}" for name, after in recovery.phases().items())
    how = ", in its standby" if recovery.standby else ""
    lines.append(f"  after its failure{how}: {reached}")
    lines.append(f"  cost: {_cost(recovery, fold)}")
    return lines


def _outcome(fold: RunFold) -> list[str]:
    named = f"run {fold.name}" if fold.name else "run"
    why = f" ({words.cause(fold.cause)})" if fold.cause else ""
    of_steps = "" if fold.steps is None else f" of {fold.steps}"
    lines = [
        f"{named} {fold.status}{why}: {fold.inner_step}{of_steps} steps, {fold.outer_step} outer steps, "
        f"{words.seconds(fold.wall_s())}"
    ]
    if fold.first_loss is not None and fold.last_loss is not None:
        lines.append(f"loss {fold.first_loss:.4f} -> {fold.last_loss:.4f}")
    efficiency = fold.efficiency()
    if efficiency is not None:
        spent = [fold.buckets(slot) for slot in fold.replicas]
        total = sum(sum(buckets.values()) for buckets in spent)
        shares = {name: sum(buckets[name] for buckets in spent) / total for name in BUCKETS if name != "train"}
        rest = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        lines.append(f"{efficiency:.1%} of the replicas' time went into training steps ({rest})")
    return lines


def _recoveries(fold: RunFold) -> list[str]:
    recoveries = fold.recoveries
    if not recoveries:
        return ["nothing failed"]
    lines = [f"{len(recoveries)} {'failure' if len(recoveries) == 1 else 'failures'}:"]
    told = recoveries[-_RECOVERIES_TOLD:]
    if len(told) < len(recoveries):
        lines.append(f"  (the last {len(told)}; the log has all of them)")
    for recovery in told:
        lines += [f"  {line}" for line in recovery_lines(recovery, fold)]
    back = [recovery.recovered_s for recovery in recoveries if recovery.recovered_s is not None]
    if len(back) > 1:
        median, worst = words.seconds(statistics.median(back)), words.seconds(max(back))
        lines.append(f"  from failure to first step: median {median}, worst {worst}")
    return lines


def _transfer(recovery: Recovery) -> str:
    moved = [words.size(recovery.bytes)] if recovery.bytes else []
    if recovery.heal_s is not None:
        moved.append(f"in {words.seconds(recovery.heal_s)}")
    return f", {' '.join(moved)}" if moved else ""


def _cost(recovery: Recovery, fold: RunFold) -> str:
    away_s = _away_until(recovery, fold) - recovery.t_origin
    everybody_s = fold.wall_s() * len(fold.replicas)
    share = away_s / everybody_s if everybody_s > 0 else 0.0
    parts = [f"replica {recovery.replica} away for {words.seconds(away_s)}, {share:.1%} of the replicas' time"]
    if recovery.outage_wait_s is not None:
        parts.append(f"others waited at most {words.seconds(recovery.outage_wait_s)} at a sync without it")
    if recovery.survivor_wait_s is not None:
        parts.append(f"others waited {words.seconds(recovery.survivor_wait_s)} at the sync in which it joined")
    if recovery.t_failed_again is not None:
        parts.append("it failed again on the way back")
    elif recovery.t_first_step is None:
        parts.append(_never_back(recovery, fold))
    return "; ".join(parts)


def _never_back(recovery: Recovery, fold: RunFold) -> str:
    if recovery.replica in fold.retired:
        return "it did not come back"
    return "it is not back yet" if fold.ended_t is None else "it was not back when the run ended"


def _away_until(recovery: Recovery, fold: RunFold) -> float:
    """Its first step, else its next failure, else the end of what the log tells."""
    for t in (recovery.t_first_step, recovery.t_failed_again):
        if t is not None:
            return t
    return (fold.started_t or 0.0) + fold.wall_s()


def _retired(fold: RunFold) -> list[str]:
    retired = sorted(fold.retired.items())
    return [f"replica {slot} was given up: {words.cause(name)}" for slot, name in retired]


def _places(fold: RunFold) -> list[str]:
    lines = []
    if fold.run_dir:
        lines.append(f"log: {Path(fold.run_dir) / 'events.jsonl'}")
    if fold.checkpoint is not None:
        lines.append(f"last state: {fold.checkpoint.path} (outer step {fold.checkpoint.outer_step})")
    return lines

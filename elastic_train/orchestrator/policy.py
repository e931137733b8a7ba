"""What to do about a failed replica, or about the loss of all: a pure function of what failed before and the config.

The manager carries the decision out. Kept apart from it, the escalation can be tested over whole histories
without a process, a clock or a random number of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from elastic_train.config import RecoveryConfig

# A process on the same host would fail again.
_NEEDS_ANOTHER_HOST = frozenset({"host_lost", "device_error"})
# These say nothing about the program, so repeating them at one step proves no defect.
_NOT_THE_PROGRAM = frozenset({"host_lost", "preempted"})
# 2**64 times any initial delay is past every bound, and a larger exponent would overflow a float.
_LARGEST_EXPONENT = 64
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One incarnation's end."""

    slot: int
    incarnation: int
    cause: str
    """One of elastic_train.events.CAUSES."""
    step: int
    """The inner step at which it failed."""
    error: str
    """What tells this error from others: the last line of the traceback, or the signal's name."""
    t: float
    """When, in unix seconds."""
    healthy_s: float
    """How long the incarnation had been RUNNING."""


@dataclass(frozen=True)
class RestartInPlace:
    """Start the processes again where they were."""

    level: ClassVar[str] = "restart_in_place"
    delay_s: float


@dataclass(frozen=True)
class Reallocate:
    """Give the hosts back and ask for others."""

    level: ClassVar[str] = "reallocate"
    delay_s: float
    exclude_host: bool


@dataclass(frozen=True)
class Retire:
    """Give the replica up; the others go on."""

    level: ClassVar[str] = "retire"
    cause: str


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The run cannot go on from what its replicas hold."""

    cause: str
    """One of elastic_train.events.CAUSES."""
    reason: str
    """One line for people."""
    outer_step: int | None
    """Of the newest durable snapshot that all can go on from; None: there is none."""
    without: str
    """Why there is none, and what to do about it; one line."""
    healthy_s: float
    """How long the replicas had trained since they last began together."""


@dataclass(frozen=True)
class AskToRestore:
    """The others are too few without this replica, so only a common new beginning can help."""

    level: ClassVar[str] = "restore"
    cause: str
    reason: str
    """One line for people."""


@dataclass(frozen=True)
class RestoreAll:
    """Let all replicas begin again from the last durable snapshot."""

    level: ClassVar[str] = "restore"
    delay_s: float


@dataclass(frozen=True)
class Stop:
    """End the run."""

    level: ClassVar[str] = "stop"
    cause: str
    reason: str
    """One line for the person who started the run."""


Decision = RestartInPlace | Reallocate | Retire | AskToRestore | Stop
"""About one replica."""


def decide(
    failure: Failure,
    history: Sequence[Failure],
    *,
    live: int,
    min_replicas: int,
    recovery: RecoveryConfig,
    jitter: float,
) -> Decision:
    """The lowest level of escalation that may still help.

    `history` holds this slot's earlier failures, oldest first; `live` counts the other replicas that have not
    ended; `jitter` is in [0, 1) and comes from outside so that the decision can be replayed.
    """
    if failure.cause == "config_error":
        return Stop(failure.cause, f"the configuration is wrong, no restart can help: {failure.error}")

    failures = [*history, failure]
    spent = _budget_spent([f for f in failures if f.cause != "preempted"], recovery.forgive_after_s)
    attempts = _budget_spent(failures, recovery.forgive_after_s)
    delay_s = _delay(attempts, recovery, jitter)

    if failure.cause == "preempted":
        return Reallocate(delay_s, exclude_host=False)
    if _repeats(failures) >= recovery.same_error_limit:
        repeated = f"failed {recovery.same_error_limit} times in a row at step {failure.step}"
        return _give_up(failure, repeated, live, min_replicas)
    if spent > recovery.restarts_in_place + recovery.reallocations:
        return _give_up(failure, "used up its restarts and reallocations", live, min_replicas)
    if spent > recovery.restarts_in_place or failure.cause in _NEEDS_ANOTHER_HOST:
        return Reallocate(delay_s, exclude_host=True)
    return RestartInPlace(delay_s)


def decide_for_all(
    loss: Loss, history: Sequence[Loss], *, recovery: RecoveryConfig, jitter: float
) -> RestoreAll | Stop:
    """The last level of escalation that may still help, or the end.

    `history` holds the run's earlier losses after which it was restored, oldest first; `jitter` as in `decide`.
    """
    if loss.outer_step is None:
        return Stop(loss.cause, f"{loss.reason}; {loss.without}")
    spent = _restores_spent([*history, loss], recovery.forgive_after_s)
    if spent > recovery.restores:
        used = f"the run went back to a durable snapshot {len(history)} times before"
        return Stop(loss.cause, f"{loss.reason}; {used} (recovery.restores = {recovery.restores})")
    return RestoreAll(_delay(spent, recovery, jitter))


def _restores_spent(losses: Sequence[Loss], forgive_after_s: float) -> int:
    """How many losses still count. Health forgives one only if there is a newer snapshot than the last time: else the
    run would go round in a circle for ever.
    """
    spent, last = 0, -1
    for loss in losses:
        assert loss.outer_step is not None, "there was something to restore"
        forgiven = int(loss.healthy_s / forgive_after_s) if loss.outer_step > last else 0
        spent, last = max(0, spent - forgiven) + 1, loss.outer_step
    return spent


def _budget_spent(failures: Sequence[Failure], forgive_after_s: float) -> int:
    """How many failures still count: each `forgive_after_s` of health before a failure forgives an earlier
    one.
    """
    spent = 0
    for failure in failures:
        spent = max(0, spent - int(failure.healthy_s / forgive_after_s)) + 1
    return spent


def _delay(attempts: int, recovery: RecoveryConfig, jitter: float) -> float:
    """Nothing for a first failure, then doubling up to the bound, spread by the jitter."""
    if attempts <= 1:
        return 0.0
    doubled: float = recovery.backoff_initial_s * 2.0 ** min(attempts - 2, _LARGEST_EXPONENT)
    return min(recovery.backoff_max_s, doubled) * (1.0 + recovery.backoff_jitter * jitter)


def _repeats(failures: Sequence[Failure]) -> int:
    """How often the last failure came in a row with the same error at the same step."""
    last = failures[-1]
    if last.cause in _NOT_THE_PROGRAM:
        return 0
    telling = (f for f in reversed(failures) if f.cause not in _NOT_THE_PROGRAM)
    same = takewhile(lambda f: (_signature(f), f.step) == (_signature(last), last.step), telling)
    return sum(1 for _ in same)


def _signature(failure: Failure) -> str:
    """What stays the same when the same thing happens again: seconds, addresses and counts do not."""
    return _NUMBER.sub("#", failure.error)


def _give_up(failure: Failure, why: str, live: int, min_replicas: int) -> Decision:
    if live >= min_replicas:
        return Retire(failure.cause)
    return AskToRestore(
        failure.cause,
        f"replica {failure.slot} {why} ({failure.error}), and without it only {live} of at least "
        f"{min_replicas} replicas would be left",
    )

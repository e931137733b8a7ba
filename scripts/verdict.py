"""What a run made of the faults that struck it, judged on its log alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf

from elastic_train.config import FaultSpec
from elastic_train.events import Record
from elastic_train.metrics import Recovery, RunFold
from elastic_train.observe.invariants import violations
from scripts.fault_plan import FaultPlan

CAUSE_OF_KIND: Mapping[str, str] = {
    "kill": "signal",
    "exit": "proc_exit",
    "segfault": "signal",
    "exception": "exception",
    "comms": "comm_error",
    "hang": "hang",
    "stop": "hang",
    "replica_actor": "signal",
    "host": "host_lost",
}
"""The cause that a failure must be reported with, by the kind of the fault."""

BORNE_AS: Mapping[str, str] = {"nan": "non_finite", "bitflip": "diverged"}
"""Why a replica must be kept out of the average, by the kind of a fault that it gets over without a restart."""

HARMLESS = frozenset({"slow", "lighthouse"})
"""Kinds of faults that nothing may come of for a replica."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault and the way back from it. Durations are seconds; phases count from the fault."""

    fault: str
    kind: str
    replica: int
    cause: str
    detail: str
    recovered_s: float | None
    """Until the end of the first inner step of the next incarnation, or for a fault that takes no restart until the
    next commit of the replica; None if there was none."""
    phases: Mapping[str, float] = field(default_factory=dict)
    survivor_wait_s: float | None = None
    """The longest that a peer waited in the sync in which the replica came back."""
    outage_wait_s: float | None = None
    """The longest that a peer waited in a sync without it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of the plan, and everything that was not as it must be."""

    strikes: tuple[Strike, ...]
    unfinished: tuple[str, ...]
    """Faults whose replica was still on its way when its peers finished: the plan left it too little time."""
    reasons: tuple[str, ...]
    """Why the run failed, one sentence each; empty if it passed."""
    saved: str
    """The folder of the last state, as the log tells it; empty if none was saved."""


def judge(plan: FaultPlan, events: Sequence[Record]) -> Verdict:
    """Follow every fault of the plan through the log of the run, and check the log itself."""
    fold = RunFold.of(events)
    planned = {str(fault): fault for fault in plan.faults}
    # A fault that one failure is put down to cannot explain another.
    recoveries = {recovery.fault: recovery for recovery in reversed(fold.recoveries)}
    struck = {
        text: (fault, recoveries[text])
        for text, fault in planned.items()
        if text in recoveries and fault.kind in CAUSE_OF_KIND
    }
    borne = _borne(planned, fold, events)
    unfinished = _unfinished(plan, struck, borne, fold)
    return Verdict(
        strikes=(*(_strike(fault, recovery) for fault, recovery in struck.values()), *borne.values()),
        unfinished=unfinished,
        saved="" if fold.checkpoint is None else fold.checkpoint.path,
        reasons=(
            *_of_the_end(plan, fold),
            *_of_the_faults(planned, {*struck, *borne}, fold),
            *_of_the_recoveries(struck, unfinished),
            *_of_the_borne(borne, unfinished),
            *_of_other_failures(struck, fold),
            *_of_other_fences(fold, events),
            *(f"{name}: {found}" for name, all_found in violations(events).items() for found in all_found),
        ),
    )


Struck = Mapping[str, tuple[FaultSpec, Recovery]]


def _strike(fault: FaultSpec, recovery: Recovery) -> Strike:
    return Strike(
        fault=str(fault),
        kind=fault.kind,
        replica=fault.replica,
        cause=recovery.cause,
        detail=recovery.detail,
        recovered_s=None if recovery.recovered_s is None else round(recovery.recovered_s, 3),
        phases={name: round(after, 3) for name, after in recovery.phases().items()},
        survivor_wait_s=recovery.survivor_wait_s,
        outage_wait_s=recovery.outage_wait_s,
    )


def _borne(planned: Mapping[str, FaultSpec], fold: RunFold, events: Sequence[Record]) -> dict[str, Strike]:
    """The faults after which their replica was kept out of an average, before it was struck again."""
    borne: dict[str, Strike] = {}
    for happened in fold.faults:
        fault = planned.get(happened.spec)
        if fault is None or fault.kind not in BORNE_AS or happened.spec in borne:
            continue
        began = happened.t
        until = min(
            (other.t for other in fold.faults if other.replica == fault.replica and other.t > began), default=inf
        )
        own = [event for event in events if event.get("replica") == fault.replica and event["t"] >= began]
        fence = next((event for event in own if event["event"] == "fenced" and event["t"] < until), None)
        if fence is None:
            continue
        back = next((e["t"] for e in own if e["event"] == "sync_committed" and e["t"] > fence["t"]), None)
        borne[happened.spec] = Strike(
            fault=happened.spec,
            kind=fault.kind,
            replica=fault.replica,
            cause=fence["cause"],
            detail="",
            recovered_s=None if back is None else round(back - began, 3),
            phases={"kept out": round(fence["t"] - began, 3)},
        )
    return borne


def _unfinished(plan: FaultPlan, struck: Struck, borne: Mapping[str, Strike], fold: RunFold) -> tuple[str, ...]:
    """Only the last fault can have come too late; who was struck earlier had the time of the next ones as well."""
    last = str(plan.faults[-1]) if plan.faults else ""
    if fold.status == "succeeded" and last in borne and borne[last].recovered_s is None:
        return (last,)
    if fold.status != "succeeded" or last not in struck:
        return ()
    fault, recovery = struck[last]
    on_its_way = recovery.t_first_step is None and recovery.t_failed_again is None and fault.replica not in fold.retired
    return (last,) if on_its_way else ()


def _of_the_end(plan: FaultPlan, fold: RunFold) -> Iterator[str]:
    if fold.status != "succeeded":
        because = f" ({fold.cause})" if fold.cause else ""
        yield f"the run is not succeeded but {fold.status}{because}, at step {fold.inner_step} of {plan.steps}"
    elif fold.inner_step != plan.steps:
        yield f"the run says that it succeeded at step {fold.inner_step} of {plan.steps}"
    elif fold.checkpoint is None or fold.checkpoint.outer_step != fold.outer_step:
        yield f"there is no checkpoint of the last outer step {fold.outer_step}"


def _of_the_faults(planned: Mapping[str, FaultSpec], found: Set[str], fold: RunFold) -> Iterator[str]:
    happened = [fault.spec for fault in fold.faults]
    for text, fault in planned.items():
        if text not in happened:
            yield f"{text} did not happen"
        elif text not in found and fault.kind not in HARMLESS:
            yield f"{text} was never detected"
        if happened.count(text) > 1:
            yield f"{text} happened {happened.count(text)} times"


def _of_the_recoveries(struck: Struck, unfinished: Sequence[str]) -> Iterator[str]:
    for text, (fault, recovery) in struck.items():
        expected = CAUSE_OF_KIND[fault.kind]
        if recovery.cause != expected:
            yield f"{text} was reported as {recovery.cause} ({recovery.detail}), not as {expected}"
        if recovery.t_failed_again is not None:
            yield f"replica {recovery.replica} failed again on its way back from {text}"
        elif recovery.t_first_step is None and text not in unfinished:
            yield f"replica {recovery.replica} did not come back from {text}"


def _of_the_borne(borne: Mapping[str, Strike], unfinished: Sequence[str]) -> Iterator[str]:
    for text, strike in borne.items():
        expected = BORNE_AS[strike.kind]
        if strike.cause != expected:
            yield f"{text} was reported as {strike.cause}, not as {expected}"
        if strike.recovered_s is None and text not in unfinished:
            yield f"replica {strike.replica} did not come back from {text}"


def _of_other_failures(struck: Struck, fold: RunFold) -> Iterator[str]:
    for recovery in fold.recoveries:
        if recovery.fault not in struck or struck[recovery.fault][1] != recovery:
            yield f"replica {recovery.replica} failed without a fault: {recovery.cause} ({recovery.detail})"
    for replica, cause in sorted(fold.retired.items()):
        yield f"replica {replica} was given up: {cause}"


def _of_other_fences(fold: RunFold, events: Sequence[Record]) -> Iterator[str]:
    """A sync that is tried again may keep a replica out again, so one fault explains more than one."""
    for event in events:
        if event["event"] != "fenced":
            continue
        before = [fault.kind for fault in fold.faults if fault.replica == event["replica"] and fault.t <= event["t"]]
        if not before or before[-1] not in BORNE_AS:
            yield f"replica {event['replica']} was kept out of the average without a fault: {event['cause']}"

"""Events and figures as sentences: one wording for the live view, the status and the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elastic_train.events import Record
from elastic_train.metrics import Recovery, RunFold

_CAUSES: Mapping[str, str] = {
    "proc_exit": "a process ended",
    "signal": "a process was killed",
    "exception": "an exception",
    "device_error": "the accelerator failed",
    "comm_error": "communication broke",
    "hang": "no progress",
    "heartbeat_lost": "no sign of life",
    "host_lost": "the host is gone",
    "preempted": "the scheduler took the host",
    "start_timeout": "not started in time",
    "heal_failed": "no state to be had",
    "diverged": "parameters differ from the others'",
    "non_finite": "values are not finite",
    "data_error": "the data cannot be read",
    "config_error": "the configuration is wrong",
}

_LEVELS: Mapping[str, str] = {
    "restart_in_place": "restarts in place",
    "reallocate": "gets another allocation",
    "retire": "is given up",
    "restore": "begins again with all others",
    "stop": "ends the run",
}


def cause(name: str, detail: str = "") -> str:
    """Why something failed: `signal`, `SIGKILL` becomes `killed by SIGKILL`."""
    if name == "signal" and detail:
        return f"killed by {detail}"
    words = _CAUSES.get(name, name)
    return f"{words}: {detail}" if detail else words


def seconds(value: float) -> str:
    """A duration to read at a glance: `0.04 s`, `12.3 s`, `5 min 20 s`, `3 h 07 min`."""
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def size(count: int) -> str:
    """Bytes in the decimal units that links are measured in."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def origin(source: str, donors: Iterable[int]) -> str:
    """Where a state came from."""
    return f"this host's memory, confirmed by {slots(donors)}" if source == "memory" else slots(donors)


def slots(numbers: Iterable[int]) -> str:
    """`replica 1`, or `replicas 0 1 2`."""
    listed = [str(number) for number in dict.fromkeys(numbers)]
    return ("replica " if len(listed) == 1 else "replicas ") + (" ".join(listed) or "none")


def victim(recovery: Recovery) -> str:
    """What died, where and of what: the beginning of a sentence about a failure."""
    where = f"replica {recovery.replica}"
    if recovery.rank is not None:
        where += f" rank {recovery.rank}"
    when = "" if recovery.step is None else f" at step {recovery.step}"
    return f"{where} failed{when}: {cause(recovery.cause, recovery.detail)}"


def happening(event: Record, fold: RunFold) -> str | None:
    """A sentence for an event that a person wants to hear of, given the fold that it was just applied to."""
    teller = _TELLERS.get(event["event"])
    return None if teller is None else teller(event, fold)


def _since_failure(event: Record, fold: RunFold) -> str | None:
    """How long after its failure a restarted replica got here; None for one that never failed."""
    recovery = fold.recovery(event["replica"], event.get("incarnation", 0))
    return None if recovery is None else f"{seconds(event['t'] - recovery.t_origin)} after its failure"


def _failure_detected(event: Record, fold: RunFold) -> str:
    recovery = fold.recovery(event["replica"], event.get("incarnation", 0) + 1)
    if recovery is None:
        return f"replica {event['replica']} failed: {cause(event['cause'])}"
    noticed = "" if recovery.t_fault is None else f", noticed after {seconds(event['t'] - recovery.t_fault)}"
    stacks = f"; where its threads stood: {recovery.stacks}" if recovery.stacks else ""
    return victim(recovery) + noticed + stacks


def _restart_scheduled(event: Record, fold: RunFold) -> str:
    delay_s = event.get("delay_s", 0.0)
    when = f"in {seconds(delay_s)}" if delay_s else "now"
    return f"replica {event['replica']} {_LEVELS.get(event['level'], event['level'])} {when}"


def _procs_started(event: Record, fold: RunFold) -> str | None:
    if (after := _since_failure(event, fold)) is None:
        return None
    whose = "goes on in its standby" if event.get("standby") else "has processes again"
    return f"replica {event['replica']} {whose}, {after}"


def _standby_ready(event: Record, fold: RunFold) -> str:
    took = f", made in {seconds(event['duration_s'])}" if "duration_s" in event else ""
    return f"replica {event['replica']} has a standby{took}"


def _donor_selected(event: Record, fold: RunFold) -> str:
    which = f" of outer step {event['outer_step']}" if "outer_step" in event else ""
    return f"replica {event['replica']} gets the state{which} from {slots(event['donors'])}"


def _transfer_progress(event: Record, fold: RunFold) -> str:
    share = 100 * event["bytes"] // event["total_bytes"]
    return f"replica {event['replica']} has {share} % of {size(event['total_bytes'])}"


def _heal_finished(event: Record, fold: RunFold) -> str:
    text = f"replica {event['replica']} has its state from {origin(event.get('source', ''), event['donors'])}"
    if event.get("bytes") and "duration_s" in event:
        text += f": {size(event['bytes'])} in {seconds(event['duration_s'])}"
    return text


def _joined(event: Record, fold: RunFold) -> str:
    after = _since_failure(event, fold)
    again = "is a member of a quorum" if after is None else f"is a member of a quorum again, {after}"
    return f"replica {event['replica']} {again}"


def _first_step(event: Record, fold: RunFold) -> str | None:
    after = _since_failure(event, fold)
    if after is None:
        return None
    return f"replica {event['replica']} trains again at step {event['inner_step']}, {after}"


def _quorum_changed(event: Record, fold: RunFold) -> str:
    return f"quorum {event['quorum_id']}: {slots(event['participants'])}"


def _fault_injected(event: Record, fold: RunFold) -> str:
    where = f"replica {event['replica']}" if "replica" in event else "the run"
    if "rank" in event:
        where += f" rank {event['rank']}"
    return f"fault injected: {event['kind']} in {where} at point {event.get('point', 'step')}"


def _control(event: Record, fold: RunFold) -> str:
    asked = [
        event["request"],
        *(f"{name} {event[name]}" for name in ("replica", "rank", "kind") if name in event),
    ]
    return f"asked from outside: {' '.join(asked)}"


def _sync_retried(event: Record, fold: RunFold) -> str:
    return (
        f"replica {event['replica']} tries outer step {event['outer_step']} again "
        f"(attempt {event['attempt']}): {cause(event['cause'])}"
    )


def _doubt_settled(event: Record, fold: RunFold) -> str:
    said = {"commit": "it was committed", "abort": "nobody committed it"}.get(event["outcome"], event["outcome"])
    took = f" after {seconds(event['duration_s'])}" if "duration_s" in event else ""
    return (
        f"replica {event['replica']} saw no vote on outer step {event['outer_step']} pass; its peers say{took}: {said}"
    )


def _drain_started(event: Record, fold: RunFold) -> str:
    why = f" ({cause(event['cause'])})" if "cause" in event else ""
    return f"replica {event['replica']} leaves at its next sync{why}"


def _caught_up(event: Record, fold: RunFold) -> str:
    source = f" with the state of replica {event['donor']}" if "donor" in event else ""
    return f"replica {event['replica']} caught up to outer step {event['outer_step']}{source}"


_TELLERS: Mapping[str, Callable[[Record, RunFold], str | None]] = {
    "run_started": lambda e, _: f"run started with {e['replicas']} replicas",
    "run_degraded": lambda e, _: f"going on with {e['live']} replicas",
    "run_restored": lambda e, _: f"all replicas take the snapshot of outer step {e['outer_step']}",
    "run_finished": lambda e, _: f"run {e['status']}",
    "lighthouse_started": lambda e, _: "the Lighthouse is there again" if e.get("restarts") else None,
    "lighthouse_lost": lambda e, _: f"Lighthouse lost: {cause(e['cause'], e.get('signal', ''))}",
    "allocation_lost": lambda e, _: f"replica {e['replica']} lost its hosts: {cause(e['cause'])}",
    "failure_detected": _failure_detected,
    "restart_scheduled": _restart_scheduled,
    "replica_retired": lambda e, _: f"replica {e['replica']} is given up: {cause(e['cause'])}",
    "procs_started": _procs_started,
    "standby_ready": _standby_ready,
    "donor_selected": _donor_selected,
    "transfer_progress": _transfer_progress,
    "heal_finished": _heal_finished,
    "heal_failed": lambda e, _: f"replica {e['replica']} got no state: {e.get('error') or cause(e['cause'])}",
    "joined": _joined,
    "first_step": _first_step,
    "quorum_changed": _quorum_changed,
    "sync_retried": _sync_retried,
    "doubt_settled": _doubt_settled,
    "fenced": lambda e, _: f"replica {e['replica']} is kept out of the average: {cause(e['cause'])}",
    "caught_up": _caught_up,
    "checkpoint_saved": lambda e, _: f"outer step {e['outer_step']} saved to {e['path']}",
    "fault_injected": _fault_injected,
    "drain_started": _drain_started,
    "replica_left": lambda e, _: f"replica {e['replica']} has left, with the state of outer step {e['outer_step']}",
    "replica_finished": lambda e, _: f"replica {e['replica']} trained to the end",
    "control": _control,
    "note": lambda e, _: e["text"],
}

TOLD = frozenset(_TELLERS)
"""The events that may be told."""

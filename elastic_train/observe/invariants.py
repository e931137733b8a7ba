"""What must hold in every run, checked on its log alone.

Each check takes the events in the order of the log and returns one sentence for each violation. The tests,
the stress script and the soak run use the same checks, so a run that a person saw can be judged like one in a
test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from elastic_train.events import CAUSES, Record

Life = tuple[int, int]
"""A replica and its incarnation."""


def violations(events: Sequence[Record]) -> dict[str, list[str]]:
    """Every check by its name, with what it found; an empty list is a kept invariant."""
    return {name: list(check(events)) for name, check in _CHECKS.items()}


def anchors_agree(events: Sequence[Record]) -> Iterator[str]:
    """I1: after every outer step all its participants have the same anchor."""
    seen: dict[int, tuple[str | None, int]] = {}
    for event in events:
        if event["event"] == "run_restored":
            seen = {step: first for step, first in seen.items() if step <= event["outer_step"]}
        if event["event"] != "sync_committed":
            continue
        who = f"outer step {event['outer_step']}: replica {event['replica']}"
        mine = event.get("anchor_hash")
        anchor, first = seen.setdefault(event["outer_step"], (mine, event["replica"]))
        if not mine:
            yield f"{who} committed without an anchor_hash"
        elif mine != anchor:
            yield f"{who} has anchor {mine}, replica {first} has {anchor}"


def no_step_is_lost(events: Sequence[Record]) -> Iterator[str]:
    """I3: what a replica that never failed has trained is in the model, whoever died meanwhile.

    Judged are the first incarnations that trained to the end, never failed, were never kept out of an average, and
    said how many tokens they trained.
    """
    failed: set[int] = set()
    counted: dict[int, int] = {}
    finished: dict[int, int] = {}
    for event in events:
        name = event["event"]
        if name in ("failure_detected", "fenced"):
            failed.add(event["replica"])
        elif name in ("sync_committed", "caught_up"):
            counted[event["replica"]] = counted.get(event["replica"], 0) + event.get("tokens", 0)
        elif name == "replica_finished" and _life(event)[1] == 0 and "tokens" in event:
            finished[event["replica"]] = event["tokens"]
    for replica, trained in finished.items():
        mine = counted.get(replica, 0)
        if replica not in failed and mine != trained:
            yield f"replica {replica} never failed and trained {trained} tokens, but its commits add up to {mine}"


def one_heal_per_join(events: Sequence[Record]) -> Iterator[str]:
    """I4: a joiner heals exactly once before it joins."""
    heals: dict[Life, int] = {}
    for event in events:
        if event["event"] == "heal_finished":
            heals[_life(event)] = heals.get(_life(event), 0) + 1
        elif event["event"] == "joined":
            healed = heals.pop(_life(event), 0)
            if healed != 1:
                yield f"{_named(event)} joined after {healed} heals"


def nobody_starts_from_scratch(events: Sequence[Record]) -> Iterator[str]:
    """I6: an incarnation that is started after the release has a peer's state before its first step, or a durable
    snapshot that all replicas take together.
    """
    released = False
    late: dict[Life, bool] = {}
    healed: set[Life] = set()
    for event in events:
        name = event["event"]
        if name == "procs_started":
            late.setdefault(_life(event), released)
        elif name == "heal_finished":
            healed.add(_life(event))
        elif name == "run_restored":
            newest = dict(sorted(late))
            healed |= {life for life in newest.items() if life[0] in event.get("replicas", ())}
        elif name == "first_step":
            # An incarnation whose start was not told is judged by its number.
            if late.get(_life(event), _life(event)[1] > 0):
                if _life(event) not in healed:
                    yield f"{_named(event)} made its first step without a peer's state"
                if event["inner_step"] <= 0:
                    yield f"{_named(event)} trained from step 0"
            released = True
        elif name == "sync_committed":
            released = True


def failures_are_explained(events: Sequence[Record]) -> Iterator[str]:
    """I7: every failure has a cause and what a person needs to act on it."""
    for event in events:
        if event["event"] != "failure_detected":
            continue
        cause = event.get("cause")
        if cause not in CAUSES:
            yield f"{_named(event)} failed with the unknown cause {cause!r}"
        missing = [field for field in _NEEDED.get(str(cause), ()) if not event.get(field)]
        if missing:
            yield f"{_named(event)} failed by {cause} without {' and '.join(missing)}"
        elif not event.get("signal") and not event.get("error"):
            yield f"{_named(event)} failed by {cause} without a word of explanation"


def quorum_ids_rise(events: Sequence[Record]) -> Iterator[str]:
    """A quorum id stands for one set of members, and no replica ever sees it fall."""
    members: dict[int, list[int]] = {}
    last: dict[int | None, int] = {}
    for event in events:
        if event["event"] != "quorum_changed":
            continue
        quorum_id, participants, witness = event["quorum_id"], event["participants"], event.get("replica")
        if sorted(participants) != sorted(members.setdefault(quorum_id, participants)):
            yield f"quorum {quorum_id} has members {members[quorum_id]} and also {participants}"
        if quorum_id <= last.get(witness, -1):
            yield f"replica {witness} saw quorum {quorum_id} after {last[witness]}"
        last[witness] = quorum_id


_CHECKS = {
    "I1": anchors_agree,
    "I3": no_step_is_lost,
    "I4": one_heal_per_join,
    "I6": nobody_starts_from_scratch,
    "I7": failures_are_explained,
    "quorum": quorum_ids_rise,
}

_NEEDED: Mapping[str, tuple[str, ...]] = {"signal": ("signal",), "exception": ("error", "traceback")}


def _life(event: Record) -> Life:
    return event["replica"], event.get("incarnation", 0)


def _named(event: Record) -> str:
    replica, incarnation = _life(event)
    return f"replica {replica} incarnation {incarnation}"

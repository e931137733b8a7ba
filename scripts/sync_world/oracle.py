"""What the outer state of a world must be, from what its replicas wrote down: computed again, in float64.

Only counts are taken from the log (how many inner steps before which sync, who took part); moves, weights, tokens and
data are computed again. So an engine that miscounts what it averages does not agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from elastic_train.events import Record
from scripts.sync_world.model import Arrays, fragment_names, move, parameters, shard
from scripts.sync_world.spec import WorldSpec


class Inconsistent(ValueError):
    """The log says what cannot be."""


@dataclass(frozen=True)
class Captured:
    """What a replica had when it captured its contribution."""

    steps: int
    outer_step: int
    theta: Arrays
    """Of the fragment that syncs."""


class Life:
    """One incarnation, followed through its log."""

    def __init__(self, oracle: Oracle, slot: int, incarnation: int, events: list[Record]) -> None:
        self._oracle = oracle
        self.slot = slot
        self.incarnation = incarnation
        self._events = [record for record in events if record["event"] in _APPLIED]
        self._next = 0
        self._theta: Arrays = {name: array.copy() for name, array in oracle.anchors[0].items()}
        self._outer_step = 0
        self._steps = 0
        self._counted = 0
        self._counted_of = [0] * oracle.fragments
        self.captured: Captured | None = None

    def captures(self, outer_step: int) -> bool:
        return any(e["event"] == "captured" and e["outer_step"] == outer_step for e in self._events)

    def commits(self, outer_step: int) -> bool:
        return any(e["event"] == "sync_committed" and e["outer_step"] == outer_step for e in self._events)

    def advance(self, outer_step: int) -> None:
        """Up to what it brought to that outer step."""
        while self._next < len(self._events):
            record = self._events[self._next]
            if record["event"] != "captured" and record["outer_step"] >= outer_step:
                return
            self._apply(record)
            self._next += 1

    def contribution(self, outer_step: int) -> tuple[Captured, int]:
        """What it brought, and the steps that it weighs by. It counts from here on."""
        captured = self.captured
        if captured is None or captured.outer_step != outer_step - 1:
            raise Inconsistent(f"replica {self.slot}.{self.incarnation} brought nothing to outer step {outer_step}")
        return captured, captured.steps - self._counted_of[(outer_step - 1) % self._oracle.fragments]

    def uncounted(self) -> int:
        """Steps whose data is in no commit yet, up to what was captured."""
        assert self.captured is not None
        return self.captured.steps - self._counted

    def _apply(self, record: Record) -> None:
        match record["event"]:
            case "captured":
                self._move_to(record["steps"])
                names = self._oracle.names[record["outer_step"] % self._oracle.fragments]
                theta = {name: self._theta[name].copy() for name in names}
                self.captured = Captured(record["steps"], record["outer_step"], theta)
            case "sync_committed":
                self._move_to(record["steps"])
                self._take_in(record["outer_step"])
            case "caught_up":
                self._move_to(record["steps"])
                self._catch_up(record["outer_step"], included=record["included"])
            case "heal_finished":
                self._steps = record["steps"]
                self._theta = {name: array.copy() for name, array in self._oracle.anchors[record["outer_step"]].items()}
                self._outer_step = record["outer_step"]
                self._count(self._steps, range(self._oracle.fragments))

    def _take_in(self, outer_step: int) -> None:
        captured, oracle = self.captured, self._oracle
        assert captured is not None
        fragment = (outer_step - 1) % oracle.fragments
        keep = oracle.merge_alpha if self._steps > captured.steps else 0.0
        for name in oracle.names[fragment]:
            self._theta[name] = (1 - keep) * oracle.anchors[outer_step][name] + keep * self._theta[name]
        self._outer_step = outer_step
        self._count(captured.steps, [fragment])

    def _catch_up(self, outer_step: int, *, included: bool) -> None:
        oracle = self._oracle
        before, after = oracle.anchors[self._outer_step], oracle.anchors[outer_step]
        ends = outer_step == len(oracle.anchors) - 1 and outer_step >= oracle.outer_steps
        own = (self.captured.outer_step % oracle.fragments) if included and self.captured is not None else None
        for fragment, names in enumerate(oracle.names):
            for name in names:
                if ends or fragment == own:
                    self._theta[name] = after[name].copy()
                else:
                    self._theta[name] = self._theta[name] + after[name] - before[name]
        if own is not None and self.captured is not None:
            self._count(self.captured.steps, [own])
        self._outer_step = outer_step

    def _count(self, steps: int, fragments: range | list[int]) -> None:
        self._counted = steps
        for fragment in fragments:
            self._counted_of[fragment] = steps

    def _move_to(self, steps: int) -> None:
        for step in range(self._steps + 1, steps + 1):
            for name, change in move(self._oracle.shapes, self.slot, self.incarnation, step).items():
                self._theta[name] = self._theta[name] + change
        self._steps = steps


_APPLIED = ("captured", "sync_committed", "caught_up", "heal_finished")


class Oracle:
    """Anchor, momentum and data of a world after each outer step."""

    def __init__(self, spec: WorldSpec, events: Mapping[int, list[Record]]) -> None:
        """
        Raises:
            Inconsistent: the log contradicts itself.
        """
        self._spec = spec
        self.fragments = spec.diloco.fragments
        self.merge_alpha = spec.diloco.merge_alpha
        self.outer_steps = spec.schedule.outer_steps
        self.names = fragment_names(spec.width, spec.diloco.fragments)
        start = parameters(spec.width)
        self.shapes = {name: array.shape for name, array in start.items()}
        self.anchors: list[Arrays] = [{name: array.astype(np.float64) for name, array in start.items()}]
        self._momentum = {name: np.zeros_like(array) for name, array in self.anchors[0].items()}
        self.read = {slot: [0, 0] for slot in range(spec.replicas)}
        """By slot: tokens and samples that are in the model."""
        self._lives = [
            Life(self, slot, incarnation, [e for e in records if e["incarnation"] == incarnation])
            for slot, records in events.items()
            for incarnation in sorted({e["incarnation"] for e in records})
        ]
        participants = {
            e["outer_step"]: e["participants"]
            for records in events.values()
            for e in records
            if e["event"] == "sync_committed"
        }
        for outer_step in range(1, max(participants, default=0) + 1):
            if outer_step not in participants:
                raise Inconsistent(f"nobody committed outer step {outer_step}, and somebody a later one")
            self._commit(outer_step, participants[outer_step])

    def expected(self, rank: int) -> Arrays:
        """``<fragment>.anchor`` and ``<fragment>.momentum`` of a rank at the end, flat float64."""
        flat: Arrays = {}
        for number, names in enumerate(self.names):
            for kind, arrays in (("anchor", self.anchors[-1]), ("momentum", self._momentum)):
                parts = [shard(arrays[name], rank, self._spec.ranks).ravel() for name in names]
                flat[f"{number}.{kind}"] = np.concatenate(parts)
        return flat

    @property
    def movement(self) -> float:
        """The largest distance of a parameter from where it began."""
        return max(float(np.abs(self.anchors[-1][name] - array).max()) for name, array in self.anchors[0].items())

    def _commit(self, outer_step: int, participants: list[int]) -> None:
        brought: list[tuple[Captured, int, int]] = []
        for slot in participants:
            life = self._who_brought(slot, outer_step)
            life.advance(outer_step)
            captured, steps = life.contribution(outer_step)
            brought.append((captured, steps, slot))
            uncounted = life.uncounted()
            self.read[slot][0] += uncounted * self._spec.tokens[slot]
            self.read[slot][1] += uncounted
        tokens = self._spec.tokens
        by_tokens = self._spec.diloco.weighting == "tokens"
        weights = [steps * tokens[slot] if by_tokens else min(steps, 1) for _, steps, slot in brought]
        total = sum(weights)
        settings = self._spec.diloco
        anchor, after = self.anchors[-1], {name: array.copy() for name, array in self.anchors[-1].items()}
        for name in self.names[(outer_step - 1) % self.fragments]:
            d = np.zeros_like(anchor[name])
            for (captured, _, _), weight in zip(brought, weights, strict=True):
                if weight:
                    d += weight / total * (anchor[name] - captured.theta[name])
            d += settings.outer_weight_decay * anchor[name]
            momentum = self._momentum[name] = settings.outer_momentum * self._momentum[name] + d
            direction = d + settings.outer_momentum * momentum if settings.outer_nesterov else momentum
            after[name] = anchor[name] - settings.outer_lr * direction
        self.anchors.append(after)

    def _who_brought(self, slot: int, outer_step: int) -> Life:
        """The incarnation that committed it; or, if it died in between, the last one that could."""
        lives = [life for life in self._lives if life.slot == slot]
        for life in lives:
            if life.commits(outer_step):
                return life
        could = [life for life in lives if life.captures(outer_step - 1)]
        if not could:
            raise Inconsistent(f"replica {slot} is in outer step {outer_step} and brought nothing to it")
        return could[-1]

"""The trainer of one rank as the engine sees it, and what the rank writes down."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_train.config import FaultSpec
from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.flat import FlatFragment
from elastic_train.diloco.publication import INNER
from elastic_train.diloco.trainee import Source
from elastic_train.events import LineFile
from elastic_train.peer_ckpt.shards import local
from elastic_train.peer_ckpt.snapshot import Snapshot
from elastic_train.replica.faults import FaultPlan
from scripts.sync_world.board import Board
from scripts.sync_world.model import Model, move, parameters, shard
from scripts.sync_world.positions import Positions
from scripts.sync_world.spec import Place, WorldSpec

_FLIPPED_BIT = 1 << 20


class Diary:
    """The events of one replica, in a file that all its incarnations write to; rank 0 speaks."""

    def __init__(self, file: LineFile, place: Place) -> None:
        self._file = file
        self._place = place

    def tell(self, event: str, **fields: Any) -> None:
        if self._place.rank == 0:
            self.tell_for_rank(event, **fields)

    def tell_for_rank(self, event: str, **fields: Any) -> None:
        """What each rank says for itself."""
        place = self._place
        self._file.append(
            {"event": event, "replica": place.slot, "incarnation": place.incarnation, "rank": place.rank, **fields}
        )


class LaggingPlan(FaultPlan):
    """Kills a moment after the point, wherever the rank is by then: in the middle of an exchange, if it is short."""

    def __init__(self, lag_s: float, *specs: Iterable[FaultSpec], **settings: Any) -> None:
        super().__init__(*specs, **settings)
        self._lag_s = lag_s

    def _act(self, spec: FaultSpec) -> None:
        if spec.kind == "kill" and self._lag_s:
            threading.Timer(self._lag_s, super()._act, (spec,)).start()
        else:
            super()._act(spec)


class WorldTrainee:
    """Moves the parameters by numbers that depend on slot, incarnation and step alone."""

    def __init__(
        self, spec: WorldSpec, place: Place, model: Model, control: ControlGroup, board: Board, diary: Diary
    ) -> None:
        self._spec = spec
        self._place = place
        self._model = model
        self._control = control
        self._board = board
        self._diary = diary
        self._parameters = {name: local(p.detach()) for name, p in model.named_parameters()}
        self._shapes = {name: array.shape for name, array in parameters(spec.width).items()}
        self._moments = {name: torch.zeros_like(tensor) for name, tensor in self._parameters.items()}
        self._inputs = torch.ones(1, spec.width)
        self.positions = Positions(place.slot, spec.replicas)
        self.steps = 0
        """Inner steps of this incarnation."""
        self.outer_step = 0
        self.included = False
        """Whether the last state that was followed had this replica's own contribution in it."""
        self.faults = LaggingPlan(
            spec.lag_s,
            place.faults,
            replica=place.slot,
            rank=place.rank,
            announce=lambda fault: diary.tell_for_rank("fault_injected", fault=str(fault)),
            supervisor_pid=0,
        )

    # -- an inner step

    def compute(self) -> None:
        """Forward; with FSDP a conversation between the ranks."""
        with torch.no_grad():
            self._model(self._inputs)

    def optimize(self) -> None:
        self.steps += 1
        place, ranks = self._place, self._spec.ranks
        for name, array in move(self._shapes, place.slot, place.incarnation, self.steps).items():
            change = torch.from_numpy(shard(array, place.rank, ranks))
            self._parameters[name].add_(change)
            self._moments[name].mul_(0.9).add_(change)
        self.positions.read(self._spec.tokens[place.slot])

    # -- faults

    def poison(self) -> None:
        next(iter(self._parameters.values())).view(-1)[0] = float("nan")

    def flip_bit_of(self, fragment: FlatFragment) -> None:
        fragment.committed.anchor.view(torch.int32)[0].bitwise_xor_(_FLIPPED_BIT)

    # -- Trainee

    def at_point(self, point: str) -> None:
        self.faults.passing(point, self.outer_step)
        if point == "quorum":
            self._board.wait_for_peers(self._place.slot, self._place.rank)

    def alive(self) -> None:
        self._board.beat(self._place.slot, self._place.rank)

    def waiting(self) -> None:
        self._board.wait_for_peers(self._place.slot, self._place.rank)

    def progress(self) -> torch.Tensor:
        self._diary.tell("captured", outer_step=self.outer_step, steps=self.steps)
        mine = self.positions.progress()
        return self._control.sum(mine if self._control.rank == 0 else torch.zeros_like(mine))

    def moments(self) -> Mapping[str, torch.Tensor]:
        return self._moments

    def counters(self) -> dict[str, Any]:
        return {"positions": self.positions.committed.tolist()}

    def take(self, snapshot: Snapshot) -> None:
        for name, moment in snapshot.sections[INNER].items():
            self._moments[name].copy_(moment)
        self.positions.restore(snapshot.header["extra"]["positions"])

    def follow(self, snapshot: Snapshot, *, included: bool) -> None:
        self.included = included
        self.positions.follow(snapshot.header["extra"]["positions"])


class WorldJournal:
    """``SyncJournal`` of a world."""

    def __init__(self, diary: Diary, trainee: WorldTrainee) -> None:
        self._diary = diary
        self._trainee = trainee

    def quorum(self, number: int, participants: Sequence[int]) -> None:
        self._diary.tell("quorum", number=number, participants=sorted(participants))

    def retried(self, outer_step: int, attempt: int, cause: str, duration_s: float) -> None:
        self._diary.tell("sync_retried", outer_step=outer_step, attempt=attempt, cause=cause, duration_s=duration_s)

    def doubt(self, outer_step: int, outcome: str, duration_s: float) -> None:
        self._diary.tell("doubt_settled", outer_step=outer_step, outcome=outcome, duration_s=duration_s)

    def fenced(self, cause: str, outer_step: int) -> None:
        self._diary.tell("fenced", cause=cause, outer_step=outer_step)

    def heal_started(self, donors: Sequence[int], outer_step: int) -> None:
        self._diary.tell("heal_started", donors=list(donors), outer_step=outer_step)

    def transferred(self, received: int, total: int, donors: Mapping[int, int]) -> None: ...

    def heal_finished(
        self,
        primary: int,
        donors: Mapping[int, int],
        outer_step: int,
        duration_s: float,
        rank_hash: int,
        source: Source = Source.PEERS,
    ) -> None:
        self._diary.tell(
            "heal_finished",
            donor=primary,
            donors=sorted(donors),
            outer_step=outer_step,
            bytes=sum(donors.values()),
            source=source.value,
            steps=self._trainee.steps,
        )

    def heal_failed(self, cause: str, error: str) -> None:
        self._diary.tell("heal_failed", cause=cause, error=error)

    def served(self, outer_step: int, state_hash: int) -> None:
        self._diary.tell_for_rank("state_served", outer_step=outer_step)

    def joined(self, outer_step: int, step: int) -> None:
        self._diary.tell("joined", outer_step=outer_step, step=step, steps=self._trainee.steps)

    def caught_up(self, outer_step: int, tokens: int, donor: int) -> None:
        self._diary.tell(
            "caught_up",
            outer_step=outer_step,
            tokens=tokens,
            donor=donor,
            included=self._trainee.included,
            steps=self._trainee.steps,
        )

    def note(self, text: str) -> None:
        self._diary.tell("note", text=text)

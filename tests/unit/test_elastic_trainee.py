"""A trainer as the elastic engine sees it; the trainer's state itself is the matter of ``test_state``."""

import threading
from collections.abc import Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.peer_ckpt.snapshot import Snapshot
from elastic_train.replica.data.position import PositionTable, ShardPosition
from elastic_train.replica.notice import Leaves, Notice
from elastic_train.replica.outer.elastic import ElasticTrainee
from elastic_train.replica.trainer import ElasticTrainer
from elastic_train.replica.watch.beacon import Phase
from tests.controls import Alone

START = PositionTable.start(3)


class Trainer(SimpleNamespace):
    """What the trainee sees of a trainer: it notes what is done to it."""

    def __init__(self, **fields: Any) -> None:
        self.phases: list[Phase] = []
        self.points: list[tuple[str, int]] = []
        super().__init__(
            step=7,
            has_state=True,
            beacon=SimpleNamespace(moved=self.phases.append),
            faults=SimpleNamespace(passing=lambda point, step: self.points.append((point, step))),
            **fields,
        )


@pytest.mark.parametrize(("point", "phases"), [("quorum", [Phase.QUORUM]), ("reduce", []), ("snapshot", [])])
def test_a_point_is_where_faults_strike(point: str, phases: list[Phase]) -> None:
    trainer = Trainer()

    ElasticTrainer.at_point(trainer, point)  # type: ignore[arg-type]

    assert trainer.points == [(point, 7)]
    # From here on the rank waits for peers, for as long as they need.
    assert trainer.phases == phases


@pytest.mark.parametrize(("has_state", "phase"), [(True, Phase.SYNC), (False, Phase.BUILD)])
def test_the_sync_gets_somewhere(has_state: bool, phase: Phase) -> None:
    trainer = Trainer()
    trainer.has_state = has_state

    ElasticTrainee(trainer).alive()  # type: ignore[arg-type]

    assert trainer.phases == [phase]


def test_a_wait_for_a_quorum_goes_on_in_its_own_phase_until_the_replica_is_to_leave() -> None:
    notice = Notice()
    trainer = Trainer(_notice=notice, control=Alone())
    trainer.leave_if_told = partial(ElasticTrainer.leave_if_told, trainer)  # type: ignore[arg-type]
    trainee = ElasticTrainee(trainer)  # type: ignore[arg-type]

    trainee.waiting()
    assert trainer.phases == [Phase.QUORUM]

    notice.give(3600.0)
    trainee.waiting()
    notice.give(0.0)
    with pytest.raises(Leaves):
        trainee.waiting()


def test_another_thread_says_nothing_about_the_main_one() -> None:
    trainer = Trainer()
    trainee = ElasticTrainee(trainer)  # type: ignore[arg-type]

    thread = threading.Thread(target=trainee.alive)
    thread.start()
    thread.join()

    assert trainer.phases == []


class Loader:
    """Positions as a data loader keeps them; shard 1 is its own."""

    def __init__(self) -> None:
        self.committed = START
        self.own = ShardPosition(document=4, samples=9)
        self.retired: list[int] = []

    def positions(self) -> PositionTable:
        return self.committed.replace({1: self.own})

    def commit(self, table: PositionTable) -> None:
        self.committed = table

    def retire(self, slots: Collection[int]) -> None:
        # Their shards begin where they are committed, so that must be known before.
        assert self.committed != START
        self.retired += slots


@pytest.mark.parametrize(
    ("included", "read"),
    [(ShardPosition(), [0, 4, 0, 9]), (ShardPosition(document=3, samples=7), [0, 1, 0, 2])],
    ids=["nothing", "most"],
)
def test_who_catches_up_goes_on_counting_what_the_peers_have_not(included: ShardPosition, read: list[int]) -> None:
    loader = Loader()
    peers = START.replace({0: ShardPosition(document=8, samples=8), 1: included})
    snapshot = Snapshot({"extra": {"positions": peers.to_list()}, "retired": [3]}, {})

    ElasticTrainee(Trainer(dataloader=loader)).follow(snapshot, included=True)  # type: ignore[arg-type]

    assert loader.committed == peers
    assert loader.retired == [3]
    assert loader.positions().delta(loader.committed).tolist() == [[0] * 4, read, [0] * 4]

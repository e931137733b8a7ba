"""After which sync a replica that was told to leave does."""

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.diloco.engine import NoPeerState, Sync, SyncKind
from elastic_train.replica.notice import Notice
from elastic_train.replica.trainer import ElasticTrainer
from tests.controls import Alone


def trainer(sync: Sync, *, told: bool) -> Any:
    """A trainer at the end of an interval."""
    notice = Notice()
    if told:
        notice.give(60.0)
    engine = SimpleNamespace(due=True, sync=lambda: sync)
    return SimpleNamespace(engine=engine, settle=lambda sync: None, control=Alone(), _notice=notice)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", SyncKind)
def test_it_leaves_after_any_sync_that_leaves_it_nothing_to_bring(kind: SyncKind, told: bool) -> None:
    stays = ElasticTrainer._train_interval(trainer(Sync(kind=kind, outer_step=3), told=told), iter(()), None)
    assert stays is not told


def test_what_it_carries_over_goes_into_one_more_sync() -> None:
    caught_up = Sync(kind=SyncKind.CAUGHT_UP, outer_step=3, carried=10)
    assert ElasticTrainer._train_interval(trainer(caught_up, told=True), iter(()), None)


def test_a_joiner_that_gets_no_state_says_so() -> None:
    told: list[tuple[str, str]] = []

    def join() -> Sync:
        raise NoPeerState("nobody is there")

    joiner: Any = SimpleNamespace(
        engine=SimpleNamespace(join=join),
        journal=SimpleNamespace(heal_failed=lambda cause, error: told.append((cause, error))),
    )
    with pytest.raises(NoPeerState):
        ElasticTrainer._join(joiner)
    assert told == [("heal_failed", "nobody is there")]

import pytest

from elastic_train.events import Record
from elastic_train.metrics import RunFold
from scripts.reproduce import Told, _active, _losses, _shares


def event(t: float, name: str, replica: int) -> Record:
    return {"t": t, "event": name, "replica": replica}


def test_a_replica_is_active_from_its_first_step_to_its_failure() -> None:
    events = [
        event(10.0, "first_step", 0),
        event(10.5, "first_step", 1),
        event(20.0, "failure_detected", 1),
        event(26.0, "first_step", 1),
        event(30.0, "replica_finished", 0),
    ]
    assert _active(events, 10.0) == [(0.0, 1), (0.5, 2), (10.0, 1), (16.0, 2)]


def test_shares_of_the_time_begin_once_all_are_there() -> None:
    told = Told(
        exit_code=0,
        active=[(0.0, 1), (2.0, 2), (6.0, 1), (8.0, 2)],
        losses={},
        fold=RunFold(),
        broken=(),
        seconds=12.0,
        events=(),
    )
    assert _shares(told, 2) == pytest.approx({0: 0.0, 1: 0.2, 2: 0.8})


def test_the_loss_of_a_step_is_the_mean_of_those_who_logged_it() -> None:
    records: list[Record] = [{"step": 2, "loss": 3.0}, {"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}, {"step": 3}]
    assert _losses(records) == {1: 5.0, 2: 3.5}

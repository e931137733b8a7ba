"""A replica that comes back before its peers have moved on takes its state from its host's memory."""

import pytest

from elastic_train.events import Record, read_all
from elastic_train.observe.invariants import violations
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch

END_S = 240

# With both needed for a quorum, the other replica cannot commit while one is away, however long that takes.
PAIR = (
    "--orchestrator.replicas", "2", "--lighthouse.min_replicas", "2", "--diloco.sync_every", "20",
    "--training.steps", "60", "--faults.at",
)  # fmt: skip


def named(events: list[Record], name: str, **fields: object) -> list[Record]:
    return [e for e in events if e["event"] == name and all(e.get(key) == value for key, value in fields.items())]


def ended(run: LaunchedRun) -> list[Record]:
    """The events of a run that succeeded and in which every state was accounted for."""
    assert run.wait(END_S) == 0, run.tail()
    events = read_all(run.run_dir / "events.jsonl")
    assert {name: found for name, found in violations(events).items() if found} == {}
    return events


def check_it_came_back_whole(events: list[Record]) -> None:
    """After its death at outer step 1 the replica took part in every later one, with the anchor of the other."""
    for outer_step in (2, 3):
        commits = named(events, "sync_committed", outer_step=outer_step)
        assert sorted(commit["replica"] for commit in commits) == [0, 1]
        assert len({commit["anchor_hash"] for commit in commits}) == 1


@pytest.mark.timeout(END_S + 60)
def test_a_killed_replica_finds_its_state_where_it_left_it(launch: Launch) -> None:
    events = ended(launch("llama3_tiny.toml", *PAIR, '["0.1@25:kill"]', "--orchestrator.procs_per_replica", "2"))

    (heal,) = named(events, "heal_finished")
    (commit,) = named(events, "sync_committed", replica=1, outer_step=1)
    assert (heal["source"], heal["outer_step"], heal["bytes"]) == ("memory", 1, 0)
    assert heal["donors"] == [1]
    assert heal["rank_donors"] == [1, 1]
    assert not named(events, "state_served")
    (first,) = named(events, "first_step", replica=0, incarnation=1)
    assert first["inner_step"] == 21
    assert commit["inner_step"] == 20
    check_it_came_back_whole(events)

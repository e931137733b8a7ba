"""The walk-through of a failure: detected, restarted in place, healed by a peer, a full member again.

Reads nothing but run folders, as any tool outside the code would.
"""

import signal

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from elastic_train.events import Record, read_all
from elastic_train.observe.invariants import violations
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch

END_S = 240


def named(events: list[Record], name: str, **fields: object) -> list[Record]:
    return [e for e in events if e["event"] == name and all(e.get(key) == value for key, value in fields.items())]


def final_loss(run: LaunchedRun, replicas: int, last: int = 20) -> float:
    """Mean loss over all replicas in the last steps of the run."""
    losses: list[float] = [r["loss"] for r in run.metrics() if r["step"] > run.metrics()[-1]["step"] - last]
    assert len(losses) >= replicas * last // 2
    return sum(losses) / len(losses)


def check_states_were_taken_over(events: list[Record]) -> None:
    """What a joiner holds hashes, rank by rank, to what its donor gave: model, moments, LR, step, data.

    From its host's memory it has its own, which no donor gave.
    """
    for heal in named(events, "heal_finished", source="peers"):
        for rank, (donor, state) in enumerate(zip(heal["rank_donors"], heal["rank_hashes"], strict=True)):
            served = named(events, "state_served", replica=donor, rank=rank, outer_step=heal["outer_step"])
            assert state in [event["state_hash"] for event in served]


@pytest.mark.timeout(2 * END_S + 60)
def test_four_replicas_lose_one_and_get_it_back(launch: Launch) -> None:
    flags = (
        "--orchestrator.replicas", "4", "--training.steps", "200", "--debug.min_step_s", "0.25", "--debug.seed", "7",
    )  # fmt: skip
    run = launch("llama3_tiny.toml", *flags, "--faults.at", '["0.0@30:kill"]')
    assert run.wait(END_S) == 0, run.tail()
    events = read_all(run.run_dir / "events.jsonl")
    (fault,) = named(events, "fault_injected")
    (failure,) = named(events, "failure_detected")
    (heal,) = named(events, "heal_finished")
    (joined,) = named(events, "joined")

    # Quorums of four, three, four, with rising ids.
    quorums = {e["quorum_id"]: e["participants"] for e in named(events, "quorum_changed")}
    assert [quorums[i] for i in sorted(quorums)] == [[0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]]

    # Reported with its cause, restarted in place.
    assert (failure["replica"], failure["rank"], failure["cause"], failure["signal"]) == (0, 0, "signal", "SIGKILL")
    assert named(events, "restart_scheduled", replica=0)[0]["level"] == "restart_in_place"
    states = [(e["from"], e["to"]) for e in named(events, "replica_state", replica=0)]
    assert [to for _, to in states] == [
        "STARTING", "JOINING", "RUNNING",
        "BACKOFF", "STARTING", "JOINING", "HEALING", "JOINING", "RUNNING", "SUCCEEDED",
    ]  # fmt: skip

    # The others go on, in steps and in syncs, and none of them is touched.
    away = [e for e in named(events, "sync_committed") if e["participants"] == [1, 2, 3]]
    assert {e["replica"] for e in away} == {1, 2, 3}
    steps = [r for r in run.metrics() if r["replica"] != 0 and fault["t"] < r["t"] < joined["t"]]
    assert len({r["step"] for r in steps}) > 20
    assert {e["replica"] for e in named(events, "failure_detected")} == {0}
    assert {r["incarnation"] for r in run.metrics() if r["replica"] != 0} == {0}

    # A living donor; the joiner never trains from step 0, and has its donor's state.
    # Two of the others were chosen to give the state; if one of them is slow, the other gives all of it.
    selected = named(events, "donor_selected", replica=0)[0]["donors"]
    assert len(selected) == 2
    assert set(selected) <= {1, 2, 3}
    assert set(heal["donors"]) <= set(selected)
    assert sum(heal["donor_bytes"].values()) == heal["bytes"]
    # It trains before the quorum that it asked for has come, and is a member from the middle of an interval on.
    (first,) = named(events, "first_step", replica=0, incarnation=1)
    assert 30 < first["inner_step"] <= joined["inner_step"]
    join = next(e for e in named(events, "sync_committed", replica=0, incarnation=1))
    assert join["outer_step"] == joined["outer_step"] + 1
    # More than an interval's, if its peers committed while it was getting its state.
    (peer,) = named(events, "sync_committed", replica=1, outer_step=join["outer_step"])
    assert 0 < join["tokens"] <= (join["outer_step"] - heal["outer_step"]) * peer["tokens"]
    assert len(named(events, "sync_committed", outer_step=join["outer_step"])) == 4
    check_states_were_taken_over(events)

    # Equal anchors on all replicas at every sync.
    by_step: dict[int, set[str]] = {}
    for sync in named(events, "sync_committed"):
        by_step.setdefault(sync["outer_step"], set()).add(sync["anchor_hash"])
    assert sorted(by_step) == list(range(1, 11))
    assert all(len(hashes) == 1 for hashes in by_step.values())
    assert {name: found for name, found in violations(events).items() if found} == {}

    # Learning rates follow the nominal step, whoever trains it.
    rates: dict[int, set[float]] = {}
    for record in run.metrics():
        rates.setdefault(record["step"], set()).add(record["lr"])
    assert all(len(values) == 1 for values in rates.values())

    calm = launch("llama3_tiny.toml", *flags, name="calm")
    assert calm.wait(END_S) == 0, calm.tail()
    assert final_loss(run, 4) == pytest.approx(final_loss(calm, 4), rel=0.03)
    assert final_loss(calm, 4) < 0.85 * calm.metrics()[0]["loss"]


@pytest.mark.timeout(2 * END_S)
def test_two_sharded_replicas_lose_a_rank(launch: Launch) -> None:
    run = launch(
        "llama3_tiny.toml", "--orchestrator.replicas", "2", "--orchestrator.procs_per_replica", "2",
        "--training.steps", "100000", "--diloco.sync_every", "10", "--faults.at", '["0.1@25:kill"]',
    )  # fmt: skip
    joined = run.wait_for_event("joined", END_S)
    run.wait_for_event("sync_committed", END_S, lambda event: event["replica"] == 0 and event["seq"] > joined["seq"])
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(END_S) == 130, run.tail()
    events = read_all(run.run_dir / "events.jsonl")
    (failure,) = named(events, "failure_detected")
    assert (failure["replica"], failure["rank"], failure["signal"]) == (0, 1, "SIGKILL")
    (heal,) = named(events, "heal_finished")
    assert heal["rank_donors"] == [1, 1]
    check_states_were_taken_over(events)
    assert {name: found for name, found in violations(events).items() if found} == {}
    assert len({tuple(e["participants"]) for e in named(events, "sync_committed")}) == 2
    pids = [set(e["pids"]) for e in named(events, "procs_started", replica=0)]
    assert len(pids) == 2
    assert not pids[0] & pids[1]

    (saved,) = named(events, "checkpoint_saved")
    metadata = FileSystemReader(saved["path"]).read_metadata()
    weight = metadata.state_dict_metadata["tok_embeddings.weight"]
    assert isinstance(weight, TensorStorageMetadata)
    assert weight.size == torch.Size([2048, 64])

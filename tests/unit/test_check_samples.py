import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config import ConfigError
from elastic_train.events import Record
from scripts.check_samples import SampledRun, differences, faults, figures, read_draws, read_run, tokens_of

SEQ_LEN = 10


def draw(shard: int, index: int, incarnation: int = 0, text: str = "") -> Record:
    """Replica 0 reads shard 0, and so on."""
    told = text or f"{shard}.{index}"
    return {
        "replica": shard,
        "incarnation": incarnation,
        "reader": shard,
        "shard": shard,
        "index": index,
        "hash": told,
    }


def committed(outer_step: int, replica: int, samples: int, participants: tuple[int, ...] = (0, 1)) -> Record:
    return {
        "event": "sync_committed",
        "outer_step": outer_step,
        "replica": replica,
        "tokens": samples * SEQ_LEN,
        "participants": list(participants),
    }


def caught_up(outer_step: int, replica: int, samples: int) -> Record:
    return {"event": "caught_up", "outer_step": outer_step, "replica": replica, "tokens": samples * SEQ_LEN}


def finished(replica: int, incarnation: int, samples: int) -> Record:
    return {
        "event": "replica_finished",
        "replica": replica,
        "incarnation": incarnation,
        "tokens": samples * SEQ_LEN,
    }


# Replica 1 dies after its first commit with one more sample drawn; its next incarnation draws that one again.
SOUND = SampledRun(
    seq_len=SEQ_LEN,
    outer_step=3,
    first=[0, 0],
    committed=[6, 4],
    draws=[
        *(draw(0, index) for index in range(6)),
        *(draw(1, index) for index in range(3)),
        *(draw(1, index, incarnation=1) for index in (2, 3)),
    ],
    events=[
        committed(1, 0, 2),
        committed(1, 1, 2),
        committed(2, 0, 2, participants=(0,)),
        {"event": "heal_finished", "replica": 1, "outer_step": 2},
        committed(3, 0, 2),
        committed(3, 1, 2),
        finished(0, 0, 6),
        finished(1, 1, 2),
    ],
)


def test_a_sound_run_with_a_failure() -> None:
    assert faults(SOUND) == []
    assert figures(SOUND) == {
        "outer_step": 3,
        "samples": 10,
        "tokens": 100,
        "draws": 11,
        "drawn_again": 1,
        "untold": [],
    }


def test_what_was_drawn_and_not_committed_does_not_matter() -> None:
    more = [*SOUND.draws, draw(1, 4, incarnation=2), draw(1, 9, incarnation=2)]
    assert faults(replace(SOUND, draws=more)) == []


@pytest.mark.parametrize("at", range(len(SOUND.draws)))
def test_a_sample_that_is_dropped(at: int) -> None:
    lost = SOUND.draws[at]
    found = faults(replace(SOUND, draws=[*SOUND.draws[:at], *SOUND.draws[at + 1 :]]))
    # Only that which died with its reader, and was drawn again, is not missed.
    assert (found == []) == (lost == draw(1, 2))


def test_a_committed_sample_that_nobody_drew() -> None:
    left = [record for record in SOUND.draws if (record["shard"], record["index"]) not in {(1, 1), (0, 2), (0, 4)}]
    found = faults(replace(SOUND, draws=left))

    assert "shard 0: 2 samples from 2 to 4 are committed and were never drawn" in found
    assert "shard 1: sample 1 is committed and was never drawn" in found


def test_a_sample_that_is_trained_on_and_not_committed() -> None:
    assert faults(replace(SOUND, committed=[6, 3])) == [
        "the snapshot of outer step 3 holds 90 tokens, and the commits up to it took in 100"
    ]


def test_a_sample_that_is_committed_twice() -> None:
    events = [committed(3, 1, 3) if event == committed(3, 1, 2) else event for event in SOUND.events]
    assert faults(replace(SOUND, events=events)) == [
        "the snapshot of outer step 3 holds 100 tokens, and the commits up to it took in 110"
    ]


def test_a_line_that_is_doubled() -> None:
    assert faults(replace(SOUND, draws=[*SOUND.draws, draw(0, 3)])) == [
        "replica 0 incarnation 0 trained on 60 tokens and drew 7 samples of 10"
    ]


def test_a_sample_that_is_another_when_it_is_drawn_again() -> None:
    changed = [draw(1, 2, 1, text="other") if record == draw(1, 2, 1) else record for record in SOUND.draws]
    assert faults(replace(SOUND, draws=changed)) == ["shard 1: sample 2 was not the same each time it was drawn"]


def test_a_run_that_goes_on_from_another() -> None:
    begun = {"event": "run_restored", "outer_step": 1}
    resumed = replace(
        SOUND,
        first=[2, 2],
        draws=[record for record in SOUND.draws if record["index"] >= 2],
        events=[begun, *(event for event in SOUND.events if event.get("outer_step", 0) > 1)],
    )
    assert faults(resumed) == []
    assert differences(SOUND, resumed) == []
    # What came before does not count twice if it is in the same log.
    assert faults(replace(resumed, events=[committed(1, 0, 2), committed(1, 1, 2), *resumed.events])) == []


def test_commits_after_the_snapshot_are_not_in_it() -> None:
    early = replace(SOUND, outer_step=2, committed=[4, 2])
    assert faults(early) == []
    assert sum(tokens_of(SOUND.events, 2).told.values()) == 60


# Replica 1 gives to outer step 3 and does not see that it is committed.
UNSEEN = [event for event in SOUND.events if event != committed(3, 1, 2)]


@pytest.mark.parametrize("reached", [3, 4])
def test_a_replica_that_learns_of_a_commit_from_its_peers(reached: int) -> None:
    run = replace(SOUND, events=[*UNSEEN, caught_up(reached, 1, 2)])
    assert faults(run) == []
    assert figures(run)["untold"] == []

    twice = replace(SOUND, events=[*UNSEEN, caught_up(reached, 1, 3)])
    assert faults(twice) == ["the snapshot of outer step 3 holds 100 tokens, and the commits up to it took in 110"]


def test_what_a_replica_trained_too_late_to_give() -> None:
    last = [*SOUND.events[:-1], caught_up(3, 1, 1)]
    left_out = [committed(3, 0, 2, participants=(0,)) if e == committed(3, 0, 2) else e for e in last]
    run = replace(SOUND, committed=[6, 2], events=[event for event in left_out if event != committed(3, 1, 2)])
    assert faults(run) == []


def test_a_replica_that_ends_in_a_commit() -> None:
    events = [event for event in UNSEEN if event["event"] != "replica_finished"]
    run = replace(SOUND, events=events)
    assert faults(run) == []
    assert figures(run)["untold"] == [(3, 1)]

    # It cannot have given more than it drew, nor less than nothing.
    most = "80 and at most 30 of which nothing is told"
    assert faults(replace(run, first=[-2, 0]))[-1].endswith(
        f"holds 120 tokens, and the commits up to it took in {most}"
    )
    assert len(faults(replace(run, committed=[5, 2]))) == 1


def test_another_run_that_is_shorter() -> None:
    other = replace(
        SOUND,
        outer_step=1,
        committed=[2, 2],
        draws=[record for record in SOUND.draws if record["incarnation"] == 0],
        events=SOUND.events[:2],
    )
    assert differences(SOUND, other) == []
    assert differences(other, SOUND) == []


def test_a_sample_that_is_another_in_another_run() -> None:
    swapped = {0: 1, 1: 0}
    other = replace(
        SOUND,
        draws=[
            {**record, "hash": f"0.{swapped.get(record['index'], record['index'])}"} if not record["shard"] else record
            for record in SOUND.draws
        ],
    )
    # The same samples in another order.
    assert differences(SOUND, other) == ["shard 0: 2 samples from 0 to 1 are not the same in both runs"]

    doubled = replace(
        SOUND, draws=[draw(0, 3, text="0.2") if record == draw(0, 3) else record for record in SOUND.draws]
    )
    assert differences(SOUND, doubled) == [
        "shard 0: sample 3 is not the same in both runs",
        "shard 0: among the first 6 samples 2 are in one run alone",
    ]


def test_runs_that_cannot_be_compared() -> None:
    for other in (replace(SOUND, seq_len=11), replace(SOUND, committed=[6, 4, 0], first=[0, 0, 0])):
        assert "compare runs with the same seq_len" in differences(SOUND, other)[0]


def written(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


def test_a_line_that_a_killed_process_left_torn_is_passed_over(tmp_path: Path) -> None:
    whole = [draw(0, 0), draw(0, 1)]
    path = written(tmp_path / "reader_0.jsonl", *map(json.dumps, whole), '{"replica":0,"inc')
    assert read_draws(path, 2) == whole


@pytest.mark.parametrize(
    "change", [{"shard": 2}, {"shard": -1}, {"index": -1}, {"index": "3"}, {"hash": None}, {"replica": True}]
)
def test_what_is_no_log_of_samples(tmp_path: Path, change: dict[str, Any]) -> None:
    path = written(tmp_path / "reader_0.jsonl", json.dumps({**draw(0, 0), **change}), "")
    with pytest.raises(ConfigError, match=r"reader_0\.jsonl is no log of samples of 2 virtual shards"):
        read_draws(path, 2)


def test_a_run_that_left_too_little(tmp_path: Path) -> None:
    written(tmp_path / "config.toml", "[training]", "seq_len = 10", "")
    with pytest.raises(ConfigError, match=r"no log of samples: run with --training.dataloader.log_samples true"):
        read_run(tmp_path)

    written(tmp_path / "samples" / "reader_0.jsonl", json.dumps(draw(0, 0)), "")
    with pytest.raises(ConfigError, match=r"no snapshot .* --checkpoint.last_save_model_only false"):
        read_run(tmp_path)

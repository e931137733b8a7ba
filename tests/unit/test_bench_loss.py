from typing import Any

from elastic_train.events import Record
from scripts.bench_loss import compare, final_figures, kills


def record(step: int, loss: float | None) -> Record:
    return {"step": step, "loss": loss}


def test_the_final_loss_is_the_mean_of_the_last_steps_of_all_replicas() -> None:
    metrics = [record(80, 9.0), record(81, 2.0), record(100, 4.0), record(100, 6.0), record(90, None)]
    events = [{"event": "sync_committed", "bytes": size} for size in (100, 300)] + [{"event": "note"}]

    assert final_figures(metrics, events, last=20) == {"loss": 4.0, "bytes": 200}
    assert final_figures([], [], last=20) == {"loss": None, "bytes": None}


def test_arms_are_compared_with_the_first() -> None:
    results: dict[str, dict[str, Any]] = {
        "none": {"loss": 4.0, "held_out": 5.0},
        "int8": {"loss": 4.04, "held_out": 4.9},
        "int4": {"loss": None, "held_out": None},
    }

    compare(results)

    assert [row["change_pct"] for row in results.values()] == [0.0, 1.0, None]
    assert [row["held_out_change_pct"] for row in results.values()] == [0.0, -2.0, None]


def test_kills_go_round_and_leave_time_to_come_back() -> None:
    struck = kills(replicas=2, ranks=2, steps=400, every=60)

    assert [str(fault) for fault in struck] == [
        "0.0@60:kill", "1.1@120:kill", "0.0@180:kill", "1.1@240:kill", "0.0@300:kill", "1.1@360:kill",
    ]  # fmt: skip
    assert max(fault.step for fault in kills(replicas=3, ranks=1, steps=150, every=60)) == 60

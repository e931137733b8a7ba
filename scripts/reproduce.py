"""The published figure in small: replicas under a steady rate of failing collectives, beside a run without any."""

from __future__ import annotations

import bisect
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from elastic_train.events import Record, read_all
from elastic_train.lifecycle import ReplicaState
from elastic_train.metrics import RunFold
from elastic_train.observe.invariants import violations
from scripts.command_line import CONFIG, CONTEXT, FAILED, FLAGS, JSON, PASSED, main
from scripts.figures import spread
from scripts.goodput import goodput
from scripts.launched_run import LaunchedRun
from scripts.struck_run import Target, make_target

_PER_STEP_S = 5.0
_START_S = 300.0
_LAST_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a run's folder tells, from its first inner step on."""

    exit_code: int
    active: Sequence[tuple[float, int]]
    """From each of these seconds on, so many replicas trained."""
    losses: Mapping[int, float]
    """Of each nominal step, the mean over the replicas that logged it."""
    fold: RunFold
    broken: Sequence[str]
    seconds: float
    events: Sequence[Record]


@click.command(context_settings=CONTEXT)
@click.option("--replicas", default=8, show_default=True, type=click.IntRange(min=2))
@click.option("--steps", default=600, show_default=True, type=click.IntRange(min=1), help="Inner steps of each run.")
@click.option(
    "--every_s",
    default=20.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds from one failing collective to the next, on average.",
)
@click.option("--seed", default=0, show_default=True, help="Decides when and where they fail.")
@CONFIG
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="PNG to draw. [default: in the folder of the runs]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for both runs, which must not exist. [default: a new one, outputs/reproduce-<time>]",
)
@JSON
@FLAGS
def reproduce(
    replicas: int,
    steps: int,
    every_s: float,
    seed: int,
    config: str,
    picture: Path | None,
    out: Path | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> int:
    """Trains twice with the same data: once under failing collectives (the fault `comms`) at a steady rate, once
    without, and draws what was published of 16 nodes with 8 accelerators each: active replicas over time, and both
    losses.

    \b
    What is smaller here: the model, the replicas (one process each, on one machine), and all times with them.
    debug.min_step_s stands for the accelerators' work.

    \b
    active_mean, active_least   replicas that trained, over the time of the run, and the fewest at any time
    active_share                of the time, for each number of replicas
    loss, loss_calm             mean of the last 20 steps of each run, and loss_ratio
    tokens_a_minute             that came into the model, of each run, and efficiency: the ratio

    Exit code 0: both runs trained to the end; 1: not so; 2: wrong use; 130: interrupted.
    """
    folder = out or Path("outputs") / time.strftime("reproduce-%Y%m%d-%H%M%S")
    if folder.exists():
        raise click.UsageError(f"{folder} exists already: choose another --out")
    ours = ("--orchestrator.replicas", str(replicas), "--training.steps", str(steps), "--debug.seed", str(seed))
    calm_target = make_target(config, [*ours, *flags])
    faults = ("--faults.every_s", str(every_s), "--faults.kinds", '["comms"]', "--faults.seed", str(seed))
    calm = _run(calm_target, folder / "calm")
    struck = _run(make_target(config, [*ours, *faults, *flags]), folder / "struck")
    figures = _figures(calm, struck, replicas) | {
        "replicas": replicas,
        "steps": steps,
        "every_s": every_s,
        "seed": seed,
        "config": Path(config).name,
        "flags": list(flags),
        "note": calm_target.note,
        "folder": str(folder),
        "picture": str(picture or folder / "reproduce.png"),
    }
    _draw(calm, struck, replicas, every_s, Path(figures["picture"]))
    click.echo(json.dumps(figures, indent=None if as_json else 2))
    return FAILED if figures["failed"] else PASSED


def _run(target: Target, run_dir: Path) -> Told:
    steps = target.resolved.training.steps
    with LaunchedRun(target.config, run_dir, target.flags) as run:
        exit_code = run.wait(_START_S + steps * max(_PER_STEP_S, 5 * target.resolved.debug.min_step_s))
        leaks = run.end()
    events = read_all(run_dir / "events.jsonl")
    fold = RunFold.of(events)
    began = next((event["t"] for event in events if event["event"] == "first_step"), math.inf)
    ended = max((event["t"] for event in events if event["event"] == "replica_finished"), default=began)
    broken = [text for texts in violations(events).values() for text in texts]
    return Told(
        exit_code=exit_code,
        active=_active(events, began),
        losses=_losses(read_all(run_dir / "metrics.jsonl")),
        fold=fold,
        broken=[*broken, *(f"left behind: {process}" for process in leaks)],
        seconds=ended - began,
        events=events,
    )


def _active(events: Sequence[Record], began: float) -> list[tuple[float, int]]:
    """How many replicas train: from an incarnation's first step to its failure."""
    training: set[int] = set()
    curve: list[tuple[float, int]] = []
    for event in events:
        match event["event"]:
            case "first_step":
                training.add(event["replica"])
            case "failure_detected" | "replica_retired" | "replica_finished":
                training.discard(event["replica"])
            case "replica_state" if event["to"] == ReplicaState.RUNNING:
                training.add(event["replica"])
            case _:
                continue
        if event["event"] == "replica_finished":
            break
        curve.append((max(0.0, event["t"] - began), len(training)))
    return curve


def _losses(metrics: Sequence[Record]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for record in metrics:
        if record.get("loss") is not None:
            found.setdefault(record["step"], []).append(record["loss"])
    return {step: statistics.fmean(values) for step, values in sorted(found.items())}


def _figures(calm: Told, struck: Told, replicas: int) -> dict[str, Any]:
    shares = _shares(struck, replicas)
    last, last_calm = _last(struck.losses), _last(calm.losses)
    rate = goodput(struck.events, struck.seconds).per_minute
    rate_calm = goodput(calm.events, calm.seconds).per_minute
    return {
        "faults": len(struck.fold.faults),
        "recoveries": len(struck.fold.recoveries),
        "recovered_s": asdict(spread(recovery.recovered_s for recovery in struck.fold.recoveries)),
        "active_mean": round(sum(count * share for count, share in shares.items()), 3),
        "active_least": min((count for count, share in shares.items() if share), default=0),
        "active_share": {str(count): round(share, 4) for count, share in shares.items() if share},
        "loss": last,
        "loss_calm": last_calm,
        "loss_ratio": round(last / last_calm, 4) if last and last_calm else None,
        "tokens_a_minute": round(rate),
        "tokens_a_minute_calm": round(rate_calm),
        "efficiency": round(rate / rate_calm, 4) if rate_calm else None,
        "seconds": round(struck.seconds, 1),
        "seconds_calm": round(calm.seconds, 1),
        "failed": [
            *(f"exit code {told.exit_code}" for told in (calm, struck) if told.exit_code),
            *calm.broken,
            *struck.broken,
        ],
    }


def _shares(told: Told, replicas: int) -> dict[int, float]:
    """Of the time from when all trained first, the share in which so many did."""
    start = next((t for t, count in told.active if count == replicas), 0.0)
    times = [t for t, _ in told.active]
    shares = dict.fromkeys(range(replicas + 1), 0.0)
    first = max(0, bisect.bisect_right(times, start) - 1)
    for index in range(first, len(told.active)):
        begin = max(start, times[index])
        end = times[index + 1] if index + 1 < len(times) else told.seconds
        shares[told.active[index][1]] += max(0.0, end - begin)
    total = sum(shares.values())
    return {count: seconds / total for count, seconds in shares.items()} if total else shares


def _last(losses: Mapping[int, float]) -> float | None:
    values = list(losses.values())[-_LAST_STEPS:]
    return round(statistics.fmean(values), 4) if values else None


def _draw(calm: Told, struck: Told, replicas: int, every_s: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6.5), layout="constrained")
    times = [t for t, _ in struck.active]
    counts = [count for _, count in struck.active]
    above.step([*times, struck.seconds], [*counts, counts[-1] if counts else 0], where="post", color="tab:blue", lw=1)
    began = next((event["t"] for event in struck.events if event["event"] == "first_step"), 0.0)
    for fault in struck.fold.faults:
        above.axvline(fault.t - began, color="tab:red", lw=0.5, alpha=0.5)
    above.set(ylim=(0, replicas + 0.5), xlabel="seconds", ylabel="replicas that train")
    above.set_title(f"{replicas} replicas, a failing collective every {every_s:g} s (red)")
    below.plot(list(calm.losses), list(calm.losses.values()), color="tab:gray", lw=1, label="without faults")
    below.plot(list(struck.losses), list(struck.losses.values()), color="tab:blue", lw=1, label="with faults")
    below.set(xlabel="nominal step", ylabel="loss, mean over the replicas")
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main(reproduce)

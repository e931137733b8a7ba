"""A real run under faults that do not stop: whether it goes on, how much it still gets done, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import psutil
from rich.table import Table

from elastic_train.config import ConfigError
from elastic_train.events import read_all
from elastic_train.metrics import RunFold
from elastic_train.observe.invariants import violations
from scripts.check_samples import faults as sample_faults
from scripts.check_samples import read_run
from scripts.command_line import CONFIG, CONTEXT, FAILED, FLAGS, JSON, PASSED, main, seconds, show_table
from scripts.fault_weather import Gust, deal, gusts
from scripts.figures import spread
from scripts.goodput import Goodput, goodput
from scripts.launched_run import LaunchedRun
from scripts.struck_run import Target, make_target

_OURS = (
    *("--training.steps", "100000000"),
    *("--training.dataloader.log_samples", "true"),
    *("--checkpoint.last_save_model_only", "false"),
    *("--checkpoint.enable", "true"),
    *("--checkpoint.interval", "500"),
)
_FORGIVING = ("--recovery.forgive_after_s", "5", "--recovery.silence_timeout_s", "5", "--recovery.backoff_max_s", "2")
"""Faults at this rate would use up any budget that is meant for a cluster, where they come every few hours."""
_START_S = 300.0
_LOOK_S = 0.2
_END_S = 180.0
_SHARED_MEMORY = Path("/dev/shm")
_BUCKET_SLACK_S = 1.0


@click.command(context_settings=CONTEXT)
@click.option(
    "--minutes", default=30.0, show_default=True, type=click.FloatRange(min=0.1), help="How long the faults go on."
)
@click.option(
    "--mtbf_s",
    default=15.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Mean seconds from one fault to the next, over all replicas.",
)
@click.option(
    "--calm_minutes",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="How long the same run goes without faults, to compare with.",
)
@click.option("--seed", default=0, show_default=True, help="Decides which faults come, when, and where.")
@CONFIG
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for both runs, which must not exist. [default: a new one, outputs/soak-<time>]",
)
@JSON
@FLAGS
def soak(
    minutes: float,
    mtbf_s: float,
    calm_minutes: float,
    seed: int,
    config: str,
    out: Path | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> int:
    """Trains without an end while faults strike, and ends it by SIGTERM. Before, the same run goes without faults.

    Of the faults 80 % end a process, 10 % stop or hang one, 10 % end a ReplicaActor or the Lighthouse. Every fifth
    death is a SIGKILL from outside, whatever the replica is doing; the other faults need a replica that trains, and
    where they find none nothing happens (missed).

    The time between faults is exponentially distributed. Budgets are more forgiving than by default: see flags in the
    output.

    \b
    efficiency            tokens that came into the global model, a minute, to those of the run without faults
    invariants            I1 to I8 of the log (name -> ok), I2 by the log of the samples, I5 by the processes
    leaked                processes, files in /dev/shm and listening sockets that are left
    recovered_s           from a death to the end of the first inner step (median_s, worst_s)
    full_restarts         how often all replicas went back to a durable snapshot
    retired               replicas that were given up
    controller            file descriptors and resident MiB of the controller, early and at the end

    Exit code 0: the run went on to the end, without a full restart, every invariant held and nothing is left; 1: not
    so; 2: wrong use; 130: interrupted.
    """
    folder = out or Path("outputs") / time.strftime("soak-%Y%m%d-%H%M%S")
    if folder.exists():
        raise click.UsageError(f"{folder} exists already: choose another --out")
    target = make_target(config, [*_OURS, *_FORGIVING, *flags])
    if target.replicas < 2:
        raise click.UsageError("with a single replica nobody has a peer to come back from: set orchestrator.replicas")
    calm = _calm(target, folder / "calm", 60 * calm_minutes)
    figures = _struck(target, folder / "struck", 60 * minutes, mtbf_s, seed)
    figures |= {
        "tokens_a_minute_calm": round(calm.per_minute),
        "efficiency": round(figures["tokens_a_minute"] / calm.per_minute, 4) if calm.tokens else None,
        "minutes": minutes,
        "mtbf_s": mtbf_s,
        "seed": seed,
        "config": Path(config).name,
        "flags": list(target.flags),
        "note": target.note,
        "folder": str(folder),
    }
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show(figures)
    return FAILED if figures["failed"] else PASSED


def _calm(target: Target, run_dir: Path, span_s: float) -> Goodput:
    with LaunchedRun(target.config, run_dir, target.flags) as run:
        run.wait_for_event("first_step", _START_S)
        deadline = time.monotonic() + span_s
        while time.monotonic() < deadline and run.process.poll() is None:
            time.sleep(_LOOK_S)
        if run.process.poll() is not None:
            raise ConfigError(f"the run without faults ended by itself: {run.tail(1)}")
        _terminate(run)
    return goodput(read_all(run_dir / "events.jsonl"), span_s)


def _struck(target: Target, run_dir: Path, span_s: float, mtbf_s: float, seed: int) -> dict[str, Any]:
    before = _files()
    struck: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    controller: list[tuple[int, float]] = []
    failed: list[str] = []
    with LaunchedRun(target.config, run_dir, target.flags) as run:
        run.wait_for_event("first_step", _START_S)
        process = psutil.Process(run.process.pid)
        began = due = time.monotonic()
        for gust in gusts(seed, mtbf_s=mtbf_s, replicas=target.replicas, ranks=target.ranks):
            due += gust.after_s
            _sleep_until(min(due, began + span_s), run)
            if time.monotonic() >= began + span_s or run.process.poll() is not None:
                break
            controller.append((process.num_fds(), process.memory_info().rss / 2**20))
            _count(gust, deal(gust, run_dir, run.events()), struck, missed)
        if run.process.poll() is not None:
            failed.append(f"the run ended by itself after {time.monotonic() - began:.0f} s: {run.tail(1)}")
        mine = [process, *run.processes()]
        listening = {place for each in mine for place in _listening(each)}
        exit_code = _terminate(run)
        leaks = [f"process {leak.pid}" for leak in run.end()]
    leaks += [f"file {name}" for name in sorted(_files() - before)]
    still = listening & _places(psutil.net_connections(kind="tcp"))
    leaks += [f"socket {ip}:{port}" for ip, port in sorted(still)]
    if not failed and exit_code not in (0, 130):
        failed.append(f"exit code {exit_code} after SIGTERM: {run.tail(1)}")
    return _judged(run_dir, span_s, controller, failed, leaks) | {
        "faults": dict(struck),
        "missed": dict(missed),
        "leaked": leaks,
    }


def _judged(
    run_dir: Path, span_s: float, controller: Sequence[tuple[int, float]], failed: list[str], leaks: Sequence[str]
) -> dict[str, Any]:
    events = read_all(run_dir / "events.jsonl")
    fold = RunFold.of(events)
    broken = violations(events)
    broken |= {"I2": _samples(run_dir), "I5": list(leaks), "I8": _buckets(fold)}
    restores = sum(event["event"] == "run_restored" for event in events)
    failed = [
        *failed,
        *(f"{name}: {text}" for name, texts in broken.items() for text in texts),
        *(f"all replicas went back to outer step {e['outer_step']}" for e in events if e["event"] == "run_restored"),
        *(f"replica {replica} was given up: {cause}" for replica, cause in fold.retired.items()),
    ]
    early = controller[min(len(controller) // 4, len(controller) - 1)] if controller else (0, 0.0)
    late = controller[-1] if controller else (0, 0.0)
    return {
        "tokens_a_minute": round(goodput(events, span_s).per_minute),
        "recoveries": len(fold.recoveries),
        "recovered_s": asdict(spread(recovery.recovered_s for recovery in fold.recoveries)),
        "outer_steps": fold.outer_step,
        "sync_retries": fold.sync_retries,
        "full_restarts": restores,
        "retired": fold.retired,
        "invariants": {name: not texts for name, texts in sorted(broken.items())},
        "controller": {"fds": [early[0], late[0]], "rss_mib": [round(early[1], 1), round(late[1], 1)]},
        "failed": failed,
    }


def _samples(run_dir: Path) -> list[str]:
    """I2: every sample that is in the last snapshot was trained on once."""
    try:
        return sample_faults(read_run(run_dir))
    except ConfigError as error:
        return [str(error)]


def _buckets(fold: RunFold) -> list[str]:
    """I8: every second of a replica is in one bucket."""
    return [
        f"the time of replica {replica} adds up to {total:.1f} s of {fold.wall_s():.1f}"
        for replica in fold.replicas
        if abs((total := sum(fold.buckets(replica).values())) - fold.wall_s()) > _BUCKET_SLACK_S
    ]


def _count(gust: Gust, missed_because: str | None, struck: Counter[str], missed: Counter[str]) -> None:
    (struck if missed_because is None else missed)[gust.kind] += 1
    said = "" if missed_because is None else f": {missed_because}"
    click.echo(f"{gust.kind} at replica {gust.replica} rank {gust.rank}{said}", err=True)


def _terminate(run: LaunchedRun) -> int:
    if run.process.poll() is None:
        os.kill(run.process.pid, signal.SIGTERM)
    return run.wait(_END_S)


def _sleep_until(deadline: float, run: LaunchedRun) -> None:
    while (left := deadline - time.monotonic()) > 0 and run.process.poll() is None:
        time.sleep(min(left, _LOOK_S))


def _files() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()


def _listening(process: psutil.Process) -> set[Any]:
    """Where it listens."""
    try:
        return _places(process.net_connections(kind="tcp"))
    except psutil.Error:
        return set()


def _places(connections: Iterable[Any]) -> set[Any]:
    return {tuple(found.laddr) for found in connections if found.status == psutil.CONN_LISTEN}


def _show(figures: Mapping[str, Any]) -> None:
    click.echo(f"{sum(figures['faults'].values())} faults in {figures['minutes']:g} minutes ({figures['note']})")
    table = Table(box=None, show_header=False)
    table.add_row("efficiency", "-" if figures["efficiency"] is None else f"{figures['efficiency']:.1%}")
    table.add_row("tokens a minute", f"{figures['tokens_a_minute']} of {figures['tokens_a_minute_calm']}")
    table.add_row("recovered, median and worst", " ".join(map(seconds, figures["recovered_s"].values())))
    table.add_row("faults", " ".join(f"{kind} {count}" for kind, count in figures["faults"].items()))
    table.add_row("missed", " ".join(f"{kind} {count}" for kind, count in figures["missed"].items()))
    table.add_row(
        "invariants", " ".join(f"{name} {'ok' if ok else 'BROKEN'}" for name, ok in figures["invariants"].items())
    )
    table.add_row("left behind", ", ".join(figures["leaked"]) or "nothing")
    show_table(table)
    for reason in figures["failed"]:
        click.echo(reason)


if __name__ == "__main__":
    main(soak)

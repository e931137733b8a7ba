"""How much training gets done while processes are killed: ours, stock torchft's, and restarts from checkpoints."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from rich.table import Table

from scripts.command_line import CONFIG, CONTEXT, FAILED, FLAGS, JSON, PASSED, main, show_table
from scripts.goodput_arms import (
    CHECKPOINT_STEPS,
    ELASTIC,
    STOCK_TORCHFT,
    TORCHRUN_CHECKPOINT,
    Arm,
    started,
)
from scripts.goodput_arms import FLAGS as ARM_FLAGS
from scripts.kill_schedule import Kill, schedule
from scripts.struck_run import Target, make_target

ARMS = (ELASTIC, STOCK_TORCHFT, TORCHRUN_CHECKPOINT)
RUN_IN_S = 10.0

_START_S = 300.0
_POLL_S = 0.02
# The log of a run is put together from its processes' own, a little later.
_LATE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Spans:
    """When what is measured begins and ends, seconds after the end of the first inner step."""

    calm: float
    struck: float
    end: float

    @classmethod
    def of(cls, *, calm_s: float, struck_s: float) -> Spans:
        return cls(calm=RUN_IN_S, struck=RUN_IN_S + calm_s, end=RUN_IN_S + calm_s + struck_s)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one arm did."""

    tokens_a_minute: float = 0.0
    """Under faults."""
    calm_tokens_a_minute: float = 0.0
    kills: int = 0
    """That found their process."""
    resumed: int = 0
    """Lives that came after a death and trained."""
    started_s: float | None = None
    """From its start to the end of its first inner step; not part of any figure."""
    failed: Sequence[str] = ()

    @property
    def efficiency(self) -> float | None:
        """Of what it does without faults, the share that it does with them."""
        return _ratio(self.tokens_a_minute, self.calm_tokens_a_minute)


@click.command(context_settings=CONTEXT)
@CONFIG
@click.option(
    "--minutes", default=5.0, show_default=True, type=click.FloatRange(min=0.1), help="With faults, for each arm."
)
@click.option(
    "--calm_minutes", default=2.0, show_default=True, type=click.FloatRange(min=0.1), help="Without, before them."
)
@click.option(
    "--every_s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds from one SIGKILL to the next.",
)
@click.option("--seed", default=0, show_default=True, help="Decides which ranks are killed; also debug.seed.")
@click.option("--arms", default=",".join(ARMS), show_default=True, metavar="A,B,...", help="In this order.")
@click.option(
    "--run_dir", type=click.Path(path_type=Path), help="Folder of the runs. [default: outputs/bench_goodput-...]"
)
@JSON
@FLAGS
def bench_goodput(
    config: str,
    minutes: float,
    calm_minutes: float,
    every_s: float,
    seed: int,
    arms: str,
    run_dir: Path | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> int:
    """Trains the same model three times, one after the other, and kills the same ranks with SIGKILL at the same times,
    by pid and from outside:

    \b
    elastic              this program
    stock_torchft        this program with torchft's DiLoCo as it is: its transport, uniform weights, no standby
    torchrun_checkpoint  torchtitan's trainer, synchronous data parallel over all ranks, a checkpoint every 20 steps
                         (waited for; in memory, where there is /dev/shm) and torchrun, which restarts all ranks

    All have as many processes, as many tokens for a rank and a step, and the same debug.min_step_s, the sleep that
    stands for an accelerator. Time runs from the end of an arm's first inner step, so no start counts: 10 s to run in,
    --calm_minutes without faults, --minutes with a SIGKILL at their beginning and every --every_s. A kill strikes the
    process that has the drawn place then, also one that is just coming back; where there is none at the moment, the
    next one.

    Tokens that count are those in the global model that were not lost: with DiLoCo those of committed outer steps, with
    checkpoints those of the steps that the model contains, or, while the ranks are restarted, of its last checkpoint.

    \b
    elastic, stock_torchft, torchrun_checkpoint   tokens a minute that count, with faults
    calm                                          for each arm the same without faults
    efficiency                                    for each arm the first by the second
    ratios                                        elastic_to_stock_torchft, elastic_to_torchrun_checkpoint, with faults
    arms                                          for each arm also: kills (that were dealt), resumed (lives that came
                                                  after a death and trained), started_s (not part of any figure)

    FLAGS are further flags of `elastic-train run`, for all arms alike. The script itself decides training.steps,
    debug.seed, faults, checkpoint.enable and recovery.restarts_in_place: no arm may run out of restarts. Nothing else
    should use the machine meanwhile.

    With --json the last line has these figures, and: minutes, calm_minutes, kills (the schedule), config, flags, note,
    failed (why a figure cannot be trusted), run_dir.

    Exit code 0: measured; 1: an arm failed; 2: wrong use; 130: interrupted.
    """
    chosen = tuple(dict.fromkeys(arms.split(",")))
    if unknown := set(chosen) - set(ARMS):
        raise click.UsageError(f"no such arm: {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    folder = run_dir or Path("outputs") / time.strftime("bench_goodput-%Y%m%d-%H%M%S")
    if folder.exists():
        raise click.UsageError(f"{folder} exists already: choose another --run_dir")
    spans = Spans.of(calm_s=60 * calm_minutes, struck_s=60 * minutes)
    targets = {arm: _target(config, arm, int(60 * minutes / every_s), seed, flags) for arm in chosen}
    first = targets[chosen[0]]
    try:
        kills = schedule(seed, span_s=60 * minutes, every_s=every_s, replicas=first.replicas, ranks=first.ranks)
    except ValueError as error:
        raise click.UsageError(f"{error}: choose more --minutes or a smaller --every_s") from error
    measured: dict[str, Measured] = {}
    for arm in chosen:
        with started(arm, targets[arm], (folder / arm).resolve(), max_restarts=2 * len(kills)) as training:
            measured[arm] = measure(training, spans, kills)
        click.echo(f"{arm}: {measured[arm]}", err=True)
    figures = {
        **summarize(measured),
        "minutes": minutes,
        "calm_minutes": calm_minutes,
        "kills": [asdict(kill) for kill in kills],
        "checkpoint_steps": CHECKPOINT_STEPS,
        "config": Path(config).name,
        "flags": list(flags),
        "note": first.note,
        "failed": [f"{arm}: {reason}" for arm, found in measured.items() for reason in found.failed],
        "run_dir": str(folder),
    }
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show(figures)
    return FAILED if figures["failed"] else PASSED


def measure(training: Arm, spans: Spans, kills: Sequence[Kill]) -> Measured:
    """Let a training go on for both spans, kill its processes, and end it."""
    launched = time.time()
    with contextlib.suppress(TimeoutError):
        training.process.wait_until(lambda: _ended(training) or training.first_step() is not None, _START_S)
    began = training.first_step()
    if began is None:
        return Measured(failed=(f"it did not come to its first step: {training.process.tail(1)}",))
    dealt: list[float] = []
    for kill in kills:
        _wait(training, began + spans.struck + kill.after_s)
        dealt += _deal(training, kill, began + spans.end)
    _wait(training, began + spans.end + _LATE_S)
    failed = []
    if _ended(training):
        failed.append(
            f"it ended by itself, {time.time() - began:.0f} s after its first step: {training.process.tail(1)}"
        )
    else:
        failed += training.stop()
    if len(dealt) < len(kills):
        failed.append(f"only {len(dealt)} of {len(kills)} kills found their process")

    def rate(since: float, until: float) -> float:
        done = training.tokens(began + until, dealt) - training.tokens(began + since, dealt)
        return round(60 * done / (until - since), 1)

    return Measured(
        tokens_a_minute=rate(spans.struck, spans.end),
        calm_tokens_a_minute=rate(spans.calm, spans.struck),
        kills=len(dealt),
        resumed=training.resumed(),
        started_s=round(began - launched, 1),
        failed=tuple(failed),
    )


def summarize(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """The figures over all arms; None where an arm was left out, or did nothing."""
    rates = {arm: measured[arm].tokens_a_minute if arm in measured else None for arm in ARMS}
    return {
        **rates,
        "calm": {arm: found.calm_tokens_a_minute for arm, found in measured.items()},
        "efficiency": {arm: found.efficiency for arm, found in measured.items()},
        "ratios": {
            f"{ELASTIC}_to_{other}": _ratio(rates[ELASTIC], rates[other])
            for other in (STOCK_TORCHFT, TORCHRUN_CHECKPOINT)
        },
        "arms": {arm: asdict(found) for arm, found in measured.items()},
    }


def _target(config: str, arm: str, kills: int, seed: int, flags: Sequence[str]) -> Target:
    ours = [
        *("--training.steps", "1000000"),
        *("--debug.seed", str(seed)),
        *("--faults.at", "[]"),
        *("--faults.every_s", "0"),
        *("--checkpoint.enable", "false"),
        *("--recovery.restarts_in_place", str(2 * kills)),
    ]
    return make_target(config, [*flags, *ours, *ARM_FLAGS[arm]])


def _deal(training: Arm, kill: Kill, until: float) -> list[float]:
    """When the process was killed, unix seconds; none if there was no such process by then."""
    while not _ended(training) and time.time() < until:
        holder = training.holder(kill.replica, kill.rank)
        if holder is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                killed = time.time()
                holder.kill()
                return [killed]
        time.sleep(_POLL_S)
    return []


def _wait(training: Arm, until: float) -> None:
    """Until then, or until the training has ended."""
    while not _ended(training) and (left := until - time.time()) > 0:
        time.sleep(min(left, _POLL_S))


def _ended(training: Arm) -> bool:
    return training.process.process.poll() is not None


def _ratio(one: float | None, other: float | None) -> float | None:
    """None if the other did nothing, or lost more than it did."""
    return round(one / other, 4) if one is not None and other is not None and other > 0 else None


def _show(figures: Mapping[str, Any]) -> None:
    table = Table(
        title=f"Tokens a minute that count, with {len(figures['kills'])} SIGKILLs in {figures['minutes']:g} minutes "
        f"({figures['note']})",
        box=None,
    )
    for name in ("", "with faults", "without", "efficiency", "elastic does"):
        table.add_column(name, justify="right" if name else "left")
    for arm in figures["arms"]:
        efficiency, ratio = figures["efficiency"][arm], figures["ratios"].get(f"{ELASTIC}_to_{arm}")
        table.add_row(
            arm,
            f"{figures[arm]:.0f}",
            f"{figures['calm'][arm]:.0f}",
            "-" if efficiency is None else f"{100 * efficiency:.1f} %",
            "" if ratio is None else f"{ratio:.2f} times as much",
        )
    show_table(table)
    for reason in figures["failed"]:
        click.echo(f"not to be trusted: {reason}")
    click.echo(f"runs: {figures['run_dir']}")


if __name__ == "__main__":
    main(bench_goodput)

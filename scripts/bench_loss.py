"""What compression, overlap and failures do to the loss: the same run again and again, each time with one of them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from elastic_train.config import FaultSpec, RunConfig
from elastic_train.events import Record, read_all
from scripts.command_line import CONTEXT, FAILED, FLAGS, JSON, PASSED, main, show_table
from scripts.fault_plan import FaultPlan
from scripts.struck_run import make_target, run_under

PLAIN = "none"
KILLS = "kills"
ARMS: Mapping[str, tuple[str, ...]] = {
    PLAIN: (),
    "bf16": ("--diloco.compression", "bf16"),
    "int8": ("--diloco.compression", "int8"),
    "int4": ("--diloco.compression", "int4"),
    "overlap": ("--diloco.overlap_steps", "5", "--diloco.merge_alpha", "0.5"),
    "overlap_replaced": ("--diloco.overlap_steps", "5"),
    "fragments": ("--diloco.fragments", "2"),
    KILLS: (),
}
"""Further flags of each arm; ``kills`` has faults instead."""


_SHOWN = ("held_out", "held_out_change_pct", "loss", "change_pct", "bytes", "failures")


@click.command(context_settings=CONTEXT)
@click.option(
    "--config", default="llama3_debug.toml", show_default=True, help="A path, or the name of a file in configs/."
)
@click.option("--steps", default=400, show_default=True, type=click.IntRange(min=1), metavar="N")
@click.option("--sync_every", default=20, show_default=True, type=click.IntRange(min=1), metavar="N")
@click.option(
    "--arms",
    default="none,int8,int4,overlap,kills",
    show_default=True,
    metavar="A,B,...",
    help=f"Of {', '.join(ARMS)}; {PLAIN} is always among them.",
)
@click.option("--kill_every", default=60, show_default=True, type=click.IntRange(min=1), metavar="N", help="Steps.")
@click.option(
    "--last", default=40, show_default=True, type=click.IntRange(min=1), metavar="N", help="Steps that count as final."
)
@click.option("--seed", default=0, show_default=True, help="Of the parameters and the data.")
@click.option(
    "--run_dir", type=click.Path(path_type=Path), help="Folder of the runs. [default: outputs/bench_loss-...]"
)
@JSON
@FLAGS
def bench_loss(
    config: str,
    steps: int,
    sync_every: int,
    arms: str,
    kill_every: int,
    last: int,
    seed: int,
    run_dir: Path | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> int:
    """Runs the same training once for each arm, and compares the final loss: that of the last state on data that no run
    has seen, the same for all, and the training loss, which is the mean over all replicas and the last steps. Training
    losses are of each replica's own parameters on its own data: with overlap a replica keeps part of what it learned by
    itself, and one that has just returned begins from the average.

    In the arm "kills" a rank of the replicas in turn is killed with SIGKILL every --kill_every steps.

    FLAGS are further flags of `elastic-train run`, for all arms alike.

    With --json the last line has for each arm: held_out and loss, held_out_change_pct and change_pct (against the arm
    none), bytes a sync (mean), wall_s, failures; and failed (why a run is not to be trusted). Exit code 0: measured;
    1: a run failed.
    """
    chosen = dict.fromkeys([PLAIN, *arms.split(",")])
    if unknown := chosen.keys() - ARMS.keys():
        raise click.UsageError(f"no such arm: {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    folder = run_dir or Path("outputs") / time.strftime("bench_loss-%Y%m%d-%H%M%S")
    if folder.exists():
        raise click.UsageError(f"{folder} exists already: choose another --run_dir")
    results: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    for arm in chosen:
        target = make_target(config, [*flags, "--faults.at", "[]", "--diloco.sync_every", str(sync_every), *ARMS[arm]])
        faults = kills(target.replicas, target.ranks, steps, kill_every) if arm == KILLS else ()
        outcome = run_under(FaultPlan(steps=steps, faults=faults), target, folder / arm, seed=seed)
        failed += [f"{arm}: {reason}" for reason in outcome.reasons]
        results[arm] = {
            "held_out": _held_out(target.resolved, folder / arm),
            **final_figures(read_all(folder / arm / "metrics.jsonl"), read_all(folder / arm / "events.jsonl"), last),
            "wall_s": outcome.wall_s,
            "failures": len(faults),
        }
        click.echo(f"{arm}: {results[arm]}", err=True)
    compare(results)
    figures = {"arms": results, "steps": steps, "sync_every": sync_every, "note": target.note, "failed": failed}
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show(figures)
    return FAILED if failed else PASSED


def _held_out(config: RunConfig, run_dir: Path) -> float | None:
    """Loss of the last state of a run; None if it left none."""
    from scripts.held_out import held_out_loss

    states = sorted(run_dir.glob(f"{config.checkpoint.folder}/step-*"), key=lambda path: int(path.name[5:]))
    return round(held_out_loss(config, states[-1]), 5) if states else None


def final_figures(metrics: Sequence[Record], events: Sequence[Record], last: int) -> dict[str, Any]:
    """Mean loss of the last nominal steps over all replicas, and the mean bytes of a sync; None if there are none."""
    end = max((record["step"] for record in metrics), default=0)
    losses = [record["loss"] for record in metrics if record["step"] > end - last and record["loss"] is not None]
    sizes = [event["bytes"] for event in events if event["event"] == "sync_committed"]
    return {
        "loss": round(statistics.mean(losses), 5) if losses else None,
        "bytes": round(statistics.mean(sizes)) if sizes else None,
    }


def compare(results: Mapping[str, dict[str, Any]]) -> None:
    """Add to each arm by how many percent its losses are above those of the first."""
    first = next(iter(results.values()))
    for loss, change in (("held_out", "held_out_change_pct"), ("loss", "change_pct")):
        reference = first[loss]
        for figures in results.values():
            known = figures[loss] is not None and reference is not None
            figures[change] = round(100 * (figures[loss] / reference - 1), 3) if known else None


def kills(replicas: int, ranks: int, steps: int, every: int) -> tuple[FaultSpec, ...]:
    """One rank of the replicas in turn, every so many steps; none so late that its replica could not come back."""
    return tuple(
        FaultSpec(replica=number % replicas, rank=number % ranks, step=step, kind="kill")
        for number, step in enumerate(range(every, steps - every // 2, every))
    )


def _show(figures: Mapping[str, Any]) -> None:
    table = Table(
        title=f"After {figures['steps']} steps, a sync every {figures['sync_every']} ({figures['note']})", box=None
    )
    for name in ("", "held-out loss", "change %", "training loss", "change %", "bytes a sync", "failures"):
        table.add_column(name, justify="right" if name else "left")
    for arm, row in figures["arms"].items():
        table.add_row(arm, *(str(row[key]) for key in _SHOWN))
    show_table(table)
    for reason in figures["failed"]:
        click.echo(f"not to be trusted: {reason}")


if __name__ == "__main__":
    main(bench_loss)

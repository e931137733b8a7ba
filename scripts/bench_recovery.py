"""How long a replica that was killed is away, phase by phase, and how long the others wait because of it."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from elastic_train.events import read_all
from scripts.command_line import CONFIG, CONTEXT, FAILED, FLAGS, JSON, PASSED, main, seconds, show_table
from scripts.fault_plan import EARLIEST_STEP, draw_plan
from scripts.figures import recovery_figures
from scripts.join_figures import join_figures, joins
from scripts.namespaces import NoNamespaces, enter, loopback
from scripts.struck_run import make_target, run_under


@click.command(context_settings=CONTEXT)
@click.option(
    "--kills", default=5, show_default=True, type=click.IntRange(min=1), metavar="N", help="How many SIGKILLs."
)
@CONFIG
@click.option(
    "--gap_steps",
    default=150,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Least inner steps from one to the next; a replica must be able to come back in that time.",
)
@click.option(
    "--first_step",
    default=EARLIEST_STEP,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Least inner steps before the first kill: more, if all standbys are to be ready by then.",
)
@click.option("--seed", default=0, show_default=True, help="Decides which replicas are killed, and at which steps.")
@click.option(
    "--mbit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let all processes of the run together send each other at most so many 10^6 bits a second, in a network "
    "namespace of their own (root only). [default: as fast as the loopback is]",
)
@click.option(
    "--run_dir",
    type=click.Path(path_type=Path),
    help="Folder of the run. [default: outputs/bench_recovery-<time>]",
)
@JSON
@FLAGS
def bench_recovery(
    kills: int,
    config: str,
    gap_steps: int,
    first_step: int,
    seed: int,
    mbit: int | None,
    run_dir: Path | None,
    as_json: bool,
    flags: tuple[str, ...],
) -> int:
    """Measures recoveries in one run: ranks of different replicas are killed with SIGKILL, one after the other, and
    come back with the state of a peer. Everything is read from events.jsonl and metrics.jsonl of the run.

    \b
    median_s, worst_s             from the SIGKILL to the end of the first inner step of the new processes
    phases                        seconds from the SIGKILL to each milestone
    survivor_wait_median_s,       the longest that a peer waited for the quorum of the sync in which the
    survivor_wait_worst_s         replica came back
    survivor_outage_wait_worst_s  the same at the syncs in which it was missing: a peer's death is known
                                  to the Lighthouse only when its heartbeats have been missing for
                                  lighthouse.heartbeat_timeout_ms

    \b
    heal_s                        of the transfer of a state (median_s, worst_s)
    donors                        for each transfer, how many slots gave bytes
    survivor_step_ratio           a survivor's median inner step while a transfer goes on, to that of the
                                  50 logged steps before; null if no transfer was so long that a step
                                  began and ended in it
    survivor_step_ratios          how many it is the median of, one for each such survivor of each transfer
    survivor_touched_step_ratio   the same, of all steps that lie partly in a transfer or contain it
    joiner_steps_before_sync      inner steps that a joiner had trained for its first commit (median, least)
    intervals_skipped             outer steps that others agreed upon once a joiner had its state, and
                                  committed before it committed any, over all joiners: must be 0
    survivor_join_wait_beyond_step_s
                                  the longest wait of a peer in the sync in which a joiner came in, from
                                  when the joiner had its state, less the joiner's median inner step
                                  (median_s, worst_s); below 0: a shorter wait

    An inner step is the time between two logged steps with no sync between them: metrics.log_freq should be 1.

    FLAGS are further flags of `elastic-train run`. The script itself decides training.steps, debug.seed and
    faults.at. Nothing else should use the machine meanwhile.

    On one machine the state of the tiny model is there within a step. To see what a transfer does to the others' steps,
    take a larger model, little to compute and a slower network, for about ten steps in each transfer: --mbit 800 --
    --model.flavor debugmodel --training.seq_len 16 --training.local_batch_size 1 --diloco.sync_every 50.

    With --json the last line has these figures, and: kills, recovered, recoveries and joins (each by itself), config,
    flags, mbit, note, failed (why the figures cannot be trusted, empty if they can), run_dir.

    Exit code 0: measured; 1: the run failed; 2: wrong use; 130: interrupted.
    """
    target = make_target(config, flags)
    if target.replicas < 2:
        raise click.UsageError("with a single replica nobody has a peer to come back from: set orchestrator.replicas")
    if run_dir is not None and run_dir.exists():
        raise click.UsageError(f"{run_dir} exists already: choose another --run_dir")
    plan = draw_plan(
        random.Random(seed),
        ["kill"] * kills,
        replicas=target.replicas,
        ranks=target.ranks,
        gap_steps=gap_steps,
        first_step=first_step,
    )
    click.echo(f"{plan.steps} steps with {kills} kills: {' '.join(map(str, plan.faults))}", err=True)
    folder = run_dir or Path("outputs") / time.strftime("bench_recovery-%Y%m%d-%H%M%S")
    with contextlib.ExitStack() as stack:
        if mbit is not None:
            try:
                # This process goes there with all that it starts, and stays.
                enter(stack.enter_context(loopback(mbit)))
            except NoNamespaces as error:
                raise click.UsageError(f"--mbit: {error}") from error
        outcome = run_under(plan, target, folder, seed=seed)
    found = joins(read_all(folder / "events.jsonl"), read_all(folder / "metrics.jsonl"))
    figures = {
        "kills": kills,
        "recovered": sum(strike.recovered_s is not None for strike in outcome.strikes),
        **recovery_figures(outcome.strikes),
        **join_figures(found),
        "recoveries": [asdict(strike) for strike in outcome.strikes],
        "joins": [asdict(join) for join in found],
        "config": Path(config).name,
        "flags": list(flags),
        "mbit": mbit,
        "note": target.note,
        "failed": [*outcome.reasons, *(f"{fault}: its replica came too late" for fault in outcome.unfinished)],
        "run_dir": str(folder),
    }
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show(figures)
    return FAILED if figures["failed"] else PASSED


def _show(figures: Mapping[str, Any]) -> None:
    click.echo(f"{figures['recovered']} recoveries from {figures['kills']} SIGKILLs ({figures['note']})")
    table = Table(title="Seconds", box=None)
    for name in ("", "median", "worst"):
        table.add_column(name, justify="right" if name else "left")
    for name, phase in figures["phases"].items():
        table.add_row(f"from the SIGKILL: {name}", seconds(phase["median_s"]), seconds(phase["worst_s"]))
    wait = (seconds(figures["survivor_wait_median_s"]), seconds(figures["survivor_wait_worst_s"]))
    table.add_row("others waited in the sync of its return", *wait)
    for text, name in (
        ("the same, less the joiner's inner step", "survivor_join_wait_beyond_step_s"),
        ("transfer of the state", "heal_s"),
    ):
        table.add_row(text, seconds(figures[name]["median_s"]), seconds(figures[name]["worst_s"]))
    table.add_row("others waited in a sync without it", "", seconds(figures["survivor_outage_wait_worst_s"]))
    show_table(table)
    steps, ratio = figures["joiner_steps_before_sync"], figures["survivor_step_ratio"]
    trained = "-" if steps["least"] is None else f"{steps['median']:g} (median), {steps['least']} (least)"
    click.echo(f"inner steps of a joiner before its first sync: {trained}")
    click.echo(f"outer steps that went by without a joiner that had its state: {figures['intervals_skipped']}")
    click.echo(f"donors of each transfer: {' '.join(map(str, figures['donors'])) or '-'}")
    during = "too short for a step" if ratio is None else f"{ratio:.2f} times as long as before"
    click.echo(f"inner steps of the others during a transfer: {during}")
    if (touched := figures["survivor_touched_step_ratio"]) is not None:
        click.echo(f"those that a transfer lies in, or has a part of: {touched:.2f} times as long as before")
    for reason in figures["failed"]:
        click.echo(f"not to be trusted: {reason}")
    click.echo(f"run: {figures['run_dir']}")


if __name__ == "__main__":
    main(bench_recovery)

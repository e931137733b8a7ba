"""Kinds of faults over and over, at places that a seed decides: what a run survives once, it must survive always."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from elastic_train.config import ConfigError, digest
from elastic_train.config.faults import check_kind
from scripts.command_line import CONFIG, CONTEXT, FAILED, FLAGS, INTERRUPTED, JSON, PASSED, main, seconds, show_table
from scripts.durable_plan import TROUBLES as DURABLE_TROUBLES
from scripts.fault_plan import draw_plan
from scripts.stress_results import OtherSettings, Result, Results, summarize
from scripts.struck_run import Target, make_target, run_under
from scripts.sync_world.families import FAMILIES
from scripts.transfer_plan import TROUBLES
from scripts.trials import Trial, repeat, sum_up
from scripts.verdict import CAUSE_OF_KIND

RESULTS = "results.jsonl"
ALL = "all"
"""Every trouble that there is."""
# A process that hangs is found after this time, and everybody waits for it until then.
_SOON_SILENT = ("--recovery.silence_timeout_s", "5")


class KindList(click.ParamType[tuple[str, ...]]):
    """Kinds of faults with commas between them."""

    name = "kinds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        kinds = value if isinstance(value, tuple) else tuple(kind.strip() for kind in value.split(","))
        try:
            for kind in kinds:
                check_kind(kind)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return kinds


class NameList(click.ParamType[tuple[str, ...]]):
    """Some of certain names with commas between them."""

    name = "names"

    def __init__(self, what: str, known: Collection[str]) -> None:
        """
        Args:
            what: they are names of, in the plural.
        """
        self._what = what
        self._known = tuple(known)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(name.strip() for name in value.split(","))
        if unknown := [name for name in names if name not in self._known]:
            self.fail(
                f"no {self._what} are called {', '.join(unknown)}; there are {', '.join(self._known)}", param, ctx
            )
        return names


@click.command(context_settings=CONTEXT)
@click.option(
    "--seeds", default=10, show_default=True, type=click.IntRange(min=1), metavar="N", help="How many runs, one a seed."
)
@click.option(
    "--first_seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="The first of the seeds.",
)
@click.option(
    "--kinds",
    type=KindList(),
    # Its runs have this machine alone.
    default=",".join(kind for kind in CAUSE_OF_KIND if kind != "host"),
    show_default=True,
    metavar="KIND,...",
    help="The faults of each run; a kind that stands here twice strikes twice.",
)
@CONFIG
@click.option(
    "--replicas", type=click.IntRange(min=2), metavar="N", help="Replicas of each run. [default: what the config says]"
)
@click.option(
    "--gap_steps",
    default=150,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Least inner steps from one fault to the next; a replica must be able to come back in that time.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the results and the runs that failed. One that has results already is gone on with: seeds "
    "that it holds are not run again. [default: a new one, outputs/stress-<time>]",
)
@click.option("--keep", is_flag=True, help="Keep the folders of all runs, not only of those that failed.")
@click.option(
    "--worlds",
    type=NameList("worlds", FAMILIES),
    default=(),
    metavar="FAMILY,...",
    help="Strike worlds of the outer sync alone instead of runs: plain, fsdp (2 ranks a replica), fragments "
    "(overlapped), joiner (another replica comes in beside the fault).",
)
@click.option(
    "--transfers",
    type=NameList("troubles", (ALL, *TROUBLES)),
    default=(),
    metavar="TROUBLE,...",
    help=f"Strike transfers of a state alone instead of runs: {', '.join(TROUBLES)}; or {ALL}.",
)
@click.option(
    "--durable",
    type=NameList("troubles", (ALL, *DURABLE_TROUBLES)),
    default=(),
    metavar="TROUBLE,...",
    help="Strike writers of durable snapshots alone instead of runs, by the part of the write in which they die or by "
    f"what befalls the newest snapshot afterwards: {', '.join(DURABLE_TROUBLES)}; or {ALL}.",
)
@click.option(
    "--repeat",
    "repeats",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="With --worlds, --transfers or --durable: how many of each family or trouble, one a seed.",
)
@JSON
@FLAGS
def stress(
    seeds: int,
    first_seed: int,
    kinds: tuple[str, ...],
    config: str,
    replicas: int | None,
    gap_steps: int,
    out: Path | None,
    keep: bool,
    worlds: tuple[str, ...],
    transfers: tuple[str, ...],
    durable: tuple[str, ...],
    repeats: int,
    as_json: bool,
    flags: tuple[str, ...],
) -> int:
    """Runs a training once for each seed. Every run takes all the faults, one after the other, in an order and at
    replicas, ranks and steps that are drawn from the seed.

    A run passes if it trains to the last step with exit code 0; if every fault happened, was reported with its
    cause, and its replica trained again; if nothing else failed; if the invariants hold on its log; if its last
    state was saved; and if it left no process behind. A fault whose replica was still on its way when the others
    finished is counted apart.

    FLAGS are further flags of `elastic-train run`. The script itself decides training.steps, debug.seed and
    faults.at; recovery.silence_timeout_s is 5 unless FLAGS say otherwise.

    Results are written to OUT/results.jsonl run by run. Ctrl-C ends the present run and sums up the others. With
    --json the last line has: runs, passed, failed (seed: reasons), unfinished (seed: faults), kinds (count,
    recovered, median_s and worst_s from the fault to the first inner step after it, median of each phase).

    With --worlds nothing is launched: replicas with a tiny model carry out the outer sync in real processes over
    real groups, and one of them takes one fault (kill, stop or comms) at a point, rank and outer step that are drawn
    from the seed. A world passes if all replicas finish with the state that a computation in float64 expects, and no
    survivor has lost a token. Only --first_seed, --repeat, --out, --keep and --json apply; results are written to
    OUT/worlds.jsonl.

    With --transfers one to three joiners fetch a state from one to three donors at the same time, all in real
    processes, and one trouble comes after a number of bytes that is drawn from the seed. A trial passes if every
    joiner ends with exactly the state and header of a donor, or, if none is left that could give it, with a failure
    that says so; if no joiner gives up a donor that nothing has struck; and if no process and no thread is left
    behind. Only --first_seed, --repeat, --out and --json apply; results are written to OUT/transfers.jsonl.

    With --durable two ranks write snapshots of a small sharded state, and one of them is killed with SIGKILL at a file
    operation, or once so much of its tensors is written, as it is drawn from the seed; the other one is ended a moment
    later, as its supervisor would. The same or another replica writes on in the same folder. A trial passes if after
    each of these a run that resumes would go on from the newest snapshot that is in its place, exactly as it was
    written, or from the one before if that was damaged, and nothing half written is left at the end. Only
    --first_seed, --repeat, --out, --keep and --json apply; results are written to OUT/durable.jsonl. The last line
    counts for each trouble also in which part of a write the writers died.

    Exit code 0: all passed; 1: one failed; 2: wrong use; 130: interrupted.
    """
    folder = out or Path("outputs") / time.strftime("stress-%Y%m%d-%H%M%S")
    if (bool(worlds), bool(transfers), bool(durable)).count(True) > 1:
        raise click.UsageError("--worlds, --transfers and --durable are tests of their own: ask for one of them")
    if worlds:
        return _stress_worlds(worlds, range(first_seed, first_seed + repeats), folder, keep=keep, as_json=as_json)
    if transfers:
        troubles = tuple(TROUBLES) if ALL in transfers else transfers
        return _stress_transfers(troubles, range(first_seed, first_seed + repeats), folder, as_json=as_json)
    if durable:
        troubles = tuple(DURABLE_TROUBLES) if ALL in durable else durable
        return _stress_durable(troubles, range(first_seed, first_seed + repeats), folder, keep=keep, as_json=as_json)
    shape = () if replicas is None else ("--orchestrator.replicas", str(replicas))
    target = make_target(config, [*_SOON_SILENT, *shape, *flags])
    if target.replicas < 2:
        raise click.UsageError("with a single replica nobody has a peer to come back from: use --replicas")
    settings = {
        "config": Path(config).name,
        "config_digest": digest(target.resolved),
        "replicas": target.replicas,
        "flags": list(target.flags),
        "kinds": list(kinds),
        "gap_steps": gap_steps,
    }
    try:
        results = Results(folder / RESULTS, settings)
    except OtherSettings as error:
        raise click.UsageError(str(error)) from error

    wanted = range(first_seed, first_seed + seeds)
    interrupted = False
    try:
        for seed in wanted:
            if seed not in results:
                results.add(_run(seed, kinds, gap_steps, target, folder))
            (result,) = results.of([seed])
            _tell(result, folder)
            if result.passed and not keep:
                shutil.rmtree(_folder_of(seed, folder), ignore_errors=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        results.close()

    summary = summarize(results.of(wanted)) | {"interrupted": interrupted, "note": target.note, "folder": str(folder)}
    if as_json:
        click.echo(json.dumps(summary))
    else:
        _show(summary)
    if interrupted:
        return INTERRUPTED
    return FAILED if summary["failed"] else PASSED


def _run(seed: int, kinds: Sequence[str], gap_steps: int, target: Target, folder: Path) -> Result:
    plan = draw_plan(random.Random(seed), kinds, replicas=target.replicas, ranks=target.ranks, gap_steps=gap_steps)
    here = _folder_of(seed, folder)
    # A run that was interrupted has left its folder.
    shutil.rmtree(here, ignore_errors=True)
    click.echo(f"seed {seed}: {' '.join(map(str, plan.faults))}, {plan.steps} steps", err=True)
    outcome = run_under(plan, target, here / "run", seed=seed)
    return Result(seed=seed, faults=tuple(map(str, plan.faults)), outcome=outcome)


def _stress_worlds(families: Sequence[str], seeds: Sequence[int], folder: Path, *, keep: bool, as_json: bool) -> int:
    # They load torch, which nobody needs who asks for help.
    from scripts.sync_world import trials as worlds

    def make(family: str, seed: int) -> Trial:
        return worlds.make(family, seed, folder, keep=keep)

    trials, interrupted = repeat(families, seeds, folder / worlds.RESULTS, make=make, tell=_tell_trial)
    return _conclude(trials, "families", "worlds", folder, interrupted=interrupted, as_json=as_json)


def _stress_transfers(troubles: Sequence[str], seeds: Sequence[int], folder: Path, *, as_json: bool) -> int:
    from scripts import transfer_trials as transfers

    trials, interrupted = repeat(troubles, seeds, folder / transfers.RESULTS, make=transfers.make, tell=_tell_trial)
    return _conclude(trials, "troubles", "trials", folder, interrupted=interrupted, as_json=as_json)


def _stress_durable(troubles: Sequence[str], seeds: Sequence[int], folder: Path, *, keep: bool, as_json: bool) -> int:
    from scripts import durable_trials

    def make(trouble: str, seed: int) -> Trial:
        return durable_trials.make(trouble, seed, folder, keep=keep)

    trials, interrupted = repeat(troubles, seeds, folder / durable_trials.RESULTS, make=make, tell=_tell_trial)
    return _conclude(trials, "troubles", "trials", folder, interrupted=interrupted, as_json=as_json)


def _tell_trial(trial: Trial) -> None:
    click.echo(f"{trial.name}: {trial.fault} {'FAILED' if trial.reasons else 'passed'} in {trial.wall_s} s", err=True)
    for reason in trial.reasons:
        click.echo(f"  {reason}", err=True)


def _conclude(
    trials: Sequence[Trial], groups: str, what: str, folder: Path, *, interrupted: bool, as_json: bool
) -> int:
    """Show what trials gave; their exit code."""
    summary = sum_up(trials, groups)
    if as_json:
        click.echo(json.dumps(summary | {"interrupted": interrupted, "folder": str(folder)}))
    else:
        for name, figures in summary[groups].items():
            click.echo(f"{name}: {figures['passed']} of {figures['runs']} {what} passed")
        click.echo(f"results: {folder}")
    if interrupted:
        return INTERRUPTED
    return FAILED if summary["failed"] else PASSED


def _folder_of(seed: int, folder: Path) -> Path:
    return folder / f"seed_{seed}"


def _tell(result: Result, folder: Path) -> None:
    outcome = result.outcome
    verdict = "passed" if result.passed else "FAILED"
    click.echo(f"seed {result.seed}: {verdict}, {len(result.faults)} faults in {outcome.wall_s:.0f} s", err=True)
    for text in outcome.unfinished:
        click.echo(f"  {text}: its replica was still on its way at the end", err=True)
    for reason in outcome.reasons:
        click.echo(f"  {reason}", err=True)
    if not result.passed:
        click.echo(f"  see {_folder_of(result.seed, folder)}", err=True)


def _show(summary: Mapping[str, Any]) -> None:
    click.echo(f"{summary['passed']} of {summary['runs']} runs passed ({summary['note']})")
    kinds = summary["kinds"]
    phases = list(dict.fromkeys(phase for figures in kinds.values() for phase in figures["phases"]))
    table = Table(title="Seconds from the fault, medians", box=None)
    for name in ("fault", "times", "back", *phases, "worst"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind, figures in kinds.items():
        medians = [seconds(figures["phases"].get(phase)) for phase in phases]
        table.add_row(kind, str(figures["count"]), str(figures["recovered"]), *medians, seconds(figures["worst_s"]))
    show_table(table)
    for seed, faults in summary["unfinished"].items():
        click.echo(f"seed {seed}: still on the way back at the end: {', '.join(faults)}")
    for seed, reasons in summary["failed"].items():
        for reason in reasons:
            click.echo(f"seed {seed}: {reason}")
    click.echo(f"results: {Path(summary['folder']) / RESULTS}")


if __name__ == "__main__":
    main(stress)

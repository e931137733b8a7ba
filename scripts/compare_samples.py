"""Whether a run whose processes are killed over and over trains on the same samples as one that nothing happens to."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from elastic_train.config import digest
from scripts.check_samples import SampledRun, differences, faults, figures, read_run
from scripts.command_line import CONFIG, CONTEXT, FAILED, FLAGS, INTERRUPTED, JSON, PASSED, main
from scripts.fault_plan import FaultPlan, draw_plan
from scripts.stress_results import OtherSettings, Result, Results
from scripts.struck_run import Target, make_target, run_under

STRUCK, CALM = "struck", "calm"
# What the check needs a run to leave.
_OURS = ("--training.dataloader.log_samples", "true", "--checkpoint.last_save_model_only", "false")
# Nobody is waited for there, so nothing needs to stand for an accelerator, and the samples are the same.
_HASTE = ("--debug.min_step_s", "0")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Committed samples of two runs, by where they are."""

    in_both: int
    in_first_alone: int
    """One of the runs has come further in some shards: a replica that is away commits nothing meanwhile."""
    in_second_alone: int


@click.command(context_settings=CONTEXT)
@click.option(
    "--kills", default=20, show_default=True, type=click.IntRange(min=1), metavar="N", help="How many SIGKILLs."
)
@CONFIG
@click.option(
    "--gap_steps",
    default=120,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Least inner steps from one to the next; a replica must be able to come back in that time.",
)
@click.option("--seed", default=0, show_default=True, help="Decides which replicas are killed, and at which steps.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the two runs. One that has a run already is gone on with. "
    "[default: a new one, outputs/compare_samples-<time>]",
)
@JSON
@FLAGS
def compare_samples(
    kills: int, config: str, gap_steps: int, seed: int, out: Path | None, as_json: bool, flags: tuple[str, ...]
) -> int:
    """Makes two runs of the same config and seed with as many steps: in one, ranks of different replicas are killed
    with SIGKILL one after the other, in the other nothing happens. Then it checks each with what scripts.check_samples
    checks (every sample that is in the model was drawn, and came in once), and that of each virtual shard both have
    trained on the same samples, up to where the one that has not come so far ends.

    FLAGS are further flags of `elastic-train run`. The script itself decides training.steps, debug.seed, faults.at,
    training.dataloader.log_samples and checkpoint.last_save_model_only, and debug.min_step_s of the run without kills.

    With --json the last line has: kills, recovered, samples (committed ones: in_both, in_struck_alone, in_calm_alone),
    runs (what scripts.check_samples tells of each), note, failed (what is wrong, one sentence each; empty if nothing
    is), interrupted, folder.

    Exit code 0: nothing is wrong; 1: something is; 2: wrong use; 130: interrupted.
    """
    target = make_target(config, [*flags, *_OURS])
    if target.replicas < 2:
        raise click.UsageError("with a single replica nobody has a peer to come back from: set orchestrator.replicas")
    chance = random.Random(seed)
    plan = draw_plan(chance, ["kill"] * kills, replicas=target.replicas, ranks=target.ranks, gap_steps=gap_steps)
    click.echo(f"{plan.steps} steps with {kills} kills: {' '.join(map(str, plan.faults))}", err=True)
    folder = out or Path("outputs") / time.strftime("compare_samples-%Y%m%d-%H%M%S")
    settings = {
        "config": Path(config).name,
        "config_digest": digest(target.resolved),
        "flags": list(flags),
        "kills": kills,
        "gap_steps": gap_steps,
    }
    plans = {
        STRUCK: (plan, target),
        CALM: (FaultPlan(faults=(), steps=plan.steps), make_target(config, [*target.flags, *_HASTE])),
    }
    made: dict[str, Result] = {}
    try:
        for name, (its_plan, its_target) in plans.items():
            made[name] = _made(name, its_plan, its_target, folder, settings, seed)
            if made[name].outcome.reasons:
                break
    except KeyboardInterrupt:
        click.echo(json.dumps({"interrupted": True, "folder": str(folder)}) if as_json else f"runs: {folder}")
        return INTERRUPTED
    told = {
        "kills": kills,
        "recovered": sum(strike.recovered_s is not None for strike in made[STRUCK].outcome.strikes),
        **_compared(made, folder),
        "note": target.note,
        "interrupted": False,
        "folder": str(folder),
    }
    if as_json:
        click.echo(json.dumps(told))
    else:
        _show(told)
    return FAILED if told["failed"] else PASSED


def overlap(one: SampledRun, other: SampledRun) -> Overlap:
    """How many of the samples that two runs have committed are the same ones, by shard and place in it."""
    both = 0
    for shard, (mine, theirs) in enumerate(zip(one.committed, other.committed, strict=True)):
        both += max(min(mine, theirs) - max(one.first[shard], other.first[shard]), 0)
    return Overlap(in_both=both, in_first_alone=one.samples - both, in_second_alone=other.samples - both)


def _made(name: str, plan: FaultPlan, target: Target, folder: Path, settings: Mapping[str, Any], seed: int) -> Result:
    """The run of that name: made now, or by an earlier call."""
    try:
        results = Results(folder / f"{name}.jsonl", settings)
    except OtherSettings as error:
        raise click.UsageError(str(error)) from error
    try:
        if seed not in results:
            here = folder / f"{name}_{seed}"
            # A run that was interrupted has left its folder.
            shutil.rmtree(here, ignore_errors=True)
            outcome = run_under(plan, target, here, seed=seed)
            results.add(Result(seed=seed, faults=tuple(map(str, plan.faults)), outcome=outcome))
        (result,) = results.of([seed])
    finally:
        results.close()
    outcome = result.outcome
    click.echo(f"{name}: {'FAILED' if outcome.reasons else 'passed'} in {outcome.wall_s:.0f} s", err=True)
    return result


def _compared(made: Mapping[str, Result], folder: Path) -> dict[str, Any]:
    failed = [f"{name}: {reason}" for name, result in made.items() for reason in result.outcome.reasons]
    if failed:
        return {"samples": None, "runs": [], "failed": failed}
    folders = {name: folder / f"{name}_{result.seed}" for name, result in made.items()}
    runs = {name: read_run(path) for name, path in folders.items()}
    wrong = [f"{name}: {fault}" for name, run in runs.items() for fault in faults(run)]
    struck, calm = runs[STRUCK], runs[CALM]
    found = overlap(struck, calm)
    return {
        "samples": {
            "in_both": found.in_both,
            "in_struck_alone": found.in_first_alone,
            "in_calm_alone": found.in_second_alone,
        },
        "runs": [{"run_dir": str(folders[name]), **figures(run)} for name, run in runs.items()],
        "failed": [*wrong, *differences(struck, calm)],
    }


def _show(told: Mapping[str, Any]) -> None:
    click.echo(f"{told['recovered']} recoveries from {told['kills']} SIGKILLs ({told['note']})")
    for run in told["runs"]:
        click.echo(
            f"{run['run_dir']}: {run['samples']} samples are in the model, {run['drawn_again']} were drawn again"
        )
    if samples := told["samples"]:
        click.echo(
            f"the same in both: {samples['in_both']}; further only with kills: {samples['in_struck_alone']}, further "
            f"only without: {samples['in_calm_alone']}"
        )
    for reason in told["failed"]:
        click.echo(f"wrong: {reason}")
    click.echo(f"runs: {told['folder']}")


if __name__ == "__main__":
    main(compare_samples)

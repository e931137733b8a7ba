"""What a run goes on from: the newest sound snapshot of another, if the config goes on where it ends."""

from __future__ import annotations

from pathlib import Path

from elastic_train.config import ConfigError, EnvironmentProblem, RunConfig
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.replica.durable.folder import DurableSnapshot, sound
from elastic_train.replica.durable.origin import differences


def find_snapshot(config: RunConfig, run_dir: Path) -> tuple[DurableSnapshot, list[str]]:
    """The newest sound snapshot below ``run_dir`` that this config can go on from, and why newer ones were passed over.

    Reads every byte of it.

    Raises:
        ConfigError: this config has another place for it, or another meaning.
        EnvironmentProblem: there is none.
    """
    if not run_dir.is_dir():
        raise EnvironmentProblem(f"{run_dir}: there is no such run folder to resume from")
    folder = run_dir.absolute() / config.checkpoint.folder
    if config.diloco.engine != "elastic":
        raise ConfigError(f'--resume needs diloco.engine = "elastic", not "{config.diloco.engine}"')
    settings = config.diloco
    schedule = OuterSchedule(steps=config.training.steps, sync_every=settings.sync_every, fragments=settings.fragments)
    passed: list[str] = []
    misplaced: list[str] = []
    for snapshot in sound(folder, passed):
        _check_origin(snapshot, config)
        facts = snapshot.facts
        if facts.step >= config.training.steps:
            raise ConfigError(
                f"the snapshot {snapshot.path} is of step {facts.step} and training.steps is "
                f"{config.training.steps}: raise training.steps"
            )
        start = schedule.start(facts.outer_step)
        if start == facts.step:
            return snapshot, passed
        # The end of training.steps may have cut its last interval short; the one before is then of a whole interval.
        place = f"is of step {facts.step} after {facts.outer_step} outer steps, which are {start} steps here"
        passed.append(f"the snapshot {snapshot.path.name} was passed over: it {place}")
        misplaced.append(f"the snapshot {snapshot.path} {place}")
    if misplaced:
        raise ConfigError(
            f"{misplaced[0]}, and no older one fits: diloco.sync_every and diloco.fragments must stay what they were, "
            "and no run goes on with more training.steps from an interval that their end cut short"
        )
    why = f" ({'; '.join(passed)})" if passed else ""
    raise EnvironmentProblem(
        f"{folder} holds no snapshot that a run can go on from{why}: name the folder of a run (not of a snapshot) that "
        "had checkpoint.enable = true and came to a step that is a multiple of checkpoint.interval, or leave --resume "
        "out; the last state of a run holds all of it only with checkpoint.last_save_model_only = false"
    )


def _check_origin(snapshot: DurableSnapshot, config: RunConfig) -> None:
    """
    Raises:
        ConfigError: its numbers mean something else here.
    """
    origin = snapshot.facts.origin
    if origin.get("diloco.engine") != "elastic":
        raise ConfigError(
            f'the snapshot {snapshot.path} was written with diloco.engine = "{origin.get("diloco.engine")}": it lacks '
            'the outer momentum, so no run can go on from it; use diloco.engine = "elastic" from the start'
        )
    differing = differences(origin, config)
    if differing:
        raise ConfigError(
            f"the snapshot {snapshot.path} is of a run with another config ({'; '.join(differing)}): give these keys "
            "the values that they had"
        )

"""What a run goes on from: the newest sound snapshot of another, if the config goes on where it ends."""

from __future__ import annotations

from pathlib import Path

from elastic_train.config import ConfigError, EnvironmentProblem, RunConfig
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.replica.durable.folder import DurableSnapshot, newest_sound


def find_snapshot(config: RunConfig, run_dir: Path) -> tuple[DurableSnapshot, list[str]]:
    """The newest sound snapshot below ``run_dir``, and why newer ones were passed over. Reads every byte of it.

    Raises:
        ConfigError: this config has another place for it.
        EnvironmentProblem: there is none.
    """
    folder = run_dir.absolute() / config.checkpoint.folder
    if config.diloco.engine != "elastic":
        raise ConfigError(f'--resume needs diloco.engine = "elastic", not "{config.diloco.engine}"')
    found, passed = newest_sound(folder)
    if found is None:
        why = f" ({'; '.join(passed)})" if passed else ""
        raise EnvironmentProblem(
            f"{folder} holds no snapshot that a run can go on from{why}: name the folder of a run that had "
            "checkpoint.enable = true, or leave --resume out"
        )
    facts, settings = found.facts, config.diloco
    schedule = OuterSchedule(steps=config.training.steps, sync_every=settings.sync_every, fragments=settings.fragments)
    if facts.step >= config.training.steps:
        raise ConfigError(
            f"the snapshot {found.path} is of step {facts.step} and training.steps is {config.training.steps}: "
            "raise training.steps"
        )
    if schedule.start(facts.outer_step) != facts.step:
        raise ConfigError(
            f"the snapshot {found.path} is of step {facts.step} after {facts.outer_step} outer steps, which are "
            f"{schedule.start(facts.outer_step)} steps here: diloco.sync_every and diloco.fragments must stay what "
            "they were"
        )
    return found, passed

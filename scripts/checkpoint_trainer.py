"""The usual way to survive a killed process, to compare with: torchtitan's own trainer, synchronous data parallel over
all ranks, a checkpoint every so many steps, and torchrun, which restarts every process when one has died.

torchrun starts it as a module. It trains the model of a run's config on the same data, with as many tokens for a rank
and a step and with the same least time for a step.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.distributed.utils import set_pg_timeouts
from torchtitan.trainer import Trainer

from elastic_train.config import RunConfig
from elastic_train.events import LineFile
from elastic_train.replica.data.loader import ElasticDataLoader
from elastic_train.replica.titan.translate import translate
from scripts.checkpoint_progress import RESUMED, SAVED, TRAINED, progress_path
from scripts.command_line import CONTEXT
from scripts.struck_run import make_target


class RankDataLoader(ElasticDataLoader):
    """A loader whose positions are saved beside those of the other ranks, each of which has its own."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ElasticDataLoader.Config):
        """As that of the loader."""

    def state_dict(self) -> dict[str, Any]:
        return {self._name: super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict[self._name])

    @property
    def _name(self) -> str:
        return f"reader_{self.reader}"


class CheckpointTrainer(Trainer):  # type: ignore[misc]
    """One rank."""

    def __init__(self, config: Trainer.Config, *, least_step_s: float, progress: LineFile | None) -> None:
        """
        Args:
            least_step_s: a step sleeps until it has lasted so long.
            progress: where the rank that reports it writes; see ``scripts.checkpoint_progress``.
        """
        super().__init__(config)
        self._least_step_s = least_step_s
        self._progress = progress
        training = config.training
        self._tokens_a_step = training.local_batch_size * training.seq_len * self.gradient_accumulation_steps
        if self.parallel_dims.dp_enabled:
            self._tokens_a_step *= self.parallel_dims.get_mesh("batch").size()

    def run(self) -> None:
        """Train from the last checkpoint, or from the start, until something ends the process."""
        self.checkpointer.load()
        first = self.step + 1
        self._report(RESUMED)
        batches = self.batch_generator(self.dataloader)
        while self.should_continue_training():
            self.step += 1
            with _lasting(self._least_step_s):
                self.gc_handler.run(self.step)
                self.train_step(batches)
            self._report(TRAINED)
            if self.checkpointer.save(self.step):
                self._report(SAVED)
            if self.step == first:
                set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)

    def _report(self, kind: str) -> None:
        if self._progress is not None:
            tokens = self.step * self._tokens_a_step
            self._progress.append({"t": round(time.time(), 6), "kind": kind, "step": self.step, "tokens": tokens})


def trainer_config(config: RunConfig, *, run_dir: Path, checkpoints: Path, interval: int) -> Trainer.Config:
    """What torchtitan's trainer is told: one replica's settings, for the ranks of all of them.

    Args:
        checkpoints: an absolute path.
        interval: steps from one checkpoint to the next; each is waited for.
    """
    alone = translate(config, slot=0, run_dir=run_dir)
    replicas = config.orchestrator.replicas
    batch = alone.training.global_batch_size
    read = {field.name: getattr(alone.dataloader, field.name) for field in dataclasses.fields(alone.dataloader)}
    return dataclasses.replace(
        alone,
        training=dataclasses.replace(alone.training, global_batch_size=batch * replicas if batch > 0 else batch),
        parallelism=dataclasses.replace(
            alone.parallelism,
            data_parallel_replicate_degree=alone.parallelism.data_parallel_replicate_degree * replicas,
        ),
        dataloader=RankDataLoader.Config(**read | {"replicas": 1}),
        checkpoint=CheckpointManager.Config(
            enable=True, folder=str(checkpoints), interval=interval, keep_latest_k=2, async_mode="disabled"
        ),
    )


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    time.sleep(max(0.0, seconds - (time.monotonic() - began)))


@click.command(context_settings=CONTEXT)
@click.argument("config")
@click.option("--run_dir", required=True, type=click.Path(path_type=Path), help="Folder for progress and metrics.")
@click.option("--checkpoints", required=True, type=click.Path(path_type=Path), help="Folder for checkpoints.")
@click.option("--interval", required=True, type=click.IntRange(min=1), help="Steps from one checkpoint to the next.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def checkpoint_trainer(config: str, run_dir: Path, checkpoints: Path, interval: int, flags: tuple[str, ...]) -> None:
    """Trains CONFIG with its FLAGS as one rank of torchrun's, from the last checkpoint on, until it is ended."""
    resolved = make_target(config, flags).resolved
    told = trainer_config(resolved, run_dir=run_dir, checkpoints=checkpoints.resolve(), interval=interval)
    progress = LineFile(progress_path(run_dir)) if os.environ["RANK"] == "0" else None
    CheckpointTrainer(told, least_step_s=resolved.debug.min_step_s, progress=progress).run()


if __name__ == "__main__":
    # SIGTERM ends it at once, so that torchrun need not wait for those that live on.
    checkpoint_trainer()

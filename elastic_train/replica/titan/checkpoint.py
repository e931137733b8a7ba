"""A durable copy of a replica's state, in torchtitan's format, complete or not there at all."""

from __future__ import annotations

import logging
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.components.checkpoint import CheckpointManager

from elastic_train.config import CheckpointConfig

if TYPE_CHECKING:
    from elastic_train.replica.trainer import ElasticTrainer

logger = logging.getLogger(__name__)

_STEP_FOLDER = re.compile(r"step-(\d+)")


def save_checkpoint(
    trainer: ElasticTrainer, config: CheckpointConfig, run_dir: Path, *, last: bool
) -> tuple[Path, float]:
    """Write ``<run_dir>/<folder>/step-<n>``; every rank of the replica calls it.

    torch's distributed checkpoint is written beside its place and renamed once it is whole, so a reader never
    meets half of one. The last save of a run honours ``last_save_model_only`` and ``export_dtype``; the others
    hold everything.

    Returns:
        The folder, and the seconds it took.
    """
    began = time.monotonic()
    folder = run_dir / config.folder
    target = folder / f"step-{trainer.step}"
    half_written = f".writing-replica_{trainer.incarnation.slot}-"
    staging = folder / f"{half_written}{trainer.incarnation.number}"
    if trainer.rank == 0:
        # What earlier incarnations were writing when they died; other ranks may be writing this one's already.
        for path in set(folder.glob(f"{half_written}*")) - {staging}:
            shutil.rmtree(path, ignore_errors=True)
    writer = CheckpointManager.Config(
        enable=True,
        folder=staging.name,
        last_save_model_only=last and config.last_save_model_only,
        export_dtype=config.export_dtype,
        keep_latest_k=0,
    ).build(
        dataloader=trainer.dataloader,
        model_parts=trainer.model_parts,
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        states={"train_state": trainer, "outer_momentum": trainer.engine.momentum()},
        sd_adapter=None,
        base_folder=str(folder),
    )
    writer.save(trainer.step, last_step=True)
    writer.close()
    if trainer.rank == 0:
        if target.exists():
            shutil.rmtree(target)
        (staging / target.name).rename(target)
        staging.rmdir()
        _keep_newest(folder, config.keep_latest_k)
    trainer.control.barrier()
    return target, time.monotonic() - began


def _keep_newest(folder: Path, count: int) -> None:
    """Remove all but the newest ``count`` checkpoints; 0 keeps all."""
    found = sorted(
        (path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name)),
        key=lambda path: int(path.name.removeprefix("step-")),
    )
    for path in found[:-count] if count else []:
        shutil.rmtree(path, ignore_errors=True)

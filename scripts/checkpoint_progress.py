"""What a training that goes back to checkpoints tells of its progress, and which of its tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic_train.events import Record

RESUMED, TRAINED, SAVED = "resumed", "trained", "saved"
"""Values of ``kind``: what a life of the processes begins with, an inner step, a checkpoint that is whole. ``tokens``
is how many the model contains then, over all ranks; ``t`` is in unix seconds."""


def progress_path(run_dir: Path) -> Path:
    return run_dir / "progress.jsonl"


def tokens_contained(progress: Sequence[Record], kills: Sequence[float], until: float) -> int:
    """Tokens that the training's model contains at a moment.

    A kill throws away what came after the last checkpoint: the processes that live on are ended too.

    Args:
        progress: in the order of ``t``.
        kills: when processes were killed, unix seconds.
        until: the moment, unix seconds.
    """
    happened = [(record["t"], record["kind"], record["tokens"]) for record in progress]
    happened += [(t, None, 0) for t in kills]
    contained = saved = 0
    lives = True
    for t, kind, tokens in sorted(happened, key=lambda entry: entry[0]):
        if t > until:
            break
        if kind is None:
            lives = False
        elif kind == SAVED:
            saved = tokens
        elif kind == RESUMED:
            contained, lives = tokens, True
        elif lives:
            contained = tokens
    return contained if lives else saved

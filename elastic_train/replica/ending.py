"""How a replica that did not fail has ended its training: what becomes of its slot depends on it, so it is told and not
guessed from the log."""

from __future__ import annotations

from enum import Enum


class Ending(Enum):
    """The answer to a request to train."""

    FINISHED = "finished"
    """It trained to the end of the run."""
    LEFT = "left"
    """It was asked to leave, and holds the state of its last commit."""

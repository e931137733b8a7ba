"""How much each replica counts in an average: by the tokens that it trained on, or all the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def shares(
    tokens: Sequence[int], counted: Sequence[bool], weighting: Literal["tokens", "uniform"] = "tokens"
) -> list[float]:
    """The weight of each member's pseudo-gradient, in the order of ``tokens``.

    Args:
        tokens: tokens that each member trained on since this part of the model was last averaged.
        counted: whether a member takes part at all.
        weighting: ``diloco.weighting``. A member without tokens weighs nothing in either.

    Returns:
        Weights that sum to 1, or all 0 if nobody who counts has tokens. Who does not count weighs exactly 0.

    Raises:
        ValueError: a negative number of tokens, or sequences of different lengths.
    """
    if any(n < 0 for n in tokens):
        raise ValueError(f"negative tokens: {list(tokens)}")
    mass = [
        (n if weighting == "tokens" else min(n, 1)) if counts else 0 for n, counts in zip(tokens, counted, strict=True)
    ]
    total = sum(mass)
    return [part / total if total else 0.0 for part in mass]


def weighted_mean(values: Sequence[float | None], tokens: Sequence[int]) -> float | None:
    """The mean of what members report for the log, by tokens; without those that report nothing finite.

    Returns:
        Never below the least or above the greatest of what is averaged; None if nobody with tokens reports anything.

    Raises:
        ValueError: sequences of different lengths.
    """
    known = [(v, n) for v, n in zip(values, tokens, strict=True) if v is not None and math.isfinite(v) and n > 0]
    if not known:
        return None
    total = sum(n for _, n in known)
    mean = math.fsum(v * (n / total) for v, n in known)
    # The products are rounded before they are added, tiny values even to 0.
    return min(max(mean, min(v for v, _ in known)), max(v for v, _ in known))

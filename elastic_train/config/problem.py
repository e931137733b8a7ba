"""Something that is wrong with a config whose values are all of the right type."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """What is wrong, and the keys to blame: the message is placed at the first of them that somebody gave."""

    keys: tuple[str, ...]
    text: str

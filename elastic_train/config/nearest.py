"""What somebody may have meant who wrote a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Below this likeness a suggestion confuses more than it helps.
_LIKENESS = 0.6


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name most like `word`, or None.

    Of dotted names the last part counts: the same in any section, else one like it in the same section, else
    one like it in any. Otherwise the sections' names would make everything in a section alike.
    """
    names = list(known)
    section, _, last = word.rpartition(".")
    same = [name for name in names if _last(name) == last]
    siblings = [name for name in names if name.rpartition(".")[0] == section]
    return next(iter(same), None) or _like(last, siblings) or _like(last, names)


def _like(last: str, names: list[str]) -> str | None:
    by_last = {_last(name): name for name in reversed(names)}
    close = difflib.get_close_matches(last, by_last, n=1, cutoff=_LIKENESS)
    return by_last[close[0]] if close else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]

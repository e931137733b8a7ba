"""The text form of an injected fault, `replica.rank@step[/point]:kind`, and what it may name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic_train.config.errors import ConfigError
from elastic_train.config.nearest import nearest

DEFAULT_POINT = "step"
POINTS: tuple[str, ...] = (DEFAULT_POINT, "quorum", "reduce", "vote", "commit", "snapshot")
KINDS: tuple[str, ...] = (
    "kill",
    "exit",
    "segfault",
    "exception",
    "comms",
    "hang",
    "stop",
    "nan",
    "bitflip",
    "slow",
    "replica_actor",
    "lighthouse",
    "host",
)

_FORM = re.compile(r"(?P<replica>\d+)\.(?P<rank>\d+)@(?P<step>\d+)(?:/(?P<point>\w+))?:(?P<kind>\w+)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """One fault. It fires at the first passage of its point at or after its inner step."""

    replica: int
    rank: int
    step: int
    point: str = DEFAULT_POINT
    kind: str

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Reads `0.1@25:kill` or `1.0@40/reduce:stop`; anything else is a ConfigError that says why."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f'"{text}" is no fault: write replica.rank@step[/point]:kind, as in 0.1@25:kill')
        point = match["point"] or DEFAULT_POINT
        if point not in POINTS:
            raise ConfigError(f'fault "{text}" names no point{_hint(point, POINTS)}: use one of {", ".join(POINTS)}')
        check_kind(match["kind"])
        return cls(
            replica=int(match["replica"]),
            rank=int(match["rank"]),
            step=int(match["step"]),
            point=point,
            kind=match["kind"],
        )

    def __str__(self) -> str:
        point = "" if self.point == DEFAULT_POINT else f"/{self.point}"
        return f"{self.replica}.{self.rank}@{self.step}{point}:{self.kind}"


def check_kind(kind: str) -> None:
    """Raises a ConfigError for a kind that cannot be injected."""
    if kind in KINDS:
        return
    raise ConfigError(f'fault kind "{kind}" is unknown{_hint(kind, KINDS)}: use one of {", ".join(KINDS)}')


def _hint(word: str, known: tuple[str, ...]) -> str:
    found = nearest(word, known)
    return f' (did you mean "{found}"?)' if found else ""

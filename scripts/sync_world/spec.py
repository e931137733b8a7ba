"""What a world is made of: a value that says everything, so that the same world can be made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_train.config import DilocoConfig, FaultSpec
from elastic_train.diloco.schedule import OuterSchedule

HOST = "127.0.0.1"


def brisk(**settings: object) -> DilocoConfig:
    """An outer sync of short intervals and short bounds; ``settings`` are keys of ``[diloco]``."""
    values: dict[str, object] = {"sync_every": 10, "timeout_s": 2.0, "bucket_mb": 1, "quorum_timeout_s": 60.0}
    return DilocoConfig(**{**values, **settings})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """One world. Slots count from 0; what is given by slot has an entry for each."""

    replicas: int = 3
    ranks: int = 1
    """Processes of each replica; from 2 on they shard the model with FSDP."""
    steps: int = 200
    """Inner steps of the run."""
    diloco: DilocoConfig = field(default_factory=brisk)
    tokens: tuple[int, ...] = (100, 200, 300)
    """Trained in an inner step."""
    step_s: tuple[float, ...] = (0.004, 0.004, 0.004)
    """Least seconds of an inner step."""
    width: int = 16
    """Of the model's layers; a multiple of ``ranks``."""
    faults: tuple[FaultSpec, ...] = ()
    """``step`` is an outer step here: a fault strikes at the first passage of its point at or after it."""
    lag_s: float = 0.0
    """Seconds from its point to a kill."""
    late: Mapping[int, int] = field(default_factory=dict)
    """Slots that start when the others have reached an outer step, and join."""
    foreign: frozenset[int] = frozenset()
    """Slots that run another config."""
    lighthouse_ends_at: int | None = None
    """Outer step at which the Lighthouse is killed, and started again at its address."""
    channels: bool = False
    """States travel by process groups, as with ``peer_ckpt.transport = "process_group"``."""
    heartbeat_timeout_ms: int = 1000
    stall_s: float = 3.5
    """A rank that gets nowhere for so long is killed with its replica; longer than ``diloco.timeout_s``."""
    bound_s: float = 60.0
    """For the whole world; far above what one takes that works."""

    @property
    def schedule(self) -> OuterSchedule:
        return OuterSchedule(steps=self.steps, sync_every=self.diloco.sync_every, fragments=self.diloco.fragments)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who one process of a world is, and where it finds the others."""

    slot: int
    rank: int
    incarnation: int
    joining: bool
    lighthouse: str
    registry: str
    token: str
    faults: tuple[FaultSpec, ...]
    """Those that have not struck yet."""

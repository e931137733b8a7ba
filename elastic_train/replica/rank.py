"""What one rank of one incarnation knows about its place in the run. It travels to the rank's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from elastic_train.config import RunConfig
from elastic_train.replica.durable.folder import DurableSnapshot


@dataclass(frozen=True, kw_only=True)
class Incarnation:
    """One life of a replica."""

    config: RunConfig
    run_dir: Path
    slot: int
    number: int
    """0 for the first life."""
    joining: bool
    """Whether it starts after the release of the cold start: then its state comes from a peer, or not at all."""
    lighthouse: str
    """Address, ``http://host:port``."""
    host: str
    """Name under which peers reach this replica's ranks."""
    fired: frozenset[str]
    """Faults that have already acted in this run, as the config writes them."""
    registry: str = ""
    """Where replicas find each other, ``http://host:port``."""
    token: str = field(default="", repr=False)
    """The run's secret: what a request to the registry or to a peer must show. It belongs in no log and no file."""
    resume: DurableSnapshot | None = None
    """What the run starts from, if not from new parameters; a joiner gets its state from a peer all the same."""
    restores: int = 0
    """How often all replicas went back to a durable snapshot in this run."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that its processes are started with."""
    supervisor_pid: int = 0
    """Process of the ReplicaActor."""
    memory: tuple[str, ...] = ()
    """Files in which its ranks' host copies outlive them, by rank; empty: they do not."""
    place: str = ""
    """Name of its part of another host, that nobody had before; empty: it runs on the controller's own."""
    remains: tuple[str, ...] = ()
    """Those of an earlier incarnation on this host; empty: there are none."""


@dataclass(frozen=True, kw_only=True)
class SegmentPaths:
    """The files that the processes of one replica write on their own host, until the controller merges them.

    Hosts may share the file system, so those on other hosts than the controller's have a folder for each allocation.
    """

    events: Path
    metrics: Path

    @classmethod
    def of(cls, run_dir: Path, slot: int, place: str = "") -> SegmentPaths:
        folder = run_dir / "segments" / place
        return cls(events=folder / f"replica_{slot}.events.jsonl", metrics=folder / f"replica_{slot}.metrics.jsonl")


def beacon_path(run_dir: Path, slot: int, number: int, rank: int) -> Path:
    """The beacon of one rank of one incarnation."""
    return run_dir / "segments" / f"replica_{slot}.{number}.rank_{rank}.beacon"


def stack_answer_path(run_dir: Path, slot: int, number: int, rank: int) -> Path:
    """Where one rank of one incarnation answers when it is asked where its threads stand."""
    return run_dir / "segments" / f"replica_{slot}.{number}.rank_{rank}.stacks"


def stacks_folder(run_dir: Path, slot: int, number: int) -> Path:
    """Where the threads of an incarnation stood when it failed: a file for each rank."""
    return run_dir / "stacks" / f"replica_{slot}.{number}"


def supervisor_log_path(run_dir: Path, slot: int) -> Path:
    """What the ReplicaActors of a slot print."""
    return run_dir / "logs" / f"replica_{slot}" / "supervisor.log"


def rank_log_path(run_dir: Path, slot: int, rank: int) -> Path:
    """Everything that a rank prints, over all incarnations."""
    return run_dir / "logs" / f"replica_{slot}" / f"rank_{rank}.log"

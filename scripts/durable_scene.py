"""Writers of durable snapshots that die as a plan says, in processes of their own; and what a run would go on from."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

import torch
import torch._dynamo  # DTensor would load it in every writer, for a second
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components.checkpoint import DATALOADER, OPTIMIZER, TRAIN_STATE

from elastic_train.config import (
    CheckpointConfig,
    DilocoConfig,
    EnvironmentProblem,
    RunConfig,
    TrainingConfig,
)
from elastic_train.diloco.control import ControlGroup
from elastic_train.orchestrator.resume import find_snapshot
from elastic_train.process_log import print_to
from elastic_train.replica.durable.content import OUTER_MOMENTUM, what_failed
from elastic_train.replica.durable.folder import MANIFEST, DurableSnapshot, Facts
from elastic_train.replica.durable.origin import origin_of
from elastic_train.replica.durable.writer import NotWritten, SnapshotWriter
from scripts import children
from scripts.durable_plan import INTERVAL, RANKS, Damage, Found, Life, Look, Moment, Phase, Plan, judge
from scripts.durable_watch import Watch
from scripts.transfer_peers import PeerFailed, answer_of, peer_context, telling

_CHECKPOINT = "checkpoint"
_BESIDE = "writers"
"""Folder of the writers' logs and of the files by which their ranks find each other."""
_SHARDS = 8
_LAYERS = 4
_ROWS, _COLUMNS = 63, 1024
"""Of each tensor; the rows do not divide evenly among the ranks."""
_BOUND_S = 60.0
"""For each thing that is waited for; far above what it takes if all goes well."""
_LEAVE_S = 10.0

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Account:
    """What came of a plan."""

    looks: tuple[Look, ...]
    wall_s: float
    reasons: tuple[str, ...]
    """Why it failed; empty if it passed."""


class Scene:
    """One trial in real processes. It is used once, by :meth:`run`."""

    def __init__(self, plan: Plan, run_dir: Path) -> None:
        """
        Args:
            run_dir: a folder that is not there yet; the snapshots go below it, where those of a run go.
        """
        self._plan = plan
        self._run_dir = run_dir
        self._folder = run_dir / _CHECKPOINT
        self._context = peer_context(__name__)
        self._told: list[int] = []
        self._looks: list[Look] = []
        self._illegible = 0

    def run(self) -> Account:
        """From the first process to the last one's end."""
        began = time.monotonic()
        (self._run_dir / _BESIDE).mkdir(parents=True)
        reasons: list[str] = []
        try:
            for number, life in enumerate(self._plan.lives):
                died = self._live(life)
                self._looks.append(self._look(life, died=died))
                if self._plan.damage is not None and number + 1 == self._plan.deaths:
                    self._looks.append(self._look(life, died=died, damaged=self._harm(self._plan.damage)))
        except PeerFailed as error:
            reasons.append(str(error))
        return Account(
            looks=tuple(self._looks),
            wall_s=time.monotonic() - began,
            reasons=(*reasons, *judge(self._plan, self._looks)),
        )

    def _live(self, life: Life) -> Phase | None:
        """Let the life pass, and tell where it died; None if it ended well."""
        processes: list[BaseProcess] = []
        ends: list[Connection] = []
        try:
            for rank in range(RANKS):
                ours, theirs = self._context.Pipe()
                arguments = (theirs, self._run_dir, self._plan.keep, life, rank)
                process: BaseProcess = self._context.Process(target=_live, args=arguments, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
            for step in life.whole:
                answer_of(ends[0], str(life), _BOUND_S)
                self._told.append(step)
            if life.death is None:
                answer_of(ends[0], str(life), _BOUND_S)
                for process in processes:
                    process.join(_LEAVE_S)
                return None
            return self._bury(life.death, str(life), processes, ends)
        finally:
            children.end(processes, ends)

    def _bury(self, death: Moment, who: str, processes: Sequence[BaseProcess], ends: Sequence[Connection]) -> Phase:
        """Wait for the death of one rank, and leave the other one the time until its supervisor would end it."""
        died: Phase = answer_of(ends[death.rank], who, _BOUND_S)
        processes[death.rank].join(_LEAVE_S)
        time.sleep(death.orphaned_s)
        return died

    def _look(self, life: Life, *, died: Phase | None, damaged: str = "") -> Look:
        there = list(self._folder.iterdir()) if self._folder.is_dir() else []
        stagings = [path.name.removeprefix(".writing-replica_") for path in there if path.name.startswith(".writing-")]
        return Look(
            after=life,
            listed=tuple(
                sorted(int(path.name.removeprefix("step-")) for path in there if path.name.startswith("step"))
            ),
            told=tuple(self._told),
            found=self._find(),
            stagings=tuple(sorted(int(name.partition("-")[0]) for name in stagings)),
            died=died,
            damaged=damaged,
            illegible=self._illegible,
        )

    def _find(self) -> Found:
        try:
            snapshot, passed = find_snapshot(config(), self._run_dir)
        except EnvironmentProblem as error:
            return Found(step=0, passed=(str(error),))
        return Found(step=snapshot.facts.step, wrong=tuple(differences(snapshot)), passed=tuple(passed))

    def _harm(self, damage: Damage) -> str:
        """Damage the newest snapshot; the file that was struck."""
        newest = max(self._folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        files = sorted(newest.iterdir())
        file = files[int(damage.file * len(files))]
        content = bytearray(file.read_bytes())
        place = int(damage.place * len(content))
        if damage.bit is None:
            content = content[:place]
        else:
            content[place] ^= 1 << damage.bit
        file.write_bytes(content)
        if file.name == MANIFEST:
            self._illegible = int(newest.name.removeprefix("step-"))
        return str(file)


def config() -> RunConfig:
    """That of the run whose snapshots these are."""
    return RunConfig(
        checkpoint=CheckpointConfig(folder=_CHECKPOINT),
        training=TrainingConfig(steps=1000 * INTERVAL),
        diloco=DilocoConfig(sync_every=INTERVAL),
    )


def facts_of(step: int) -> Facts:
    """What the snapshot of a step says of itself."""
    return Facts(
        step=step,
        outer_step=step // INTERVAL,
        state_hash=f"{step * 0x9E3779B97F4A7C15 & (1 << 64) - 1:016x}",
        whole=True,
        origin=origin_of(config()),
    )


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a step's state by section and name, each whole; "" is the model's section."""
    generator = torch.Generator().manual_seed(step)
    names = [f"layers.{index}.weight" for index in range(_LAYERS)]
    moments = [f"state.{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")]
    return {
        section: {name: torch.rand(_ROWS, _COLUMNS, generator=generator) for name in those}
        for section, those in (("", names), (OPTIMIZER, moments), (OUTER_MOMENTUM, names))
    }


def positions_of(step: int) -> torch.Tensor:
    """int64 ``[virtual shards, 4]``."""
    return torch.arange(_SHARDS * 4, dtype=torch.int64).view(_SHARDS, 4) + step


def state_of(step: int, tensors: Mapping[str, Mapping[str, Any]]) -> State:
    """What is written for a step, of tensors in whatever form."""
    sections = {section: dict(those) for section, those in tensors.items() if section}
    return {
        **tensors[""],
        **sections,
        DATALOADER: {"positions": positions_of(step)},
        TRAIN_STATE: {"step": step, "ntokens_seen": 64 * step},
    }


def differences(snapshot: DurableSnapshot) -> list[str]:
    """What is in a snapshot that was not written for its step, one sentence each."""
    step = snapshot.facts.step
    wanted = tensors_of(step)
    read = {section: {name: torch.zeros_like(t) for name, t in those.items()} for section, those in wanted.items()}
    state = state_of(0, read)
    try:
        with warnings.catch_warnings():
            # It warns that it takes this process to be alone, which is meant.
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=dcp.FileSystemReader(snapshot.path), no_dist=True)
    except (Exception, CheckpointException) as error:
        return [f"the snapshot of step {step} cannot be loaded: {what_failed(error)}"]
    found = [
        f"{section}.{name} of step {step} is not what was written".removeprefix(".")
        for section, those in wanted.items()
        for name, tensor in those.items()
        if not torch.equal(read[section][name], tensor)
    ]
    if not torch.equal(state[DATALOADER]["positions"], positions_of(step)):
        found.append(f"the positions of step {step} are not what was written")
    if state[TRAIN_STATE] != state_of(step, wanted)[TRAIN_STATE] or snapshot.facts != facts_of(step):
        found.append(f"the snapshot of step {step} says that it is {state[TRAIN_STATE]}, {snapshot.facts}")
    return found


def _live(connection: Connection, run_dir: Path, keep: int, life: Life, rank: int) -> None:
    beside, folder = run_dir / _BESIDE / f"{life.slot}.{life.incarnation}", run_dir / _CHECKPOINT
    print_to(beside.with_name(f"{beside.name}.{rank}.log"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with telling(connection, "", str(life)):
        store = dist.FileStore(str(beside.with_name(f"{beside.name}.store")), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        dies = life.death is not None and life.death.rank == rank
        watch = _watch(connection, folder, life) if dies else None
        if watch is not None and life.death is not None and life.death.phase is Phase.LEFTOVERS:
            watch.arm()
            watch = None
        control = ControlGroup(_BOUND_S)
        writer = SnapshotWriter(
            folder,
            slot=life.slot,
            incarnation=life.incarnation,
            keep=keep,
            device=torch.device("cpu"),
            control=control,
            on_saved=lambda snapshot, duration_s: None,
            on_failed=lambda text: None,
        )
        for step in life.whole:
            _write(writer, step)
            if rank == 0:
                connection.send(None)
        if life.death is None:
            control.barrier()
            connection.send(None)
            dist.destroy_process_group()
            return
        state = sharded(life.doomed)
        if watch is not None:
            watch.arm()
        writer.start(state, facts_of(life.doomed))
        writer.join()
        # The other one is dead, and whoever has started this one ends it.
        connection.recv()


def _watch(connection: Connection, folder: Path, life: Life) -> Watch:
    assert life.death is not None
    size = sum(tensor.nbytes for those in tensors_of(life.doomed).values() for tensor in those.values()) // RANKS
    return Watch(folder, life.death, size, connection.send)


def _write(writer: SnapshotWriter, step: int) -> None:
    writer.start(sharded(step), facts_of(step))
    try:
        writer.wait()
    except NotWritten as error:
        raise PeerFailed(str(error)) from error


def sharded(step: int) -> State:
    """What this rank writes for a step: its shards along the rows of all tensors, as FSDP has them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def mine(whole: torch.Tensor) -> DTensor:
        rows = whole.chunk(mesh.size())[mesh.get_local_rank()]
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    return state_of(
        step,
        {section: {name: mine(whole) for name, whole in those.items()} for section, those in tensors_of(step).items()},
    )

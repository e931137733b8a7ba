"""A world and its supervisor: starts the ranks, sees who dies or hangs, and starts whole replicas again as joiners."""

from __future__ import annotations

import multiprocessing
import secrets
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from elastic_train.events import Record, read_all
from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.peer_ckpt.directory import Directory
from scripts.sync_world.board import Board, Stage
from scripts.sync_world.lighthouse import Lighthouse
from scripts.sync_world.model import Arrays
from scripts.sync_world.rank import DONE, REFUSED, events_of, run_rank, state_of
from scripts.sync_world.spec import HOST, Place, WorldSpec

_LOOK_S = 0.02
_LEAVE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class End:
    """How one process ended."""

    slot: int
    rank: int
    incarnation: int
    exit_code: int
    """Below 0: the signal."""
    hung: bool = False
    """It got nowhere, so the supervisor ended it."""

    def __str__(self) -> str:
        how = signal.Signals(-self.exit_code).name if self.exit_code < 0 else f"code {self.exit_code}"
        return f"rank {self.rank} of replica {self.slot}.{self.incarnation}: {how}{' (hung)' if self.hung else ''}"


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a world has left behind."""

    events: dict[int, list[Record]]
    """By slot, in the order in which they happened there."""
    states: dict[tuple[int, int], Arrays]
    """By slot and rank: ``<fragment>.anchor`` and ``<fragment>.momentum`` at the end."""
    ends: tuple[End, ...]
    """Of processes that ended before the world did."""
    wall_s: float
    unfinished: str = ""
    """Why the world had to be ended; empty if it came to its end."""
    left: tuple[str, ...] = ()
    """Processes that were still there after it."""


@dataclass(kw_only=True)
class _Replica:
    """What the supervisor knows of one slot."""

    incarnation: int = -1
    processes: dict[int, Any]
    hung: bool = False
    gone: bool = False
    """It was refused, and is not started again."""


def context() -> Any:
    """Processes that are there at once: they are forked from one that has everything loaded."""
    made = multiprocessing.get_context("forkserver")
    # The main module is run in each process once more, with what it imports.
    made.set_forkserver_preload(
        ["__main__", "scripts.command_line", "scripts.sync_world.rank", "scripts.sync_world.lighthouse"]
    )
    return made


class World:
    """Runs a spec once."""

    def __init__(self, spec: WorldSpec, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._spec = spec
        self._folder = folder
        self._context = context()
        self._token = secrets.token_hex(16)
        self._board = Board(self._context, spec.replicas, spec.ranks)
        self._replicas = [_Replica(processes={}) for _ in range(spec.replicas)]
        self._ends: list[End] = []
        self._released = False
        self._lighthouse_ended = spec.lighthouse_ends_at is None

    def run(self) -> Account:
        """To its end, or the bound. Nothing is left running."""
        spec = self._spec
        self._registry = RegistryServer(HOST, 0, self._token)
        self._directory = Directory(self._registry.url, self._token)
        self._lighthouse = Lighthouse(self._context, self._folder / "lighthouse.log", spec.heartbeat_timeout_ms)
        began = time.monotonic()
        unfinished = ""
        try:
            for slot in range(spec.replicas):
                if slot not in spec.late:
                    self._start(slot, joining=False)
            while not self._all_finished():
                if time.monotonic() - began > spec.bound_s:
                    unfinished = f"it had not ended after {spec.bound_s:g} s, at outer step {self._board.outer_step}"
                    break
                self._look()
            self._board.end()
            if not unfinished:
                unfinished = self._await_exits()
        finally:
            left = self._end_all()
            self._lighthouse.end()
            self._registry.close()
        return Account(
            events={slot: read_all(events_of(self._folder, slot)) for slot in range(spec.replicas)},
            states=self._states(),
            ends=tuple(self._ends),
            wall_s=time.monotonic() - began,
            unfinished=unfinished,
            left=left,
        )

    # -- the supervisor

    def _look(self) -> None:
        """One look at everybody."""
        spec, board = self._spec, self._board
        wait([p.sentinel for replica in self._replicas for p in replica.processes.values()], timeout=_LOOK_S)
        for slot, replica in enumerate(self._replicas):
            if replica.gone:
                continue
            for rank, process in replica.processes.items():
                if board.silence_s(slot, rank) > spec.stall_s and process.is_alive():
                    replica.hung = True
                    process.kill()
            if any(not process.is_alive() for process in replica.processes.values()):
                self._bury(slot)
            elif not replica.processes and board.outer_step >= spec.late.get(slot, 0):
                self._start(slot, joining=True)
        cold = [slot for slot in range(spec.replicas) if slot not in spec.late]
        ranks = [(slot, rank) for slot in cold for rank in range(spec.ranks)]
        if not self._released and all(board.stage(*rank) is Stage.READY for rank in ranks):
            self._released = True
            board.release()
        if not self._lighthouse_ended and board.outer_step >= (spec.lighthouse_ends_at or 0):
            self._lighthouse_ended = True
            self._lighthouse.kill_and_start()

    def _bury(self, slot: int) -> None:
        """End what is left of a replica, say that it has ended, and start it again."""
        replica = self._replicas[slot]
        # Only after all of them are killed is anything waited for.
        first = {rank: process.exitcode for rank, process in replica.processes.items()}
        for process in replica.processes.values():
            process.kill()
        for process in replica.processes.values():
            process.join()
        codes = {rank: process.exitcode for rank, process in replica.processes.items()}
        for rank, code in codes.items():
            if first[rank] is not None:
                end = End(slot=slot, rank=rank, incarnation=replica.incarnation, exit_code=code, hung=replica.hung)
                self._ends.append(end)
        self._directory.ended(slot, replica.incarnation)
        replica.processes, replica.hung = {}, False
        if REFUSED in codes.values():
            replica.gone = True
        else:
            self._start(slot, joining=True)

    def _start(self, slot: int, *, joining: bool) -> None:
        spec, replica = self._spec, self._replicas[slot]
        replica.incarnation += 1
        struck = {
            record["fault"] for record in read_all(events_of(self._folder, slot)) if record["event"] == "fault_injected"
        }
        for rank in range(spec.ranks):
            self._board.clear(slot, rank)
        for rank in range(spec.ranks):
            place = Place(
                slot=slot,
                rank=rank,
                incarnation=replica.incarnation,
                joining=joining,
                lighthouse=self._lighthouse.url,
                registry=self._registry.url,
                token=self._token,
                faults=tuple(fault for fault in spec.faults if str(fault) not in struck),
            )
            process = self._context.Process(target=run_rank, args=(spec, place, self._board, self._folder), daemon=True)
            process.start()
            replica.processes[rank] = process

    def _all_finished(self) -> bool:
        return all(
            replica.gone
            or (
                bool(replica.processes)
                and all(self._board.stage(slot, rank) is Stage.FINISHED for rank in range(self._spec.ranks))
            )
            for slot, replica in enumerate(self._replicas)
        )

    def _await_exits(self) -> str:
        """Why it did not end well; empty if it did."""
        deadline = time.monotonic() + _LEAVE_S
        for slot, replica in enumerate(self._replicas):
            for rank, process in replica.processes.items():
                process.join(max(deadline - time.monotonic(), 0.0))
                if process.exitcode != DONE:
                    return f"rank {rank} of replica {slot} did not leave at the end: {process.exitcode}"
        return ""

    def _end_all(self) -> tuple[str, ...]:
        left: list[str] = []
        for slot, replica in enumerate(self._replicas):
            for rank, process in replica.processes.items():
                if process.is_alive():
                    left.append(f"rank {rank} of replica {slot}")
                    process.kill()
                    process.join()
        return tuple(left)

    def _states(self) -> dict[tuple[int, int], Arrays]:
        states: dict[tuple[int, int], Arrays] = {}
        for slot in range(self._spec.replicas):
            for rank in range(self._spec.ranks):
                path = state_of(self._folder, slot, rank)
                if path.exists():
                    with np.load(path) as arrays:
                        states[slot, rank] = dict(arrays)
        return states

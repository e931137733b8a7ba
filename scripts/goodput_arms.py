"""The same training under three ways to survive a killed process, each as somebody outside of it sees it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from elastic_train.events import read_all
from elastic_train.orchestrator.monarch_env import trainer_environment
from scripts.checkpoint_progress import RESUMED, TRAINED, progress_path, tokens_contained
from scripts.goodput import goodput
from scripts.launched_run import LaunchedRun, config_path
from scripts.marked_process import MarkedProcess
from scripts.struck_run import Target

ELASTIC, STOCK_TORCHFT, TORCHRUN_CHECKPOINT = "elastic", "stock_torchft", "torchrun_checkpoint"

FLAGS: Mapping[str, Sequence[str]] = {
    ELASTIC: (),
    STOCK_TORCHFT: (
        *("--diloco.engine", "torchft"),
        *("--diloco.weighting", "uniform"),
        *("--peer_ckpt.transport", "http"),
        *("--recovery.standby", "false"),
    ),
    TORCHRUN_CHECKPOINT: (),
}
"""What sets an arm apart, as flags of ``elastic-train run``."""

CHECKPOINT_STEPS = 20

_END_S = 60.0
_SHARED_MEMORY = Path("/dev/shm")
_SAME_PROCESS_S = 1.0
"""The log's word for when a process was made is that of another reader of the kernel's."""


class Arm(ABC):
    """A training that runs until it is ended."""

    process: MarkedProcess

    @abstractmethod
    def first_step(self) -> float | None:
        """When its first inner step ended, unix seconds; None: it has not."""

    @abstractmethod
    def holder(self, replica: int, rank: int) -> psutil.Process | None:
        """The process that has this place in the training; None: there is none at the moment."""

    @abstractmethod
    def resumed(self) -> int:
        """How often processes have taken the place of dead ones and trained."""

    @abstractmethod
    def tokens(self, until: float, kills: Sequence[float]) -> int:
        """Tokens that count at a moment: they are in the global model, and were not lost.

        Args:
            until: unix seconds.
            kills: when processes were killed, unix seconds.
        """

    @abstractmethod
    def stop(self) -> list[str]:
        """End it as its user would; what was wrong with that."""


class RunArm(Arm):
    """A run of the product."""

    process: LaunchedRun

    def __init__(self, process: LaunchedRun) -> None:
        self.process = process

    def first_step(self) -> float | None:
        return next((event["t"] for event in self.process.events() if event["event"] == "first_step"), None)

    def holder(self, replica: int, rank: int) -> psutil.Process | None:
        events = self.process.events()
        lives = [event for event in events if event["event"] == "procs_started" and event["replica"] == replica]
        if not lives:
            return None
        pid, created = lives[-1]["pids"][rank], lives[-1]["created"][rank]
        found = _living(pid)
        return found if found is not None and abs(found.create_time() - created) < _SAME_PROCESS_S else None

    def resumed(self) -> int:
        return sum(e["event"] == "first_step" and e["incarnation"] > 0 for e in self.process.events())

    def tokens(self, until: float, kills: Sequence[float]) -> int:
        began = self.first_step()
        return 0 if began is None else goodput(self.process.events(), until - began).tokens

    def stop(self) -> list[str]:
        self.process.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(_END_S)
        except TimeoutError:
            return [f"it had not ended {_END_S:g} s after SIGTERM"]
        wrong = [] if code == 130 else [f"exit code {code} after SIGTERM: {self.process.tail(1)}"]
        return [*wrong, *(f"left behind: {leak}" for leak in self.process.end())]


class CheckpointArm(Arm):
    """torchrun with a training that goes back to its last checkpoint."""

    def __init__(self, process: MarkedProcess, progress: Path, ranks: int) -> None:
        """
        Args:
            progress: file, see ``scripts.checkpoint_progress``.
            ranks: of what stands for a replica.
        """
        self.process = process
        self._progress = progress
        self._ranks = ranks

    def first_step(self) -> float | None:
        return next((record["t"] for record in read_all(self._progress) if record["kind"] == TRAINED), None)

    def holder(self, replica: int, rank: int) -> psutil.Process | None:
        wanted = str(replica * self._ranks + rank)
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.environ().get("RANK") == wanted:
                        return _living(child.pid)
        return None

    def resumed(self) -> int:
        lives = [record for record in read_all(self._progress) if record["kind"] == RESUMED]
        return max(0, len(lives) - 1)

    def tokens(self, until: float, kills: Sequence[float]) -> int:
        return tokens_contained(read_all(self._progress), kills, until)

    def stop(self) -> list[str]:
        self.process.end()
        return []


@contextmanager
def started(name: str, target: Target, run_dir: Path, *, max_restarts: int) -> Iterator[Arm]:
    """An arm that starts; nothing of it is left afterwards but its folder.

    Args:
        target: with the arm's flags.
        max_restarts: how often torchrun may restart.
    """
    if name != TORCHRUN_CHECKPOINT:
        with LaunchedRun(target.config, run_dir, target.flags) as run:
            yield RunArm(run)
        return
    # On a disk each checkpoint would be waited for longer.
    checkpoints = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
    try:
        ranks = target.replicas * target.ranks
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
            *("--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts), "--monitor-interval", "0.1"),
            *("-m", "scripts.checkpoint_trainer", str(config_path(target.config)), "--run_dir", str(run_dir)),
            *("--checkpoints", str(checkpoints), "--interval", str(CHECKPOINT_STEPS), "--", *target.flags),
        ]
        environment = trainer_environment(
            replicas=target.replicas, procs=target.ranks, cores=os.cpu_count() or 1, interface="lo"
        )
        # The agent's own store keeps the addresses of dead ranks, at which a restart then fails and is repeated.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with MarkedProcess(command, run_dir.parent / f"{run_dir.name}.console", environment) as process:
            yield CheckpointArm(process, progress_path(run_dir), target.ranks)
    finally:
        shutil.rmtree(checkpoints, ignore_errors=True)


def _living(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None

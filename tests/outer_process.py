"""A replica in a process of its own, which a test drives through one outer sync after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from elastic_train.config import DilocoConfig
from elastic_train.diloco.engine import COLD_START_STEP, NoPeerState, Sync
from elastic_train.diloco.torchft_engine import SyncHooks, TorchftEngine
from elastic_train.peer_ckpt.shards import export_tensors, load_tensors
from elastic_train.replica.membership import ReplicaManager
from tests.outer import member

Arrays = dict[str, np.ndarray]
Moment = Literal["formed", "reduce", "vote", "commit"]
"""Where in a sync a process can be made to die; ``formed``: the quorum is there, and nothing was exchanged yet."""

_ANSWER_S = 90.0
SHAPES = {"0": (3, 5), "1": (7,)}


class ReplicaProcess:
    """The test's end of it."""

    def __init__(self, address: str, slot: int, config: DilocoConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, address, slot, config), daemon=True)
        self.process.start()
        theirs.close()

    def open(self, *, joining: bool = False) -> None:
        """Become a member of the quorum: from here on the others wait for this replica."""
        assert self.ask(joining) == "open"

    def send(self, *order: Any) -> None:
        self._connection.send(order)

    def answer(self) -> Any:
        assert self._connection.poll(_ANSWER_S), f"no answer in {_ANSWER_S} s"
        return self._connection.recv()

    def ask(self, *order: Any) -> Any:
        self.send(*order)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


@contextlib.contextmanager
def replicas(*processes: ReplicaProcess) -> Iterator[None]:
    """Ends the processes, whatever comes."""
    try:
        yield
    finally:
        for process in processes:
            process.end()


class _Replica:
    """The other end: parameters, membership and engine."""

    manager: ReplicaManager
    engine: TorchftEngine

    def __init__(self) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()})
        self.progress = torch.zeros(2, 4, dtype=torch.int64)
        self.healed = 0
        self.dies_at: Moment | None = None
        self.hooks = SyncHooks(
            at_point=self.at, progress=self.read, on_state=self.on_state, participants=self.participants
        )

    def at(self, point: str) -> None:
        if point == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def read(self) -> torch.Tensor:
        return self.progress.clone()

    def on_state(self) -> None:
        self.healed += 1

    def participants(self) -> tuple[int, ...]:
        return self.manager.quorum.participants if self.manager.quorum else ()

    def export_state(self) -> dict[str, object]:
        return {"theta": export_tensors(self.model.items()), "outer": self.engine.export_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        load_tensors(self.model.items(), state["theta"])
        self.engine.load_state(state["outer"])

    def obey(self, order: str, *arguments: Any) -> Any:
        match order:
            case "enter":
                return self.engine.enter()
            case "train":
                moves, progress = arguments
                self.progress = torch.from_numpy(progress)
                for name, parameter in self.model.items():
                    parameter.data += torch.from_numpy(moves[name])
            case "die at":
                [self.dies_at] = arguments
            case "sync" | "join":
                try:
                    return self.outcome(self.engine.sync() if order == "sync" else self.engine.join())
                except NoPeerState as error:
                    return str(error)
            case "tensors":
                momentum = {name.removeprefix("0."): tensor.numpy() for name, tensor in self.engine.momentum().items()}
                return {
                    "theta": {name: parameter.detach().numpy() for name, parameter in self.model.items()},
                    "anchor": {name.removeprefix("0."): t.numpy() for name, t in self.engine.anchor().items()},
                    "momentum": momentum,
                }
        return None

    def outcome(self, sync: Sync) -> dict[str, Any]:
        quorum = self.manager.quorum
        assert sync.progress is not None
        return {
            "committed": sync.committed,
            "outer_step": sync.outer_step,
            "progress": sync.progress.tolist(),
            "bytes": sync.bytes,
            "cause": sync.cause,
            "participants": list(sync.participants),
            "donor": quorum.donor if quorum else None,
            "healed": self.healed,
        }


def _serve(connection: Connection, address: str, slot: int, config: DilocoConfig) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    replica = _Replica()
    [joining] = connection.recv()
    with member(
        address,
        [replica.model],
        torch.optim.SGD(replica.model.parameters(), lr=0.1),
        slot=slot,
        config=config,
        first_step=0 if joining else COLD_START_STEP,
        export_state=replica.export_state,
        load_state=replica.load_state,
        hooks=replica.hooks,
        on_quorum=lambda quorum: replica.at("formed"),
    ) as seat:
        replica.manager, replica.engine = seat.manager, seat.engine
        connection.send("open")
        while True:
            connection.send(replica.obey(*connection.recv()))

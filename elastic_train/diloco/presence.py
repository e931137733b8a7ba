"""How a replica is found by its peers, and what it says to them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.doubt import Docket
from elastic_train.diloco.peers import Transfers, status_of
from elastic_train.diloco.trainee import SyncJournal
from elastic_train.peer_ckpt.channel import Channels
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shared_memory import SharedMemory
from elastic_train.peer_ckpt.tls import Tls


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose engine it is."""

    slot: int
    incarnation: int
    host: str
    """Name under which peers reach this rank."""
    registry: str
    token: str
    config_digest: int
    watchdog_s: float
    """Within which any peer that hangs is found and ended."""
    transfers: Transfers = Transfers()  # noqa: RUF009 - frozen
    snapshots: int = 2
    """Outer steps that peers can ask for at the same time."""
    channel_device: torch.device | None = None
    """Where the tensors are of the process groups by which states travel; None: they travel by connections alone."""
    tls: Tls | None = None


class Presence:
    """One rank's server. Peers ask rank 0 how the replica stands, and each rank for its part of the state."""

    def __init__(
        self,
        identity: Identity,
        control: ControlGroup,
        directory: Directory,
        docket: Docket,
        journal: SyncJournal,
        memory: SharedMemory | None = None,
    ) -> None:
        """
        Args:
            memory: where what is served may lie.
        """
        self._identity = identity
        self._control = control
        self._directory = directory
        self._docket = docket
        self._journal = journal
        self._shown = (-1, 0)
        self._left = False
        self._telling = threading.Lock()
        self.server = PeerServer(
            identity.host,
            identity.token,
            self._status,
            self._served,
            keep=identity.snapshots,
            memory=memory,
            channels=None if identity.channel_device is None else Channels(identity.host, identity.channel_device),
            tls=identity.tls,
        )

    def register(self) -> bool:
        """Be found: all ranks' addresses under the slot. Every rank calls.

        Returns:
            False if the registry does not answer.

        Raises:
            RegistrationRefused: on rank 0, this incarnation is known to have ended.
        """
        host, _, port = self.server.address.rpartition(":")
        ports = [row[0] for row in self._control.gather([int(port)])]
        heard = False
        if self._control.rank == 0:
            addresses = [f"{host}:{port}" for port in ports]
            heard = self._directory.register(self._identity.slot, self._identity.incarnation, addresses)
        return bool(self._control.word([int(heard)]).heard()[0])

    def show(self, outer_step: int, state_hash: int) -> None:
        """The state that peers may ask for from now on; until the first call there is none."""
        self._shown = (outer_step, state_hash)

    def holds(self, header: Mapping[str, Any]) -> None:
        """That state can be had of all ranks now, or will be in a moment; called beside the training.

        As long as the registry has not answered to the last word, there is no other.
        """
        if self._control.rank != 0 or not self._telling.acquire(blocking=False):
            return
        try:
            self._directory.held(
                self._identity.slot,
                self._identity.incarnation,
                outer_step=header["outer_step"],
                state_hash=header["state_hash"],
                host=self._identity.host,
                load=self.server.load,
            )
        finally:
            self._telling.release()

    def leave(self) -> None:
        """This replica commits nothing any more: nobody must wait for it, while it goes on giving its state."""
        self._left = True

    def close(self) -> None:
        self.server.close()

    def _status(self, attempt: str, dead: frozenset[int]) -> Mapping[str, Any]:
        """Called in a thread of the server."""
        outer_step, state_hash = self._shown
        return status_of(
            slot=self._identity.slot,
            incarnation=self._identity.incarnation,
            outer_step=outer_step,
            state_hash=state_hash,
            left=self._left,
            answer=self._docket.answer(attempt, dead),
        )

    def _served(self, header: Mapping[str, Any], joiner: str) -> None:
        """Called in a thread of the server."""
        self._journal.served(header["outer_step"], header["whole_hash"])

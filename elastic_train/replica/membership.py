"""A replica's membership in the quorum: torchft's Manager, made explicitly and observed.

torchft reads a dozen settings from the environment and keeps what a quorum decided to itself. Here every setting
is an argument, and the last quorum is a value that can be logged.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchft.manager
from torchft.checkpointing import CheckpointTransport
from torchft.coordination import LighthouseClient
from torchft.manager import REPLICA_ID_KEY, Manager
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from elastic_train.config import ConfigError, DilocoConfig
from elastic_train.device import Device
from elastic_train.diloco.engine import COLD_START_STEP, FaultHook
from elastic_train.replica.rank import Incarnation

logger = logging.getLogger(__name__)

_NEVER = timedelta(days=30)
_ASK_AGAIN = timedelta(seconds=0.5)
"""Between two requests for a quorum, when there is a Lighthouse again. As long as there is none, each waits for the
connection, for up to diloco.connect_timeout_s."""


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """What the last quorum decided, as this rank saw it."""

    quorum_id: int
    participants: tuple[int, ...]
    """Slots, in the order of the group's ranks."""
    donor: int | None
    """Slot whose same rank gives this rank its state, if this replica is behind."""
    outer_step: int
    """The newest outer step that a member has."""


def slot_of(replica_id: str) -> int:
    """The slot in a torchft replica id (``replica_<slot>:<what tells the run, or the Manager>``)."""
    return int(replica_id.partition(":")[0].removeprefix("replica_"))


def _name_of(slot: int) -> str:
    return f"replica_{slot}"


class _QuorumRecorder:
    """Stands before torchft's ManagerClient and keeps its last answer, which the Manager does not."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.quorum: Quorum | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, **request: Any) -> Any:
        answer = self._client._quorum(**request)
        source = answer.recover_src_replica_rank
        self.quorum = Quorum(
            quorum_id=answer.quorum_id,
            participants=tuple(slot_of(i) for i in answer.replica_ids),
            donor=slot_of(answer.replica_ids[source]) if answer.heal and source is not None else None,
            outer_step=answer.max_step - COLD_START_STEP,
        )
        return answer


class ReplicaManager(Manager):
    """torchft's Manager with the points of a sync at which a fault can be injected."""

    def __init__(
        self, *, hook: FaultHook, on_quorum: Callable[[Quorum], None], lighthouse: str, **settings: Any
    ) -> None:
        self._hook = hook
        self._on_quorum = on_quorum
        self._announced = False
        super().__init__(lighthouse_addr=lighthouse, **settings)
        self._recorder = _QuorumRecorder(self._client)
        self._client: Any = self._recorder

    @property
    def quorum(self) -> Quorum | None:
        """The last quorum that this replica was a member of."""
        return self._recorder.quorum

    def start_quorum(self, *args: Any, **kwargs: Any) -> None:
        self._announced = True
        super().start_quorum(*args, **kwargs)

    def wait_quorum(self) -> None:
        # Called once by start_quorum, after the request was sent, and by every later operation.
        first = self._announced
        self._announced = False
        if first:
            self._hook("quorum")
        super().wait_quorum()
        if first and self.quorum is not None:
            self._on_quorum(self.quorum)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self._hook("vote")
        passed = super().should_commit(timeout)
        if passed:
            self._hook("commit")
        return passed


def _backend(backend: str, device: Device) -> str:
    """What ``diloco.backend`` comes to on a device: gloo or nccl."""
    return device.backend if backend == "auto" else backend


def make_group(backend: str, device: Device, timeout_s: float) -> ProcessGroup:
    """The reconfigurable group of one rank with its peers. ``backend``: auto, gloo or nccl.

    Raises:
        ConfigError: nccl was asked for without an accelerator.
    """
    chosen = _backend(backend, device)
    if chosen == "nccl" and device.kind == "cpu":
        raise ConfigError('diloco.backend = "nccl" needs an accelerator; use "gloo" or "auto"')
    group = ProcessGroupNCCL if chosen == "nccl" else ProcessGroupGloo
    return group(timeout=timedelta(seconds=timeout_s))


def wire_device(backend: str, device: Device, accelerator: torch.device) -> torch.device:
    """Where the tensors of the group of ``make_group`` must be: gloo's on the host, NCCL's on the accelerator."""
    chosen = _backend(backend, device)
    return accelerator if chosen == "nccl" else torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank sits: its slot, its place in the replica, and the addresses it needs."""

    slot: int
    rank: int
    ranks: int
    lighthouse: str
    host: str
    """Name under which peers reach this replica's manager."""
    run: str = ""
    """What tells the run from others that ask the same Lighthouse, and from itself before it went back to a durable
    snapshot: of what the Lighthouse knows of those who died then, nothing may count for those who begin anew."""

    @classmethod
    def of(cls, incarnation: Incarnation, *, rank: int, ranks: int) -> Seat:
        return cls(
            slot=incarnation.slot,
            rank=rank,
            ranks=ranks,
            lighthouse=incarnation.lighthouse,
            host=incarnation.host,
            run=hashlib.blake2b(f"{incarnation.token} {incarnation.restores}".encode(), digest_size=8).hexdigest(),
        )


@dataclass(frozen=True, kw_only=True)
class Healing:
    """How stock DiLoCo heals a replica that is behind, inside the quorum."""

    transport: CheckpointTransport[Any]
    transfer_timeout_s: float
    export_state: Callable[[], dict[str, object]]
    load_state: Callable[[dict[str, object]], None]
    first_step: int
    """torchft's step counter; 0 makes the replica heal in its first quorum."""


def make_manager(
    seat: Seat, *, config: DilocoConfig, min_replicas: int, store: dist.TCPStore, group: ProcessGroup
) -> Manager:
    """This rank's Manager for the elastic engine: it asks for quorums, and heals nobody.

    A request stays pending until it is answered, also by a Lighthouse that was started again meanwhile: one that timed
    out would stay with the Lighthouse, and give the next caller a quorum with an absent member.

    Args:
        store: the replica's own store, new in every incarnation (rank 0 hosts it).

    Raises:
        RuntimeError: the Lighthouse is away.
    """
    with _id_for_the_run(seat.run):
        return Manager(
            lighthouse_addr=seat.lighthouse,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=True,
            timeout=timedelta(seconds=config.timeout_s),
            quorum_timeout=_NEVER,
            checkpoint_transport=_NoTransport(),
            # torchft spreads them over the time that a request may take.
            quorum_retries=_NEVER // _ASK_AGAIN,
            **_common(seat, config, min_replicas, store, group),
        )


def make_stock_manager(
    seat: Seat,
    *,
    config: DilocoConfig,
    min_replicas: int,
    store: dist.TCPStore,
    group: ProcessGroup,
    healing: Healing,
    hook: FaultHook,
    on_quorum: Callable[[Quorum], None],
) -> ReplicaManager:
    """This rank's Manager for stock DiLoCo. From here on the replica heartbeats, and survivors may wait for it."""
    manager = ReplicaManager(
        hook=hook,
        on_quorum=on_quorum,
        lighthouse=seat.lighthouse,
        load_state_dict=healing.load_state,
        state_dict=healing.export_state,
        use_async_quorum=False,
        timeout=timedelta(seconds=max(config.timeout_s, healing.transfer_timeout_s)),
        quorum_timeout=timedelta(seconds=config.quorum_timeout_s),
        checkpoint_transport=healing.transport,
        quorum_retries=config.quorum_retries,
        **_common(seat, config, min_replicas, store, group),
    )
    manager.load_state_dict({"step": healing.first_step, "batches_committed": 0})
    _introduce(seat, config, store)
    return manager


def _common(
    seat: Seat, config: DilocoConfig, min_replicas: int, store: dist.TCPStore, group: ProcessGroup
) -> dict[str, Any]:
    return {
        "pg": group,
        "min_replica_size": min_replicas,
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "rank": seat.rank,
        "world_size": seat.ranks,
        "store_addr": store.host,
        "store_port": store.port,
        "replica_id": _name_of(seat.slot),
        "hostname": seat.host,
        "port": config.manager_port,
        "init_sync": False,
    }


@contextmanager
def _id_for_the_run(run: str) -> Iterator[None]:
    """Let a Manager that is made inside have the id of the slot's last incarnation.

    torchft gives each Manager an id of its own. But the Lighthouse forms no quorum without somebody who had a heartbeat
    a moment ago, so that the survivors would wait for the ghost of a replica that is back already. Under the old id the
    new incarnation takes the ghost's place. What torchft wants the ids for is done by others: the first request of an
    incarnation asks for new groups, and processes of an older one are gone before a new one starts.
    """
    given = torchft.manager.uuid
    torchft.manager.uuid = SimpleNamespace(uuid4=lambda: run)
    try:
        yield
    finally:
        torchft.manager.uuid = given


def introduce(seat: Seat, config: DilocoConfig) -> bool:
    """Let the Lighthouse hear of a replica whose managers are made next; False if it does not answer.

    It forms a quorum of whoever has asked and is more than half of those that it has heard of. A heartbeat by hand
    makes sure that it has heard of this replica before anybody is released.
    """
    try:
        _heartbeat(seat, config, f"{_name_of(seat.slot)}:{seat.run}")
    except Exception as error:
        logger.debug("the Lighthouse does not answer: %s", error)
        return False
    return True


def _introduce(seat: Seat, config: DilocoConfig, store: dist.TCPStore) -> None:
    """The same for managers that are there, whose id torchft has drawn. Every rank calls."""
    if seat.rank == 0:
        _heartbeat(seat, config, store.get(REPLICA_ID_KEY).decode())


def _heartbeat(seat: Seat, config: DilocoConfig, replica_id: str) -> None:
    bound = timedelta(seconds=config.connect_timeout_s)
    LighthouseClient(seat.lighthouse, connect_timeout=bound).heartbeat(replica_id, bound)


class _NoTransport(CheckpointTransport[Any]):
    """States do not travel through torchft."""

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        raise AssertionError("this manager heals nobody")

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        raise AssertionError("this manager heals nobody")

    def disallow_checkpoint(self) -> None:
        return

    def shutdown(self, wait: bool = True) -> None:
        return

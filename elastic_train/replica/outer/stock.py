"""The trainer's side of stock DiLoCo: torchft asks for the state and gives it, inside its quorum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from elastic_train.diloco.engine import COLD_START_STEP, NoPeerState
from elastic_train.diloco.fragments import split
from elastic_train.diloco.torchft_engine import SyncHooks, TorchftEngine
from elastic_train.peer_ckpt.http import MeteredHTTPTransport
from elastic_train.replica.membership import Healing, Quorum, ReplicaManager, Seat, make_stock_manager
from elastic_train.replica.state import export_state, load_state
from elastic_train.replica.titan import fixes
from elastic_train.replica.watch.beacon import Phase

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

    from elastic_train.replica.trainer import ElasticTrainer


class StockTrainee:
    """Gives and takes states for one rank, and passes on what torchft says."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        self._received_hash: int | None = None
        self._export_error: Exception | None = None
        self.manager: ReplicaManager | None = None
        incarnation, config = trainer.incarnation, trainer.run_config
        self.transport = MeteredHTTPTransport(
            timeout_s=config.peer_ckpt.timeout_s,
            chunks=config.peer_ckpt.http_chunks,
            advertise_host=incarnation.host,
            on_receive=self._receives,
        )
        self.hooks = SyncHooks(
            at_point=trainer.at_point,
            progress=trainer.progress,
            on_state=self._state_is_in_place,
            participants=lambda: self._quorum.participants,
        )

    @property
    def _quorum(self) -> Quorum:
        assert self.manager is not None
        quorum = self.manager.quorum
        assert quorum is not None, "a member has entered a quorum"
        return quorum

    def on_quorum(self, quorum: Quorum) -> None:
        self._trainer.beacon.moved(Phase.SYNC)
        if self._export_error is not None:
            raise self._export_error
        self._trainer.journal.quorum(quorum.quorum_id, quorum.participants)

    def give_state(self) -> dict[str, object]:
        """torchft asks for the state that a joiner gets; the main thread waits for the quorum meanwhile."""
        trainer = self._trainer
        try:
            trainer.faults.passing("snapshot", trainer.step)
            state = export_state(trainer)
        except Exception as error:
            # torchft would only log it, and the joiner would wait for a state that never comes.
            self._export_error = error
            raise
        trainer.journal.served(trainer.outer_step, state["hash"])
        return state

    def take_state(self, state: dict[str, object]) -> None:
        """Take over a donor's state and prove it: what is in place now must hash to what the donor had."""
        load_state(self._trainer, state)
        self._received_hash = export_state(self._trainer)["hash"]
        if self._received_hash != state["hash"]:
            raise NoPeerState("the state in place differs from the donor's: it was damaged on the way")

    def _receives(self) -> None:
        quorum = self._quorum
        assert quorum.donor is not None
        self._trainer.journal.heal_started([quorum.donor], quorum.outer_step)

    def _state_is_in_place(self) -> None:
        donor, transfer = self._quorum.donor, self.transport.received
        assert donor is not None
        assert transfer is not None
        assert self._received_hash is not None
        trainer = self._trainer
        trainer.journal.heal_finished(
            donor, {donor: transfer.bytes}, trainer.outer_step, transfer.duration_s, self._received_hash
        )
        trainer.journal.joined(trainer.outer_step, trainer.step)


def make_stock_engine(trainer: ElasticTrainer, group: ProcessGroup, store: dist.TCPStore) -> TorchftEngine:
    """The engine of ``diloco.engine = "torchft"``; a member of the Lighthouse's replicas from here on."""
    incarnation, config = trainer.incarnation, trainer.run_config
    trainee = StockTrainee(trainer)
    trainee.manager = make_stock_manager(
        Seat.of(incarnation, rank=trainer.rank, ranks=trainer.control.ranks),
        config=config.diloco,
        min_replicas=config.lighthouse.min_replicas,
        store=store,
        group=group,
        healing=Healing(
            transport=trainee.transport,
            transfer_timeout_s=config.peer_ckpt.timeout_s,
            export_state=trainee.give_state,
            load_state=trainee.take_state,
            first_step=0 if incarnation.joining else COLD_START_STEP,
        ),
        hook=trainer.at_point,
        on_quorum=trainee.on_quorum,
    )
    return TorchftEngine(
        trainee.manager,
        split(trainer.model_parts, config.diloco.fragments),
        trainer.optimizers,
        config.diloco,
        trainer.schedule,
        pin_memory=fixes.DEVICE.pins_memory,
        hooks=trainee.hooks,
    )

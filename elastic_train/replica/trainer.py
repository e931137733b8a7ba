"""One rank's training loop: torchtitan's trainer between elastic outer syncs.

torchtitan does the inner step (forward and backward under FSDP, clipping, optimizer, LR schedule, metrics). This
module decides what happens around it: who is in the quorum, what a joiner takes over, which step it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from elastic_train.replica.titan import fixes  # isort: skip  (must come before the rest of torchtitan)

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.metrics import _get_metrics_rank
from torchtitan.distributed.utils import set_pg_timeouts
from torchtitan.trainer import Trainer

from elastic_train.config import ConfigError
from elastic_train.diloco.engine import COLD_START_STEP, NoPeerState, OuterSync, Sync, SyncHooks
from elastic_train.diloco.fragments import split
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.diloco.torchft_engine import TorchftEngine
from elastic_train.events import EventWriter, LineFile
from elastic_train.peer_ckpt.http import MeteredHTTPTransport
from elastic_train.replica.control import ControlGroup
from elastic_train.replica.data.loader import DataError
from elastic_train.replica.faults import FaultPlan
from elastic_train.replica.journal import Journal
from elastic_train.replica.membership import Quorum, ReplicaManager, Seat, make_group, make_manager
from elastic_train.replica.rank import Incarnation
from elastic_train.replica.state import export_state, load_state
from elastic_train.replica.titan.checkpoint import save_checkpoint
from elastic_train.replica.titan.lr import set_lr_step
from elastic_train.replica.titan.translate import translate
from elastic_train.replica.watch.beacon import Beacon, Phase

logger = logging.getLogger(__name__)


_ON_CPU = (
    "on a CPU the model trains in float32 and attends across the borders of packed documents: "
    "there is no fast bfloat16 and no attention kernel with a document mask"
)


class ElasticTrainer(Trainer):
    """A rank that trains, syncs with its peers, and gives or takes state.

    Building it does everything that needs no peer. ``run`` then trains to the end of the run.
    """

    step: int
    """The nominal step (``diloco.schedule``): the inner step of the run that this rank is at."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        events: EventWriter,
        metrics: LineFile,
        beacon: Beacon,
        faults: FaultPlan,
    ) -> None:
        config = incarnation.config
        super().__init__(translate(config, slot=incarnation.slot, run_dir=incarnation.run_dir))
        self.incarnation = incarnation
        self.run_config = config
        self.beacon = beacon
        self.faults = faults
        self.schedule = OuterSchedule(
            steps=config.training.steps,
            sync_every=config.diloco.sync_every,
            fragments=config.diloco.fragments,
        )
        self.control = ControlGroup(config.comm.init_timeout_seconds)
        self.rank = self.control.rank
        self.journal = Journal(events, self.control)
        if self.rank == _get_metrics_rank(
            parallel_dims=self.parallel_dims, pp_schedule=config.parallelism.pipeline_parallel_schedule
        ):
            self.metrics_processor.sink = lambda record: metrics.append(self._metrics_record(record))

        batch_rank = self.parallel_dims.get_mesh("batch").get_local_rank() if self.parallel_dims.dp_enabled else 0
        batch_ranks = [row[0] for row in self.control.gather([batch_rank])]
        # Ranks that share a batch (tensor, context, pipeline parallel) read the same; one of them counts.
        self._reads_data = batch_ranks.index(batch_rank) == self.rank
        self._data_ranks = len(set(batch_ranks)) * self.parallel_dims.cp
        self._tokens_trained = 0
        self._interval_tokens = 0
        self._first_step_done = False
        self._received_hash: int | None = None
        self._export_error: Exception | None = None

        if self.tokenizer.get_vocab_size() > self.model_config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.tokenizer.get_vocab_size()} tokens, the model {config.model.flavor} room for "
                f"{self.model_config.vocab_size}: set model.hf_assets_path or model.flavor to a pair that fits"
            )
        if fixes.DEVICE.kind == "cpu" and (incarnation.slot, incarnation.number, self.rank) == (0, 0, 0):
            events.emit("note", text=_ON_CPU)
        self._store = self._make_store()
        self._group = make_group(config.diloco.backend, fixes.DEVICE, config.diloco.timeout_s)
        faults.abort_groups = self._abort_groups
        self._membership: ReplicaManager | None = None
        self._engine: OuterSync | None = None
        if not incarnation.joining:
            # Before the release, so that the Lighthouse knows everybody when the first one asks for a quorum.
            self._enter_membership(COLD_START_STEP)
        beacon.moved(Phase.IDLE)

    @property
    def outer_step(self) -> int:
        """Committed outer syncs."""
        return self.engine.outer_step

    @property
    def engine(self) -> OuterSync:
        assert self._engine is not None, "the engine is made with the membership"
        return self._engine

    @property
    def membership(self) -> ReplicaManager:
        assert self._membership is not None, "a joiner becomes a member when it joins"
        return self._membership

    @property
    def _quorum(self) -> Quorum:
        """The quorum that this replica is in."""
        quorum = self.membership.quorum
        assert quorum is not None, "a member has entered a quorum"
        return quorum

    def run(self) -> None:
        """Train from wherever the quorum stands to the last step of the run.

        Raises:
            NoPeerState: a joiner could not get a peer's state.
            SyncFailed: too many syncs failed in a row.
            ReplicaBroken: another rank of this replica is gone.
        """
        if self.incarnation.joining:
            self._join()
        else:
            self.engine.enter()
            self.beacon.moved(Phase.BUILD)
        with self.config.profiler.build(global_step=self.step, base_folder=self.config.dump_folder) as profiler:
            batches = self.batch_generator(self.dataloader)
            while self.outer_step < self.schedule.outer_steps:
                while self.step < self.schedule.start(self.outer_step + 1):
                    self._inner_step(batches)
                    profiler.step()
                self._settle(self.engine.sync())
        self.beacon.moved(Phase.IDLE)
        self.journal.finished(self.step, self.outer_step)

    def save(self, *, last: bool) -> None:
        """Write a checkpoint that torchtitan's tools read; all ranks of the replica call it together."""
        with self.beacon.during(Phase.SAVE):
            path, duration_s = save_checkpoint(self, self.run_config.checkpoint, self.incarnation.run_dir, last=last)
        self.journal.saved(self.outer_step, str(path), duration_s)

    def close(self) -> None:
        super().close()
        if self._membership is not None:
            self._membership.shutdown(wait=False)

    # -- one inner step ------------------------------------------------------------------------------------------

    def _inner_step(self, batches: Iterator[Any]) -> None:
        began = time.monotonic()
        self.step += 1
        self.beacon.moved(Phase.STEP if self._first_step_done else Phase.BUILD, self.step)
        self.faults.passing("step", self.step)
        self.gc_handler.run(self.step)
        seen = self.ntokens_seen
        try:
            self.train_step(batches)
        except DataloaderExhaustedError as error:
            raise DataError(
                f"the dataset ended at step {self.step} of {self.schedule.steps}: lower training.steps or give more"
            ) from error
        tokens = (self.ntokens_seen - seen) * self._data_ranks
        self._tokens_trained += tokens
        self._interval_tokens += tokens
        if self.config.validator.enable and self.validator.should_validate(self.step):
            with self.beacon.during(Phase.EVALUATE):
                self.validator.validate(self.model_parts, self.step)
        time.sleep(max(0.0, self.run_config.debug.min_step_s - (time.monotonic() - began)))
        if not self._first_step_done:
            self._first_step_done = True
            set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)
            self.journal.first_step(self.step)
        overlap = self.run_config.diloco.overlap_steps
        if overlap and self.step == self.schedule.start(self.outer_step + 1) - overlap:
            self.engine.prepare()
            self.beacon.moved(Phase.STEP)

    def _metrics_record(self, record: dict[str, Any]) -> dict[str, Any]:
        """A logged step as a line of metrics.jsonl. ``train_step`` logs before its tokens are counted."""
        tokens = self._tokens_trained + self._step_tokens
        return {
            "t": round(time.time(), 6),
            "replica": self.incarnation.slot,
            "incarnation": self.incarnation.number,
            "outer_step": self.outer_step,
            "tokens": tokens,
            **record,
        }

    @property
    def _step_tokens(self) -> int:
        training = self.run_config.training
        per_rank = training.local_batch_size * training.seq_len * self.gradient_accumulation_steps
        return per_rank * self._data_ranks // self.parallel_dims.cp

    # -- the outer sync ------------------------------------------------------------------------------------------

    def _progress(self) -> torch.Tensor:
        """What this replica read since the last commit, summed over the ranks that read."""
        mine = self.dataloader.positions().delta(self.dataloader.committed)
        return self.control.sum(mine if self._reads_data else torch.zeros_like(mine))

    def _settle(self, outcome: Sync) -> None:
        """Bring step, LR and data to where the sync left the run."""
        if self.step != self.schedule.start(outcome.outer_step):
            # A failed sync of stock DiLoCo goes back to the anchor; a joiner under overlap comes in before the end.
            self.step = self.schedule.start(outcome.outer_step)
            set_lr_step(self.lr_schedulers, self.step)
        if outcome.committed:
            self.dataloader.commit(self.dataloader.committed.plus(outcome.progress))
            self.journal.committed(
                outcome,
                step=self.step,
                tokens=self._interval_tokens,
                quorum=self._quorum,
                anchor=self.engine.anchor(),
            )
        else:
            self.journal.failed(outcome)
            self.dataloader.restore(self.dataloader.committed)
        self._interval_tokens = 0
        self.beacon.moved(Phase.STEP, self.step)
        if outcome.committed:
            self._save_if_due()

    def _save_if_due(self) -> None:
        """One replica writes, the lowest slot in the quorum, at the first commit after each interval of steps."""
        settings = self.run_config.checkpoint
        before = self.schedule.start(self.outer_step - 1)
        due = settings.enable and self.step // settings.interval > before // settings.interval
        if due and self.step < self.schedule.steps and min(self._quorum.participants) == self.incarnation.slot:
            self.save(last=False)

    # -- membership, and the way in for a joiner ---------------------------------------------------------------

    def _join(self) -> None:
        self._enter_membership(first_step=0)
        self._settle(self.engine.join())

    def _enter_membership(self, first_step: int) -> None:
        incarnation, config = self.incarnation, self.run_config
        transport = MeteredHTTPTransport(
            timeout_s=config.peer_ckpt.timeout_s,
            chunks=config.peer_ckpt.http_chunks,
            advertise_host=incarnation.host,
            on_receive=lambda: self.journal.heals(self._quorum),
        )
        self._transport = transport
        self._membership = make_manager(
            Seat(
                slot=incarnation.slot,
                rank=self.rank,
                ranks=self.control.ranks,
                lighthouse=incarnation.lighthouse,
                host=incarnation.host,
            ),
            config=config.diloco,
            min_replicas=config.lighthouse.min_replicas,
            transfer_timeout_s=config.peer_ckpt.timeout_s,
            store=self._store,
            group=self._group,
            transport=transport,
            export_state=self._give_state,
            load_state=self._take_state,
            first_step=first_step,
            hook=self._at_point,
            on_quorum=self._on_quorum,
        )
        self._engine = TorchftEngine(
            self._membership,
            split(self.model_parts, config.diloco.fragments),
            self.optimizers,
            config.diloco,
            pin_memory=fixes.DEVICE.pins_memory,
            hooks=SyncHooks(at_point=self._at_point, progress=self._progress, on_state=self._state_is_in_place),
        )

    def _abort_groups(self) -> None:
        """What a failing collective library does to this rank: nothing that it is a member of works any more."""
        self.control.abort()
        self._group.abort()
        dist.distributed_c10d._abort_process_group()

    def _make_store(self) -> dist.TCPStore:
        """The replica's own store, hosted by rank 0, new in every incarnation: peers rendezvous in it."""
        host, timeout = self.incarnation.host, timedelta(seconds=self.run_config.comm.init_timeout_seconds)
        if self.rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            self.control.gather([store.port])
            return store
        port = self.control.gather([0])[0][0]
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    def _at_point(self, point: str) -> None:
        if point == "quorum":
            self.beacon.moved(Phase.QUORUM)
        self.faults.passing(point, self.step)

    def _on_quorum(self, quorum: Quorum) -> None:
        self.beacon.moved(Phase.SYNC)
        if self._export_error is not None:
            raise self._export_error
        self.journal.entered(quorum)

    def _give_state(self) -> dict[str, object]:
        """torchft asks for the state that a joiner gets; the main thread waits for the quorum meanwhile."""
        try:
            self.faults.passing("snapshot", self.step)
            state = export_state(self)
        except Exception as error:
            # torchft would only log it, and the joiner would wait for a state that never comes.
            self._export_error = error
            raise
        self.journal.served(self.outer_step, state["hash"])
        return state

    def _take_state(self, state: dict[str, object]) -> None:
        """Take over a donor's state and prove it: what is in place now must hash to what the donor had."""
        load_state(self, state)
        self._received_hash = export_state(self)["hash"]
        if self._received_hash != state["hash"]:
            raise NoPeerState("the state in place differs from the donor's: it was damaged on the way")

    def _state_is_in_place(self) -> None:
        donor, transfer = self._quorum.donor, self._transport.received
        assert donor is not None
        assert transfer is not None
        assert self._received_hash is not None
        self.journal.healed(donor, transfer, self._received_hash, outer_step=self.outer_step, step=self.step)

"""One rank's training loop: torchtitan's trainer between elastic outer syncs.

torchtitan does the inner step (forward and backward under FSDP, clipping, optimizer, LR schedule, metrics). This
module decides what happens around it: who is in the quorum, what a joiner takes over, which step it is.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from elastic_train.replica.titan import fixes  # isort: skip  (must come before the rest of torchtitan)

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroup
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.metrics import _get_metrics_rank
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.utils import set_pg_timeouts
from torchtitan.trainer import Trainer

from elastic_train.config import ConfigError
from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.engine import NoPeerState, OuterSync, Sync, SyncKind, Trained
from elastic_train.diloco.outer import advice
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.events import EventWriter, LineFile
from elastic_train.peer_ckpt.shards import local
from elastic_train.replica.data.loader import DataError
from elastic_train.replica.data.sample_log import SampleLog
from elastic_train.replica.durable.content import OuterContent, parameters, read, whole_state
from elastic_train.replica.durable.folder import DurableSnapshot, Facts
from elastic_train.replica.durable.origin import origin_of
from elastic_train.replica.durable.writer import NotWritten, SnapshotWriter
from elastic_train.replica.ending import Ending
from elastic_train.replica.faults import FaultPlan
from elastic_train.replica.journal import Journal
from elastic_train.replica.membership import make_group
from elastic_train.replica.notice import Leaves, Notice
from elastic_train.replica.outer.elastic import make_elastic_engine
from elastic_train.replica.outer.stock import make_stock_engine
from elastic_train.replica.rank import Incarnation
from elastic_train.replica.titan.lr import lr_step, set_lr_step
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
        notice: Notice,
    ) -> None:
        config = incarnation.config
        super().__init__(translate(config, slot=incarnation.slot, run_dir=incarnation.run_dir))
        self.incarnation = incarnation
        self.run_config = config
        self.beacon = beacon
        self.faults = faults
        self._notice = notice
        self.schedule = OuterSchedule(
            steps=config.training.steps,
            sync_every=config.diloco.sync_every,
            fragments=config.diloco.fragments,
            first=incarnation.resume.facts.outer_step if incarnation.resume else 0,
        )
        self.control = ControlGroup(config.comm.init_timeout_seconds)
        self.rank = self.control.rank
        self.journal = Journal(events, self.control)
        if self.rank == _get_metrics_rank(
            parallel_dims=self.parallel_dims, pp_schedule=config.parallelism.pipeline_parallel_schedule
        ):
            self.metrics_processor.sink = lambda record: self._logged(record, metrics)

        batch_rank = self.parallel_dims.get_mesh("batch").get_local_rank() if self.parallel_dims.dp_enabled else 0
        batch_ranks = [row[0] for row in self.control.gather([batch_rank])]
        # Ranks that share a batch (tensor, context, pipeline parallel) read the same; one of them counts.
        self._reads_data = batch_ranks.index(batch_rank) == self.rank
        if config.training.dataloader.log_samples and self._reads_data:
            self.dataloader.log_to(
                SampleLog(
                    incarnation.run_dir,
                    replica=incarnation.slot,
                    incarnation=incarnation.number,
                    reader=self.dataloader.reader,
                )
            )
        self._data_ranks = len(set(batch_ranks)) * self.parallel_dims.cp
        self._tokens_trained = 0
        self._first_step_done = False
        self._losses: list[torch.Tensor] = []
        self._grad_norm: float | None = None
        self._slowness = 0.0
        self._step_s = 0.0
        """What the last inner step took."""
        self.has_state = not incarnation.joining
        """Whether the parameters are those of the run."""

        if self.tokenizer.get_vocab_size() > self.model_config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.tokenizer.get_vocab_size()} tokens, the model {config.model.flavor} room for "
                f"{self.model_config.vocab_size}: set model.hf_assets_path or model.flavor to a pair that fits"
            )
        if fixes.DEVICE.kind == "cpu" and (incarnation.slot, incarnation.number, self.rank) == (0, 0, 0):
            events.emit("note", text=_ON_CPU)
        if (incarnation.slot, incarnation.number) == (0, 0):
            hint = advice(config.diloco.outer_lr, config.orchestrator.replicas)
            if hint is not None:
                self.journal.note(hint)
        self._writer = self._make_writer()
        self.restored: OuterContent | None = None
        """The outer state of a durable snapshot, until the engine has it."""
        if incarnation.resume is not None and not incarnation.joining:
            self.restored = read(self, incarnation.resume)
        self._store = self._make_store()
        self._group = self._make_group()
        self._engine: OuterSync | None = None
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.engine.before_optimizer())
        faults.abort_groups = self._abort_groups
        faults.poison = self._poison
        faults.flip_bit = self._flip_bit
        faults.slow_down = self._slow_down
        if not incarnation.joining:
            # Before the release, so that the Lighthouse knows everybody when the first one asks for a quorum.
            self._make_engine()
            self.restored = None
            self.engine.open_membership()
        beacon.moved(Phase.IDLE)

    @property
    def outer_step(self) -> int:
        """Committed outer syncs."""
        return self.engine.outer_step

    @property
    def engine(self) -> OuterSync:
        assert self._engine is not None, "a joiner makes its engine when it joins"
        return self._engine

    @engine.setter
    def engine(self, engine: OuterSync) -> None:
        self._engine = engine

    def run(self) -> Ending:
        """Train from wherever the quorum stands to the last step of the run, or until this replica is to leave.

        Raises:
            NoPeerState: a joiner could not get a peer's state.
            SyncFailed: too many syncs failed in a row.
            ReplicaBroken: another rank of this replica is gone.
        """
        self.beacon.moved(Phase.BUILD)
        if self.incarnation.joining:
            self._make_engine()
            self._join()
        else:
            self.engine.enter()
        self.beacon.moved(Phase.BUILD)
        with self.config.profiler.build(global_step=self.step, base_folder=self.config.dump_folder) as profiler:
            batches = self.batch_generator(self.dataloader)
            stays = True
            while stays and self.outer_step < self.schedule.outer_steps:
                try:
                    stays = self._train_interval(batches, profiler)
                except Leaves:
                    stays = False
                    # What is left is the state after a commit, which can be written and gone on from.
                    self.engine.rewind()
        if self.outer_step < self.schedule.outer_steps:
            self.engine.leave()
            self.journal.left(self.step, self.outer_step)
            self.beacon.moved(Phase.IDLE)
            return Ending.LEFT
        # Stock DiLoCo throws tokens away when a sync fails.
        exact = self.run_config.diloco.engine == "elastic"
        self.journal.finished(self.step, self.outer_step, self._tokens_trained if exact else None)
        self.beacon.moved(Phase.IDLE)
        return Ending.FINISHED

    def save(self, *, whole: bool, wait: bool) -> None:
        """Write a snapshot that torchtitan's tools read, beside the training; every rank of the replica calls it.

        Args:
            whole: all that a run can go on from; else the parameters alone, in ``checkpoint.export_dtype``.
            wait: until it is there.

        Raises:
            NotWritten: one that is waited for could not be written.
        """
        settings = self.run_config.checkpoint
        model_only = not whole
        with self.beacon.during(Phase.SAVE):
            facts = Facts(
                step=self.step,
                outer_step=self.outer_step,
                state_hash=self.engine.anchor_hash(self._gathered),
                whole=not model_only,
                origin=origin_of(self.run_config),
            )
            # So that there is one copy on the host at a time.
            self._writer.join()
            state = self._copied(TORCH_DTYPE_MAP[settings.export_dtype] if model_only else None)
            if state is None:
                failure = f"no snapshot of step {self.step}: a rank could not copy its state, and its log says why"
                self.journal.note(failure)
                if wait:
                    raise NotWritten(failure)
                return
            self._writer.start(state, facts)
            if wait:
                self._writer.wait()

    def close(self) -> None:
        self._writer.close()
        super().close()
        if self._engine is not None:
            self._engine.close()

    def _join(self) -> None:
        try:
            sync = self.engine.join()
        except NoPeerState as error:
            self.journal.heal_failed("heal_failed", str(error))
            raise
        self.settle(sync)
        self.has_state = True

    def _train_interval(self, batches: Iterator[Any], profiler: Any) -> bool:
        """Inner steps and the sync after them; whether this replica stays.

        Raises:
            Leaves: it does not, and there is no time for the sync.
        """
        while not self.engine.due:
            # Said before the step and heard after it, it costs nothing.
            word = self.control.word([int(self._notice.forbids(self.engine.steps_to_sync * self._step_s))])
            began = time.monotonic()
            self.inner_step(batches)
            self._step_s = time.monotonic() - began
            profiler.step()
            if word.heard()[0]:
                raise Leaves
        sync = self.engine.sync()
        self.settle(sync)
        # What it carries over is not lost: one more sync takes it in.
        return sync.carried > 0 or not self.control.word([int(self._notice.given)]).heard()[0]

    def leave_if_told(self) -> None:
        """Called while a quorum is waited for; every rank calls.

        Raises:
            Leaves: there is no time to wait for it.
        """
        if self.control.word([int(self._notice.forbids(0.0))]).heard()[0]:
            raise Leaves

    # -- one inner step ------------------------------------------------------------------------------------------

    def inner_step(self, batches: Iterator[Any]) -> None:
        """Train one inner step, whichever step of the run the engine says it is."""
        began = time.monotonic()
        self.step = self.engine.next_step
        self._put_lr_at(self.step - 1)
        self.beacon.moved(Phase.STEP if self._first_step_done else Phase.FIRST_STEP, self.step)
        self.faults.passing("step", self.step)
        self.gc_handler.run(self.step)
        seen = self.ntokens_seen
        self._losses.clear()
        self._grad_norm = None
        try:
            self.train_step(batches)
        except DataloaderExhaustedError as error:
            raise DataError(
                f"the dataset ended at step {self.step} of {self.schedule.steps}: lower training.steps or give more"
            ) from error
        tokens = (self.ntokens_seen - seen) * self._data_ranks
        self._tokens_trained += tokens
        if self.config.validator.enable and self.validator.should_validate(self.step):
            with self.beacon.during(Phase.EVALUATE):
                self.validator.validate(self.model_parts, self.step)
        time.sleep(max(0.0, self.run_config.debug.min_step_s - (time.monotonic() - began)))
        time.sleep(self._slowness * (time.monotonic() - began))
        if not self._first_step_done:
            self._first_step_done = True
            set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)
            self.journal.first_step(self.step)
        # What a rank's loss lacks to the mean over the replica is what its other data ranks add.
        loss = torch.stack(self._losses).sum() * self._data_ranks if self._losses else None
        self.engine.step_ended(
            Trained(tokens=tokens, seconds=time.monotonic() - began, loss=loss, grad_norm=self._grad_norm)
        )
        self.beacon.moved(Phase.STEP)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """torchtitan's, with its loss kept where it is: reading it would wait for an accelerator."""
        loss = super().forward_backward_step(**batch)
        if not self.parallel_dims.pp_enabled or self.pp_has_last_stage:
            self._losses.append(loss.detach().clone())
        return loss

    def _put_lr_at(self, steps: int) -> None:
        """The LR follows the nominal step, which a commit can move."""
        if lr_step(self.lr_schedulers) != steps:
            set_lr_step(self.lr_schedulers, steps)

    def _logged(self, record: dict[str, Any], metrics: LineFile) -> None:
        """A logged step becomes a line of metrics.jsonl. ``train_step`` logs before its tokens are counted."""
        self._grad_norm = record["grad_norm"]
        metrics.append(
            {
                "t": round(time.time(), 6),
                "replica": self.incarnation.slot,
                "incarnation": self.incarnation.number,
                "outer_step": self.outer_step,
                "tokens": self._tokens_trained + self._step_tokens,
                **record,
            }
        )

    @property
    def _step_tokens(self) -> int:
        training = self.run_config.training
        per_rank = training.local_batch_size * training.seq_len * self.gradient_accumulation_steps
        return per_rank * self._data_ranks // self.parallel_dims.cp

    # -- the outer sync ------------------------------------------------------------------------------------------

    def at_point(self, point: str) -> None:
        """The outer sync has come to a named point; a fault that waits there acts."""
        if point == "quorum":
            self.beacon.moved(Phase.QUORUM)
        self.faults.passing(point, self.step)

    def progress(self) -> torch.Tensor:
        """int64 ``[virtual_shards, 4]``: what this replica read since the last commit, on all ranks that read."""
        mine = self.dataloader.positions().delta(self.dataloader.committed)
        return self.control.sum(mine if self._reads_data else torch.zeros_like(mine))

    def settle(self, sync: Sync) -> None:
        """Bring step, LR and data to where the sync left the run."""
        self.step = self.schedule.start(sync.outer_step)
        self._put_lr_at(self.step)
        match sync.kind:
            case SyncKind.COMMITTED:
                assert sync.progress is not None
                self.dataloader.commit(self.dataloader.committed.plus(sync.progress))
                self.dataloader.retire(sync.retired)
                self.journal.committed(sync, step=self.step, anchor_hash=self.engine.anchor_hash(self._gathered))
            case SyncKind.FAILED:
                self.journal.failed(sync)
                self.dataloader.restore(self.dataloader.committed)
        self.engine.settled()
        self.beacon.moved(Phase.STEP, self.step)
        if sync.committed:
            self._save_if_due(sync)

    def _save_if_due(self, sync: Sync) -> None:
        """One replica writes, the lowest slot in the quorum, at the first commit after each interval of steps."""
        settings = self.run_config.checkpoint
        before = self.schedule.start(self.outer_step - 1)
        due = settings.enable and self.step // settings.interval > before // settings.interval
        if not due or self.step >= self.schedule.steps or min(sync.participants) != self.incarnation.slot:
            return
        if self._writer.is_busy():
            self.journal.note(f"no snapshot of step {self.step}: the one before is still being written")
            return
        self.save(whole=True, wait=False)

    def _copied(self, model_as: torch.dtype | None) -> dict[str, Any] | None:
        """What a snapshot holds, the whole state or the parameters alone in a type; None if any rank cannot copy it."""
        state: dict[str, Any] | None = None
        try:
            state = whole_state(self) if model_as is None else parameters(self, model_as)
        except (RuntimeError, MemoryError):  # torch's allocators raise a RuntimeError
            logger.exception("the state of step %d could not be copied to the host", self.step)
        return state if self.control.all(state is not None) else None

    def _gathered(self, value: int) -> list[int]:
        return [row[0] for row in self.control.gather([value])]

    # -- membership, and faults that strike it -------------------------------------------------------------------

    def _make_group(self) -> ProcessGroup:
        """The elastic engine bounds each operation by itself, so the group's own bound is that of its setup."""
        diloco = self.run_config.diloco
        bound_s = diloco.connect_timeout_s if diloco.engine == "elastic" else diloco.timeout_s
        return make_group(diloco.backend, fixes.DEVICE, bound_s)

    def _make_writer(self) -> SnapshotWriter:
        settings, incarnation = self.run_config.checkpoint, self.incarnation

        def saved(snapshot: DurableSnapshot, duration_s: float) -> None:
            self.journal.saved(snapshot.facts.outer_step, str(snapshot.path), duration_s)

        return SnapshotWriter(
            incarnation.run_dir / settings.folder,
            slot=incarnation.slot,
            incarnation=incarnation.number,
            keep=settings.keep_latest_k,
            device=self.device,
            control=self.control,
            on_saved=saved,
            on_failed=self.journal.note,
        )

    def _make_engine(self) -> None:
        make = make_elastic_engine if self.run_config.diloco.engine == "elastic" else make_stock_engine
        self.engine = make(self, self._group, self._store)

    def _poison(self) -> None:
        shards = (local(p.detach()) for part in self.model_parts for p in part.parameters())
        next(shard for shard in shards if shard.numel()).view(-1)[0] = math.nan

    def _flip_bit(self) -> None:
        """One bit of the anchor, as failing memory would."""
        anchor = next(tensor for tensor in self.engine.anchor().values() if tensor.numel())
        local(anchor).view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)

    def _slow_down(self) -> None:
        self._slowness = 1.0

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

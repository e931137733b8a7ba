"""One run from a config to its end: checks first, then the heavy imports, then the manager."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Protocol

from elastic_train.clock import SystemClock
from elastic_train.config import EnvironmentProblem, RunConfig
from elastic_train.events import EventLog, LineFile, Record
from elastic_train.orchestrator import accelerators, monarch_env, runfolder
from elastic_train.orchestrator.addresses import bracketed, with_addresses
from elastic_train.orchestrator.end import RunEnd
from elastic_train.orchestrator.interruption import Interruption
from elastic_train.orchestrator.resume import find_snapshot
from elastic_train.peer_ckpt.tls import TlsProblem, tls_of
from elastic_train.process_log import stderr_to
from elastic_train.replica.data.corpus import ensure_corpus
from elastic_train.replica.data.sources import STDLIB, check_dataset, check_tokenizer
from elastic_train.replica.durable.folder import DurableSnapshot

logger = logging.getLogger(__name__)


class View(Protocol):
    """Somebody who looks on. Nothing that it does can stop the run."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def on_event(self, event: Record) -> None: ...

    def on_metrics(self, record: Record) -> None: ...


def run(
    config: RunConfig, notes: tuple[str, ...], *, name: str, run_dir: Path | None, resume: Path | None, view: View
) -> RunEnd:
    """Run a training from its start to its end. Nothing is left running afterwards.

    Args:
        notes: remarks about the config that a person should see.
        name: what to call the run.
        run_dir: the run's folder; None makes one below ``job.dump_folder``.
        resume: folder of a run to go on from; None starts from new parameters.

    Raises:
        ConfigError: the config does not go on where that run's snapshot ends.
        EnvironmentProblem: this machine cannot run this config, or that run left no sound snapshot.
    """
    _check_datasets(config)
    check_tokenizer(config.model.hf_assets_path)
    _check_accelerators(config)
    _check_tls(config)
    config = _with_seed(config)
    # The folder keeps what was given: another run from it may be on another machine.
    addressed = with_addresses(config)
    _check_port(addressed)
    snapshot, passed = (None, []) if resume is None else find_snapshot(config, resume)
    if snapshot is not None:
        passed.append(f"the run goes on from {snapshot.path} (step {snapshot.facts.step} of {config.training.steps})")
    elif config.checkpoint.enable and config.checkpoint.interval >= config.training.steps:
        passed.append(
            f"checkpoint.interval = {config.checkpoint.interval} is not reached within training.steps = "
            f"{config.training.steps}: no snapshot is written but the last state"
        )
    folder = runfolder.create(config, name, run_dir)
    if STDLIB in (config.training.dataset, config.model.hf_assets_path or STDLIB):
        # Once and here, so that its few seconds are not part of every replica's start.
        ensure_corpus()
    monarch_env.configure()
    view.start()
    try:
        with stderr_to(folder.controller_log):
            return asyncio.run(_run(addressed, (*notes, *passed), folder, name, snapshot, view))
    finally:
        view.stop()


async def _run(
    config: RunConfig,
    notes: tuple[str, ...],
    folder: runfolder.RunFolder,
    name: str,
    snapshot: DurableSnapshot | None,
    view: View,
) -> RunEnd:
    interruption = Interruption()
    interruption.listen()
    # Monarch reads its environment when it is imported.
    import monarch.actor

    from elastic_train.orchestrator.barrier import ColdStart
    from elastic_train.orchestrator.generation import Generation
    from elastic_train.orchestrator.manager import OrchestrationManager
    from elastic_train.orchestrator.scheduler import make_scheduler
    from elastic_train.orchestrator.slot import RunContext

    # Without it, Monarch ends this process when it finds a fault that nobody waits for.
    monarch.actor.unhandled_fault_hook = lambda fault: logger.warning("supervision at the root: %s", fault)
    clock = SystemClock()
    log = EventLog(folder.events, clock)
    log.subscribe(view.on_event)
    if config.scheduler.kind != "local":
        # Before anything else of Monarch's: other hosts must reach this process.
        monarch.actor.enable_transport(f"tcp://{bracketed(config.orchestrator.advertise_host)}:0")
    scheduler = make_scheduler(config, folder.path / "logs" / "hosts", lambda text: log.emit("note", text=text))
    context = RunContext(
        config=config,
        folder=folder,
        log=log,
        metrics=LineFile(folder.metrics),
        clock=clock,
        scheduler=scheduler,
        generation=Generation(barrier=ColdStart(config.orchestrator.replicas), snapshot=snapshot),
        on_metrics=[view.on_metrics],
    )
    for note in notes:
        log.emit("note", text=note)
    return await OrchestrationManager(context, name).run(interruption)


def _with_seed(config: RunConfig) -> RunConfig:
    """All replicas start from the same parameters, so they need the same seed; without one, one is drawn."""
    if config.debug.seed is not None:
        return config
    return dataclasses.replace(config, debug=dataclasses.replace(config.debug, seed=secrets.randbelow(2**31)))


def _check_datasets(config: RunConfig) -> None:
    check_dataset(config.training.dataset, config.training.dataset_path)
    if not config.validation.enable:
        return
    try:
        check_dataset(config.validation.dataset, config.validation.dataset_path)
    except EnvironmentProblem as problem:
        # The keys to blame have the same names in their own section.
        raise EnvironmentProblem(str(problem).replace("training.dataset", "validation.dataset")) from problem


def _check_accelerators(config: RunConfig) -> None:
    if config.scheduler.kind != "local":
        # Each host sees to its own.
        return
    found = accelerators.find(os.environ)
    found.check(config.orchestrator.replicas, config.orchestrator.procs_per_replica)
    if config.diloco.backend == "nccl" and not found.ids:
        raise EnvironmentProblem(
            'diloco.backend = "nccl" needs accelerators, and this machine shows none: use "gloo" or "auto"'
        )


def _check_tls(config: RunConfig) -> None:
    tls = tls_of(config.peer_ckpt)
    try:
        if tls is not None:
            tls.check()
    except TlsProblem as problem:
        raise EnvironmentProblem(f"peer_ckpt.tls_*: {problem}") from problem


def _check_port(config: RunConfig) -> None:
    settings = config.lighthouse
    if settings.address or not settings.port:
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, settings.port))
    except OSError as error:
        raise EnvironmentProblem(
            f"lighthouse.port = {settings.port} cannot be used on {settings.host} ({error.strerror}): "
            "choose another port, or 0 for any"
        ) from error

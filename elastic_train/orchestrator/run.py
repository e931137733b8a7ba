"""One run from a config to an exit code: checks first, then the heavy imports, then the manager."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from elastic_train.clock import SystemClock
from elastic_train.config import EnvironmentProblem, RunConfig
from elastic_train.events import EventLog, LineFile
from elastic_train.observe.live import LiveView
from elastic_train.observe.summary import summary_lines
from elastic_train.orchestrator import monarch_env, runfolder
from elastic_train.process_log import stderr_to
from elastic_train.replica.sources import check_dataset, check_tokenizer

if TYPE_CHECKING:
    from elastic_train.orchestrator.manager import RunEnd

logger = logging.getLogger(__name__)

SUCCEEDED, FAILED, WRONG_CONFIG, INTERRUPTED = 0, 1, 2, 130


def run(config: RunConfig, notes: tuple[str, ...], run_dir: Path | None, name: str) -> int:
    """Run a training from its start to its end.

    Args:
        notes: remarks about the config that a person should see.
        run_dir: the run's folder; None makes one below ``job.dump_folder``.
        name: what to call the run.

    Returns:
        The exit code: 0 trained to the last step, 1 failed, 2 the config turned out to be wrong, 130 interrupted.

    Raises:
        EnvironmentProblem: this machine cannot run this config.
    """
    check_dataset(config.training.dataset, config.training.dataset_path)
    check_tokenizer(config.model.hf_assets_path)
    _check_port(config)
    config = _with_seed(config)
    folder = runfolder.create(config, name, run_dir)
    monarch_env.configure()
    with stderr_to(folder.controller_log):
        end, view = asyncio.run(_run(config, notes, folder, name))
    return _report(end, view)


async def _run(
    config: RunConfig, notes: tuple[str, ...], folder: runfolder.RunFolder, name: str
) -> tuple[RunEnd, LiveView]:
    # Monarch reads its environment when it is imported.
    from elastic_train.orchestrator.barrier import ColdStart
    from elastic_train.orchestrator.manager import OrchestrationManager
    from elastic_train.orchestrator.scheduler import make_scheduler
    from elastic_train.orchestrator.slot import RunContext

    clock = SystemClock()
    log, metrics = EventLog(folder.events, clock), LineFile(folder.metrics)
    scheduler = make_scheduler(config.scheduler)
    host = config.peer_ckpt.advertise_host or ("127.0.0.1" if scheduler.loopback else socket.gethostname())
    ranks = config.orchestrator.replicas * config.orchestrator.procs_per_replica
    environment = monarch_env.trainer_environment(ranks, os.cpu_count() or 1, loopback=scheduler.loopback)
    interrupted = _interruption()
    with LiveView(notes=notes) as view:
        log.subscribe(view.on_event)
        context = RunContext(
            config=config,
            folder=folder,
            log=log,
            metrics=metrics,
            clock=clock,
            scheduler=scheduler,
            barrier=ColdStart(config.orchestrator.replicas),
            lighthouse="",
            host=host,
            environment=tuple(environment.items()),
            on_metrics=view.on_metrics,
        )
        for note in notes:
            log.emit("note", text=note)
        end = await OrchestrationManager(context, name, view.fold).run(interrupted)
    return end, view


def _report(end: RunEnd, view: LiveView) -> int:
    """Tell a person how the run went; the exit code."""
    for line in summary_lines(view.fold):
        view.console.print(line, highlight=False, markup=False, soft_wrap=True)
    match end.status:
        case "succeeded":
            return SUCCEEDED
        case "interrupted":
            return INTERRUPTED
        case _:
            Console(stderr=True).print(
                f"{end.cause}: {end.reason}", style="red", highlight=False, markup=False, soft_wrap=True
            )
            return WRONG_CONFIG if end.cause == "config_error" else FAILED


def _interruption() -> asyncio.Event:
    """Set at the first SIGINT or SIGTERM; a second one ends the process at once."""
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupt(number: signal.Signals) -> None:
        interrupted.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    return interrupted


def _with_seed(config: RunConfig) -> RunConfig:
    """Every replica starts from the same parameters, so they need the same seed; one is drawn if none is given."""
    if config.debug.seed is not None:
        return config
    return dataclasses.replace(config, debug=dataclasses.replace(config.debug, seed=secrets.randbelow(2**31)))


def _check_port(config: RunConfig) -> None:
    settings = config.lighthouse
    if settings.address or not settings.port:
        return
    try:
        socket.create_server((settings.host, settings.port)).close()
    except OSError as error:
        raise EnvironmentProblem(
            f"lighthouse.port = {settings.port} cannot be used on {settings.host} ({error.strerror}): "
            "choose another port, or 0 for any"
        ) from error

"""One run under a plan of faults, from its start to the verdict on it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.config import ConfigError, RunConfig, load_config
from elastic_train.events import read_all
from scripts.fault_plan import FaultPlan
from scripts.launched_run import LaunchedRun, config_path
from scripts.verdict import Strike, judge

# A bound for a run that gets nowhere, far above what one takes that does.
_START_S = 180.0
_PER_FAULT_S = 60.0
_PER_STEP_S = 2.0
_SLOWER_THAN_LEAST = 3.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is run: a config file with further flags, and what they come to."""

    config: str
    flags: tuple[str, ...]
    resolved: RunConfig

    @property
    def replicas(self) -> int:
        return self.resolved.orchestrator.replicas

    @property
    def ranks(self) -> int:
        """Processes of each replica."""
        return self.resolved.orchestrator.procs_per_replica

    @property
    def note(self) -> str:
        """What has to be said beside every figure that is measured with it."""
        shape = f"{self.replicas} replicas x {self.ranks} processes on {os.cpu_count()} cores"
        pause_s = self.resolved.debug.min_step_s
        return f"{shape}; debug.min_step_s = {pause_s:g} stands for an accelerator" if pause_s else shape


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run under a plan ended."""

    exit_code: int | None
    """None: it did not end in time."""
    wall_s: float
    strikes: tuple[Strike, ...]
    unfinished: tuple[str, ...]
    """Faults whose replica was still on its way back when its peers finished."""
    reasons: tuple[str, ...]
    """Why it failed, one sentence each; empty if it passed."""


def make_target(config: str, flags: Sequence[str]) -> Target:
    """Check what is to be run, as the run itself will.

    Raises:
        ConfigError: the config or a flag is wrong.
    """
    names, values = flags[::2], flags[1::2]
    if len(names) != len(values) or not all(name.startswith("--") for name in names):
        raise ConfigError(f"write further flags as --section.key VALUE, not as {' '.join(flags)}")
    overrides = {name[2:].replace("-", "_"): value for name, value in zip(names, values, strict=True)}
    return Target(
        config=config,
        flags=tuple(flags),
        resolved=load_config(config_path(config), overrides, os.environ).config,
    )


def run_under(plan: FaultPlan, target: Target, run_dir: Path, *, seed: int) -> Outcome:
    """Run the target to its end while the plan strikes it. Nothing is left running afterwards."""
    faults = json.dumps([str(fault) for fault in plan.faults])
    ours = ("--training.steps", str(plan.steps), "--debug.seed", str(seed), "--faults.at", faults)
    began = time.monotonic()
    exit_code: int | None = None
    reasons: list[str] = []
    with LaunchedRun(target.config, run_dir, [*target.flags, *ours]) as run:
        try:
            exit_code = run.wait(_bound_s(plan, target))
        except TimeoutError:
            reasons.append(f"it had not ended after {time.monotonic() - began:.0f} s")
        wall_s = time.monotonic() - began
        leaks = run.end()
    if exit_code:
        reasons.append(f"exit code {exit_code}: {run.tail(1)}")
    reasons += [f"left behind: {process}" for process in leaks]
    verdict = judge(plan, read_all(run_dir / "events.jsonl"))
    if verdict.saved and not Path(verdict.saved).is_dir():
        reasons.append(f"the last state is not where the log says: {verdict.saved}")
    return Outcome(
        exit_code=exit_code,
        wall_s=round(wall_s, 1),
        strikes=verdict.strikes,
        unfinished=verdict.unfinished,
        reasons=(*reasons, *verdict.reasons),
    )


def _bound_s(plan: FaultPlan, target: Target) -> float:
    step_s = max(_PER_STEP_S, _SLOWER_THAN_LEAST * target.resolved.debug.min_step_s)
    return _START_S + _PER_FAULT_S * len(plan.faults) + step_s * plan.steps

"""From a file, flags and the environment to one checked config, or to one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from elastic_train.config import aliases
from elastic_train.config.checks import check
from elastic_train.config.environment import read_environment
from elastic_train.config.errors import ConfigError
from elastic_train.config.keys import keys, sections
from elastic_train.config.layers import Given, Layer, described, read_file, read_flags
from elastic_train.config.problem import Problem
from elastic_train.config.schema import RunConfig
from elastic_train.config.support import differences
from elastic_train.config.toml_text import value_text

_SYNC_EVERY = "diloco.sync_every"
_BUCKET = "diloco.bucket_mb"
# Settings of a Lighthouse of our own. The host is not among them: the registry of the replicas listens there too.
_OWN_LIGHTHOUSE = tuple(
    f"lighthouse.{name}" for name in ("port", "join_timeout_ms", "heartbeat_timeout_ms", "quorum_tick_ms")
)


@dataclass(frozen=True)
class Loaded:
    """A config that a run can start with, and what a person should know about how it came to be."""

    config: RunConfig
    notes: tuple[str, ...]


def load_config(path: Path, overrides: Mapping[str, str], environ: Mapping[str, str]) -> Loaded:
    """Reads a config.

    Flags in `overrides` (key name to text) hold over the file, and torchft's variables in `environ` over
    both, as torchft itself would have it. Raises a ConfigError whose message is one line with all problems
    found.
    """
    file, flags, environment = read_file(path), read_flags(overrides), read_environment(environ)
    switch = flags.given.get(aliases.SWITCH) or file.given.get(aliases.SWITCH)
    fault_tolerance = switch is not None and switch.value is True
    file, notes = aliases.resolve(file, fault_tolerance=fault_tolerance)
    flags, flag_notes = aliases.resolve(flags, fault_tolerance=fault_tolerance)
    told = file.given | flags.given
    given = told | environment.given
    config, problems = _build(given)
    problems = [*file.problems, *flags.problems, *environment.problems, *problems]
    if config is not None:
        problems += [_placed(problem, given) for problem in check(config)]
    if config is None or problems:
        raise ConfigError("; ".join(" ".join(problem.split()) for problem in problems))
    if fault_tolerance and _SYNC_EVERY not in given:
        notes.append(
            f"fault_tolerance.sync_steps is not set, so {_SYNC_EVERY} = {config.diloco.sync_every} holds "
            "(torchtitan's default was 5)"
        )
    notes += [*flag_notes, *_environment_notes(environment, told), *differences(config)]
    return Loaded(config, (*notes, *_idle_notes(config, told)))


def _build(given: Mapping[str, Given]) -> tuple[RunConfig | None, list[str]]:
    """The config of these values; or None, and which of them do not fit their keys."""
    built: dict[str, Any] = {}
    problems: list[str] = []
    # Inner sections come after the ones that hold them, and are needed first.
    for path, section in reversed(sections().items()):
        values = {key.field: given[key.path].value for key in section.keys if key.path in given}
        inner = {name.rpartition(".")[2]: built.pop(name) for name in _inside(path, built)}
        try:
            built[path] = section.schema(**values, **inner)
        except ValidationError as error:
            wrong = {detail["loc"][0] for detail in error.errors(include_url=False)}
            problems += [
                f"{given[key.path]} wants {key.wanted}, got {described(given[key.path].value)}"
                for key in reversed(section.keys)
                if key.field in wrong
            ]
    if problems:
        return None, problems[::-1]
    return RunConfig(**built), []


def _inside(path: str, built: Mapping[str, Any]) -> list[str]:
    return [name for name in built if name.startswith(f"{path}.")]


def _placed(problem: Problem, given: Mapping[str, Given]) -> str:
    """The problem after the file and line, the flag or the variable that gave the first key to blame."""
    source = next((given[key] for key in problem.keys if key in given), None)
    return f"{source.where or source.name}: {problem.text}" if source else problem.text


def _idle_notes(config: RunConfig, told: Mapping[str, Given]) -> Iterator[str]:
    idle = [key for key in _OWN_LIGHTHOUSE if key in told and keys()[key].differs(told[key].value)]
    if config.lighthouse.address and idle:
        yield f"not in force with lighthouse.address, as that Lighthouse has its own: {', '.join(idle)}"
    if config.diloco.engine == "torchft" and _BUCKET in told and keys()[_BUCKET].differs(told[_BUCKET].value):
        yield f'not in force with diloco.engine = "torchft", which makes no buckets: {_BUCKET}'


def _environment_notes(environment: Layer, told: Mapping[str, Given]) -> Iterator[str]:
    for key, source in environment.given.items():
        before = told[key].value if key in told else keys()[key].default
        yield (
            f"{source.name} in the environment sets {key} = {value_text(source.value)} "
            f"(the config has {value_text(before)})"
        )

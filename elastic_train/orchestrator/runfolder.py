"""The folder of one run: where everything that it leaves behind lies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from elastic_train.config import EnvironmentProblem, RunConfig, to_toml

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class RunFolder:
    """Paths below a run's folder."""

    path: Path

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def controller(self) -> Path:
        """Pid and control socket of the controller, while it lives."""
        return self.path / "controller.json"

    @property
    def controller_log(self) -> Path:
        return self.path / "logs" / "controller.log"

    @property
    def lighthouse_log(self) -> Path:
        return self.path / "logs" / "lighthouse.log"

    def announce_controller(self, socket: Path) -> None:
        """Say where the controller of this run can be reached."""
        staging = self.controller.with_suffix(".tmp")
        staging.write_text(json.dumps({"pid": os.getpid(), "socket": str(socket)}))
        staging.rename(self.controller)


def create(config: RunConfig, name: str, run_dir: Path | None) -> RunFolder:
    """Make the run's folder, with the resolved config in it, and let ``latest`` beside it point to it.

    Args:
        name: what the run is called, from the config file's name.
        run_dir: the folder to use; None makes ``<job.dump_folder>/<time>-<name>``.

    Raises:
        EnvironmentProblem: the folder cannot be written, or holds a run already.
    """
    target = (run_dir or Path(config.job.dump_folder)).absolute()
    try:
        folder = RunFolder(target if run_dir else _make_unused(target, name))
        (folder.path / "logs").mkdir(parents=True, exist_ok=True)
        # Made here and by nobody twice, so that two runs that start in one folder at once do not both get it.
        folder.events.open("x").close()
        (folder.path / "segments").mkdir(exist_ok=True)
        (folder.path / "config.toml").write_text(to_toml(config))
    except FileExistsError as error:
        if error.filename == str(folder.events):
            raise EnvironmentProblem(f"{folder.path} holds a run already: choose another --run_dir") from error
        raise EnvironmentProblem(f"cannot make the run folder {target}: {error.filename} is in the way") from error
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write the run folder {target} ({error.strerror}): "
            "set job.dump_folder or --run_dir to a folder that you may write"
        ) from error
    with contextlib.suppress(OSError):
        # Beside a folder that somebody named there may be no place for it, which is no reason not to run.
        _point_latest_to(folder.path)
    return folder


def _make_unused(parent: Path, name: str) -> Path:
    """Make a folder that is not there yet, also when another run does the same in this moment."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{_NOT_IN_A_NAME.sub('-', name)}"
    parent.mkdir(parents=True, exist_ok=True)
    path, number = parent / stem, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = parent / f"{stem}-{number}"


def _point_latest_to(path: Path) -> None:
    """Renaming over the old link leaves no moment without one, also when two runs start at once."""
    staging = path.parent / f".latest-{secrets.token_hex(8)}"
    staging.symlink_to(path.name)
    staging.rename(path.parent / "latest")

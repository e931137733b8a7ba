"""The command line: run a training, look at one, strike one.

Only the config is imported here. What a command needs beside it, torch above all, is imported once its
arguments are known to be right, so that help and errors come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from elastic_train import __version__
from elastic_train.config import ConfigError, EnvironmentProblem, load_config
from elastic_train.config.faults import DEFAULT_POINT, KINDS, POINTS
from elastic_train.config.keys import Key, keys, sections
from elastic_train.config.nearest import nearest
from elastic_train.config.toml_text import value_text

PROGRAM = "elastic-train"
WRONG_CONFIG = 2
INTERRUPTED = 130

_CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "max_content_width": 110,
}
_FOLDER = click.Path(path_type=Path)


class ConfigValue(click.ParamType[str]):
    """The text of a TOML value; what it is worth is for the config to say."""

    name = "value"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value.startswith("--"):
            self.fail(f"a value is missing before {value}", param, ctx)
        return value


class ConfigOption(click.Option):
    """One key of the config as a flag."""

    def __init__(self, key: Key) -> None:
        default = "not set" if key.default is None else value_text(key.default)
        super().__init__(
            [f"--{key.path}", key.path.replace(".", "__")],
            type=ConfigValue(),
            metavar="VALUE",
            help=f"{key.doc} {key.wanted[0].upper()}{key.wanted[1:]}. [default: {default}]",
        )
        self.key = key


class RunCommand(click.Command):
    """A command whose flags are all the keys of the config, in the help by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        flags = [option for option in options if isinstance(option, ConfigOption)]
        with formatter.section("Options"):
            formatter.write_dl(_records([option for option in options if option not in flags], ctx))
        for section in sections().values():
            records = _records([flag for flag in flags if flag.key.section == section.path], ctx)
            if records:
                with formatter.section(f"[{section.path}] {section.doc.rstrip('.')}"):
                    formatter.write_dl(records)


def _records(params: Iterable[click.Parameter], ctx: click.Context) -> list[tuple[str, str]]:
    return [record for param in params if (record := param.get_help_record(ctx)) is not None]


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Trains one LLM on many machines and does not stop when some of them die."""


def _run(config: Path, run_dir: Path | None, resume: Path | None, **flags: str | None) -> int:
    """Trains what CONFIG, a TOML file, says.

    Each key of the config is also a flag, over the file: a TOML value, or a bare word for a string.
    """
    overrides = {key: text for key in keys() if (text := flags[key.replace(".", "__")]) is not None}
    loaded = load_config(config, overrides, os.environ)

    from elastic_train.observe.live import LiveView
    from elastic_train.observe.summary import summary_lines
    from elastic_train.orchestrator.run import run

    view = LiveView()
    end = run(loaded.config, loaded.notes, name=config.stem, run_dir=run_dir, resume=resume, view=view)
    for line in summary_lines(view.fold):
        click.echo(line)
    if end.status != "succeeded" and view.fold.checkpoint is not None and loaded.config.diloco.engine == "elastic":
        folder = view.fold.run_dir
        click.echo(f"to go on: {PROGRAM} run {Path(folder) / 'config.toml'} --resume {folder}")
    if end.status == "failed":
        click.echo(f"{PROGRAM}: {end.cause}: {end.reason}", err=True)
    return end.exit_code


cli.add_command(
    RunCommand(
        "run",
        callback=_run,
        help=_run.__doc__,
        short_help="Trains what a TOML file says.",
        params=[
            click.Argument(["config"], type=_FOLDER),
            click.Option(
                ["--run_dir"],
                type=_FOLDER,
                help="Folder of the run. [default: a new one under job.dump_folder]",
            ),
            click.Option(
                ["--resume"],
                type=_FOLDER,
                metavar="RUN_DIR",
                help="Go on from the newest sound snapshot of that run, with as many replicas as CONFIG says.",
            ),
            *(ConfigOption(key) for key in keys().values()),
        ],
    )
)


@cli.command()
@click.argument("run_dir", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(run_dir: Path, as_json: bool) -> int:
    """Shows how the run in RUN_DIR is doing, or did."""
    _require_run(run_dir)

    from elastic_train.observe.status import show

    show(run_dir, as_json)
    return 0


@cli.command()
@click.argument("run_dir", type=_FOLDER)
@click.option("--replica", type=click.IntRange(min=0), required=True, help="Which replica, counted from 0.")
@click.option("--rank", type=click.IntRange(min=0), required=True, help="Which of its ranks, counted from 0.")
@click.option("--kind", type=click.Choice(KINDS), required=True, help="What happens to it.")
@click.option("--point", type=click.Choice(POINTS), default=DEFAULT_POINT, show_default=True, help="Where.")
def inject(run_dir: Path, replica: int, rank: int, kind: str, point: str) -> int:
    """Injects a fault into the living run in RUN_DIR."""
    _require_run(run_dir)

    from elastic_train.orchestrator.control import ask

    request = {"op": "inject", "replica": replica, "rank": rank, "kind": kind, "point": point}
    reply = ask(run_dir, request)
    click.echo(reply["text"])
    return 0 if reply["ok"] else 1


def _require_run(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise click.UsageError(f"{run_dir}: there is no such run folder; the newest one is <job.dump_folder>/latest")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: with one line on stderr and code 2 if what it was told is wrong."""
    try:
        code = cli.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except NoArgsIsHelpError as error:
        click.echo(error.format_message())
        code = WRONG_CONFIG
    except click.NoSuchOption as error:
        code = _refuse(f"{error.option_name} is no known flag{_meant(error)}")
    except click.ClickException as error:
        code = _refuse(error.format_message())
    except (ConfigError, EnvironmentProblem) as error:
        code = _refuse(str(error))
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code)


def _refuse(problem: str) -> int:
    click.echo(f"{PROGRAM}: {' '.join(problem.split())}", err=True)
    return WRONG_CONFIG


def _meant(error: click.NoSuchOption) -> str:
    command = error.ctx.command if error.ctx else cli
    known = [name for param in command.params if isinstance(param, click.Option) for name in param.opts]
    found = nearest(error.option_name.lstrip("-").replace("-", "_"), [name.lstrip("-") for name in known])
    return f", did you mean --{found}?" if found else f"; see {PROGRAM} {command.name} --help"

"""What the scripts' command lines have in common: how they read words, and how they end."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from elastic_train.config import ConfigError
from elastic_train.name_service import be_impatient

_PIPE_WIDTH = 130

PASSED, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

CONTEXT: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "max_content_width": 110,
}

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
CONFIG = click.option(
    "--config",
    default="llama3_tiny.toml",
    show_default=True,
    help="Config to run: a path, or the name of a file in configs/.",
)
FLAGS = click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS]...")


def main(command: click.Command) -> NoReturn:
    """Run a command that returns its exit code, and exit with it.

    SIGTERM is handled as Ctrl-C is, so that the runs that a script has started end with it.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    be_impatient()
    try:
        code = command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = WRONG_USE
    except ConfigError as error:
        click.echo(str(error), err=True)
        code = WRONG_USE
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code)


def seconds(value: float | None) -> str:
    """A duration in a table."""
    return "-" if value is None else f"{value:.2f}"


def show_table(table: Table) -> None:
    """Print a table, in a pipe as wide as in a terminal that has room for it."""
    in_terminal = Console().is_terminal
    Console(width=None if in_terminal else _PIPE_WIDTH).print(table)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt

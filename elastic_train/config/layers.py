"""Where settings come from: a file, flags and the environment, each read into a layer that remembers its
source.

A layer maps a key's dotted name to what was given for it. Layers are read whole, so that everything that is
wrong with them is said at once; whether a value fits its key is found out when the config is built.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_train.config.errors import ConfigError
from elastic_train.config.keys import keys, sections
from elastic_train.config.lines import lines_of_keys
from elastic_train.config.nearest import nearest
from elastic_train.config.toml_text import value_text

_AT = re.compile(r" \(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True)
class Given:
    """A value and who gave it."""

    value: Any
    name: str
    """What the source calls it: a key, a flag or a variable."""
    where: str = ""
    """File and line, where there is one."""

    def __str__(self) -> str:
        return f"{self.where}: {self.name}" if self.where else self.name


@dataclass(frozen=True)
class Layer:
    """What one source gives, and what is wrong with it."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_file(path: Path) -> Layer:
    """The settings of a TOML file. One that cannot be read or is no TOML raises a ConfigError."""
    try:
        text = path.read_bytes().decode()
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; name a TOML config, such as configs/llama3_debug.toml"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: this is no text in UTF-8; name a TOML config") from None
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        at = _AT.search(str(error))
        place = f"{path}:{at[1]}:{at[2]}" if at else str(path)
        raise ConfigError(f"{place}: this is no valid TOML: {_AT.sub('', str(error))}") from None
    layer, lines = Layer(), lines_of_keys(text)
    for key, value in _flatten(tables, ""):
        line = lines.get(key)
        where = f"{path}:{line}" if line else str(path)
        if key in keys():
            layer.given[key] = Given(value, key, where)
        elif key in sections():
            layer.problems.append(f"{where}: {key} is a section, so write [{key}]")
        else:
            layer.problems.append(f"{where}: {unknown(key, is_section=isinstance(value, dict))}")
    return layer


def read_flags(flags: Mapping[str, str]) -> Layer:
    """The settings of the command line: `-` is as good as `_`, and a value is TOML or a bare word."""
    layer = Layer()
    for flag, text in flags.items():
        key = flag.replace("-", "_")
        if key in keys():
            layer.given[key] = Given(_flag_value(text, keys()[key].is_string), f"--{key}")
        else:
            layer.problems.append(f"--{flag}: {unknown(key)}")
    return layer


def unknown(key: str, *, is_section: bool = False) -> str:
    """What to say of a name that does not exist."""
    if is_section:
        found = nearest(key, sections())
        return f"[{key}] is no known section" + (f", did you mean [{found}]?" if found else "")
    found = nearest(key, keys())
    return f"{key} is no known key" + (f", did you mean {found}?" if found else "")


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a file. A table is entered where the schema has one, and is a leaf in any other place."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path in sections():
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _flag_value(text: str, is_string: bool) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = read["value"]
    # Text that breaks the line can add keys of its own. A flag like 2 means "2" where only a string will do.
    return text if len(read) > 1 or (is_string and not isinstance(value, str)) else value


def described(value: Any) -> str:
    """A value in a message: short, on one line, with its type."""
    text = value_text(value)
    kinds = {bool: "boolean", int: "integer", float: "float", str: "string", list: "array", dict: "table"}
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({kinds.get(type(value), type(value).__name__)})"

"""Values and whole configs as TOML text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_train.config.schema import RunConfig


def value_text(value: Any) -> str:
    """A value as TOML writes it. TOML has no None: what is not set has no text and must not be asked for."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's strings are TOML's, but for the delete character, which TOML wants escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(value_text(item) for item in value)}]"
        case Mapping():
            return "{" + ", ".join(f"{value_text(key)} = {value_text(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def to_toml(config: RunConfig) -> str:
    """The whole config as a file that loads back equal. A key that is not set is left out."""
    return "\n".join(_tables(config, "")).lstrip("\n") + "\n"


def _tables(section: Any, path: str) -> Iterator[str]:
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    inner = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
    plain = {name: value for name, value in values.items() if name not in inner and value is not None}
    if plain:
        yield f"\n[{path}]"
        yield from (f"{name} = {value_text(value)}" for name, value in plain.items())
    for name, value in inner.items():
        yield from _tables(value, f"{path}.{name}" if path else name)

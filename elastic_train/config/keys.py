"""Every key of the config by its dotted name, with its type in words, its default and its meaning.

Read once from the schema; files, flags, error messages and the reference all go by it.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from elastic_train.config.schema import RunConfig
from elastic_train.config.toml_text import value_text


@dataclass(frozen=True)
class Key:
    """One setting, such as `training.dataloader.virtual_shards`."""

    path: str
    section: str
    field: str
    wanted: str
    """Its type and bounds in words."""
    is_string: bool
    """Whether nothing but strings will do."""
    default: Any
    doc: str

    def differs(self, value: Any) -> bool:
        """Whether a value, as TOML has it, is another than the default."""
        return self.default is None or value_text(value) != value_text(self.default)


@dataclass(frozen=True)
class Section:
    """One table of the file, such as `training.dataloader`."""

    path: str
    schema: type
    doc: str
    keys: tuple[Key, ...]
    """The settings of the section itself, without those of the tables inside."""


@cache
def sections() -> dict[str, Section]:
    """All sections by name, in the order of the file."""
    return {section.path: section for section in _walk(RunConfig, RunConfig(), "")}


@cache
def keys() -> dict[str, Key]:
    """All keys by name, in the order of the file."""
    return {key.path: key for section in sections().values() for key in section.keys}


def is_section(annotation: Any) -> bool:
    """Whether a field of this type is a table of its own."""
    return inspect.isclass(annotation) and dataclasses.is_dataclass(annotation)


def value_of(config: RunConfig, path: str) -> Any:
    """The value of the key with this dotted name."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _walk(schema: type, defaults: Any, prefix: str) -> Iterator[Section]:
    hints = get_type_hints(schema, include_extras=True)
    documented: dict[str, FieldInfo] = schema.__pydantic_fields__  # type: ignore[attr-defined]
    plain = [name for name, hint in hints.items() if not is_section(hint)]
    if prefix:
        yield Section(
            path=prefix,
            schema=schema,
            doc=_one_line(schema.__doc__),
            keys=tuple(
                Key(
                    path=f"{prefix}.{name}",
                    section=prefix,
                    field=name,
                    wanted=_wanted(hints[name]),
                    is_string=_is_string(hints[name]),
                    default=getattr(defaults, name),
                    doc=_one_line(documented[name].description),
                )
                for name in plain
            ),
        )
    for name, hint in hints.items():
        if is_section(hint):
            yield from _walk(hint, getattr(defaults, name), f"{prefix}.{name}" if prefix else name)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a type, without the None of an optional key."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for member in get_args(annotation) if member is not type(None)]
    return [annotation]


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_string(annotation: Any) -> bool:
    def only_strings(member: Any) -> bool:
        member = _bare(member)
        return member is str or get_origin(member) is Literal

    return all(only_strings(member) for member in _members(annotation))


def _wanted(annotation: Any) -> str:
    return " or ".join(_words(member) for member in _members(annotation))


def _words(annotation: Any) -> str:
    bare = _bare(annotation)
    if get_origin(bare) is Literal:
        return "one of " + ", ".join(value_text(choice) for choice in get_args(bare))
    if get_origin(bare) is tuple:
        return f"an array of {_plural(get_args(bare)[0])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[bare]
    bounds = [bound for info in get_args(annotation)[1:] for bound in info.metadata]
    return words + "".join(_bound(bound, bounds) for bound in bounds)


def _plural(element: Any) -> str:
    element = _bare(element)
    if get_origin(element) is tuple:
        return f"arrays of {_plural(get_args(element)[0])}"
    if get_origin(element) is Literal:
        return " or ".join(value_text(choice) for choice in get_args(element))
    return {str: "strings"}[element]


def _bound(bound: object, bounds: list[object]) -> str:
    match bound:
        case Ge(ge=low) if len(bounds) > 1:
            return f" from {low}"
        case Ge(ge=low):
            return f" of at least {low}"
        case Le(le=high):
            return f" to {high}"
        case Lt(lt=high):
            return f" to below {high}"
        case Gt(gt=low):
            return f" above {low}"
        case MinLen():
            return " that is not empty"
        case _:
            return ""

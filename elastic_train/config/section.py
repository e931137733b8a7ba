"""How a section of the config is declared: frozen, keyword-only, strict, with a sentence under every key.

The types of this module are the vocabulary of the schema; they carry the bounds that hold for a key by
itself. What several keys must be to each other is in `checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

C = TypeVar("C", bound=type)

_RULES = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
_declare: Callable[[Any], Any] = dataclass(frozen=True, kw_only=True, config=_RULES)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: C) -> C:
    """Makes a class a section of the config."""
    declared: C = _declare(cls)
    return declared


PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(min_length=1)]
# A TOML array arrives as a list; what is kept must not change. The elements stay strict.
Strings = Annotated[tuple[str, ...], Field(strict=False)]
StringLists = Annotated[tuple[Strings, ...], Field(strict=False)]

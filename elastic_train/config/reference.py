"""Writes the config reference from the schema: a file with every key, and a page of documentation.

python -m elastic_train.config.reference            writes configs/reference.toml and docs/configuration.md
python -m elastic_train.config.reference --check    exits with 1 if they are not what the schema says
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from elastic_train.config.environment import VARIABLES
from elastic_train.config.keys import Key, Section, sections
from elastic_train.config.support import UNSUPPORTED
from elastic_train.config.toml_text import value_text

ROOT = Path(__file__).parents[2]
_WIDTH = 100

_TOML_HEAD = """\
Every key of the config with its meaning and its default, written by
"python -m elastic_train.config.reference". A key without a default is commented out.
"""

_PAGE_HEAD = """\
# Configuration

Written by `python -m elastic_train.config.reference`; do not edit.

A run is told everything by one TOML file: `elastic-train run CONFIG`. Each key below is also a flag,
`--section.key VALUE`, which holds over the file; a value is a TOML value, a bare word is a string, and `-` is
as good as `_` in a flag's name. An unknown key, a value of the wrong type, or keys that contradict each other
end `elastic-train` with exit code 2 and one line that says what to do.

The first sections are torchtitan's, with the names of its last TOML release (v0.2.2), so that its Llama files
load unchanged. A key marked *must stay* is known, but cannot be honoured: any other value is an error while
it is in force.

torchft's environment variables hold over file and flags:

"""


def toml_reference() -> str:
    """A config file with every key at its default and what it means above it."""
    lines = list(_commented(_TOML_HEAD))
    for section in sections().values():
        if section.keys:
            lines += ["", f"[{section.path}]", *_commented(section.doc)]
        for key in section.keys:
            lines += ["", *_commented(f"{key.doc} {_remark(key)}"), _assignment(key)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The documentation of all sections and keys, in Markdown."""
    variables = [f"| `{variable}` | `{key}` |" for variable, key in VARIABLES.items()]
    parts = ["\n".join(["| variable | key |", "|---|---|", *variables])]
    parts += ["\n".join(_table(section)) for section in sections().values() if section.keys]
    return _PAGE_HEAD + "\n\n".join(parts) + "\n"


def _table(section: Section) -> Iterator[str]:
    yield f"## [{section.path}]\n\n{section.doc}\n"
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for key in section.keys:
        default = "not set" if key.default is None else f"`{value_text(key.default)}`"
        meaning = f"{key.doc} *{_sentence(key.wanted)}*" + (f" **{stays}**" if (stays := _stays(key)) else "")
        yield f"| `{key.field}` | {default} | {meaning.replace('|', chr(92) + '|')} |"


def _assignment(key: Key) -> str:
    return f"#{key.field} =" if key.default is None else f"{key.field} = {value_text(key.default)}"


def _remark(key: Key) -> str:
    return " ".join(part for part in (f"({key.wanted})", _stays(key)) if part)


def _stays(key: Key) -> str:
    row = UNSUPPORTED.get(key.path)
    if row is None:
        return ""
    off = "unset" if row.off is None else value_text(row.off)
    condition = f" while {row.switch} is true" if row.switch else ""
    return f"Must stay {off}{condition}: {row.why}."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _commented(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH, break_on_hyphens=False)]


def main(arguments: list[str]) -> str | None:
    """Writes or checks the files; returns what is wrong, for the exit code."""
    written = {
        ROOT / "configs" / "reference.toml": toml_reference(),
        ROOT / "docs" / "configuration.md": page(),
    }
    if arguments == ["--check"]:
        stale = [
            str(path.relative_to(ROOT))
            for path, text in written.items()
            if not path.is_file() or path.read_text() != text
        ]
        remedy = "run python -m elastic_train.config.reference"
        return f"not what the schema says: {', '.join(stale)}; {remedy}" if stale else None
    if arguments:
        return f"unknown arguments {arguments}: there is only --check"
    for path, text in written.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

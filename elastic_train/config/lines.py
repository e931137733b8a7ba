"""On which line of a TOML file each key stands.

The TOML parser of the standard library does not tell, and an error that names the line saves a search. This
reads only as much of TOML as that needs; a key that it does not find is reported without a line.
"""

from __future__ import annotations

import re

_NAME = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_TABLE = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=\s*(.*)")
_LONG_STRING = re.compile(r'"""|\'\'\'')
_STRING_OR_COMMENT = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|#.*")


def lines_of_keys(text: str) -> dict[str, int]:
    """Dotted names of keys and tables, each with the number of the line on which it first stands."""
    lines: dict[str, int] = {}
    table, quotes, brackets = "", "", 0
    for number, line in enumerate(text.split("\n"), start=1):
        if quotes:
            quotes = "" if quotes in line else quotes
        elif brackets:
            brackets += _opened(line)
        elif header := _TABLE.match(line):
            table = f"{_plain(header[1])}."
            lines.setdefault(table[:-1], number)
        elif entry := _KEY.match(line):
            path = table + _plain(entry[1])
            while path:
                lines.setdefault(path, number)
                path = path.rpartition(".")[0]
            long = _LONG_STRING.match(entry[2])
            if long and entry[2].count(long[0]) == 1:
                quotes = long[0]
            elif not long:
                brackets = _opened(entry[2])
    return lines


def _opened(line: str) -> int:
    """Arrays that are open at the end of a line, less those that were before it."""
    bare = _STRING_OR_COMMENT.sub("", line)
    return bare.count("[") - bare.count("]")


def _plain(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in dotted.split("."))

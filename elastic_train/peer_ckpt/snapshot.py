"""The state of one rank after an outer step, as its peers may read it while the rank trains on.

A snapshot does not own its memory for ever: the next one may be written where it lies. So its owner retires a
section before it writes, and whoever is reading that section at the time is cut off rather than served a mixture.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch


class Retired(Exception):
    """The memory of a section belongs to a newer snapshot by now."""


class Snapshot:
    """Tensors in named sections, and a header that says what they are. Nothing of it is ever changed."""

    def __init__(self, header: Mapping[str, Any], sections: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """
        Args:
            header: outer_step, rank_hash, state_hash, history and what else a peer needs to know, as JSON has it.
                A copy is kept as a peer will read it, so keys become strings and tuples lists.
            sections: contiguous host tensors by name, which are not copied. The names of sections are identifiers.

        Raises:
            TypeError: JSON cannot express the header.
            ValueError: a tensor or the name of a section is not as it must be.
        """
        for section, tensors in sections.items():
            if not section.isidentifier():
                raise ValueError(f"a section cannot be called {section!r}")
            for name, tensor in tensors.items():
                if tensor.device.type != "cpu" or not tensor.is_contiguous():
                    raise ValueError(f"{section}/{name} is no contiguous host tensor")
        self._header: Mapping[str, Any] = MappingProxyType(json.loads(json.dumps(dict(header))))
        self._sections: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType(
            {section: MappingProxyType(dict(tensors)) for section, tensors in sections.items()}
        )
        self._guard = threading.Lock()
        self._retired: set[str] = set()
        self._readers: dict[object, tuple[str, Callable[[], None]]] = {}

    @property
    def header(self) -> Mapping[str, Any]:
        return self._header

    @property
    def sections(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Tensors by section and name. For the snapshot's owner: others go through ``reading``."""
        return self._sections

    def is_retired(self, section: str) -> bool:
        """Whether the memory of that section may hold something else by now."""
        return section in self._retired

    def retire(self, section: str) -> None:
        """Give up a section: when this returns, nobody reads its memory, and nobody will.

        Pages that the kernel was given to send (``Wire.send_file``), or a collective library (``Channel.send``), may
        still be on their way; the checksum behind them does not fit what is written there from now on.

        Raises:
            KeyError: there is no such section.
        """
        if section not in self._sections:
            raise KeyError(section)
        with self._guard:
            self._retired.add(section)
            # Under the lock, so that a reader that is just leaving keeps its connection until it was cut off.
            for reading, cut_off in self._readers.values():
                if reading == section:
                    cut_off()

    @contextmanager
    def reading(self, section: str, cut_off: Callable[[], None]) -> Iterator[Mapping[str, torch.Tensor]]:
        """The tensors of a section, to be read inside the ``with`` only.

        Args:
            cut_off: called from another thread if the section is retired meanwhile. When it returns, the memory
                must not be read any more, or not for anything that counts; it must not wait for anything.

        Raises:
            KeyError: there is no such section.
            Retired: too late.
        """
        tensors, reader = self._sections[section], object()
        with self._guard:
            if section in self._retired:
                raise Retired(section)
            self._readers[reader] = (section, cut_off)
        try:
            yield tensors
        finally:
            with self._guard:
                del self._readers[reader]

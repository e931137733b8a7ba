"""Files in memory that outlive the ranks which use them: a rank's next incarnation may find its own state there.

The ReplicaActor makes them, without names, and holds them open; ranks open them by their place under ``/proc``, which
needs the same user on the same host. So nothing is ever left behind: the memory goes when the ReplicaActor does, at the
latest, and no limit of a mounted file system applies.
"""

from __future__ import annotations

import logging
import os

from elastic_train.config import RunConfig

logger = logging.getLogger(__name__)


def keeps_memory(config: RunConfig) -> bool:
    """Whether ranks of a run have any use for such files: stock DiLoCo keeps no snapshot on the host."""
    return config.peer_ckpt.shared_memory and config.diloco.engine == "elastic"


class MemoryFiles:
    """One file per rank for the present incarnation, and those that the one before has left."""

    def __init__(self) -> None:
        self._present: list[int] = []
        self._remains: list[int] = []

    def renew(self, ranks: int) -> None:
        """Make new files for an incarnation, once no process of the one before is left.

        What that one has left is kept, and what is older goes; but one that never used its files has not looked at
        what it had either, so that stays.
        """
        if any(os.fstat(file).st_size for file in self._present):
            self._present, self._remains = self._remains, self._present
        _close(self._present)
        try:
            for rank in range(ranks):
                self._present.append(os.memfd_create(f"elastic_train rank {rank}", os.MFD_CLOEXEC))
        except OSError as error:
            logger.warning("no shared memory for the ranks of this replica: %s", error)
            _close(self._present)

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the present incarnation's files, by rank; empty if there are none."""
        return _paths(self._present)

    @property
    def remains(self) -> tuple[str, ...]:
        """Of the files that an earlier one has left."""
        return _paths(self._remains)

    def close(self) -> None:
        """Give all of them up."""
        _close(self._present)
        _close(self._remains)


def _paths(files: list[int]) -> tuple[str, ...]:
    return tuple(f"/proc/{os.getpid()}/fd/{file}" for file in files)


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())

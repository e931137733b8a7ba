"""Where the ranks of a replica meet: a store that rank 0 opens before torch.distributed asks for one.

Left to itself, torch.distributed opens it at a port that somebody has to guess beforehand, and a port that was free a
moment ago may be another's by then. So it is told, as by torchrun's agent, that the store is there already.
"""

from __future__ import annotations

import os

from torch.distributed import TCPStore


def open_store(host: str) -> TCPStore:
    """The store, which lives as long as what is returned; its ``port`` is a free one.

    Args:
        host: name under which the ranks reach this process.
    """
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def expect_store() -> None:
    """Let torch.distributed, in this process, look for the store instead of opening one."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)

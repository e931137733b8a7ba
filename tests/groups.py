"""Process groups of a single process, for tests of what a rank does with its peers."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """The default group of this process alone, over gloo."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

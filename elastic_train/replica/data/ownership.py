"""Which reader owns which virtual shard, also when replicas were given up for good.

Every reader works it out by itself and all come to the same result: nothing is negotiated or stored. A reader that has
heard of fewer retirements than another owns no shard that the other owns, so the news may reach them one after another.
"""

from __future__ import annotations

from collections.abc import Collection

import xxhash


def owners(virtual_shards: int, *, replicas: int, ranks: int, retired: Collection[int] = ()) -> list[int]:
    """The reader of each virtual shard. Reader ``slot * ranks + rank`` is data-parallel rank ``rank`` of a replica.

    A shard belongs to reader ``shard % (replicas * ranks)``. If that one's replica is retired, the shard goes to the
    living reader that gives the highest hash with it (rendezvous hashing): one more retirement moves that replica's
    shards and no others.

    Args:
        virtual_shards: parts of the dataset.
        replicas: slots of the run, the retired ones included.
        ranks: data-parallel ranks of a replica.
        retired: slots that are given up for good.

    Raises:
        ValueError: a retired slot is none of the run's, or no slot is left.
    """
    if unknown := sorted(set(retired).difference(range(replicas))):
        raise ValueError(f"no such replica to retire: {unknown}, where the run has {replicas}, counted from 0")
    living = [slot for slot in range(replicas) if slot not in retired]
    if not living:
        raise ValueError(f"all {replicas} replicas are retired: none is left to read the data")
    readers = [slot * ranks + rank for slot in living for rank in range(ranks)]
    base = [shard % (replicas * ranks) for shard in range(virtual_shards)]
    return [
        max(readers, key=lambda heir: (_score(shard, heir), heir)) if reader // ranks in retired else reader
        for shard, reader in enumerate(base)
    ]


def _score(shard: int, reader: int) -> int:
    """64 bits, the same on every machine (xxh3)."""
    return xxhash.xxh3_64_intdigest(shard.to_bytes(8, "big") + reader.to_bytes(8, "big"))

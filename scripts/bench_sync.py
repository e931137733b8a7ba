"""What an outer sync costs, in seconds and bytes, by the size of the model, the compression and the replicas."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import psutil
from rich.table import Table

from scripts.command_line import CONTEXT, FAILED, JSON, PASSED, main, show_table

if TYPE_CHECKING:
    from scripts.sync_replica import Replicas, TimedSync

MIB = 1 << 20

_FLAT_MIB = 4
_WARM_UP_ROUNDS = 2
_LONG_NUMEL = 200_000
_LONG_BUCKET_BYTES = _LONG_NUMEL
_LONG_FIRST = 200
_MARGIN_BYTES = 1 << 30


@click.command(context_settings=CONTEXT)
@click.option(
    "--millions",
    multiple=True,
    default=(10.0, 50.0, 200.0),
    show_default=True,
    type=click.FloatRange(min=0.001),
    metavar="N",
    help="Million parameters; once for every size.",
)
@click.option(
    "--replicas",
    multiple=True,
    default=(2, 3),
    show_default=True,
    type=click.IntRange(min=2),
    metavar="N",
    help="Replicas; once for every number.",
)
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(min=1), metavar="N", help="Measured syncs of each."
)
@click.option("--bucket_mb", default=32, show_default=True, type=click.IntRange(min=1), help="As diloco.bucket_mb.")
@click.option(
    "--long_syncs",
    default=1000,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Syncs over which memory must not grow, of a small model; more than {_LONG_FIRST}, or 0 for none.",
)
@click.option("--only_long", is_flag=True, help="Only that.")
@JSON
def bench_sync(
    millions: tuple[float, ...],
    replicas: tuple[int, ...],
    rounds: int,
    bucket_mb: int,
    long_syncs: int,
    only_long: bool,
    as_json: bool,
) -> int:
    """Measures the data part of outer syncs: pseudo-gradient, exchange, outer step, hash, new parameters. Each replica
    is one process with one thread; they exchange over gloo on the loopback device. Within a case the compressions
    take turns sync by sync, so that what else happens on the machine happens to all of them.

    \b
    seconds         median over the rounds of the slowest replica
    bytes           sent by one replica in one sync
    seconds_ratio   both divided by those without compression
    bytes_ratio
    relative_error  of the mean of all pseudo-gradients (normal noise, tokens as weights), against float64, in a first
                    sync, where no error of an earlier one is made good
    growth_mib      how much the most memory that a process ever held grew after two rounds of warm-up; the long
                    case: how much the memory held grew from sync 200 to the last. Up to a bucket, it is what
                    glibc keeps of gloo's buffers; MALLOC_MMAP_THRESHOLD_=131072 in the environment forbids that,
                    at some cost in time

    Nothing else should use the machine meanwhile. A case for which there is not enough memory is not measured.

    With --json the last line has: cases (each with millions, replicas, methods, growth_mib), long (null if left out),
    rounds, bucket_mb, cores, load (of the machine before, 1 minute), failed (why the figures cannot be trusted, empty
    if they can).

    Exit code 0: measured; 1: a case failed, or memory grew; 2: wrong use; 130: interrupted.
    """
    if 0 < long_syncs <= _LONG_FIRST or (only_long and not long_syncs):
        raise click.UsageError(f"--long_syncs must be more than {_LONG_FIRST}")
    from scripts.sync_replica import ReplicaFailed

    figures: dict[str, Any] = {
        "cases": [],
        "long": None,
        "rounds": rounds,
        "bucket_mb": bucket_mb,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "failed": [],
    }
    for size, count in [] if only_long else [(size, count) for size in millions for count in replicas]:
        name = f"{size:g} M parameters, {count} replicas"
        click.echo(name, err=True)
        try:
            case = measure(round(size * 1e6), count, rounds, bucket_mb * MIB)
            figures["cases"].append({"millions": size, "replicas": count, **case})
            figures["failed"] += grown(name, case["growth_mib"], bucket_mb * MIB)
        except (ReplicaFailed, MemoryError) as error:
            figures["failed"].append(f"{name}: {error}")
    if long_syncs:
        count = max(replicas)
        name = f"{long_syncs} syncs of {_LONG_NUMEL / 1e6:g} M parameters, {count} replicas"
        click.echo(name, err=True)
        try:
            figures["long"] = {"syncs": long_syncs, "replicas": count, **endure(count, long_syncs)}
            figures["failed"] += grown(name, figures["long"]["growth_mib"], _LONG_BUCKET_BYTES)
        except (ReplicaFailed, MemoryError) as error:
            figures["failed"].append(f"{name}: {error}")
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show(figures)
    return FAILED if figures["failed"] else PASSED


def measure(numel: int, count: int, rounds: int, bucket_bytes: int) -> dict[str, Any]:
    """One case: every compression by turns, with the same ``count`` replicas of ``numel`` parameters.

    Raises:
        ReplicaFailed: a replica failed.
        MemoryError: the machine has not enough left.
    """
    from scripts.sync_replica import METHODS

    with _replicas(count, numel, bucket_bytes) as replicas:
        errors = {method: replicas.check(method) for method in METHODS}
        # Twice: only then does error feedback have all its memory.
        warm = [replicas.sync(method) for _ in range(_WARM_UP_ROUNDS) for method in METHODS]
        syncs: dict[str, list[Sequence[TimedSync]]] = {method: [] for method in METHODS}
        for turn in range(rounds):
            for method in in_turn(METHODS, turn):
                syncs[method].append(replicas.sync(method))
    measured = [sync for method in METHODS for sync in syncs[method]]
    return {
        "methods": compare({method: method_figures(syncs[method], errors[method]) for method in METHODS}),
        "growth_mib": growth([[s.peak_rss for s in sync] for sync in (*warm, *measured)], since=len(warm) - 1),
    }


def endure(count: int, syncs: int) -> dict[str, Any]:
    """Very many syncs of a small model by the same processes, the compressions by turns.

    Raises:
        ReplicaFailed: a replica failed.
        MemoryError: the machine has not enough left.
    """
    from scripts.sync_replica import METHODS

    with _replicas(count, _LONG_NUMEL, _LONG_BUCKET_BYTES) as replicas:
        held = [[s.rss for s in replicas.sync(METHODS[turn % len(METHODS)])] for turn in range(syncs)]
    return {
        "rss_first_mib": round(max(held[_LONG_FIRST - 1]) / MIB, 1),
        "rss_last_mib": round(max(held[-1]) / MIB, 1),
        "growth_mib": growth([held[_LONG_FIRST - 1], held[-1]], since=0),
    }


def in_turn(methods: Sequence[str], turn: int) -> list[str]:
    """The methods in the order of one round: everyone is first sometimes."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def method_figures(rounds: Sequence[Sequence[TimedSync]], error: float) -> dict[str, Any]:
    """Figures of one compression from its rounds, each with what every replica measured."""
    return {
        "seconds": round(statistics.median(max(sync.seconds for sync in one) for one in rounds), 4),
        "bytes": max(sync.bytes for one in rounds for sync in one),
        "relative_error": float(f"{error:.3g}"),
    }


def compare(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same figures, with the ratios of seconds and bytes to those of the first method."""
    base = next(iter(methods.values()))
    return {
        name: {
            **figures,
            "seconds_ratio": round(figures["seconds"] / base["seconds"], 3),
            "bytes_ratio": round(figures["bytes"] / base["bytes"], 4),
        }
        for name, figures in methods.items()
    }


def growth(memory: Sequence[Sequence[int]], *, since: int) -> float:
    """MiB by which that process grew most that grew most.

    Args:
        memory: bytes of every process, moment by moment.
        since: the moment to compare with; earlier ones do not matter.
    """
    before = memory[since]
    largest = [max(moment[i] for moment in memory[since:]) - size for i, size in enumerate(before)]
    return round(max(largest) / MIB, 2)


def grown(name: str, growth_mib: float, bucket_bytes: int) -> list[str]:
    """Why memory that grew by that much is not flat; empty if it is.

    What gloo allocates and frees in an exchange is about as large as a bucket, and not always given back at once.
    """
    if growth_mib <= _FLAT_MIB + bucket_bytes / MIB:
        return []
    return [f"{name}: a process grew by {growth_mib:.0f} MiB"]


def _replicas(count: int, numel: int, bucket_bytes: int) -> Replicas:
    from scripts.sync_replica import Replicas, needed_bytes

    needed, free = needed_bytes(numel, count, bucket_bytes), psutil.virtual_memory().available
    if needed + _MARGIN_BYTES > free:
        raise MemoryError(f"not measured: it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    return Replicas(count, numel, bucket_bytes)


def _show(figures: Mapping[str, Any]) -> None:
    click.echo(
        f"Outer syncs over loopback, one thread a replica, {figures['cores']} cores (load before: {figures['load']}), "
        f"buckets of {figures['bucket_mb']} MiB, median of {figures['rounds']} rounds"
    )
    if figures["cases"]:
        table = Table(box=None)
        for name in ("M parameters", "replicas", "compression", "seconds", "ratio", "MB sent", "ratio", "error"):
            table.add_column(name, justify="left" if name == "compression" else "right")
        table.add_column("growth MiB", justify="right")
        for case in figures["cases"]:
            names = [f"{case['millions']:g}", str(case["replicas"])]
            growth_mib = f"{case['growth_mib']:.1f}"
            for method, row in case["methods"].items():
                table.add_row(
                    *names,
                    method,
                    f"{row['seconds']:.3f}",
                    f"{row['seconds_ratio']:.2f}",
                    f"{row['bytes'] / 1e6:.2f}",
                    f"{row['bytes_ratio']:.3f}",
                    f"{row['relative_error']:.1e}",
                    growth_mib,
                )
                names, growth_mib = ["", ""], ""
            table.add_section()
        show_table(table)
    if figures["long"] is not None:
        long = figures["long"]
        click.echo(
            f"{long['syncs']} syncs of a small model, {long['replicas']} replicas: {long['rss_first_mib']:.1f} MiB "
            f"after {_LONG_FIRST}, {long['rss_last_mib']:.1f} MiB at the end, growth {long['growth_mib']:.2f} MiB"
        )
    for reason in figures["failed"]:
        click.echo(f"not to be trusted: {reason}")


if __name__ == "__main__":
    main(bench_sync)

"""How fast a joiner gets its state from its donors, beside plain sockets and torchft's transport."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import psutil
from rich.table import Table

from scripts.command_line import CONTEXT, FAILED, JSON, PASSED, main, show_table
from scripts.figures import spread

if TYPE_CHECKING:
    from scripts.transfer_peers import TimedTransfer

MIB = 1 << 20

COLD = ("raw", "ours", "process_group", "http")
"""What is compared, into memory that is new to the joiner."""
WARM = ("warm_raw", "warm_ours")
"""The same, into memory that it has used before."""
ONE_DONOR, TWO_DONORS = "1 donor", "2 donors"

_DIGITS = 4
_MARGIN_BYTES = 1 << 30


@click.command(context_settings=CONTEXT)
@click.option(
    "--mib", default=1024, show_default=True, type=click.IntRange(min=1), metavar="N", help="Size of the state."
)
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Measured transfers of each.",
)
@click.option(
    "--streams", default=2, show_default=True, type=click.IntRange(1, 16), metavar="N", help="As peer_ckpt.streams."
)
@click.option(
    "--link_mib",
    default=256,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Size of the state that comes over slow links, from one donor and from two; 0: not measured. Two can share "
    "it only if it is many times as large as a part, 32 MiB.",
)
@click.option(
    "--link_mbit",
    default=500,
    show_default=True,
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="What each donor's link carries, in 10^6 bits a second.",
)
@JSON
def bench_transfer(mib: int, rounds: int, streams: int, link_mib: int, link_mbit: int, as_json: bool) -> int:
    """Measures transfers of a rank's state, half of it outer and half inner, over the loopback device. Donors and
    joiner are processes of their own. The ways take turns round by round, so that what else happens on the machine
    happens to all of them. What arrived is compared with what was sent, outside the time.

    \b
    gb_s            PeerServer and PeerClient, checksums made and checked in each transfer (10^9 bytes a second, from
                    the median time)
    raw_gb_s        plain sockets, as many as ours, that check nothing: sendall from the tensors, recv_into the tensors
    process_group_gb_s
                    ours with the bytes by process groups of gloo, as with peer_ckpt.transport = "process_group"
    http_gb_s       torchft's transport, in one piece, as by default
    ratio           gb_s / raw_gb_s; process_group_ratio: process_group_gb_s / raw_gb_s; http_ratio: gb_s / http_gb_s
    warm_gb_s       gb_s and raw_gb_s where the joiner has used its memory before. In a run it has not: it is a new
    warm_raw_gb_s   process, as in the other figures, and often its memory takes longer to get than its state.
    warm_ratio
    donors_gb_s     ours from 1 donor and from 2, each at the end of a slow link of its own, made of network namespaces
                    (needs root and the commands ip and tc; null, and donors_note says why, where they cannot be made)
    donors_ratio    from 2 / from 1

    Nothing else should use the machine meanwhile. If there is not enough memory, nothing is measured.

    With --json the last line has these and: seconds (of each way: median_s, worst_s), donors_shares (part of the bytes
    that each of 2 donors gave, in the median), mib, rounds, streams, link_mib, link_mbit, cores, load (of the machine
    before, 1 minute), failed (why the figures cannot be trusted, empty if they can).

    Exit code 0: measured; 1: a transfer failed; 2: wrong use; 130: interrupted.
    """
    from scripts.transfer_peers import PeerFailed

    figures: dict[str, Any] = {
        **wire_figures({}),
        **donor_figures({}),
        "donors_note": "",
        "seconds": {},
        "mib": mib,
        "rounds": rounds,
        "streams": streams,
        "link_mib": link_mib,
        "link_mbit": link_mbit,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "failed": [],
    }
    try:
        click.echo(f"{mib} MiB over loopback", err=True)
        wires = measure_wires(mib * MIB, rounds, streams)
        figures |= wire_figures(wires)
        figures["seconds"] |= durations(wires)
    except (PeerFailed, MemoryError) as error:
        figures["failed"].append(f"over loopback: {error}")
    _add_donors(figures, rounds, streams)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show(figures)
    return FAILED if figures["failed"] else PASSED


def measure_wires(size: int, rounds: int, streams: int) -> dict[str, list[TimedTransfer]]:
    """Transfers of ``size`` bytes over loopback in every way, by turns.

    Raises:
        PeerFailed: one failed.
        MemoryError: the machine has not enough left.
    """
    from scripts.transfer_peers import Peers, Place, Way

    ways = {name: Way(wire=name.removeprefix("warm_"), warm=name in WARM) for name in (*COLD, *WARM)}
    _need(size, 1)
    with Peers(size, [Place()], streams=streams) as peers:
        # Once before it counts: what is loaded and opened at first use is not what is measured.
        for way in ways.values():
            peers.transfer(way)
        transfers: dict[str, list[TimedTransfer]] = {name: [] for name in ways}
        for turn in range(rounds):
            for name in in_turn(list(ways), turn):
                transfers[name].append(peers.transfer(ways[name]))
    return transfers


def measure_donors(size: int, rounds: int, streams: int, mbit: int) -> dict[str, list[TimedTransfer]]:
    """Transfers of ``size`` bytes from one donor and from two, each at the end of a link of ``mbit``, by turns.

    Raises:
        NoNamespaces: the links cannot be made.
        PeerFailed: a transfer failed.
        MemoryError: the machine has not enough left.
    """
    from scripts.namespaces import star
    from scripts.transfer_peers import OURS, Peers, Place, Way

    counts = {ONE_DONOR: 1, TWO_DONORS: 2}
    _need(size, 2)
    with star(2, mbit) as links:
        places = [Place(host=end.host, namespace=end.name) for end in links.ends]
        with Peers(size, places, streams=streams, joiner=links.middle) as peers:
            peers.transfer(Way(wire=OURS), 2)
            transfers: dict[str, list[TimedTransfer]] = {name: [] for name in counts}
            for turn in range(rounds):
                for name in in_turn(list(counts), turn):
                    transfers[name].append(peers.transfer(Way(wire=OURS), counts[name]))
    return transfers


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """The names in the order of one round: everyone is first sometimes."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def speed(transfers: Sequence[TimedTransfer]) -> float | None:
    """10^9 bytes a second, from the median time; None if there are none. All have the same size."""
    if not transfers:
        return None
    median = statistics.median(transfer.seconds for transfer in transfers)
    return round(transfers[0].bytes / 1e9 / median, _DIGITS)


def ratio(speed: float | None, base: float | None) -> float | None:
    """The one speed in terms of the other, if there are both."""
    return None if not speed or not base else round(speed / base, _DIGITS)


def wire_figures(transfers: Mapping[str, Sequence[TimedTransfer]]) -> dict[str, Any]:
    """What the transfers over loopback say, by way; None for what was not measured."""
    speeds = {name: speed(transfers.get(name, ())) for name in (*COLD, *WARM)}
    return {
        "gb_s": speeds["ours"],
        "raw_gb_s": speeds["raw"],
        "ratio": ratio(speeds["ours"], speeds["raw"]),
        "process_group_gb_s": speeds["process_group"],
        "process_group_ratio": ratio(speeds["process_group"], speeds["raw"]),
        "http_gb_s": speeds["http"],
        "http_ratio": ratio(speeds["ours"], speeds["http"]),
        "warm_gb_s": speeds["warm_ours"],
        "warm_raw_gb_s": speeds["warm_raw"],
        "warm_ratio": ratio(speeds["warm_ours"], speeds["warm_raw"]),
    }


def donor_figures(transfers: Mapping[str, Sequence[TimedTransfer]]) -> dict[str, Any]:
    """What the transfers over slow links say, by donors; None for what was not measured."""
    if not transfers:
        return {"donors_gb_s": None, "donors_ratio": None, "donors_shares": None}
    one, two = speed(transfers[ONE_DONOR]), speed(transfers[TWO_DONORS])
    given = [[share / transfer.bytes for share in transfer.shares] for transfer in transfers[TWO_DONORS]]
    return {
        "donors_gb_s": {"1": one, "2": two},
        "donors_ratio": ratio(two, one),
        "donors_shares": [round(statistics.median(shares), 3) for shares in zip(*given, strict=True)],
    }


def durations(transfers: Mapping[str, Sequence[TimedTransfer]]) -> dict[str, dict[str, float | None]]:
    """What the transfers took, by way."""
    return {name: asdict(spread(transfer.seconds for transfer in those)) for name, those in transfers.items()}


def _add_donors(figures: dict[str, Any], rounds: int, streams: int) -> None:
    from scripts.namespaces import NoNamespaces
    from scripts.transfer_peers import PeerFailed

    if not figures["link_mib"]:
        figures["donors_note"] = "left out"
        return
    click.echo(f"{figures['link_mib']} MiB over links of {figures['link_mbit']} Mbit/s", err=True)
    try:
        donors = measure_donors(figures["link_mib"] * MIB, rounds, streams, figures["link_mbit"])
        figures |= donor_figures(donors)
        figures["seconds"] |= durations(donors)
    except NoNamespaces as error:
        figures["donors_note"] = str(error)
    except (PeerFailed, MemoryError) as error:
        figures["failed"].append(f"over slow links: {error}")


def _need(size: int, donors: int) -> None:
    from scripts.transfer_peers import needed_bytes

    needed, free = needed_bytes(size, donors), psutil.virtual_memory().available
    if needed + _MARGIN_BYTES > free:
        raise MemoryError(f"not measured: it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")


def _show(figures: Mapping[str, Any]) -> None:
    click.echo(
        f"Transfers of {figures['mib']} MiB over loopback, {figures['streams']} connections, {figures['cores']} cores "
        f"(load before: {figures['load']}), median of {figures['rounds']} rounds"
    )
    table = Table(box=None)
    for name in ("", "GB/s", "of raw", "warm GB/s", "of raw"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("raw sockets", *_cells(figures["raw_gb_s"], None, figures["warm_raw_gb_s"], None))
    table.add_row("peer_ckpt", *_cells(figures["gb_s"], figures["ratio"], figures["warm_gb_s"], figures["warm_ratio"]))
    table.add_row(
        "by process groups", *_cells(figures["process_group_gb_s"], figures["process_group_ratio"], None, None)
    )
    http_of_raw = ratio(figures["http_gb_s"], figures["raw_gb_s"])
    table.add_row("torchft's HTTP", *_cells(figures["http_gb_s"], http_of_raw, None, None))
    show_table(table)
    if figures["donors_gb_s"] is None:
        click.echo(f"from several donors: not measured, {figures['donors_note'] or 'it failed'}")
    else:
        given = figures["donors_gb_s"]
        shares = " and ".join(f"{share:.0%}" for share in figures["donors_shares"])
        click.echo(
            f"{figures['link_mib']} MiB over links of {figures['link_mbit']} Mbit/s: {given['1']:.3f} GB/s from 1 "
            f"donor, {given['2']:.3f} from 2 ({figures['donors_ratio']:.2f} times as fast; they gave {shares})"
        )
    for reason in figures["failed"]:
        click.echo(f"not to be trusted: {reason}")


def _cells(*values: float | None) -> list[str]:
    return ["-" if value is None else f"{value:.2f}" for value in values]


if __name__ == "__main__":
    main(bench_transfer)

"""Whether the groups of the outer sync can be set up anew without an end: memory and descriptors must stay flat."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import click
import psutil

from scripts import children
from scripts.command_line import CONTEXT, FAILED, JSON, PASSED, main

_HOST = "127.0.0.1"
_WARM = 50
"""Reconfigurations after which nothing may grow any more."""
_CONNECT_S = 60.0
_ANSWER_S = 1800.0
_FLAT_MIB = 16.0
_FLAT_FDS = 0
_NUMEL = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a process held after a reconfiguration."""

    rss: int
    """Bytes."""
    fds: int
    threads: int


@click.command(context_settings=CONTEXT)
@click.option("--times", default=500, show_default=True, type=click.IntRange(min=_WARM + 1), metavar="N")
@click.option("--replicas", default=3, show_default=True, type=click.IntRange(min=2), metavar="N")
@JSON
def bench_reconfigure(times: int, replicas: int, as_json: bool) -> int:
    """Sets up the process group of the outer sync again and again, as after every change of the quorum, and reduces a
    tensor of 64 Ki numbers in each.

    \b
    rss_growth_mib   the most that a process grew from the 50th time to the last
    fd_growth        the same of its file descriptors
    thread_growth    and of its threads
    seconds          median of one reconfiguration with its reduction

    Exit code 0: flat; 1: something grew; 2: wrong use; 130: interrupted.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(replicas):
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(rank, replicas, times, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        port = _hear(pipes[0])
        for pipe in pipes:
            pipe.send(port)
        told = [_hear(pipe) for pipe in pipes]
    finally:
        children.end(processes, pipes)
    figures = _figures(told, times, replicas)
    click.echo(json.dumps(figures, indent=None if as_json else 2))
    return FAILED if figures["failed"] else PASSED


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(_ANSWER_S):
        raise TimeoutError(f"a member said nothing for {_ANSWER_S:.0f} s")
    return pipe.recv()


def _figures(told: Sequence[tuple[Held, Held, float]], times: int, replicas: int) -> dict[str, Any]:
    growth_mib = max((last.rss - warm.rss) / 2**20 for warm, last, _ in told)
    fds = max(last.fds - warm.fds for warm, last, _ in told)
    threads = max(last.threads - warm.threads for warm, last, _ in told)
    failed = []
    if growth_mib > _FLAT_MIB:
        failed.append(f"a process grew by {growth_mib:.1f} MiB")
    if fds > _FLAT_FDS:
        failed.append(f"a process has {fds} file descriptors more")
    return {
        "times": times,
        "replicas": replicas,
        "rss_growth_mib": round(growth_mib, 2),
        "fd_growth": fds,
        "thread_growth": threads,
        "seconds": round(max(seconds for _, _, seconds in told), 4),
        "failed": failed,
    }


def _member(rank: int, world: int, times: int, pipe: Connection) -> None:
    import statistics

    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import AllreduceOptions

    from elastic_train.device import Device
    from elastic_train.replica.membership import make_group

    torch.set_num_threads(1)
    bound = timedelta(seconds=_CONNECT_S)
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=bound) if rank == 0 else None
    if store is not None:
        pipe.send(store.port)
    port = pipe.recv()
    group = make_group("gloo", Device("cpu"), _CONNECT_S)
    process, warm, took = psutil.Process(), None, []
    for number in range(times):
        began = time.monotonic()
        group.configure(f"{_HOST}:{port}/{number}", f"replica_{rank}", rank, world)
        tensor = torch.full((_NUMEL,), float(rank + number))
        group.allreduce([tensor], AllreduceOptions()).wait()
        expected = float(sum(range(world)) + world * number)
        if not bool((tensor == expected).all()):
            raise AssertionError(f"the sum is {tensor[0].item()}, not {expected}")
        took.append(time.monotonic() - began)
        if number == _WARM - 1:
            warm = _held(process)
    assert warm is not None
    pipe.send((warm, _held(process), statistics.median(took)))
    # The store goes with rank 0, which the others may still need for their last words.
    pipe.recv()


def _held(process: psutil.Process) -> Held:
    return Held(rss=process.memory_info().rss, fds=process.num_fds(), threads=process.num_threads())


if __name__ == "__main__":
    main(bench_reconfigure)

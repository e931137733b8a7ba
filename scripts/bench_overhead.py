"""What coordination costs a run in which nothing fails: ours and stock DiLoCo's, beside the same trainers without."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from scripts.command_line import CONTEXT, FAILED, FLAGS, JSON, PASSED, main, show_table
from scripts.overhead_replica import ELASTIC, PLAIN, STOCK, Places, replicas
from scripts.struck_run import make_target

ARMS = (PLAIN, ELASTIC, STOCK)
_REPLICAS = 2
_ENDLESS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of one stretch under each arm, the mean over the replicas."""

    plain: float
    elastic: float
    stock: float
    elastic_sync: float = 0.0
    """Of what came after the last inner step without the wait for the slower: sync, and taking it in."""
    stock_sync: float = 0.0

    @property
    def overhead_pct(self) -> float:
        return 100 * (self.elastic / self.plain - 1)

    @property
    def stock_overhead_pct(self) -> float:
        return 100 * (self.stock / self.plain - 1)


@click.command(context_settings=CONTEXT)
@click.option(
    "--config", default="llama3_debug.toml", show_default=True, help="A path, or the name of a file in configs/."
)
@click.option("--sync_every", default=20, show_default=True, type=click.IntRange(min=1), metavar="N")
@click.option("--batch", default=8, show_default=True, type=click.IntRange(min=1), help="As training.local_batch_size.")
@click.option(
    "--rounds", default=10, show_default=True, type=click.IntRange(min=1), help="Stretches under each arm, in turn."
)
@JSON
@FLAGS
def bench_overhead(config: str, sync_every: int, batch: int, rounds: int, as_json: bool, flags: tuple[str, ...]) -> int:
    """Two replicas, each a process on a core of its own, train stretches of --sync_every inner steps. Each stretch ends
    in nothing (plain), in our own outer sync (elastic), or in stock DiLoCo's (stock); the order changes from round to
    round. A stretch begins at the same moment on both, and a coordinated one includes the wait for the slower.

    \b
    overhead_pct, stock_overhead_pct   median over the rounds of the time above that of the plain stretch
    step_s_plain, step_s_elastic       seconds of an inner step, its share of the sync included
    sync_s_elastic, sync_s_stock       seconds after the last inner step, without the wait for the slower: the work
                                       that coordination adds, which the noise of the inner steps does not touch
    sync_pct, stock_sync_pct           the same, of the time of the plain stretch

    FLAGS are further flags of `elastic-train run`. Nothing else should use the machine meanwhile: it needs two cores.

    With --json the last line has these figures and the rounds. Exit code 0: measured; 1: a replica failed.
    """
    if len(os.sched_getaffinity(0)) < _REPLICAS:
        raise click.UsageError(f"{_REPLICAS} replicas need {_REPLICAS} cores")
    target = make_target(
        config,
        [
            *("--orchestrator.replicas", str(_REPLICAS)),
            *("--orchestrator.procs_per_replica", "1"),
            *("--training.local_batch_size", str(batch)),
            *("--training.steps", str(_ENDLESS)),
            *("--metrics.enable_tensorboard", "false"),
            *("--metrics.log_freq", str(sync_every)),
            *("--diloco.sync_every", str(sync_every)),
            *("--faults.at", "[]"),
            *("--debug.seed", "0"),
            *flags,
        ],
    )
    # torchft tells of every heartbeat otherwise.
    os.environ.setdefault("RUST_LOG", "error")
    places = Places()
    measured: list[Round] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="bench_overhead-") as folder,
            replicas(_REPLICAS, target.resolved, Path(folder), places) as running,
        ):
            for number in range(-1, rounds):
                seconds: dict[str, float] = {}
                syncs: dict[str, float] = {}
                for arm in order(number):
                    for replica in running:
                        replica.send("stretch", arm)
                    answers = [replica.answer() for replica in running]
                    seconds[arm] = statistics.mean(whole for whole, _ in answers)
                    syncs[arm] = statistics.mean(sync for _, sync in answers)
                if number >= 0:
                    measured.append(Round(**seconds, elastic_sync=syncs[ELASTIC], stock_sync=syncs[STOCK]))
                    click.echo(f"round {number}: {_in_words(seconds, sync_every)}", err=True)
    except RuntimeError as error:
        click.echo(str(error), err=True)
        return FAILED
    finally:
        places.close()
    figures = summarize(measured, sync_every)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show(figures)
    return PASSED


def summarize(rounds: Sequence[Round], sync_every: int) -> dict[str, Any]:
    """The figures over all rounds."""
    plain = statistics.median(r.plain for r in rounds)
    return {
        "overhead_pct": round(statistics.median(r.overhead_pct for r in rounds), 3),
        "stock_overhead_pct": round(statistics.median(r.stock_overhead_pct for r in rounds), 3),
        "step_s_plain": round(plain / sync_every, 4),
        "step_s_elastic": round(statistics.median(r.elastic for r in rounds) / sync_every, 4),
        "step_s_stock": round(statistics.median(r.stock for r in rounds) / sync_every, 4),
        "sync_s_elastic": round(statistics.median(r.elastic_sync for r in rounds), 4),
        "sync_s_stock": round(statistics.median(r.stock_sync for r in rounds), 4),
        "sync_pct": round(statistics.median(100 * r.elastic_sync / r.plain for r in rounds), 3),
        "stock_sync_pct": round(statistics.median(100 * r.stock_sync / r.plain for r in rounds), 3),
        "sync_every": sync_every,
        "rounds": [{arm: round(getattr(r, arm), 4) for arm in ARMS} for r in rounds],
        "note": f"{_REPLICAS} replicas, each on one of {os.cpu_count()} cores",
    }


def order(number: int) -> tuple[str, ...]:
    """Every arm once, each time another one first, and in either direction."""
    shift = number % len(ARMS)
    turned = ARMS[shift:] + ARMS[:shift]
    return turned if number % 2 else turned[::-1]


def _in_words(seconds: dict[str, float], sync_every: int) -> str:
    return "  ".join(f"{arm} {seconds[arm]:.2f} s ({seconds[arm] / sync_every:.3f} a step)" for arm in ARMS)


def _show(figures: dict[str, Any]) -> None:
    table = Table(title=f"One sync every {figures['sync_every']} inner steps ({figures['note']})", box=None)
    for name in ("", "seconds a step", "overhead", "work of the sync"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("uncoordinated", f"{figures['step_s_plain']:.4f}", "", "")
    for name, arm, prefix in (("elastic", ELASTIC, ""), ("stock torchft DiLoCo", STOCK, "stock_")):
        shares = [f"{figures[f'{prefix}{share}']:.2f} %" for share in ("overhead_pct", "sync_pct")]
        table.add_row(name, f"{figures[f'step_s_{arm}']:.4f}", *shares)
    show_table(table)


if __name__ == "__main__":
    main(bench_overhead)

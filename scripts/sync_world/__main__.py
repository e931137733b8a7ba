"""Make one world and say what is wrong with it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from elastic_train.config import ConfigError, FaultSpec
from scripts.command_line import CONTEXT, FAILED, PASSED, main
from scripts.sync_world.checks import faults_of
from scripts.sync_world.spec import WorldSpec, brisk
from scripts.sync_world.world import World


@click.command(context_settings=CONTEXT)
@click.option("--replicas", default=3, show_default=True, type=click.IntRange(min=1), metavar="N")
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(min=1), metavar="N", help="A replica's.")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(min=1), metavar="N", help="Inner steps.")
@click.option("--fragments", default=1, show_default=True, type=click.IntRange(min=1), metavar="N")
@click.option("--overlap_steps", default=0, show_default=True, type=click.IntRange(min=0), metavar="N")
@click.option("--merge_alpha", default=0.0, show_default=True, type=float, metavar="A")
@click.option("--compression", default="none", show_default=True, metavar="NAME")
@click.option("--fault", "faults", multiple=True, metavar="SLOT.RANK@OUTER_STEP/POINT:KIND")
@click.option("--lag_s", default=0.0, show_default=True, type=float, metavar="S", help="From its point to a kill.")
@click.option("--late", multiple=True, metavar="SLOT@OUTER_STEP", help="A slot that joins when the others are there.")
@click.option("--lighthouse_ends_at", type=int, metavar="OUTER_STEP")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="[default: a temporary one]")
def world(
    replicas: int,
    ranks: int,
    steps: int,
    fragments: int,
    overlap_steps: int,
    merge_alpha: float,
    compression: str,
    faults: tuple[str, ...],
    lag_s: float,
    late: tuple[str, ...],
    lighthouse_ends_at: int | None,
    folder: Path | None,
) -> int:
    """Runs one world of replicas with unequal tokens, and checks it against a computation in float64."""
    try:
        spec = WorldSpec(
            replicas=replicas,
            ranks=ranks,
            steps=steps,
            diloco=brisk(
                fragments=fragments, overlap_steps=overlap_steps, merge_alpha=merge_alpha, compression=compression
            ),
            tokens=tuple(100 * (slot + 1) for slot in range(replicas)),
            step_s=(0.004,) * replicas,
            faults=tuple(FaultSpec.parse(fault) for fault in faults),
            lag_s=lag_s,
            late={int(slot): int(step) for slot, _, step in (text.partition("@") for text in late)},
            lighthouse_ends_at=lighthouse_ends_at,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    folder = folder or Path(tempfile.mkdtemp(prefix="world-"))
    account = World(spec, folder).run()
    wrong = faults_of(spec, account)
    for end in account.ends:
        click.echo(f"ended: {end}")
    for reason in wrong:
        click.echo(reason)
    click.echo(f"{'FAILED' if wrong else 'passed'} in {account.wall_s:.1f} s; see {folder}")
    return FAILED if wrong else PASSED


if __name__ == "__main__":
    sys.exit(main(world))

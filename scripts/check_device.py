"""Whether what replicas do with an accelerator's tensors comes out right on this machine's accelerator.

One accelerator is enough, and no run is started: each check is a part of a sync or of a recovery by itself, small
enough to be compared with what the same computation gives on the CPU.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from scripts.command_line import CONTEXT, FAILED, JSON, PASSED, WRONG_USE, main, show_table

if TYPE_CHECKING:
    import torch

CHECKS = ("codecs", "reduce_gloo", "reduce_nccl", "publication", "transfer", "channel")
"""In their order, the simplest first."""


@click.command(context_settings=CONTEXT)
@click.option(
    "--mib",
    default=256,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Size of what is transferred.",
)
@click.option(
    "--only", multiple=True, type=click.Choice(CHECKS), help="Only that check; once for each. All, if left out."
)
@JSON
def check_device(mib: int, only: tuple[str, ...], as_json: bool) -> int:
    """Checks the parts of elastic_train that touch an accelerator's tensors, on the first one of this machine. It needs
    torchft, and neither Monarch nor torchtitan.

    \b
    codecs       every compression decodes to the same bits on the accelerator and on the CPU, and encodes as well on
                 both; encoded_alike says whether to the same bits too
    reduce_gloo  two ranks with their parameters on the accelerator average them through the host: both get the same
                 anchor to the last bit, it is the mean of both, and the same as with parameters on the CPU
    reduce_nccl  the operations of a sync in an NCCL (or RCCL) group of one rank: two cannot share an accelerator
    publication  what a rank shows is what its stream had computed when it was shown, copied beside what the stream
                 computes next, into page-locked memory
    transfer     a snapshot of the accelerator's tensors, fetched by a peer and taken over by its tensors, has the
                 same hash
    channel      a state of the accelerator that is fetched by process groups arrives as it was: by NCCL's (or RCCL's)
                 if there are two accelerators, by gloo's through the host if there is one; library says which

    With --json the last line has: device, kind (cuda, rocm), torch, mib, checks (name -> ok, seconds, and figures or
    error), failed (names).

    Exit code 0: all passed; 1: one failed; 2: wrong use, or there is no accelerator; 130: interrupted.
    """
    import torch

    from elastic_train.device import detect
    from scripts import device_checks

    device = detect()
    if device.kind == "cpu":
        click.echo(
            "There is no accelerator that torch can see. Run this where there is one, with a torch built for it.",
            err=True,
        )
        return WRONG_USE
    place = torch.device(device.type, 0)
    # All that is exchanged here stays on this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "codecs": lambda: device_checks.check_codecs(place),
        "reduce_gloo": lambda: device_checks.check_reduce_gloo(place),
        "reduce_nccl": lambda: device_checks.check_reduce_nccl(place),
        "publication": lambda: device_checks.check_publication(place),
        "transfer": lambda: device_checks.check_transfer(place, mib << 20),
        "channel": lambda: device_checks.check_channel(place, mib << 20),
    }
    results = {name: run_check(checks[name], place) for name in only or CHECKS}
    figures = {
        "device": torch.cuda.get_device_name(place),
        "kind": device.kind,
        "torch": torch.__version__,
        "mib": mib,
        "checks": results,
        "failed": [name for name, result in results.items() if not result["ok"]],
    }
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _show(figures)
    return FAILED if figures["failed"] else PASSED


def run_check(check: Callable[[], Mapping[str, Any]], device: torch.device) -> dict[str, Any]:
    """The result of one check: ok, seconds, and its figures, or the error that it ended with."""
    import torch

    began = time.perf_counter()
    try:
        figures = dict(check())
        if device.type == "cuda":
            # What went wrong on the accelerator shows no earlier.
            torch.cuda.synchronize(device)
    except Exception as error:
        figures = {"error": f"{type(error).__name__}: {error}"}
    return {"ok": "error" not in figures, "seconds": round(time.perf_counter() - began, 3), **figures}


def _show(figures: Mapping[str, Any]) -> None:
    click.echo(f"{figures['device']} ({figures['kind']}), torch {figures['torch']}")
    table = Table("check", "", "seconds", "", box=None)
    for name, result in figures["checks"].items():
        said = ", ".join(f"{key} {value}" for key, value in result.items() if key not in ("ok", "seconds"))
        table.add_row(name, "ok" if result["ok"] else "FAILED", f"{result['seconds']:.2f}", said)
    show_table(table)


if __name__ == "__main__":
    main(check_device)

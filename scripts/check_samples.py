"""Whether a run has trained on every sample exactly once, from what it left in its folder."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from elastic_train.config import ConfigError, load_config
from elastic_train.events import Record, read_all
from elastic_train.replica.data.sample_log import sample_files
from scripts.command_line import CONTEXT, FAILED, PASSED, main

_FIELDS = {"replica": int, "incarnation": int, "reader": int, "shard": int, "index": int, "hash": str}

Sample = tuple[int, int]
"""A virtual shard, and how many samples of it came before."""
Life = tuple[int, int]
"""A replica and its incarnation."""
Part = tuple[int, int]
"""An outer step, and the slot of a replica that counted in it."""


@dataclass(frozen=True, kw_only=True)
class SampledRun:
    """What a run left that says what it has trained on."""

    seq_len: int
    outer_step: int
    """Of the last snapshot."""
    first: Sequence[int]
    """Of each shard the samples that lay behind when the run began: not 0 in one that went on from another."""
    committed: Sequence[int]
    """Of each shard the samples that are in the last snapshot."""
    draws: Sequence[Record]
    """The lines of its readers (``replica.data.sample_log``)."""
    events: Sequence[Record]

    @property
    def samples(self) -> int:
        """How many it has added to what is in the snapshot."""
        return sum(self.committed) - sum(self.first)

    @cached_property
    def hashes(self) -> Mapping[Sample, str]:
        """Each sample that was drawn, as it was the first time."""
        found: dict[Sample, str] = {}
        for draw in self.draws:
            found.setdefault((draw["shard"], draw["index"]), draw["hash"])
        return found


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What the events of a run say has come into its last snapshot."""

    told: Mapping[Part, int]
    """By the commits, and by the catch-ups with peers that had already taken in what the replica gave."""
    untold: frozenset[Part]
    """Parts of replicas that ended before they could say how much it was."""


@click.command(context_settings=CONTEXT)
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("other_run_dir", type=click.Path(path_type=Path, exists=True, file_okay=False), required=False)
def check_samples(run_dir: Path, other_run_dir: Path | None) -> int:
    """Checks that the model of a run has been trained on every sample of its data exactly once, whoever was killed.

    \b
    The run must have been told to leave what is needed:
      --training.dataloader.log_samples true
      --checkpoint.last_save_model_only false

    Of the data that is in its last snapshot, every sample was drawn, and whoever drew it again drew the same; the
    samples are as many as the tokens of all commits and catch-ups; and a replica that trained to the end has trained
    on what it drew, no less and no more.

    Given the folder of another run with the same data (one without kills, say), both are checked, and each sample must
    be the same in both.

    Prints one JSON object: runs (of each: run_dir, outer_step, samples and tokens that are in its last snapshot, draws,
    drawn_again, untold: outer steps and slots of replicas that ended before they could say how many tokens they gave),
    compared (samples that both runs drew; null for one run), failed (what is wrong, one sentence each; empty if nothing
    is).

    Exit code 0: nothing is wrong; 1: something is; 2: wrong use; 130: interrupted.
    """
    folders = [run_dir] if other_run_dir is None else [run_dir, other_run_dir]
    runs = [read_run(folder) for folder in folders]
    failed = [f"{folder}: {fault}" for folder, run in zip(folders, runs, strict=True) for fault in faults(run)]
    if len(runs) > 1:
        failed += differences(*runs)
    told = {
        "runs": [{"run_dir": str(folder), **figures(run)} for folder, run in zip(folders, runs, strict=True)],
        "compared": len(runs[0].hashes.keys() & runs[1].hashes.keys()) if len(runs) > 1 else None,
        "failed": failed,
    }
    click.echo(json.dumps(told))
    return FAILED if failed else PASSED


def faults(run: SampledRun) -> list[str]:
    """What is wrong with one run, a sentence each."""
    return [*_of_the_hashes(run), *_of_the_committed(run), *_of_the_tokens(run), *_of_the_finished(run)]


def differences(one: SampledRun, other: SampledRun) -> list[str]:
    """What two runs read differently, as far as both have come, a sentence each."""
    if (one.seq_len, len(one.committed)) != (other.seq_len, len(other.committed)):
        return ["the runs cut their data differently: compare runs with the same seq_len and virtual_shards"]
    return [*_of_the_same_samples(one, other), *_of_the_same_multiset(one, other)]


def figures(run: SampledRun) -> dict[str, Any]:
    """What a run has come to."""
    return {
        "outer_step": run.outer_step,
        "samples": run.samples,
        "tokens": run.samples * run.seq_len,
        "draws": len(run.draws),
        "drawn_again": len(run.draws) - len(run.hashes),
        "untold": sorted(tokens_of(run.events, run.outer_step).untold),
    }


def tokens_of(events: Iterable[Record], last: int) -> Tokens:
    """What the commits up to outer step ``last`` took in, since the run began or was restored."""
    members: dict[int, set[int]] = {}
    told: dict[Part, int] = {}
    caught_up: dict[Part, int] = {}
    began, reached = 0, dict[int, int]()
    for event in events:
        match event["event"]:
            case "run_restored":
                members, told, caught_up, reached = {}, {}, {}, {}
                began = event["outer_step"]
            case "sync_committed" if event["outer_step"] <= last:
                members.setdefault(event["outer_step"], set()).update(event["participants"])
                told[event["outer_step"], event["replica"]] = event["tokens"]
            case "caught_up" if event["tokens"]:
                # It had a part in the sync after the one that it had come to.
                caught_up[reached.get(event["replica"], began) + 1, event["replica"]] = event["tokens"]
        if event["event"] in ("sync_committed", "caught_up", "heal_finished"):
            reached[event["replica"]] = event["outer_step"]
    untold = {(step, slot) for step, slots in members.items() for slot in slots}.difference(told)
    # Of what a replica brought in any other catch-up, nothing is in the model: the run was at its end.
    told |= {part: tokens for part, tokens in caught_up.items() if part in untold}
    return Tokens(told=told, untold=frozenset(untold.difference(told)))


def read_run(run_dir: Path) -> SampledRun:
    """Read what a run left.

    Raises:
        ConfigError: it was not told to leave what is needed, or what is there cannot be read.
    """
    from elastic_train.replica.durable.folder import newest_sound

    config = load_config(run_dir / "config.toml", {}, {}).config
    shards = config.training.dataloader.virtual_shards
    files = sample_files(run_dir)
    if not files:
        raise ConfigError(f"{run_dir} has no log of samples: run with --training.dataloader.log_samples true")
    snapshot, passed = newest_sound(run_dir / config.checkpoint.folder)
    if snapshot is None:
        why = f" ({'; '.join(passed)})" if passed else ""
        raise ConfigError(
            f"{run_dir} has no snapshot with positions in the data{why}: run to the end with "
            "--checkpoint.last_save_model_only false, or with --checkpoint.enable true"
        )
    events = read_all(run_dir / "events.jsonl")
    restored = next((Path(event["path"]) for event in reversed(events) if event["event"] == "run_restored"), None)
    return SampledRun(
        seq_len=config.training.seq_len,
        outer_step=snapshot.facts.outer_step,
        first=samples_in(restored, shards) if restored else [0] * shards,
        committed=samples_in(snapshot.path, shards),
        draws=[draw for file in files for draw in read_draws(file, shards)],
        events=events,
    )


def read_draws(path: Path, shards: int) -> list[Record]:
    """The lines of one reader. What a killed process left of its last line is passed over.

    Raises:
        ConfigError: it is no log of samples.
    """
    draws = read_all(path)
    for draw in draws:
        sound = all(type(draw.get(name)) is kind for name, kind in _FIELDS.items())
        if not sound or not 0 <= draw["shard"] < shards or draw["index"] < 0:
            raise ConfigError(f"{path} is no log of samples of {shards} virtual shards: it holds {json.dumps(draw)}")
    return draws


def samples_in(snapshot: Path, shards: int) -> list[int]:
    """Of each virtual shard the samples that are in a durable snapshot.

    Raises:
        ConfigError: it has none, or of another number of shards.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    positions = torch.zeros(shards, 4, dtype=torch.int64)
    try:
        with warnings.catch_warnings():
            # It warns that it takes this process to be alone, which is meant.
            warnings.simplefilter("ignore")
            reader = dcp.FileSystemReader(snapshot)
            dcp.load({"dataloader": {"positions": positions}}, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError) as error:
        raise ConfigError(
            f"the snapshot {snapshot} has no positions of {shards} virtual shards that can be read: "
            "put back what the run wrote or began with"
        ) from error
    return [int(count) for count in positions[:, 3]]


def _of_the_hashes(run: SampledRun) -> Iterator[str]:
    """Whoever draws a sample again draws the same."""
    first, changed = run.hashes, dict[int, set[int]]()
    for draw in run.draws:
        if draw["hash"] != first[draw["shard"], draw["index"]]:
            changed.setdefault(draw["shard"], set()).add(draw["index"])
    yield from _told(changed, "was not the same each time it was drawn", "were not the same each time they were drawn")


def _of_the_committed(run: SampledRun) -> Iterator[str]:
    """What is in the model was drawn."""
    drawn = run.hashes
    missing = {
        shard: {index for index in range(first, stop) if (shard, index) not in drawn}
        for shard, (first, stop) in enumerate(zip(run.first, run.committed, strict=True))
    }
    yield from _told(missing, "is committed and was never drawn", "are committed and were never drawn")


def _of_the_tokens(run: SampledRun) -> Iterator[str]:
    """What is in the model was brought there by a commit, once."""
    tokens, held = tokens_of(run.events, run.outer_step), run.samples * run.seq_len
    told = sum(tokens.told.values())
    # A replica that ended in a commit may have given all that it drew and had not told of.
    slots = {slot for _, slot in tokens.untold}
    drawn = sum(draw["replica"] in slots for draw in run.draws) * run.seq_len
    most = drawn - sum(given for (_, slot), given in tokens.told.items() if slot in slots)
    if not 0 <= held - told <= most:
        at_most = f" and at most {most} of which nothing is told" if slots else ""
        yield (
            f"the snapshot of outer step {run.outer_step} holds {held} tokens, and the commits up to it took in "
            f"{told}{at_most}"
        )


def _of_the_finished(run: SampledRun) -> Iterator[str]:
    """A replica that trained to the end has trained on what it drew."""
    drawn = Counter[Life]((draw["replica"], draw["incarnation"]) for draw in run.draws)
    for event in run.events:
        if event["event"] == "replica_finished" and "tokens" in event:
            replica, incarnation = life = event["replica"], event["incarnation"]
            if drawn[life] * run.seq_len != event["tokens"]:
                yield (
                    f"replica {replica} incarnation {incarnation} trained on {event['tokens']} tokens and drew "
                    f"{drawn[life]} samples of {run.seq_len}"
                )


def _of_the_same_samples(one: SampledRun, other: SampledRun) -> Iterator[str]:
    mine, theirs = one.hashes, other.hashes
    changed: dict[int, set[int]] = {}
    for shard, index in mine.keys() & theirs.keys():
        if mine[shard, index] != theirs[shard, index]:
            changed.setdefault(shard, set()).add(index)
    yield from _told(changed, "is not the same in both runs", "are not the same in both runs")


def _of_the_same_multiset(one: SampledRun, other: SampledRun) -> Iterator[str]:
    """In whatever order: of each shard both have trained on the same, up to where the shorter one ends."""
    mine, theirs = one.hashes, other.hashes
    for shard in range(len(one.committed)):
        both = range(
            max(one.first[shard], other.first[shard]),
            min(one.committed[shard], other.committed[shard]),
        )
        first, second = (Counter(of[shard, index] for index in both if (shard, index) in of) for of in (mine, theirs))
        if first != second:
            apart = ((first - second) + (second - first)).total()
            yield f"shard {shard}: among the first {both.stop} samples {apart} are in one run alone"


def _told(found: Mapping[int, set[int]], of_one: str, of_many: str) -> Iterator[str]:
    """A sentence for each shard."""
    for shard, indices in sorted(found.items()):
        if len(indices) == 1:
            yield f"shard {shard}: sample {min(indices)} {of_one}"
        elif indices:
            yield f"shard {shard}: {len(indices)} samples from {min(indices)} to {max(indices)} {of_many}"


if __name__ == "__main__":
    main(check_samples)

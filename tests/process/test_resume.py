"""Ranks write snapshots together, and a run goes on from the newest that is sound, with other replicas and ranks."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from elastic_train.events import Record
from elastic_train.observe.invariants import violations
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch
from tests.programs import running

END_S = 200
STEPS = 24
SYNC_EVERY = 4
BATCH = 2
FLAGS = [
    *("--training.steps", str(STEPS), "--diloco.sync_every", str(SYNC_EVERY), "--debug.seed", "7"),
    *("--checkpoint.enable", "true", "--checkpoint.interval", str(SYNC_EVERY)),
    *("--checkpoint.last_save_model_only", "false", "--debug.min_step_s", "0.05"),
]


def samples_and_steps(snapshot: Path) -> tuple[torch.Tensor, float]:
    """Samples read of each virtual shard, and how often the inner optimizer has stepped."""
    positions, steps = torch.zeros(64, 4, dtype=torch.int64), torch.zeros(())
    state = {"dataloader": {"positions": positions}, "optimizer": {"state.norm.weight.step": steps}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(snapshot), no_dist=True)
    return positions[:, 3], steps.item()


def named(run: LaunchedRun, event: str) -> list[Record]:
    return [record for record in run.events() if record["event"] == event]


def snapshots(run: LaunchedRun) -> list[Path]:
    """The oldest first."""
    folders = (run.run_dir / "checkpoint").glob("step-*")
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_goes_on_with_other_replicas_and_ranks(launch: Launch) -> None:
    first = launch("llama3_tiny.toml", *FLAGS, "--orchestrator.replicas", "2", name="first")
    assert first.wait(END_S) == 0, first.tail()
    *_, sound, flipped, truncated = snapshots(first)
    flip(flipped / "__0_0.distcp")
    truncate(truncated / "__0_0.distcp")
    resumed_at = int(sound.name.removeprefix("step-"))

    second = launch(
        "llama3_tiny.toml", *FLAGS, "--orchestrator.replicas", "1", "--orchestrator.procs_per_replica", "2",
        "--resume", str(first.run_dir), name="second",
    )  # fmt: skip
    assert second.wait(END_S) == 0, second.tail()

    (restored,) = named(second, "run_restored")
    assert (restored["outer_step"], restored["path"]) == (resumed_at // SYNC_EVERY, str(sound))
    notes = " ".join(event["text"] for event in named(second, "note"))
    assert all(str(path / "__0_0.distcp") in notes for path in (flipped, truncated))

    steps = {record["step"]: record for record in second.metrics()}
    before = {record["step"]: record for record in first.metrics() if record["replica"] == 0}
    assert sorted(steps) == list(range(resumed_at + 1, STEPS + 1))
    assert all(steps[step]["lr"] == before[step]["lr"] for step in steps)
    assert steps[resumed_at + 1]["loss"] < (before[1]["loss"] + before[resumed_at + 1]["loss"]) / 2

    # Both have read each of their samples once, the second beginning where the first had committed.
    (at_first, _), (at_end, optimizer_steps) = samples_and_steps(sound), samples_and_steps(snapshots(second)[-1])
    assert int(at_first.sum()) == resumed_at * 2 * BATCH
    assert bool((at_end >= at_first).all())
    assert int((at_end - at_first).sum()) == (STEPS - resumed_at) * 2 * BATCH
    assert optimizer_steps == STEPS
    assert all(found == [] for found in violations(second.events()).values())


RANK = """
import sys
from pathlib import Path
from elastic_train.replica.titan import fixes
import torch
import torch.distributed as dist
from elastic_train.diloco.control import ControlGroup
from elastic_train.replica.durable import writer as writing
from elastic_train.replica.durable.folder import Facts

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
told = []
writer = writing.SnapshotWriter(
    folder / "ckpt", slot=0, incarnation=0, keep=0, device=torch.device("cpu"), control=ControlGroup(60.0),
    on_saved=lambda snapshot, duration_s: told.append(snapshot.path.name), on_failed=told.append,
)

def denied(*args, **kwargs):
    raise OSError("denied")

facts = Facts(step=1, outer_step=1, state_hash="", whole=True, origin={})
writes = [(writing, "clear_stagings", 0), (writing.dcp.FileSystemWriter, "write_data", 1), (writing, "finish", 0)]
for place, name, failing in writes:
    sound = getattr(place, name)
    if rank == failing:
        setattr(place, name, denied)
    writer.start({"numbers": torch.full((3,), float(rank))}, facts)
    try:
        writer.wait()
    except writing.NotWritten as error:
        print(error, flush=True)
    setattr(place, name, sound)
writer.start({"numbers": torch.full((3,), float(rank))}, facts)
writer.wait()
print(told, flush=True)
"""


def test_ranks_fail_together_and_write_the_next_one(tmp_path: Path) -> None:
    with running(RANK, 0, tmp_path) as leader, running(RANK, 1, tmp_path) as other:
        led, followed = (process.communicate(timeout=END_S)[0].splitlines() for process in (leader, other))

    own = "the snapshot could not be written: OSError: denied"
    others = "the snapshot could not be written: NotWritten: another rank failed; its log says why"
    note = "the snapshot of step 1 could not be written: OSError: denied"
    assert led == [own, own, own, str([note, note, note, "step-1"])]
    assert followed == [others, own, others, "[]"]

"""What trials of durable snapshots are drawn and judged, and some of them for real."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from scripts import durable_trials
from scripts.command_line import FAILED, PASSED
from scripts.durable_plan import FLIP, INTERVAL, TROUBLES, TRUNCATE, Found, Life, Look, Moment, Phase, Plan, draw, judge
from scripts.durable_scene import Scene
from scripts.durable_watch import phase_of
from scripts.stress import stress
from scripts.trials import Trial

DYING = Life(slot=0, incarnation=0, whole=(10, 20), doomed=30, death=Moment(phase=Phase.MANIFEST, operation=1))
OTHER = Life(slot=1, incarnation=0, whole=(40,))
SAME = Life(slot=0, incarnation=1, whole=(50,))
PLAN = Plan(trouble="manifest", seed=0, keep=2, lives=(DYING, OTHER, SAME))


def look(after: Life, *listed: int, told: tuple[int, ...], **changes: Any) -> Look:
    """A look at a folder where all is well."""
    found = Found(step=listed[-1] if listed else 0)
    return Look(after=after, listed=listed, told=told, found=found, **{"stagings": (), **changes})


DEAD = look(DYING, 10, 20, told=(10, 20), stagings=(0,), died=Phase.MANIFEST)
BESIDE = look(OTHER, 20, 40, told=(10, 20, 40), stagings=(0,))
CLEARED = look(SAME, 40, 50, told=(10, 20, 40, 50))


def test_a_seed_decides_everything() -> None:
    for trouble in TROUBLES:
        plans = [draw(trouble, seed) for seed in range(40)]
        assert plans == [draw(trouble, seed) for seed in range(40)]
        assert len({str(plan) for plan in plans}) > 20


def test_the_trouble_decides_in_which_part_of_the_write_it_dies() -> None:
    for phase in Phase:
        for seed in range(20):
            plan = draw(phase.value, seed)
            deaths = [life.death for life in plan.lives if life.death is not None]
            assert phase in [death.phase for death in deaths]
            assert plan.damage is None
            assert all(death.rank == 0 or death.phase is Phase.TENSORS for death in deaths)
    assert {draw("tensors", seed).lives[0].death.rank for seed in range(20)} == {0, 1}  # type: ignore[union-attr]


def test_where_something_is_damaged_something_sound_is_left() -> None:
    for trouble in (TRUNCATE, FLIP):
        for seed in range(40):
            plan = draw(trouble, seed)
            assert plan.keep >= 2
            assert len(plan.lives[0].whole) >= 2
            assert plan.damage is not None
            assert (plan.damage.bit is None) == (trouble == TRUNCATE)


def test_steps_grow_and_every_slot_that_died_writes_again() -> None:
    for trouble in TROUBLES:
        for seed in range(40):
            lives = draw(trouble, seed).lives
            steps = [step for life in lives for step in (*life.whole, *([life.doomed] if life.doomed else []))]
            assert steps == [INTERVAL * (number + 1) for number in range(len(steps))]
            assert len({(life.slot, life.incarnation) for life in lives}) == len(lives)
            assert [life.slot for life in lives[-2:] if life.death is None] in ([0, 1], [1, 0])


def test_all_is_well_if_the_newest_is_found_and_nothing_is_left() -> None:
    assert judge(PLAN, [DEAD, BESIDE, CLEARED]) == []
    # It was in its place when the writer died.
    there = look(DYING, 10, 20, 30, told=(10, 20), died=Phase.OLD)
    assert judge(PLAN, [there, look(OTHER, 30, 40, told=(10, 20, 40)), CLEARED]) == []
    # It died in its first write.
    assert judge(PLAN, [look(DYING, told=(), died=Phase.TENSORS)]) == []


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (replace(DEAD, found=Found(step=10)), "step 10 was found and not step 20"),
        (replace(DEAD, found=Found(step=0)), "nothing was found and not step 20"),
        (replace(DEAD, found=Found(step=20, wrong=("weight is another",))), "weight is another"),
        (replace(DEAD, found=Found(step=20, passed=("step-30",))), "a sound snapshot was passed over: step-30"),
        (look(DYING, 10, told=(10, 20), died=Phase.MANIFEST), "the snapshot of step 20 was written and is gone"),
        (look(DYING, 20, told=(10, 20), died=Phase.OLD), "old snapshots were removed before that of step 30 was in"),
        (replace(DEAD, died=None), "it did not die"),
        (replace(CLEARED, stagings=(0,)), "what this slot had left half written is still there"),
    ],
)
def test_what_is_wrong_is_said(wrong: Look, complaint: str) -> None:
    (found,) = judge(PLAN, [wrong])[:1]
    assert complaint in found


def test_what_is_left_at_the_end_is_said() -> None:
    assert judge(PLAN, [DEAD, BESIDE, replace(CLEARED, stagings=(1,))]) == [
        "half written snapshots of slots 1 are left"
    ]
    fewer = look(SAME, 50, told=(10, 20, 40, 50))
    assert judge(PLAN, [DEAD, BESIDE, fewer]) == [
        "the snapshots of steps (40, 50) should have stayed, and there are (50,)"
    ]


def test_of_a_damaged_one_the_file_must_be_named() -> None:
    damaged = replace(DEAD, damaged="step-20/.metadata", found=Found(step=10, passed=("step-20/.metadata is short",)))
    assert judge(PLAN, [DEAD, damaged]) == []
    (unnamed,) = judge(PLAN, [DEAD, replace(damaged, found=Found(step=10))])
    assert "nobody named the damaged file step-20/.metadata" in unnamed
    (taken,) = judge(PLAN, [DEAD, replace(damaged, found=Found(step=20, passed=damaged.found.passed))])
    assert "step 20 was found and not step 10" in taken


def test_one_whose_manifest_is_damaged_stays_beside_those_that_are_kept() -> None:
    last = look(SAME, 20, 40, 50, told=(10, 20, 40, 50), illegible=40)
    assert judge(PLAN, [DEAD, BESIDE, last]) == []


OPERATIONS = [
    ("shutil.rmtree", ".writing-replica_0-0", False, Phase.LEFTOVERS),
    ("open", ".writing-replica_0-0", True, Phase.LEFTOVERS),
    ("os.remove", "__0_0.distcp", False, Phase.LEFTOVERS),
    ("os.rmdir", ".writing-replica_0-0", False, Phase.LEFTOVERS),
    ("os.mkdir", ".writing-replica_0-1", False, Phase.TENSORS),
    ("open", ".writing-replica_0-1/__1_0.distcp", False, Phase.TENSORS),
    ("os.remove", "something", False, None),
    ("open", ".writing-replica_0-1/.metadata.tmp", False, Phase.METADATA),
    ("os.rename", ".writing-replica_0-1/.metadata.tmp", False, Phase.METADATA),
    ("os.listdir", ".writing-replica_0-1", False, Phase.CHECKSUMS),
    ("open", ".writing-replica_0-1/.metadata", True, Phase.CHECKSUMS),
    ("open", ".writing-replica_0-1/__0_0.distcp", True, Phase.CHECKSUMS),
    ("open", ".writing-replica_0-1/MANIFEST.json", False, Phase.MANIFEST),
    ("open", ".writing-replica_0-1", True, Phase.MANIFEST),
    ("os.rename", ".writing-replica_0-1", False, Phase.RENAME),
    ("open", "checkpoint", True, Phase.RENAME),
    ("os.listdir", "checkpoint", False, Phase.OLD),
    ("open", "step-20/MANIFEST.json", True, Phase.OLD),
    ("shutil.rmtree", "step-10", False, Phase.OLD),
    ("open", "step-10", True, Phase.OLD),
    ("os.remove", "MANIFEST.json", False, Phase.OLD),
    ("os.rmdir", "step-10", False, Phase.OLD),
]
"""Of one write, in their order."""


def test_the_part_of_a_write_is_known_by_its_file_operations() -> None:
    phase = Phase.LEFTOVERS
    for operation, path, reads, expected in OPERATIONS:
        found = phase_of(operation, Path(path), reads=reads, before=phase)
        assert (operation, path, found) == (operation, path, expected)
        phase = found or phase


@pytest.mark.parametrize(("reasons", "code"), [((), PASSED), (("it did not die",), FAILED)])
def test_the_command_tells_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reasons: tuple[str, ...], code: int
) -> None:
    def make(trouble: str, seed: int, folder: Path, *, keep: bool) -> Trial:
        return Trial(kind=trouble, seed=seed, fault="", wall_s=1.0, counts={"loaded": 2}, reasons=reasons)

    monkeypatch.setattr(durable_trials, "make", make)

    done = CliRunner().invoke(
        stress, ["--durable", "all", "--repeat", "2", "--out", str(tmp_path)], standalone_mode=False
    )

    assert done.return_value == code
    assert f"rename: {0 if reasons else 2} of 2 trials passed" in done.stdout
    assert done.stderr.count(" 1.0 s") == 2 * len(TROUBLES)
    assert ("it did not die" in done.stderr) == bool(reasons)


@pytest.mark.parametrize("trouble", ["rename", FLIP])
def test_a_trial_in_real_processes(trouble: str, tmp_path: Path) -> None:
    plan = draw(trouble, 0)

    account = Scene(plan, tmp_path / "run").run()

    assert account.reasons == ()
    assert [look.after for look in account.looks if not look.damaged] == list(plan.lives)
    assert sum(look.died is not None and not look.damaged for look in account.looks) == plan.deaths
    assert account.looks[-1].found.step == plan.lives[-1].whole[-1]
    assert any(look.found.passed for look in account.looks) == (trouble == FLIP)

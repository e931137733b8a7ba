"""Folders of durable snapshots: what is whole is found, whatever is damaged is passed over by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_train.replica.durable.folder import (
    MANIFEST,
    Damaged,
    Facts,
    check,
    clear_stagings,
    finish,
    newest_sound,
    staging_folder,
)


def facts(step: int, *, whole: bool = True) -> Facts:
    return Facts(step=step, outer_step=step // 10, state_hash="00ff", whole=whole, origin={"model.flavor": "tiny"})


def write(folder: Path, step: int, *, slot: int = 0, text: str = "tensors", keep: int = 0, whole: bool = True) -> Path:
    staging = staging_folder(folder, slot, 0)
    staging.mkdir(parents=True)
    (staging / "__0_0.distcp").write_text(text)
    (staging / ".metadata").write_text("what they are")
    return finish(staging, facts(step, whole=whole), keep=keep).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_finished_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, 40)

    assert path == tmp_path / "step-40"
    assert names(tmp_path) == ["step-40"]
    assert check(path).facts == facts(40)
    found, passed = newest_sound(tmp_path)
    assert found is not None
    assert (found.path, passed) == (path, [])


@pytest.mark.parametrize(("keep", "left"), [(2, ["step-100", "step-90"]), (0, ["step-100", "step-80", "step-90"])])
def test_the_newest_are_kept(keep: int, left: list[str], tmp_path: Path) -> None:
    for step in (80, 90, 100):
        write(tmp_path, step, keep=keep)

    assert names(tmp_path) == left


def test_one_that_holds_the_parameters_alone_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (70, 80):
        write(tmp_path, step)
    write(tmp_path, 90, keep=1, whole=False)

    assert names(tmp_path) == ["step-80", "step-90"]


def test_one_whose_manifest_is_damaged_does_not_count_as_kept(tmp_path: Path) -> None:
    write(tmp_path, 70)
    (write(tmp_path, 80) / MANIFEST).write_text("{")
    write(tmp_path, 90, keep=2)

    assert names(tmp_path) == ["step-70", "step-80", "step-90"]


def test_of_two_of_the_same_step_the_first_stays(tmp_path: Path) -> None:
    write(tmp_path, 40, text="first")

    path = write(tmp_path, 40, slot=1, text="second")

    assert names(tmp_path) == ["step-40"]
    assert (path / "__0_0.distcp").read_text() == "first"


def test_one_of_the_same_step_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    flip(write(tmp_path, 40, text="first") / "__0_0.distcp")

    path = write(tmp_path, 40, slot=1, text="second")

    assert names(tmp_path) == ["step-40"]
    assert (path / "__0_0.distcp").read_text() == "second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-40"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [MANIFEST, "__0_0.distcp", ".metadata"])
def test_what_is_damaged_is_passed_over_and_its_file_named(damage: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, 30)
    newest = write(tmp_path, 40)
    DAMAGES[damage](newest / name)

    with pytest.raises(Damaged, match=name.replace(".", r"\.")):
        check(newest)
    found, passed = newest_sound(tmp_path)
    assert found is not None
    assert found.facts == facts(30)
    assert [str(newest / name) in text for text in passed] == [True]


@pytest.mark.parametrize("text", ["[]", "null", '{"facts": 1}', '{"checksum": ""}', "{", "\0", '{"checksum": []}'])
def test_a_manifest_that_is_none_is_damage(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, 40)
    (path / MANIFEST).write_text(text)

    with pytest.raises(Damaged, match=MANIFEST):
        check(path)


def test_another_number_in_the_facts_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path, 40)
    content = json.loads((path / MANIFEST).read_text())
    content["facts"]["outer_step"] = 3
    (path / MANIFEST).write_text(json.dumps(content))

    with pytest.raises(Damaged, match=MANIFEST):
        check(path)


def test_one_that_holds_the_parameters_alone_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 30)
    write(tmp_path, 40, whole=False)

    found, passed = newest_sound(tmp_path)

    assert found is not None
    assert found.facts.step == 30
    assert passed == ["the snapshot step-40 was passed over: it holds the parameters alone"]


def test_where_there_is_nothing_nothing_is_found(tmp_path: Path) -> None:
    staging_folder(tmp_path, 0, 0).mkdir()
    (tmp_path / "step-x").mkdir()

    assert newest_sound(tmp_path) == (None, [])
    assert newest_sound(tmp_path / "no_such_folder") == (None, [])


def test_only_what_the_own_slot_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    for slot, incarnation in ((1, 0), (1, 2), (11, 0)):
        staging_folder(tmp_path, slot, incarnation).mkdir()

    clear_stagings(tmp_path, 1)

    assert names(tmp_path) == [staging_folder(tmp_path, 11, 0).name]

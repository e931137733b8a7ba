from collections.abc import Callable

import pytest
import torch

from elastic_train.peer_ckpt.snapshot import Retired, Snapshot


def snapshot() -> Snapshot:
    return Snapshot({"outer_step": 3}, {"outer": {"weight": torch.ones(2)}, "inner": {"moment": torch.zeros(2)}})


def never() -> None:
    raise AssertionError("nothing was to be cut off")


class Cut:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_the_header_is_what_a_peer_will_read() -> None:
    history = {3: "ab"}
    made = Snapshot({"history": history, "shape": (1, 2)}, {})
    history[4] = "cd"
    assert made.header == {"history": {"3": "ab"}, "shape": [1, 2]}


@pytest.mark.parametrize("change", [lambda s: s.header.update(a=1), lambda s: s.sections.clear()])
def test_it_cannot_be_changed(change: Callable[[Snapshot], None]) -> None:
    with pytest.raises(AttributeError):
        change(snapshot())


def test_a_header_that_json_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError):
        Snapshot({"tensor": torch.ones(1)}, {})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"a/b": {}}, "cannot be called"),
        ({"a,b": {}}, "cannot be called"),
        ({"a": {"w": torch.ones(2, 3).T}}, "a/w is no contiguous host tensor"),
        ({"a": {"w": torch.ones(2, device="meta")}}, "a/w is no contiguous host tensor"),
    ],
)
def test_what_cannot_be_sent_as_it_lies_is_refused(sections: dict[str, dict[str, torch.Tensor]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Snapshot({}, sections)


def test_tensors_are_not_copied() -> None:
    memory = torch.ones(2)
    made = Snapshot({}, {"outer": {"weight": memory}})
    with made.reading("outer", never) as tensors:
        assert tensors["weight"].data_ptr() == memory.data_ptr()


def test_who_reads_a_retired_section_is_cut_off() -> None:
    made, outer, inner = snapshot(), Cut(), Cut()
    with made.reading("outer", outer), made.reading("outer", outer), made.reading("inner", inner):
        made.retire("outer")
        assert (outer.count, inner.count) == (2, 0)
    assert made.is_retired("outer")
    assert not made.is_retired("inner")


def test_who_has_read_is_left_alone() -> None:
    made = snapshot()
    with made.reading("outer", never):
        pass
    made.retire("outer")


def test_who_failed_to_read_is_left_alone() -> None:
    made = snapshot()
    with pytest.raises(OSError, match="gone"), made.reading("outer", never):
        raise OSError("gone")
    made.retire("outer")


def test_a_retired_section_cannot_be_read() -> None:
    made = snapshot()
    made.retire("outer")
    with pytest.raises(Retired), made.reading("outer", never):
        pass
    with made.reading("inner", never) as tensors:
        assert torch.equal(tensors["moment"], torch.zeros(2))


def test_a_section_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError):
        snapshot().retire("other")
    with pytest.raises(KeyError), snapshot().reading("other", never):
        pass

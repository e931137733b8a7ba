import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.peer_ckpt.layout import LENGTH_BYTES, Layout, LayoutError, Place
from elastic_train.peer_ckpt.snapshot import Snapshot

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
SHAPES = st.lists(st.integers(0, 3), max_size=3)
TENSORS = st.dictionaries(st.text(), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=4)


def layout_of(sections: dict[str, dict[str, tuple[torch.dtype, list[int]]]], order: list[str]) -> Layout:
    tensors = {
        section: {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in described.items()}
        for section, described in sections.items()
    }
    return Layout.of(Snapshot({"outer_step": 4, "x": "ü"}, tensors), order, 5)


@given(st.dictionaries(st.sampled_from(["outer", "inner", "data"]), TENSORS), st.randoms())
def test_what_is_written_can_be_read(sections: dict[str, Any], chance: Any) -> None:
    order = list(sections)
    chance.shuffle(order)
    layout = layout_of(sections, order)
    encoded = layout.encode()
    assert int.from_bytes(encoded[:LENGTH_BYTES], "little") == len(encoded) - LENGTH_BYTES
    assert len(encoded) % 8 == 0
    assert Layout.decode(encoded[LENGTH_BYTES:]) == layout
    parts = list(layout.parts())
    assert len(parts) == layout.count
    assert sum(part.size for part in parts) == layout.size == sum(map(layout.size_of, order))
    assert list(dict.fromkeys(part.section for part in parts)) == [name for name in order if layout.size_of(name)]
    assert layout.size == sum(
        torch.zeros(shape, dtype=dtype).nbytes for described in sections.values() for dtype, shape in described.values()
    )


KNOWN = {"header": "{}", "sections": '["a"]', "part_bytes": "32"}
PLACE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def described(metadata: object = None, **entries: object) -> bytes:
    known = KNOWN if metadata is None else metadata
    return json.dumps(
        {"__metadata__": known} | {name.replace("__", "/"): entry for name, entry in entries.items()}
    ).encode()


def test_a_tensor_has_its_place() -> None:
    place = Place(section="a", name="w", dtype=torch.float32, shape=(2, 3))
    assert Layout.decode(described(a__w=PLACE)).places == (place,)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"{}",
        b"[" * 100_000,
        described(metadata=[]),
        described(metadata={"header": "{}"}),
        described(metadata=KNOWN | {"header": "[]"}),
        described(metadata=KNOWN | {"header": "{"}),
        described(metadata=KNOWN | {"sections": '["a", "a"]'}),
        described(metadata=KNOWN | {"sections": '[["a"]]'}),
        described(metadata=KNOWN | {"part_bytes": "0"}),
        described(metadata=KNOWN | {"part_bytes": "many"}),
        described(metadata={"header": "{}", "sections": "[]"}),
        described(
            metadata=KNOWN | {"sections": '["a", "b"]'},
            b__w=PLACE,
            a__w=PLACE | {"data_offsets": [24, 48]},
        ),
        described(b__w=PLACE),
        described(w=PLACE),
        described(a__w=3),
        described(a__w=PLACE | {"dtype": "F31"}),
        described(a__w=PLACE | {"dtype": ["F32"]}),
        described(a__w=PLACE | {"shape": [2, 4]}),
        described(a__w=PLACE | {"shape": [-2, -3]}),
        described(a__w=PLACE | {"shape": [2.0, 3]}),
        described(a__w=PLACE | {"shape": 6}),
        described(a__w=PLACE | {"data_offsets": [8, 32]}),
        described(a__w=PLACE | {"data_offsets": [0, 28]}),
        described(a__w=PLACE, a__v=PLACE),
    ],
)
def test_what_describes_no_snapshot_is_refused(text: bytes) -> None:
    with pytest.raises(LayoutError):
        Layout.decode(text)


@given(st.binary(max_size=60))
def test_noise_is_refused(text: bytes) -> None:
    with pytest.raises(LayoutError):
        Layout.decode(text)

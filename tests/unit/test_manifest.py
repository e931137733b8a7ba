"""What stands before a transfer, and how it is told from what arrived damaged."""

import io
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.peer_ckpt.layout import Layout, LayoutError
from elastic_train.peer_ckpt.manifest import encode_manifest, read_manifest
from elastic_train.peer_ckpt.snapshot import Snapshot

LAYOUT = Layout.of(Snapshot({"outer_step": 4, "lr": [0.5]}, {"outer": {"w": torch.ones(3)}}), ["outer"])
MANIFEST = encode_manifest(LAYOUT)


class Received:
    """An answer that is there already."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)
        self.length = len(content)

    def read(self, size: int) -> bytes:
        if size > self.length:
            raise ConnectionError("the answer ends too early")
        self.length -= size
        return self._content.read(size)


def read(content: bytes) -> Layout:
    answer: Any = Received(content)
    return read_manifest(answer)


def test_a_layout_arrives_as_it_was_sent() -> None:
    assert read(MANIFEST) == LAYOUT


def test_it_is_a_safetensors_header_with_a_checksum_behind_it() -> None:
    assert LAYOUT.encode() + xxhash.xxh3_64_digest(LAYOUT.encode()) == MANIFEST


@given(st.integers(0, 8 * len(MANIFEST) - 1))
def test_one_flipped_bit_is_noticed(bit: int) -> None:
    damaged = bytearray(MANIFEST)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(LayoutError):
        read(bytes(damaged))


@pytest.mark.parametrize("content", [MANIFEST + b"1", MANIFEST[:-1], MANIFEST[:8], bytes(16)])
def test_what_has_another_length_is_none(content: bytes) -> None:
    with pytest.raises(LayoutError):
        read(content)


def test_what_ends_before_its_length_is_none() -> None:
    with pytest.raises(OSError, match="too early"):
        read(MANIFEST[:5])

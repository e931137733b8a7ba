import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.diloco.compress import BLOCK, Codec, Scratch, make_codec
from tests.allocations import Allocations

NAMES = ("bf16", "int8", "int4")
LARGEST = {"int8": 127, "int4": 7}
names = st.sampled_from(NAMES)
sizes = st.one_of(st.integers(1, 700), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 1]))


def codec_called(name: str) -> Codec:
    codec = make_codec(name)
    assert codec is not None
    assert codec.name == name
    return codec


@st.composite
def gradients(draw: st.DrawFn) -> torch.Tensor:
    """Blocks of very different size, some of them zero."""
    numel, seed = draw(sizes), draw(st.integers(0, 2**32))
    numbers = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=numbers)
    for start in range(0, numel, BLOCK):
        values[start : start + BLOCK] *= draw(st.sampled_from([0.0, 1e-30, 1e-5, 1.0, 3e5]))
    return values


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(codec.encoded_size(values.numel()), dtype=torch.uint8)
    codec.encode(values, out)
    return out


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, float("nan"))
    codec.decode(encoded(codec, values), out)
    return out


def by_block(values: torch.Tensor) -> np.ndarray:
    numbers = values.numpy()
    return np.pad(numbers, (0, -len(numbers) % BLOCK)).reshape(-1, BLOCK)


@given(names, sizes)
def test_sizes_are_what_is_promised(name: str, numel: int) -> None:
    blocks = -(-numel // BLOCK)
    exact = {"bf16": 2 * numel, "int8": 4 * blocks + numel, "int4": 4 * blocks + (numel + 1) // 2}[name]

    size = codec_called(name).encoded_size(numel)

    assert exact <= size < exact + 4
    assert size % 4 == 0


@given(gradients())
def test_bf16_rounds_as_torch_does(values: torch.Tensor) -> None:
    assert torch.equal(round_trip(codec_called("bf16"), values), values.bfloat16().float())


@given(st.sampled_from(["int8", "int4"]), gradients())
def test_error_is_at_most_half_a_scale(name: str, values: torch.Tensor) -> None:
    blocks = by_block(values).astype(np.float64)
    half = np.abs(blocks).max(axis=1, keepdims=True) / LARGEST[name] / 2

    error = np.abs(by_block(round_trip(codec_called(name), values)) - blocks)

    assert np.all(error <= half * (1 + 1e-5))


@given(st.sampled_from(["int8", "int4"]), gradients())
def test_bytes_are_those_of_the_formula(name: str, values: torch.Tensor) -> None:
    blocks = by_block(values)
    scales = np.abs(blocks).max(axis=1) / np.float32(LARGEST[name])
    whole = np.rint(blocks / np.where(scales == 0, np.float32(1), scales)[:, None]).astype(np.int64)
    if name == "int8":
        numbers = whole.astype(np.int8).view(np.uint8).flatten()[: values.numel()]
    else:
        halves = (whole + 8).reshape(-1, 2)
        numbers = (halves[:, 0] + 16 * halves[:, 1]).astype(np.uint8)[: (values.numel() + 1) // 2]

    out = encoded(codec_called(name), values).numpy()

    assert out[: scales.nbytes].tobytes() == scales.tobytes()
    np.testing.assert_array_equal(out[scales.nbytes :][: len(numbers)], numbers)


@given(names, gradients())
def test_zeros_and_signs_survive(name: str, values: torch.Tensor) -> None:
    out = round_trip(codec_called(name), values)

    assert torch.all(out[values == 0] == 0)
    assert torch.all(out * values.sign() >= 0)


@given(names, gradients(), st.data())
def test_what_is_not_finite_stays_visible_and_in_its_block(
    name: str, values: torch.Tensor, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, values.numel() - 1))
    bad = values.clone()
    bad[at] = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    codec = codec_called(name)

    out, clean = round_trip(codec, bad), round_trip(codec, values)

    block = slice(at // BLOCK * BLOCK, (at // BLOCK + 1) * BLOCK)
    assert not torch.isfinite(out[at])
    clean[block] = out[block] = 0
    assert torch.equal(out, clean)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tiny", [1.4e-45, 7e-44, 2.5e-43, 1e-38])
def test_the_smallest_numbers_do_no_harm(name: str, tiny: float) -> None:
    values = torch.tensor([tiny, -tiny, 0.0])

    out = round_trip(codec_called(name), values)

    # Coarse, since the scale is rounded as well, but not the other way round.
    assert torch.all((out - values).abs() <= tiny)


@given(names, gradients(), gradients())
def test_memory_that_is_used_again_leaves_no_trace(name: str, first: torch.Tensor, second: torch.Tensor) -> None:
    used = codec_called(name)
    round_trip(used, first)

    assert torch.equal(encoded(used, second), encoded(codec_called(name), second))
    assert torch.equal(round_trip(used, second), round_trip(codec_called(name), second))


@given(names, gradients())
def test_encoding_leaves_the_numbers_alone(name: str, values: torch.Tensor) -> None:
    before = values.clone()
    encoded(codec_called(name), values)

    assert torch.equal(values, before)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_large_is_allocated_again(name: str) -> None:
    codec, numel = codec_called(name), 64 * BLOCK + 3
    values, out = torch.randn(numel), torch.empty(codec.encoded_size(numel), dtype=torch.uint8)
    codec.encode(values, out)
    codec.decode(out, values)
    with Allocations() as allocations:
        codec.encode(values, out)
        codec.decode(out, values)

    assert allocations.largest <= 4 * 65


def test_scratch_keeps_its_memory_until_more_is_needed() -> None:
    scratch, cpu = Scratch(torch.float32), torch.device("cpu")
    first = scratch.take(10, cpu)

    assert scratch.take(4, cpu).data_ptr() == first.data_ptr()
    assert scratch.take(4, cpu).shape == (4,)
    larger = scratch.take(11, cpu)
    assert larger.shape == (11,)
    assert scratch.take(10, cpu).data_ptr() == larger.data_ptr()


def test_no_compression_is_no_codec_and_an_unknown_one_an_error() -> None:
    assert make_codec("none") is None
    with pytest.raises(ValueError, match="'int2'"):
        make_codec("int2")

"""The shapes of the Llama 3 flavors, as far as a config can contradict them.

torchtitan has these numbers too, but reading them there costs seconds, and a config is checked in an instant.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Flavor = Literal["tiny", "debugmodel", "1B", "3B", "8B", "70B", "405B"]


class Shape(NamedTuple):
    """How often a model can be divided."""

    layers: int
    heads: int
    kv_heads: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(layers=2, heads=4, kv_heads=4),
    "debugmodel": Shape(layers=6, heads=16, kv_heads=16),
    "1B": Shape(layers=16, heads=32, kv_heads=8),
    "3B": Shape(layers=28, heads=24, kv_heads=8),
    "8B": Shape(layers=32, heads=32, kv_heads=8),
    "70B": Shape(layers=80, heads=64, kv_heads=8),
    "405B": Shape(layers=126, heads=128, kv_heads=8),
}

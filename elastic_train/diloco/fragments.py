"""How a model is split into fragments that sync in turn (Streaming DiLoCo, arXiv 2501.18512, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def split(model_parts: Sequence[nn.Module], fragments: int) -> list[nn.Module]:
    """Split the model's layers into ``fragments`` strided groups.

    Fragment ``f`` holds layers f, f + n, f + 2n, ... The embedding goes with the first fragment, whatever comes
    after the layers with the last, so every parameter is in exactly one fragment; parameters that two modules
    share stay with the first. One fragment is the whole model.

    Raises:
        ValueError: more fragments than layers.
    """
    if fragments == 1:
        return [nn.ModuleList(model_parts)]
    layers = [layer for part in model_parts for layer in part.layers.values()]  # type: ignore[operator]
    if fragments > len(layers):
        raise ValueError(f"diloco.fragments = {fragments}, but the model has {len(layers)} layers")
    groups: list[list[nn.Module]] = [layers[f::fragments] for f in range(fragments)]
    placed: set[int] = set()
    for part in model_parts:
        for name, child in part.named_children():
            parameters = {id(parameter) for parameter in child.parameters()}
            if name == "layers" or parameters <= placed:
                continue
            placed |= parameters
            groups[0 if "embed" in name else -1].append(child)
    return [nn.ModuleList(group) for group in groups]

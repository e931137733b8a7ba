"""How a model is split into fragments that sync in turn (Streaming DiLoCo, arXiv 2501.18512, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def split(model_parts: Sequence[nn.Module], fragments: int) -> list[nn.Module]:
    """Split the model's layers into ``fragments`` strided groups, and spread what is around them by size.

    Fragment ``f`` holds layers f, f + n, f + 2n, ... Everything else (embedding, norm, output), the largest first,
    goes to the fragment that is the smallest so far, the first of equals. A module that shares parameters with one
    already placed goes with it. So every parameter is in exactly one fragment, and depends on shapes alone: the same
    on every replica. One fragment is the whole model.

    Raises:
        ValueError: more fragments than layers, or parameters shared by modules that are in different fragments.
    """
    if fragments == 1:
        return [nn.ModuleList(model_parts)]
    layers = [layer for part in model_parts for layer in part.layers.values()]  # type: ignore[operator]
    if fragments > len(layers):
        raise ValueError(f"diloco.fragments = {fragments}, but the model has {len(layers)} layers")
    around: list[nn.Module] = []
    for part in model_parts:
        around += [child for name, child in part.named_children() if name != "layers"]
        # Parameters of the model itself: left out, they would never be averaged.
        around += [nn.ParameterList([parameter]) for parameter in part.parameters(recurse=False)]
    around.sort(key=lambda module: sum(p.numel() for p in module.parameters()), reverse=True)
    groups = _Groups(fragments)
    for number, layer in enumerate(layers):
        groups.add(layer, number % fragments)
    for module in around:
        groups.add(module)
    return [nn.ModuleList(group) for group in groups.modules]


class _Groups:
    """Fragments in the making."""

    def __init__(self, fragments: int) -> None:
        self.modules: list[list[nn.Module]] = [[] for _ in range(fragments)]
        self._numel = [0] * fragments
        self._fragment: dict[int, int] = {}
        """Of each parameter placed, by its id."""

    def add(self, module: nn.Module, wanted: int | None = None) -> None:
        """Place a module in the fragment wanted, where its shared parameters are, or in the smallest."""
        parameters = list(module.parameters())
        fresh = [p for p in parameters if id(p) not in self._fragment]
        allowed = {self._fragment[id(p)] for p in parameters if id(p) in self._fragment}
        allowed |= {wanted} if wanted is not None else set()
        if len(allowed) > 1:
            raise ValueError(f"diloco.fragments: {type(module).__name__} shares parameters with another fragment")
        if not fresh:
            return
        target = allowed.pop() if allowed else self._numel.index(min(self._numel))
        self.modules[target].append(module)
        self._numel[target] += sum(p.numel() for p in fresh)
        self._fragment.update({id(p): target for p in fresh})

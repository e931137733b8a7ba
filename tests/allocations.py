"""What tensor operations allocate, for tests of code that promises to use its memory again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """While it is active, remembers the size of the largest tensor that this thread newly made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        """Bytes."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in known]
        self.largest = max([self.largest, *(tensor.nbytes for tensor in fresh)])
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

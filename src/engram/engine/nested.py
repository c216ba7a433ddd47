"""Tensors among the arguments of an operation, however they are nested."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.Size)  # hold no tensors


def tensors(tree: Any) -> list[Tensor]:
    """Tensors in nested arguments, in order; plain containers are walked here, which is quicker."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            if not isinstance(item, PLAIN):
                _collect(item, found)
    elif not isinstance(tree, PLAIN):
        found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

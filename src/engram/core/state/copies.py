"""A copy of a model that shares nothing with it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import TrainingError


def private_copy(model: nn.Module) -> nn.Module:
    """A deep copy of a model; results that modules keep as attributes lose their graph."""
    kept = [v for module in model.modules() for v in vars(module).values()]
    results = [v for v in kept if isinstance(v, Tensor) and (_in_transform(v) or not v.is_leaf)]
    memo: dict[int, Any] = {id(v): _free(v) for v in results}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever copying the parts of a model raises
        raise TrainingError(
            "a model that copy.deepcopy can copy",
            f"{type(error).__name__}: {error}",
            "keep what cannot be copied outside of the model",
        ) from error


def _free(result: Tensor) -> Tensor:
    return torch.empty(0) if _in_transform(result) else result.detach().clone()


def _in_transform(result: Tensor) -> bool:
    """Whether it belongs to a ``vmap`` that is over."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(result))

"""Mixtures of experts as ``transformers`` has them, by operations that can be seen one by one.

Their own forward gathers for each expert the positions that were sent to it: rows that the data has
sorted, which no rule can follow. Here every position stays in its place, and goes through the
linear layer of its expert (:func:`~engram.engine.rules.experts.routed_linear`).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import Tensor, nn

from engram.engine.interception import Forward, Substitution
from engram.engine.rules.experts import routed_linear, sent


class routed(Substitution):  # noqa: N801 (read as the statement that it is)
    """Every mixture of experts in a model keeps its positions in order while this lasts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def substitutes(self) -> Iterator[tuple[nn.Module, Forward]]:
        """Methods, so that a copy of the model has its own."""
        for module in self.model.modules():
            if _is_mixture(module):
                yield module, MethodType(_in_order, module)


def _is_mixture(module: nn.Module) -> bool:
    """Whether its class is one of transformers' experts, with weights [E, O, I]."""
    return (
        hasattr(type(module), "_apply_gate")
        and getattr(module, "is_transposed", True) is False
        and getattr(module, "has_post_expert_norm", True) is False
        and getattr(module, "_is_expert_parallel", True) is False
    )


def _in_order(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What the module's own forward computes, from the same arguments."""
    count = top_k_index.shape[-1]
    numbers = top_k_index.reshape(-1)
    first = "gate_up_proj" if module.has_gate else "up_proj"

    def through(name: str, inputs: Tensor) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return routed_linear(sent(inputs, numbers), getattr(module, name), bias)

    moved = through(first, hidden_states.repeat_interleave(count, dim=0))
    moved = module._apply_gate(moved) if module.has_gate else module.act_fn(moved)
    weighted = through("down_proj", moved) * top_k_weights.reshape(-1, 1)
    found: Tensor = weighted.reshape(len(hidden_states), count, -1).sum(1)
    return found.to(hidden_states.dtype)

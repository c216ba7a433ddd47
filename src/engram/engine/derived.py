"""Tensors made from parameters alone, and in which order to make them again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engram.engine.nested import tensors
from engram.engine.rules.base import Function


@dataclass(frozen=True)
class Derived:
    """A tensor made from parameters alone, with the recipe to make it once per example."""

    result: Tensor  # held, so that its identity stays its own
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int

    def make(self, *args: Any, **kwargs: Any) -> Tensor:
        """The tensor from other arguments."""
        return tensors(self.function(*args, **kwargs))[self.index]


def in_order(
    tensor: Tensor, recipes: Mapping[int, Derived], made: Collection[int]
) -> list[Derived]:
    """The recipes that a tensor needs and that are not yet made, what they are made from first.

    Each comes once, however often it is used, and a long chain needs no deep recursion. A recipe
    is made from tensors that were there before it, so there is no circle to walk in.
    """
    needed: dict[int, Derived] = {}
    waiting = [tensor]
    while waiting:
        key = id(waiting.pop())
        if key in recipes and key not in needed and key not in made:
            needed[key] = recipes[key]
            waiting += tensors((recipes[key].args, recipes[key].kwargs))
    return [recipe for key, recipe in recipes.items() if key in needed]

"""Other forwards of some modules while something lasts; the modules are as before afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

Forward = Callable[..., Any]
Substituting = TypeVar("Substituting", bound="Substitution")


class Substitution(ABC):
    """Every module gets a forward of ours in place of its own."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], Forward | None]] = []

    @abstractmethod
    def substitutes(self) -> Iterable[tuple[nn.Module, Forward]]:
        """The modules, each with the forward that it gets; made from its present one."""

    def __enter__(self: Substituting) -> Substituting:
        for module, forward in self.substitutes():
            attributes = vars(module)
            self._before.append((attributes, attributes.get("forward")))
            attributes["forward"] = forward
        return self

    def __exit__(self, *failure: object) -> None:
        for attributes, forward in self._before:
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward

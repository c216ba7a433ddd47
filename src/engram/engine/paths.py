"""Which module is running, by its path in the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from engram.engine.forwards import Forward, Substitution


class Paths(Substitution):
    """Keeps the path of the innermost module that runs, while this lasts.

    Example:
        >>> model = nn.Sequential(nn.Identity())
        >>> with Paths(model) as paths:
        ...     paths.innermost
        ''
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.running = [""]

    @property
    def innermost(self) -> str:
        """Of the module that runs; the model itself has an empty one."""
        return self.running[-1]

    def substitutes(self) -> Iterator[tuple[nn.Module, Forward]]:
        """All modules, which then say when they begin and end."""
        for path, module in self.model.named_modules():
            yield module, self._noted(path, module.forward)

    def _noted(self, path: str, forward: Forward) -> Forward:
        @functools.wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.running.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self.running.pop()

        return noted

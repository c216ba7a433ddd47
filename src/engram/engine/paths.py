"""Which module is running, by its path in the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


class Paths:
    """Keeps the path of the innermost module that runs, while this lasts.

    Example:
        >>> model = nn.Sequential(nn.Identity())
        >>> with Paths(model) as paths:
        ...     paths.innermost
        ''
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.running = [""]
        self.before: list[tuple[dict[str, Any], Callable[..., Any] | None]] = []

    @property
    def innermost(self) -> str:
        """Of the module that runs; the model itself has an empty one."""
        return self.running[-1]

    def __enter__(self) -> Paths:
        for path, module in self.model.named_modules():
            attributes, forward = vars(module), module.forward
            self.before.append((attributes, attributes.get("forward")))
            attributes["forward"] = self._noted(path, forward)
        return self

    def __exit__(self, *failure: object) -> None:
        for attributes, forward in self.before:
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward

    def _noted(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.running.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self.running.pop()

        return noted

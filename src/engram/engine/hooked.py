"""Hooks on a model's call while something lasts, and none of them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

TABLES = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


@contextmanager
def hooked(
    model: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> Iterator[None]:
    """Call these before and after every call of the model, with its keyword arguments.

    They are taken off by what they are and not by their handles: Ctrl-C may come between a hook
    and its handle.
    """
    known = {name: set(getattr(model, name)) for name in TABLES}
    own = {"with_kwargs": True}
    try:
        model.register_forward_pre_hook(before, prepend=True, **own)
        model.register_forward_hook(after, always_call=True, **own)
        yield
    finally:
        try:
            _take_off(model, known, (before, after))
        except BaseException:  # Ctrl-C while taking them off
            _take_off(model, known, (before, after))
            raise


def _take_off(model: nn.Module, known: dict[str, set[int]], own: tuple[Any, Any]) -> None:
    """What came since and is ours; hooks that the user registered meanwhile stay."""
    hooks = {**model._forward_pre_hooks, **model._forward_hooks}
    ours = {number for number, hook in hooks.items() if hook in own}
    for name in reversed(TABLES):
        for number in ours - known[name]:
            getattr(model, name).pop(number, None)

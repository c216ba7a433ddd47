"""How a running model is seen: every operation, and every module that begins and ends.

:class:`FunctionMode` is handed each operation of its thread; :class:`Interceptor` is the one that
plans and passes are made with. :class:`Substitution` gives modules another forward while something
lasts; :class:`Paths` knows by it which module is running.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack, _pop_torch_function_stack
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from engram.engine.rules import plain_form
from engram.engine.rules.base import Function

if TYPE_CHECKING:
    from engram.engine.units import Unit

Mode = TypeVar("Mode", bound="FunctionMode")
Forward = Callable[..., Any]
Substituting = TypeVar("Substituting", bound="Substitution")
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


class FunctionMode(TorchFunctionMode):
    """As torch's, but leaving it takes away what is there, be it one mode more or none.

    While an operation is handled, torch takes the mode off its stack. A Ctrl-C at that moment
    leaves it off, and torch's own way out would fail there with another error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depths: list[int] = []

    def __enter__(self: Mode) -> Mode:
        self._depths.append(_len_torch_function_stack())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        depth = self._depths.pop()
        while _len_torch_function_stack() > depth:
            _pop_torch_function_stack()


class Interceptor(FunctionMode):
    """Sees every operation, opens up attention and recurrence, and is silent inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = False

    def __torch_function__(
        self,
        function: Function,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.silent:
            return self.unseen(function, args, kwargs)
        plain = plain_form(function, args, kwargs)
        if plain is not None:
            with self:
                return plain()
        return self.operation(function, args, kwargs)

    def operation(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        return function(*args, **kwargs)

    def unseen(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation inside a unit."""
        return function(*args, **kwargs)

    def returned(self, unit: Unit, arguments: Any, result: Any, forward: Function) -> None:
        """A unit has returned."""


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

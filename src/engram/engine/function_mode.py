"""A mode that sees every operation of its thread, and that Ctrl-C cannot leave half open."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

from torch._C import _len_torch_function_stack, _pop_torch_function_stack
from torch.overrides import TorchFunctionMode

Mode = TypeVar("Mode", bound="FunctionMode")


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

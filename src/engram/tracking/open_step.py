"""One streamed step at a time, and a way out of one that does not end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from engram.core.errors import ArgumentError, EngineError
from engram.core.state.process import end_suspended


class OpenStep:
    """The step that is under way, if one is.

    Example:
        >>> from contextlib import nullcontext
        >>> steps = OpenStep()
        >>> with steps.during(nullcontext()):
        ...     steps.check("an update")
        Traceback (most recent call last):
        ...
        engram.core.errors.EngineError: expected an update outside of a step; got one that is ...
    """

    def __init__(self) -> None:
        self._stack: ExitStack | None = None
        self._closed = False

    def check(self, what: str) -> None:
        """EngineError inside of a step, ArgumentError once everything is closed."""
        if self._closed:
            raise ArgumentError(
                f"an open tracker for {what}",
                "one that was closed",
                "make a new one, and load_state_dict what this one has",
            )
        if self._stack is not None:
            raise EngineError(
                f"{what} outside of a step",
                "one that is under way, or that was begun and never ended",
                "end every `with tracker.step(...)` before; tracker.leave_step() forgets one",
            )

    @contextmanager
    def during(self, step: AbstractContextManager[None]) -> Iterator[None]:
        """Run a step inside; nothing else may begin before it ends."""
        self.check("a step")
        stack = ExitStack()
        try:
            self._stack = stack
            with stack:
                stack.enter_context(step)
                yield
        except KeyboardInterrupt as error:
            end_suspended(error)
            raise
        finally:
            if self._stack is stack:
                self._stack = None

    def leave(self) -> None:
        """Forget the step that is under way, as if it had been interrupted."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(GeneratorExit, GeneratorExit(), None)

    def close(self) -> None:
        """Leave, and begin nothing more."""
        self.leave()
        self._closed = True

"""One training step of the user's, recorded: the model's call and its backward pass, as they were.

The step itself is untouched. What the call was given, the random numbers it drew, its outputs and
the gradient that arrived there are enough to repeat it (the twin of a followed group does). With a
:class:`~engram.engine.streaming.tape.Tape` the operations are noted down as well, and the tangent
pass is all that has to be added for the deviation of every example of the batch; where they cannot
be followed (parameters without a rule, attention, recurrence, in-place operations), the batch is
run once more with the same random numbers, after the user's backward pass, and ``way`` says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engram.core.data.batches import as_outputs, logits_of
from engram.core.state.model import state_kept
from engram.core.state.process import RandomState, end_suspended
from engram.engine.passes import trace
from engram.engine.refusals import named_failures, pass_on
from engram.engine.streaming.tape import UPDATE, Tape
from engram.errors import EngineError, brief
from engram.linalg.precision import Precision

# where a module keeps its forward hooks
TABLES = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


class StepRecorder:
    """Inputs, random state, outputs and their gradient of one call of the model.

    Args:
        model: whose call it is.
        num_examples: rows that the batch should have.
        tape: takes down the operations, where deviations are wanted.

    Attributes:
        args: positional arguments that the model was called with.
        kwargs: those by name.
        random: the generators' state when it was called.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> step = StepRecorder(model, 3)
        >>> with step.recording():
        ...     model(torch.ones(3, 2)).sum().backward()
        >>> step.check()
        >>> step.output_gradient.flatten()
        tensor([1., 1., 1.])
    """

    def __init__(self, model: nn.Module, num_examples: int, tape: Tape | None = None) -> None:
        self.model, self.num_examples, self.tape = model, num_examples, tape
        self.raw: Tensor | None = None
        self.gradient: Tensor | None = None
        self.random: RandomState | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self._handle: RemovableHandle | None = None
        self._parameters = list(model.parameters())  # walking the model takes longer than looking
        self._weights: list[tuple[int, int]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the user's step inside; hooks are gone afterwards, also after an exception."""
        on_model = hooked(self.model, self._begin, self._end)
        depth = torch._C._len_torch_function_stack()
        try:
            with on_model, nullcontext() if self.tape is None else self.tape:
                yield
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                end_suspended(error)  # torch takes modes off the stack while it runs them
            for _ in range(torch._C._len_torch_function_stack() - depth):
                torch._C._pop_torch_function_stack()
            raise

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.random is not None:
            raise EngineError(
                "one call of the model in a streamed step",
                "a second one",
                f"put every call into a step of its own, or {UPDATE}",
            )
        self.random = RandomState.now({p.device for p in self._parameters})
        self._weights = self._marks()
        self.args, self.kwargs = args, kwargs
        if self.tape is not None:
            self.tape.begin()

    def _end(self, model: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self.tape is not None:
            self.tape.recording = False
        logits = logits_of(result)
        if isinstance(logits, Tensor) and logits.requires_grad:
            self.raw = logits
            self._handle = logits.register_hook(self._arrived)

    def _arrived(self, gradient: Tensor) -> None:
        seen = gradient.detach()
        self.gradient = seen if self.gradient is None else self.gradient + seen

    def check(self) -> None:
        """The step must have had one forward and one backward pass over this batch."""
        if self.random is None:
            raise EngineError(
                "a call of the model inside the step",
                "none",
                "write outputs = model(inputs) inside `with tracker.step(indices):` (or twin_step)",
            )
        if self.raw is None or self.gradient is None:
            raise EngineError(
                "a backward pass inside the step",
                "none that reached the model's outputs",
                "call loss.backward() inside `with tracker.step(indices):` (or twin_step)",
            )
        if len(self.outputs) != self.num_examples:
            raise EngineError(
                f"{self.num_examples} examples, as many as there are indices",
                f"outputs for {len(self.outputs)}",
                "give the indices of exactly the examples in the batch",
            )
        if self._marks() != self._weights:
            raise EngineError(
                "the same weights from the model's call to the end of the step",
                "weights that were changed inside `with tracker.step(...)`",
                "call optimizer.step() after the block; with IVON, open the step inside of "
                "engram.optimizers.ivon.sampled(optimizer)",
            )

    def release(self) -> None:
        """Let go of the user's graph and of everything that was noted down."""
        if self._handle is not None:
            self._handle.remove()
        self.raw = self.gradient = None
        self.args, self.kwargs = (), {}
        if self.tape is not None:
            self.tape.release()

    @property
    def outputs(self) -> Tensor:
        """f, [B, K], as the user's forward pass gave them."""
        assert self.raw is not None
        return as_outputs(self.raw.detach())

    @property
    def output_gradient(self) -> Tensor:
        """Gradient of the user's loss by the outputs, [B, K]."""
        assert self.gradient is not None
        return as_outputs(self.gradient)

    @property
    def way(self) -> str:
        """How the deviation is found, on the user's own pass or by running the batch again."""
        return "tape" if self.tape is not None and self.tape.usable() else "again"

    def deviation(self, residual: Tensor, precision: Precision, scale: float) -> Tensor:
        """J S^-1 J' e, [B, K], with the user's gradients being scale times those of e.

        For a step that was recorded with a tape.
        """
        assert self.tape is not None
        if self.way == "tape":
            found = self._followed(self.tape, precision)
            if found is not None:
                return as_outputs(found) / scale
        return self._run_again(self.tape, residual, precision)

    def _followed(self, tape: Tape, precision: Precision) -> Tensor | None:
        """By the tape; None where an operation has no forward derivative, or was not seen."""
        assert self.raw is not None
        assert self.gradient is not None
        try:
            return tape.deviation(self.raw, self.gradient, precision)
        except RuntimeError as error:
            pass_on(error)
            tape.obstacle = brief(error)
            return None

    def _run_again(self, tape: Tape, residual: Tensor, precision: Precision) -> Tensor:
        """By a recorded pass over the same batch, with the same random numbers and buffers."""
        assert self.random is not None
        assert tape.buffers is not None
        try:
            with (
                named_failures("again after its step"),
                state_kept(self.model),
                self.random.again(),
                tape.buffers.again(),
            ):
                inputs = _as_inputs(self.model, self.args, self.kwargs)
                again = trace(self.model, tape.plan, inputs, len(residual))
        except EngineError as error:
            if not self.model.training:
                raise
            raise EngineError(
                "a model with the same operations in train mode as in eval mode, in which its "
                "passes are planned",
                f"{error.got} (attention or recurrence with dropout, spectral normalisation)",
                f"{UPDATE}; or set the dropout inside of those layers to 0",
            ) from error
        return again.deviation(residual, precision)

    def _marks(self) -> list[tuple[int, int]]:
        """What changes with the weights, cheap to look at: where they lie, and their version."""
        return [(p.data_ptr(), p._version) for p in self._parameters]


def _as_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs:
        return args
    named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
    return named | kwargs


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

"""One training step of the user's, watched from the forward pass to the end of the backward pass.

The step itself is untouched. Where its operations can be followed on a tape, only the tangent
pass is added; where they cannot (parameters without a rule, attention, recurrence, in-place
operations), the batch is run once more with the same random numbers, after the user's backward
pass, and ``way`` says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.data.batches import as_outputs
from engram.core.errors import EngineError, brief
from engram.core.state.model import state_kept
from engram.core.state.modules import Buffers
from engram.core.state.process import end_suspended
from engram.engine.hooked import hooked
from engram.engine.passes import trace
from engram.engine.prepare import Engine
from engram.engine.refusals import named_failures, pass_on
from engram.engine.tape import Tape
from engram.engine.witness import UPDATE, Witness
from engram.linalg.precision import Precision

_BatchNorm = nn.modules.batchnorm._BatchNorm


def mixing_layers(model: nn.Module) -> list[_BatchNorm]:
    """Layers in which the examples of a batch depend on each other while they train."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


class Watch:
    """What was seen of one step.

    Args:
        engine: the model with its plan.
        mixing: layers of the model that mix examples in train mode, of :func:`mixing_layers`.
        num_examples: rows that the batch should have.
    """

    def __init__(self, engine: Engine, mixing: Sequence[_BatchNorm], num_examples: int) -> None:
        self.engine, self.mixing, self.num_examples = engine, mixing, num_examples
        self.witness = Witness(engine.model, num_examples)
        self.tape = Tape(engine.parameters, engine.plan, num_examples)
        self._buffers: Buffers | None = None

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Run the user's step inside; hooks are gone afterwards, also after an exception."""
        on_model = hooked(self.engine.model, self._begin, self._end)
        depth = torch._C._len_torch_function_stack()
        try:
            with on_model, self.witness.watching(), self.tape:
                yield self
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                end_suspended(error)  # torch takes modes off the stack while it runs them
            for _ in range(torch._C._len_torch_function_stack() - depth):
                torch._C._pop_torch_function_stack()
            raise

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_mode()
        self._buffers = Buffers.now(model)
        self.tape.recording = True

    def _end(self, model: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self.tape.recording = False

    def _check_mode(self) -> None:
        for module in self.mixing:
            if module.training or module.running_mean is None:
                raise EngineError(
                    "a model that treats the examples of a batch independently in training",
                    f"{type(module).__name__} in train mode, in which no example has a gradient "
                    "of its own",
                    UPDATE,
                )
        if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
            raise EngineError("a step in one precision", "automatic mixed precision", UPDATE)

    @property
    def way(self) -> str:
        """How the deviation is found: on the user's own pass, or by running the batch again."""
        return "tape" if self.tape.obstacle is None and self.tape.fresh() else "again"

    def check(self) -> None:
        """The step must have had one forward and one backward pass over this batch."""
        self.witness.check()

    def release(self) -> None:
        """Let go of the user's graph and of everything that was noted down."""
        self.witness.release()
        self.tape.release()
        self._buffers = None

    @property
    def outputs(self) -> Tensor:
        """f, [B, K], as the user's forward pass gave them."""
        return self.witness.outputs

    @property
    def output_gradient(self) -> Tensor:
        """Gradient of the user's loss by the outputs, [B, K]."""
        return self.witness.output_gradient

    def deviation(self, residual: Tensor, precision: Precision, scale: float) -> Tensor:
        """J S^-1 J' e, [B, K], with the user's gradients being scale times those of e."""
        seen = self.witness
        assert seen.raw is not None
        if self.way == "tape":
            assert seen.gradient is not None
            found = self._followed(seen.raw, seen.gradient, precision)
            if found is not None:
                return as_outputs(found) / scale
        assert seen.random is not None
        assert self._buffers is not None
        model = self.engine.model
        try:
            with (
                named_failures("again after its step"),
                state_kept(model),
                seen.random.again(),
                self._buffers.again(),
            ):
                inputs = _as_inputs(model, seen.args, seen.kwargs)
                again = trace(model, self.engine.plan, inputs, len(residual))
        except EngineError as error:
            if not model.training:
                raise
            raise EngineError(
                "a model with the same operations in train mode as in eval mode, in which its "
                "passes are planned",
                f"{error.got} (attention or recurrence with dropout, spectral normalisation)",
                f"{UPDATE}; or set the dropout inside of those layers to 0",
            ) from error
        return again.deviation(residual, precision)

    def _followed(self, outputs: Tensor, arrived: Tensor, precision: Precision) -> Tensor | None:
        """By the tape; None where an operation has no forward derivative, or was not seen."""
        try:
            return self.tape.deviation(outputs, arrived, precision)
        except RuntimeError as error:
            pass_on(error)
            self.tape.obstacle = brief(error)
            return None


def _as_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not kwargs:
        return args
    named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
    return named | kwargs

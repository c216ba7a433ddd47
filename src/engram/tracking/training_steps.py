"""The training steps of the user's own loop: one at a time, recorded once and checked once.

A step is a forward and a backward pass inside ``with tracker.step(...)``. What it did is recorded
by hooks that leave it as it is. When it is over, the batch must be the one that the indices name
and the loss the likelihood's; then everything that listens takes the step: the stream, which
estimates sensitivities, and the held-out twin, which repeats it without some of the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.core.arguments import positive
from engram.core.data.batches import Batches
from engram.core.dtypes import SMALLEST_DIVISOR, wide
from engram.core.state.process import end_suspended, of_the_thread, random_states, restored
from engram.engine.streaming.step import StepRecorder
from engram.engine.streaming.tape import Tape
from engram.errors import ArgumentError, EngineError, LikelihoodError
from engram.likelihoods import Likelihood
from engram.tracking.index_check import IndexCheck, Indices, check_batch_indices, check_length
from engram.training.training import Training as TrainingRecord

# How far the gradient that arrives may be from the likelihood's residual: beyond rounding, since
# a loss of the user's own may be computed in half precision or in another order.
TOLERANCE = 1e-2  # relative, of norms and of the factor between them
ROUNDING = 1e-6  # absolute, of one entry, where the residual itself vanishes


@dataclass(frozen=True)
class Training:
    """The model, optimizer, data and likelihood of a training.

    Args:
        model, optimizer: in training.
        batches: of the training data, which indices refer to.
        likelihood: whose loss is trained with.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Batches
    likelihood: Likelihood


@dataclass(frozen=True)
class TrainingStep:
    """One step of the user's, after its backward pass, checked.

    Args:
        call: of the model: its inputs, random numbers, outputs and their gradient; with a tape of
            its operations where sensitivities are asked for.
        indices, targets: of the examples in the batch.
        prepared: the targets as the likelihood wants them.
        factor: the user's loss over the sum of the likelihood's losses.
        loss: of every example, [B].
        residual: e, [B, K]; None where losses or gradients are not finite.
    """

    call: StepRecorder
    indices: Tensor
    targets: Tensor
    prepared: Tensor
    factor: float
    loss: Tensor
    residual: Tensor | None


class Listener(Protocol):
    """An observer of training steps: the stream, or the held-out twin."""

    def begin_step(self) -> None:
        """Before the forward pass."""

    def take(self, step: TrainingStep) -> None:
        """After the backward pass."""


class TrainingSteps:
    """Runs the user's steps, one at a time; a step that does not end can be left.

    Args:
        training: whose steps they are.
        reduction: of the user's loss over a batch, ``mean`` or ``sum``.
        record: of the training, which is told what each step said about its examples.
    """

    def __init__(
        self, training: Training, reduction: str, record: TrainingRecord | None = None
    ) -> None:
        self.training, self.reduction, self.record = training, reduction, record
        self.index_check, self.count = IndexCheck(training.batches), 0
        self._open: ExitStack | None = None
        self._closed = False

    def check_outside(self, what: str) -> None:
        """EngineError inside of a step, ArgumentError once everything is closed."""
        if self._closed:
            raise ArgumentError(
                f"an open tracker for {what}",
                "one that was closed",
                "make a new one, and load_state_dict what this one has",
            )
        if self._open is not None:
            raise EngineError(
                f"{what} outside of a step",
                "one that is under way, or that was begun and never ended",
                "end every `with tracker.step(...)` before; tracker.leave_step() forgets one",
            )

    @contextmanager
    def step(
        self,
        indices: Indices,
        targets: Tensor | None,
        scale: float,
        listeners: Sequence[Listener],
        tape: Callable[[int], Tape] | None = None,
    ) -> Iterator[None]:
        """Run a step inside; nothing else may begin before it ends.

        Args:
            indices, targets: of the batch; targets None for the data's own.
            scale: factor on the loss before ``backward``.
            listeners: take the step when it is over.
            tape: makes the one that takes down the operations of a batch of so many examples;
                without it only the model's call is recorded.
        """
        self.check_outside("a step")
        stack = ExitStack()
        try:
            self._open = stack
            with stack:
                stack.enter_context(self._recorded(indices, targets, scale, listeners, tape))
                yield
        except KeyboardInterrupt as error:
            end_suspended(error)
            raise
        finally:
            if self._open is stack:
                self._open = None

    @contextmanager
    def _recorded(
        self,
        indices: Indices,
        targets: Tensor | None,
        scale: float,
        listeners: Sequence[Listener],
        tape: Callable[[int], Tape] | None,
    ) -> Iterator[None]:
        check_length(self.training.batches)
        chosen = check_batch_indices(indices, self.training.batches.num_data)
        factor = loss_factor(self.training.optimizer, scale, self.reduction, len(chosen))
        for listener in listeners:
            listener.begin_step()
        taken_down = None if tape is None else tape(len(chosen))
        if self.record is not None and self.record.is_recording:
            self.record.note(chosen)
        call = StepRecorder(self.training.model, len(chosen), taken_down)
        try:
            with call.recording():
                yield
            with restored((*of_the_thread(), *random_states())):
                call.check()
                own = self.index_check.targets(call, chosen, targets, self.count)
                step = self._checked(call, chosen, own, factor)
                for listener in listeners:
                    listener.take(step)
                if self.record is not None and self.record.is_recording:
                    self.record.visit(step.indices, call.outputs, step.targets)
        finally:
            call.release()
        self.count += 1

    def _checked(
        self, call: StepRecorder, indices: Tensor, targets: Tensor, factor: float
    ) -> TrainingStep:
        outputs, gradient = call.outputs, call.output_gradient
        likelihood = self.training.likelihood
        prepared = likelihood.prepare(outputs, targets.to(outputs.device))
        loss = likelihood.loss(outputs, prepared).detach()
        residual = None
        if torch.isfinite(loss).all() and torch.isfinite(gradient).all():
            residual = likelihood.residual(outputs, prepared).detach()
            check_loss(gradient, residual, factor, likelihood)
        return TrainingStep(call, indices, targets, prepared, factor, loss, residual)

    def leave(self) -> None:
        """Forget the step that is under way, as if it had been interrupted."""
        stack, self._open = self._open, None
        if stack is not None:
            stack.__exit__(GeneratorExit, GeneratorExit(), None)

    def close(self) -> None:
        """Leave, and begin nothing more."""
        self.leave()
        self._closed = True


def loss_factor(optimizer: Optimizer, scale: float, reduction: str, count: int) -> float:
    """The user's loss over the sum of the likelihood's: minus it where the optimizer maximises."""
    factor = positive("scale", scale, "pass the factor on the loss before backward, such as 1/4")
    signs = {-1.0 if group.get("maximize") else 1.0 for group in optimizer.param_groups}
    if len(signs) > 1:
        raise ArgumentError(
            "an optimizer that minimises or maximises",
            "one with maximize=True in some groups only",
            "set it for all groups, or for none",
        )
    return signs.pop() * (factor / count if reduction == "mean" else factor)


def check_loss(gradient: Tensor, residual: Tensor, factor: float, likelihood: Likelihood) -> None:
    """The gradient that arrived must be the factor times the likelihood's residual."""
    gradient, residual = wide(gradient), wide(residual)
    length = float(residual.norm())
    limit = TOLERANCE * length + ROUNDING * residual.numel() ** 0.5
    if float((gradient - factor * residual).norm()) <= abs(factor) * limit:
        return
    found = float((gradient * residual).sum()) / max(length**2, SMALLEST_DIVISOR)
    if float((gradient - found * residual).norm()) > abs(found) * limit:
        raise LikelihoodError(
            f"a loss with the gradients of {likelihood!r} for these examples",
            "other gradients at the model's outputs",
            "check that indices and batch belong together, pass targets= if they are changed on "
            "the way, and give the tracker the likelihood of your loss (likelihoods.from_loss)",
        )
    raise ArgumentError(
        f"a training loss of {factor:.6g} times the sum over the batch",
        f"{found:.6g} times it ({_meaning(found, len(residual))})",
        'set reduction="mean" or "sum" on the tracker as in your loss; where the loss is scaled '
        "before backward (accumulation, a gradient scaler), pass that scale= to tracker.step",
    )


def _meaning(factor: float, count: int) -> str:
    if abs(factor * count - 1) < TOLERANCE:
        return "the mean over the batch"
    return (
        "the sum over the batch" if abs(factor - 1) < TOLERANCE else "neither its mean nor its sum"
    )

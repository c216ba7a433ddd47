"""A recorded training, walked again from a checkpoint with some examples left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from engram.core.arguments import whole
from engram.core.data.batches import Batches, Data, as_outputs, logits_of
from engram.core.data.inputs import handed
from engram.core.parameters import Named, check_module, uncompiled
from engram.core.progress import Bar
from engram.core.selection import check_indices
from engram.core.state.copies import private_copy
from engram.core.state.model import device_of
from engram.core.state.process import kept_surroundings
from engram.errors import (
    ArgumentError,
    DataError,
    ModelMismatchError,
    NonFiniteError,
    TrainingError,
)
from engram.likelihoods import Likelihood, resolve
from engram.training.checkpoints import Checkpoint
from engram.training.order import Order, Part, restore
from engram.training.training import Training

#: mean loss of a batch, as the training loop had it: outputs and targets to a scalar
Loss = Callable[[Any, Tensor], Tensor]
MakeOptimizer = Callable[[list[Any]], Optimizer]
# How long a replay will take is measured on some steps: surer against later
MEASURED_STEPS = 51
MEASURED_FOR = 2.0  # seconds at most, whatever the steps


def replay(
    model: nn.Module,
    data: Data,
    training: Training,
    without: Sequence[int] | Tensor | None = None,
    *,
    start: int = 0,
    loss: str | Likelihood | Loss = "categorical",
    optimizer: MakeOptimizer | None = None,
    before_step: Callable[[nn.Module], object] | None = None,
    displacement: Named | None = None,
    progress: bool = True,
) -> nn.Module:
    r"""Train on from a recorded checkpoint, with some examples left out.

    Every recorded step is taken again, with the same examples in the same order, the same numbers
    drawn and the same settings. Those left out are removed from their batches, and a step goes
    along the gradient of

    .. math:: \frac{1}{B} \sum_{i \in \text{batch}, i \notin \text{without}} \ell_i

    with the recorded size B; a batch of which nothing remains is skipped, and so is one of which a
    single example remains where BatchNorm takes statistics. Where nothing is left out, the outcome
    is that of the recorded training, bit for bit.

    Args:
        model: that was trained; it is not changed.
        data: the training data, in the order that the recorded indices count in.
        training: of ``engram.record(optimizer, model, replay=True)``.
        without: examples that are left out; none if not given.
        start: step to begin after; the last checkpoint up to there is taken, and 0 is all of it.
        loss: of the training: a function of a batch's outputs and targets that gives its mean loss
            (its sum, for ``reduction="sum"``), or a likelihood.
        optimizer: makes the optimizer from parameter groups, where it is not one of torch's own.
        before_step: called with the model after the backward passes of each step; clip gradients
            here, if the training did.
        displacement: added to the weights of the checkpoint, by name.

    Returns:
        A copy of the model with the weights and buffers at the end, in eval mode.

    Example:
        >>> model, x = nn.Linear(2, 1), torch.randn(8, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> from engram.training.record import record
        >>> training = record(optimizer, model, replay=True)
        >>> for indices in torch.arange(8).view(4, 2):
        ...     training.note(indices)
        ...     optimizer.zero_grad()
        ...     nn.functional.mse_loss(model(x[indices]), x[indices, :1]).backward()
        ...     _ = optimizer.step()
        >>> again = replay(model, (x, x[:, :1]), training, loss=nn.functional.mse_loss)
        >>> torch.equal(again.weight, model.weight)
        True

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, NeurIPS 2023.
    """
    path = Path(model, data, training, loss_of(loss), optimizer, before_step)
    left_out = None if without is None else check_indices(without, path.batches.num_data)
    return path.walked(path.checkpoint(start), left_out, displacement, progress).model


@dataclass(frozen=True)
class Replayed:
    """The outcome of a walk.

    Args:
        model: at the end.
        steps: that were taken again.
        skipped: of them without any example left.
        examples: that were passed forward and backward.
    """

    model: nn.Module
    steps: int
    skipped: int
    examples: int


class Path:
    """A recorded training that can be walked again, and what it needs for that.

    Args:
        model: that was trained.
        data: training data.
        training: with an order.
        loss: of a batch.
        optimizer: makes it from parameter groups; torch's own by its name if not given.
        before_step: called with the model before each step.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        training: Training,
        loss: Loss,
        optimizer: MakeOptimizer | None = None,
        before_step: Callable[[nn.Module], object] | None = None,
    ) -> None:
        check_module(model)
        self.model, self.training, self.loss = uncompiled(model), training, loss
        self.order = _order_of(training)
        self.batches = Batches(data, 1)
        self.numbers = training.of(model).numbers
        self.make, self.before_step = optimizer or _named(self.order), before_step
        largest = max((int(part.indices.max()) for part in self.order.parts), default=0)
        if largest >= self.batches.num_data:
            raise DataError(
                f"training data with the recorded example {largest:,}",
                f"{self.batches.num_data:,} examples",
                "pass the data that the training had, in the order of its indices",
            )
        if self.order.clipped and before_step is None:
            raise ArgumentError(
                "before_step=, which clips gradients as the training did",
                f"none, and {self.order.clipped:,} recorded steps with clipped gradients",
                "pass for instance before_step=lambda model: "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            )

    def checkpoint(self, start: int) -> Checkpoint:
        """The last one up to this step."""
        step = whole("start", start, 0, self.training.num_steps, "use 0 for all of the training")
        found = [s for s in self.training.grid.snapshots if s.step <= step]
        if not found:
            first = min((s.step for s in self.training.grid.snapshots), default=None)
            raise TrainingError(
                f"a checkpoint up to step {step:,}",
                "none at all" if first is None else f"the first at step {first:,}",
                "record with checkpoints=6, or start later",
            )
        return Checkpoint(found[-1].step, found[-1], self.numbers)

    def before(self, members: Tensor) -> Checkpoint:
        """The last checkpoint before any of these examples is seen: up to there nothing differs."""
        return self.checkpoint(int(self._first_steps[members].min()) - 1)

    @cached_property
    def _first_steps(self) -> Tensor:
        """The step that sees each example first; one after the last for those that none sees."""
        found = torch.full((self.batches.num_data,), self.training.num_steps + 1)
        for part in reversed(self.order.parts):
            found[part.indices] = part.step
        return found

    def seconds_per_step(self) -> float:
        """Measured on some of the first steps, and not on the very first, which sets things up."""
        number, last = 1, self.training.num_steps
        with kept_surroundings(), torch.inference_mode(False), torch.enable_grad():
            nothing = torch.zeros(self.batches.num_data, dtype=torch.bool)
            walk = _Walk(self, self.checkpoint(0), nothing, None)
            walk.step(number)
            began = time.perf_counter()
            while number < min(last, MEASURED_STEPS) and time.perf_counter() - began < MEASURED_FOR:
                number += 1
                walk.step(number)
            return (time.perf_counter() - began) / max(1, number - 1)

    def walked(
        self,
        start: Checkpoint,
        without: Tensor | None = None,
        displacement: Named | None = None,
        progress: bool = True,
        on_step: Callable[[], None] | None = None,
    ) -> Replayed:
        """The training from this checkpoint on; ``on_step`` is called after each step."""
        left_out = torch.zeros(self.batches.num_data, dtype=torch.bool)
        if without is not None:
            left_out[without] = True
        with kept_surroundings(), torch.inference_mode(False), torch.enable_grad():
            walk = _Walk(self, start, left_out, displacement)
            last = self.training.num_steps
            count = last - start.step
            bar = Bar(count, f"replay of {count:,} of {last:,} steps", progress)
            for number in range(start.step + 1, last + 1):
                walk.step(number)
                bar.update()
                if on_step is not None:
                    on_step()
            bar.close()
        return Replayed(walk.model.eval(), count, walk.skipped, walk.examples)


class _Walk:
    """A copy of the model on its way through the recorded steps."""

    def __init__(
        self, path: Path, start: Checkpoint, left_out: Tensor, displacement: Named | None
    ) -> None:
        self.path, self.left_out = path, left_out
        self.model = private_copy(path.model)
        self.device, self.skipped, self.examples = device_of(self.model), 0, 0
        parameters = dict(self.model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = None
        start.put_into(self.model)
        with torch.no_grad():
            for name, value in (displacement or {}).items():
                parameters[name].add_(value.to(parameters[name]))
        for module, mode in zip(self.model.modules(), path.order.modes, strict=True):
            module.training = mode == "1"
        self.optimizer = self._optimizer(start)

    def _optimizer(self, start: Checkpoint) -> Optimizer:
        """As it was after this step, over the copy's parameters."""
        state = start.snapshot.optimizer_state()
        groups = [] if state is None else state["param_groups"]
        names = {number: name for name, number in self.path.numbers.items()}
        parameters = dict(self.model.named_parameters())
        if missing := [n for group in groups for n in group["params"] if n not in names]:
            raise ModelMismatchError(
                "a model with all parameters that the optimizer trained",
                f"one in which {len(missing)} of them are not, or are frozen",
                "pass the model that was trained",
            )
        made = [{**g, "params": [parameters[names[n]] for n in g["params"]]} for g in groups]
        optimizer = self.path.make(made)
        restore(optimizer, start.snapshot)
        return optimizer

    def step(self, number: int) -> None:
        """One recorded step."""
        order, model = self.path.order, self.model
        order.apply(number, self.optimizer)
        parts = order.of_step(number)
        self.optimizer.zero_grad()
        moved = [self._backward(part, len(parts)) for part in parts]
        if not any(moved):
            self.skipped += 1
            return
        if self.path.before_step is not None:
            self.path.before_step(model)
        self.optimizer.step()

    def _backward(self, part: Part, passes: int) -> bool:
        """The gradient of what remains of a batch; False where nothing does."""
        if part.random_state is not None:
            torch.set_rng_state(part.random_state)
        batch = self.path.batches.take(part.indices)
        kept = ~self.left_out[part.indices]
        count, size = int(kept.sum()), len(kept)
        if count < size:
            batch = batch.select(kept.nonzero()[:, 0])
        if not count or (count == 1 < size and self._normalises()):
            return False
        batch = batch.to(self.device)
        args, kwargs = handed(batch.inputs)
        loss = self.path.loss(logits_of(self.model(*args, **kwargs)), batch.targets)
        if self.path.order.reduction == "mean":
            loss = loss * (count / size) if count < size else loss
            loss = loss / passes if passes > 1 else loss
        _check_loss(loss, part)
        loss.backward()
        self.examples += count
        return True

    def _normalises(self) -> bool:
        """Whether the statistics of a batch are taken, which one example may not have."""
        return any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())


def _check_loss(loss: Tensor, part: Part) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ArgumentError(
            "a loss function that gives one number, the mean over the batch",
            f"{got}",
            "pass the function that the training loop called backward() on",
        )
    if not bool(loss.isfinite()):
        raise NonFiniteError(
            "a finite loss of every batch",
            f"{float(loss)} for the batch of example {int(part.indices[0]):,}",
            "start at a later checkpoint, or leave fewer examples out",
        )


def _order_of(training: Training) -> Order:
    if not isinstance(training, Training) or training.order is None:
        raise TrainingError(
            "a record that can be replayed",
            "one without order" if isinstance(training, Training) else type(training).__name__,
            "record with engram.record(optimizer, model, replay=True), and name the examples of "
            "every step by training.note(indices)",
        )
    return training.order


def _named(order: Order) -> MakeOptimizer:
    """One of torch's own optimizers."""
    found = getattr(torch.optim, order.optimizer.rpartition(".")[2], None)
    if found is None or f"{found.__module__}.{found.__qualname__}" != order.optimizer:
        raise ArgumentError(
            f"optimizer=, which makes a {order.optimizer} from parameter groups",
            "none",
            "pass for instance optimizer=lambda groups: MyOptimizer(groups, lr=0.1)",
        )
    made: MakeOptimizer = found
    return made


def loss_of(loss: str | Likelihood | Loss) -> Loss:
    """A function of outputs and targets that gives the mean of a batch."""
    if callable(loss) and not isinstance(loss, Likelihood):
        return loss
    likelihood = resolve(loss)

    def mean(outputs: Any, targets: Tensor) -> Tensor:
        found = as_outputs(outputs)
        prepared = likelihood.prepare(found.detach(), targets)
        return likelihood.loss(found, prepared).mean()

    return mean

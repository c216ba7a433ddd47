"""Copies that are trained one by one, by the user's function, and what is kept of each.

Parts of a run are, as for stacks of copies, the refits with nothing left out, then the left-out
copies.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from engram.core.data.batches import Batches, Data, call
from engram.core.data.inputs import mapped
from engram.core.progress import Bar
from engram.core.state.copies import private_copy
from engram.core.state.model import device_of, state_preserved
from engram.core.state.process import kept_surroundings
from engram.engine.refusals import named_failures
from engram.errors import NonFiniteError, TrainingError
from engram.retraining.identity import sample_fingerprint
from engram.retraining.pace import StepPace
from engram.retraining.run_folder import Part
from engram.retraining.selection import EXAMPLES_AT_ONCE, NOTHING, Task
from engram.retraining.user_function import (
    check_finite,
    check_same_parameters,
    has_moved,
    kept_state,
    trained_model,
)

UNCHANGED_ALLOWED = 3  # copies that a function may leave as they were before it is an error


@dataclass(frozen=True, eq=False)
class TrainedCopy:
    """What a training function has made of its copy.

    Args:
        model: the trained one.
        returned: whether the function gave it back, and did not only train in place.
        in_place: whether it is the copy that the function was given.
        moved: whether any weight or buffer differs from the start.
    """

    model: nn.Module
    returned: bool
    in_place: bool
    moved: bool


@dataclass(frozen=True, eq=False)
class FunctionWorker:
    """Copies trained one by one by the user's function.

    Args:
        model: a private copy of the trained model, in the user's modes.
        steady: whether reading the data twice gives the same; otherwise it cannot be watched.
        pace: of the trainings, in steps.
    """

    task: Task
    function: Callable[[nn.Module, Any], nn.Module | None]
    model: nn.Module
    data: Data
    steady: bool
    pace: StepPace = field(default_factory=StepPace)

    @property
    def num_refits(self) -> int:
        """Trainings with nothing left out."""
        return self.task.refits

    def say_cost(self, trainings: int, shown: bool) -> None:
        """How long a function takes is only known when it has trained once: the pace says it."""

    def refit(self, bar: Bar) -> Part:
        """Trainings with nothing left out: the first twice with one seed, then with others."""
        began, trained = time.perf_counter(), []
        for number in range(self.task.refits):
            with self.pace.reported(bar):
                seed = self.task.seed + max(0, number - 1)
                made = self.train(self.model, NOTHING, seed).model
                trained.append(evaluated(self.task, self.data, made))
        return refits_part(trained, began)

    def copies(self, numbers: Sequence[int], baseline: Tensor, bar: Bar) -> Iterator[Part]:
        """Left-out copies, one at a time."""
        unchanged = 0
        for position, number in enumerate(numbers):
            began = time.perf_counter()
            with self.pace.reported(bar):
                members = self.task.selection.members[number]
                made = self.train(self.model, members, self.task.seed)
            unchanged += not (made.returned or made.moved)
            if unchanged == position + 1 >= min(UNCHANGED_ALLOWED, len(numbers)):
                raise TrainingError(
                    "a training function that trains the model in place or returns the trained one",
                    f"None, with all weights as before, {unchanged} times",
                    "return the trained model",
                )
            yield copy_part(self.task, self.data, number, made.model, self.model, began)

    def train(self, start: nn.Module, members: Tensor, seed: int) -> TrainedCopy:
        """A copy of a model, trained without some examples."""
        kept = without(self.data, members)
        watched = Watched.of(kept, self.data) if self.steady else Watched.of()
        private = private_copy(start)
        with kept_surroundings(), seeded(seed):
            returned = self.function(private, kept)
        watched.check()
        trained = trained_model(returned, private)
        check_same_parameters(trained, self.model)
        check_finite(trained, self.model)
        moved = has_moved(trained, start)
        return TrainedCopy(trained, returned is not None, trained is private, moved)


Outputs = tuple[Tensor, Tensor | None]  # on the data [N, K]; and losses on evaluate_on [T]


def evaluated(task: Task, data: Data, trained: nn.Module) -> Outputs:
    """What is kept of a training with nothing left out."""
    return outputs_of(trained, data, None), _evaluation_losses(task, trained)


def refits_part(trained: Sequence[Outputs], began: float) -> Part:
    """The part of a run with the trainings that nothing was left out of."""
    part: Part = {
        "refit_outputs": torch.stack([outputs for outputs, _ in trained]),
        "gradient_norm": torch.full((len(trained),), torch.nan, dtype=torch.float64),
        "wanted_norm": torch.full((len(trained),), torch.inf, dtype=torch.float64),
        "baseline": torch.zeros(0),
        "seconds": torch.tensor([time.perf_counter() - began], dtype=torch.float64),
    }
    found = [losses for _, losses in trained if losses is not None]
    return part | ({"refit_evaluation": torch.stack(found)} if found else {})


def copy_part(
    task: Task, data: Data, number: int, trained: nn.Module, template: nn.Module, began: float
) -> Part:
    """The part of a run with one left-out copy."""
    part = {
        "number": torch.tensor([number]),
        "outputs_without": outputs_of(trained, data, task.selection.members[number]),
        "gradient_norm": torch.tensor([torch.nan], dtype=torch.float64),
        "wanted_norm": torch.tensor([torch.inf], dtype=torch.float64),
        "evaluations": torch.tensor([0]),
        "seconds": torch.tensor([time.perf_counter() - began], dtype=torch.float64),
    }
    losses = _evaluation_losses(task, trained)
    if losses is not None:
        part["evaluation"] = losses[None]
    if task.keep_models:
        part |= {
            f"parameter {name}": value[None].clone()
            for name, value in kept_state(trained, template).items()
        }
    return part


def outputs_of(trained: nn.Module, data: Data, members: Tensor | None) -> Tensor:
    """Outputs of a model on all or some examples, in eval mode."""
    batches = Batches(data, EXAMPLES_AT_ONCE)
    source = batches if members is None else batches.subset(members)
    with state_preserved(trained), torch.no_grad(), named_failures("on the data"):
        rows = [call(trained, b.to(device_of(trained)).inputs).cpu() for b in source]
    outputs = torch.cat(rows)
    if not torch.isfinite(outputs).all():
        raise NonFiniteError(
            "finite outputs", "NaN or infinity after training", "lower the learning rate"
        )
    return outputs


def _evaluation_losses(task: Task, trained: nn.Module) -> Tensor | None:
    if task.evaluate_on is None:
        return None
    outputs = outputs_of(trained, task.evaluate_on, None)
    targets = torch.cat([b.targets.cpu() for b in Batches(task.evaluate_on, EXAMPLES_AT_ONCE)])
    return task.likelihood.loss(outputs, task.likelihood.prepare(outputs, targets))


@dataclass(frozen=True, eq=False)
class Watched:
    """Data sets with digests of their content, to notice that a training function changed them.

    Args:
        data: that reads the same each time; other data cannot be watched.
        before: a fingerprint of each.
    """

    data: tuple[Data, ...]
    before: tuple[str, ...]

    @classmethod
    def of(cls, *data: Data) -> Watched:
        """Digests of the present content."""
        return cls(data, tuple(map(sample_fingerprint, data)))

    def check(self) -> None:
        """TrainingError where the content has changed since."""
        if self.before != tuple(map(sample_fingerprint, self.data)):
            raise TrainingError(
                "a training function that leaves the data as it is",
                "data that changed during the training",
                "copy what you want to change, for instance x = x.clone()",
            )


def without(data: Data, members: Tensor) -> Data:
    """The data without some examples, in the form it has; tensors are copies."""
    batches = Batches(data, 1)
    kept = torch.ones(batches.num_data, dtype=torch.bool)
    kept[members] = False
    rows = kept.nonzero()[:, 0]
    if isinstance(data, DataLoader):
        return DataLoader(
            Subset(data.dataset, rows.tolist()),
            batch_size=getattr(data.batch_sampler, "batch_size", None),  # a sampler has it too
            collate_fn=data.collate_fn,
        )
    if batches.table:
        return mapped(batches.data, lambda t: t[rows.to(t.device)])
    return Subset(data, rows.tolist())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Gradients, and all random numbers from a seed; call inside :func:`kept_surroundings`."""
    with torch.enable_grad():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # numpy's seeds have 32 bits
        yield

"""Copies trained by a function of the user's, one at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from engram.core.data.batches import Batches, Data, call
from engram.core.data.inputs import mapped
from engram.core.errors import NonFiniteError, TrainingError
from engram.core.state.model import device_of, state_preserved
from engram.core.state.process import kept_surroundings
from engram.engine.refusals import named_failures
from engram.retraining.recipe import Report
from engram.retraining.returned import (
    check_finite,
    check_same_parameters,
    has_moved,
    kept_state,
    private_copy,
    trained_model,
)
from engram.retraining.run_folder import Part
from engram.retraining.task import NOTHING, Task
from engram.retraining.watched import Watched

UNCHANGED_ALLOWED = 3


@dataclass(frozen=True, eq=False)
class FunctionWorker:
    """Copies trained one by one by the user's function.

    Args:
        model: a private copy of the trained model, in the user's modes.
        steady: whether reading the data twice gives the same; otherwise it cannot be watched.
    """

    task: Task
    function: Callable[[nn.Module, Any], nn.Module | None]
    model: nn.Module
    data: Data
    steady: bool

    def refit(self, report: Report) -> Part:
        """Trainings with nothing left out: the first twice with one seed, then with others."""
        began = time.perf_counter()
        outputs, losses = [], []
        for number in range(self.task.refits):
            seed = self.task.seed + max(0, number - 1)
            trained, _ = self._train(NOTHING, seed)
            outputs.append(self.outputs(trained, self.data, None))
            losses.append(self._evaluated(trained))
            report(1.0)
        part: Part = {
            "refit_outputs": torch.stack(outputs),
            "gradient_norm": torch.full((len(outputs),), torch.nan, dtype=torch.float64),
            "wanted_norm": torch.full((len(outputs),), torch.inf, dtype=torch.float64),
            "baseline": torch.zeros(0),
            "seconds": torch.tensor([time.perf_counter() - began], dtype=torch.float64),
        }
        found = [loss for loss in losses if loss is not None]
        return part | ({"refit_evaluation": torch.stack(found)} if found else {})

    def copies(self, numbers: Sequence[int], baseline: Tensor, report: Report) -> Iterator[Part]:
        """Left-out copies, one at a time."""
        unchanged = 0
        for position, number in enumerate(numbers):
            began = time.perf_counter()
            members = self.task.selection.members[number]
            trained, moved = self._train(members, self.task.seed)
            unchanged += not moved
            if unchanged == position + 1 >= min(UNCHANGED_ALLOWED, len(numbers)):
                raise TrainingError(
                    "a training function that trains the model in place or returns the trained one",
                    f"None, with all weights as before, {unchanged} times",
                    "return the trained model",
                )
            part = {
                "number": torch.tensor([number]),
                "outputs_without": self.outputs(trained, self.data, members),
                "gradient_norm": torch.tensor([torch.nan], dtype=torch.float64),
                "wanted_norm": torch.tensor([torch.inf], dtype=torch.float64),
                "evaluations": torch.tensor([0]),
                "seconds": torch.tensor([time.perf_counter() - began], dtype=torch.float64),
            }
            loss = self._evaluated(trained)
            if loss is not None:
                part["evaluation"] = loss[None]
            if self.task.keep_models:
                part |= {
                    f"parameter {name}": value[None].clone()
                    for name, value in kept_state(trained, self.model).items()
                }
            report(1.0)
            yield part

    def _train(self, members: Tensor, seed: int) -> tuple[nn.Module, bool]:
        """A trained copy, and whether it was returned or its weights have changed."""
        kept = without(self.data, members)
        watched = Watched.of(kept, self.data) if self.steady else Watched.of()
        private = private_copy(self.model)
        with kept_surroundings(), seeded(seed):
            returned = self.function(private, kept)
        watched.check()
        trained = trained_model(returned, private)
        check_same_parameters(trained, self.model)
        check_finite(trained, self.model)
        return trained, returned is not None or has_moved(trained, self.model)

    def outputs(self, trained: nn.Module, data: Data, members: Tensor | None) -> Tensor:
        """Outputs of a model on all or some examples, in eval mode."""
        batches = Batches(data, 256)
        source = batches if members is None else batches.subset(members)
        with state_preserved(trained), torch.no_grad(), named_failures("on the data"):
            rows = [call(trained, b.to(device_of(trained)).inputs).cpu() for b in source]
        outputs = torch.cat(rows)
        if not torch.isfinite(outputs).all():
            raise NonFiniteError("finite outputs", "NaN or infinity after training", "train slower")
        return outputs

    def _evaluated(self, trained: nn.Module) -> Tensor | None:
        if self.task.evaluate_on is None:
            return None
        outputs = self.outputs(trained, self.task.evaluate_on, None)
        targets = torch.cat([b.targets.cpu() for b in Batches(self.task.evaluate_on, 256)])
        likelihood = self.task.likelihood
        return likelihood.loss(outputs, likelihood.prepare(outputs, targets))


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
        np.random.seed(seed % 2**32)
        yield

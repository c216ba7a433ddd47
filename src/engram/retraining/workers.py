"""Workers that train the copies: a recipe for a stack at a time, or the user's function one by one.

Both give the same parts of a run: the refits with nothing left out, then the left-out copies.
"""

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

from engram.core.data.batches import Batch, Batches, Data, call
from engram.core.data.inputs import mapped
from engram.core.state.copies import private_copy
from engram.core.state.model import device_of, state_preserved
from engram.core.state.process import kept_surroundings
from engram.engine.refusals import named_failures
from engram.errors import NonFiniteError, TrainingError
from engram.problem import Opener
from engram.retraining.recipes import Recipe, Report, Trained
from engram.retraining.run_folder import Part
from engram.retraining.selection import EXAMPLES_AT_ONCE, NOTHING, Task
from engram.retraining.stack import Objective, Stack
from engram.retraining.user_function import (
    Watched,
    check_finite,
    check_same_parameters,
    has_moved,
    kept_state,
    trained_model,
)

PERTURBATION = 1e-3  # share of |theta| by which the starts of repeated refits differ
BASELINE_ROUNDS = 4  # refits with everything, each from the last one, until one has converged
UNCHANGED_ALLOWED = 3  # copies that a function may leave as they were before it is an error


def _unreported(count: float) -> None:
    """Work that the progress bar does not count."""


@dataclass(frozen=True, eq=False)
class RecipeWorker:
    """Stacks of copies, trained by a recipe."""

    task: Task
    stack: Stack
    opener: Opener
    recipe: Recipe
    evaluation: tuple[Batch, Tensor] | None

    def refit(self, report: Report) -> Part:
        """Trainings with nothing left out: outputs on all data, and the baseline's parameters."""
        start = self.stack.start[None]
        began = time.perf_counter()
        baseline = self._baseline(start, report)
        trained = [baseline, *self._repeats(baseline.flat, start, report)]
        flat = torch.cat([t.flat for t in trained])
        part: Part = {
            "refit_outputs": _finite(self.stack.predict(flat).detach(), self.recipe),
            "gradient_norm": torch.cat([t.gradient_norm for t in trained]),
            "wanted_norm": torch.cat([t.wanted_norm for t in trained]),
            "baseline": trained[0].flat[0],
            "seconds": torch.tensor([time.perf_counter() - began], dtype=torch.float64),
        }
        return part | self._evaluated(flat, "refit_evaluation")

    def _baseline(self, start: Tensor, report: Report) -> Trained:
        """The refit with everything; a recipe that converges may go on with what it has learned."""
        trained = self._train(self.recipe, (NOTHING,), start, self.task.seed, report)
        for _ in range(BASELINE_ROUNDS - 1 if self.recipe.converges else 0):
            if bool(trained.gradient_norm <= trained.wanted_norm):
                break
            recipe = self._recipe_at(trained.flat[0])
            trained = self._train(recipe, (NOTHING,), trained.flat, self.task.seed, _unreported)
        return trained

    def _recipe_at(self, flat: Tensor) -> Recipe:
        """The recipe with what it knows about the model at other parameters."""
        if torch.equal(flat, self.stack.start):
            return self.recipe
        model = private_copy(self.stack.model)
        with torch.no_grad():
            for name, value in self.stack.layout.unflatten(flat).items():
                model.get_parameter(name).copy_(value)
        return self.recipe.rebind(model, self.opener, self.stack.mean_prior)

    def _repeats(self, baseline: Tensor, start: Tensor, report: Report) -> Iterator[Trained]:
        """More refits: a little off the baseline, or, where chance decides, with other seeds."""
        recipe, seed = self._recipe_at(baseline[0]), self.task.seed
        numbers = range(1, self.task.refits)
        if recipe.converges:
            starts = torch.cat([self._perturbed(baseline, seed + number) for number in numbers])
            for part in starts.split(self.stack.copies_at_once()):
                yield self._train(recipe, (NOTHING,) * len(part), part, seed, report)
            return
        for number in numbers:
            yield self._train(recipe, (NOTHING,), start, seed + number - 1, report)

    def _perturbed(self, baseline: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(baseline.shape, generator=generator, dtype=baseline.dtype)
        noise = noise.to(baseline.device)
        return baseline + PERTURBATION * baseline.norm() / noise.norm() * noise

    def copies(self, numbers: Sequence[int], baseline: Tensor, report: Report) -> Iterator[Part]:
        """Left-out copies, a stack at a time."""
        first = baseline.to(self.stack.start) if self.recipe.converges else self.stack.start
        recipe = self._recipe_at(first)
        for chosen in torch.tensor(numbers).split(self.stack.copies_at_once()):
            began = time.perf_counter()
            members = tuple(self.task.selection.members[int(n)] for n in chosen)
            start = first.expand(len(members), -1)
            trained = self._train(recipe, members, start, self.task.seed, report)
            outputs = [
                self.stack.outputs(trained.flat[c : c + 1], part)[0].detach()
                for c, own in enumerate(members)
                for part in self.stack.parts(self.stack.batch.select(own), 1)
            ]
            part = {
                "number": chosen,
                "outputs_without": _finite(torch.cat(outputs), recipe),
                "gradient_norm": trained.gradient_norm,
                "wanted_norm": trained.wanted_norm,
                "evaluations": trained.evaluations,
                "seconds": torch.full((len(chosen),), time.perf_counter() - began).double()
                / len(chosen),
            }
            part |= self._evaluated(trained.flat, "evaluation")
            if self.task.keep_models:
                named = self.stack.layout.unflatten(trained.flat)
                part |= {f"parameter {name}": value.clone() for name, value in named.items()}
            yield part

    def _train(
        self,
        recipe: Recipe,
        members: tuple[Tensor, ...],
        start: Tensor,
        seed: int,
        report: Report,
    ) -> Trained:
        trained = recipe.train(Objective(self.stack, members), start, seed, report)
        broken = ~torch.isfinite(trained.flat).all(1)
        if broken.any():
            number = int(broken.nonzero()[0])
            raise TrainingError(
                "training that stays finite",
                f"NaN or infinity in the copy without {members[number].tolist()[:5]} "
                f"({self.recipe!r})",
                "lower the learning rate, or use another recipe",
            )
        return trained

    def _evaluated(self, flat: Tensor, name: str) -> Part:
        if self.evaluation is None:
            return {}
        batch, targets = self.evaluation
        rows, position = [], 0
        with torch.no_grad():
            for part in self.stack.parts(batch, len(flat)):
                outputs = self.stack.outputs(flat, part)
                own = targets[position : position + len(part)]
                position += len(part)
                rows.append(torch.stack([self.task.likelihood.loss(f, own) for f in outputs]))
        return {name: torch.cat(rows, dim=1)}


def _finite(outputs: Tensor, recipe: Recipe) -> Tensor:
    if not torch.isfinite(outputs).all():
        raise TrainingError(
            "training after which outputs are finite",
            f"NaN or infinity ({recipe!r})",
            "lower the learning rate, or use another recipe",
        )
    return outputs


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
            trained = self.train(self.model, NOTHING, seed).model
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
            made = self.train(self.model, members, self.task.seed)
            trained = made.model
            unchanged += not (made.returned or made.moved)
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

    def outputs(self, trained: nn.Module, data: Data, members: Tensor | None) -> Tensor:
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

    def _evaluated(self, trained: nn.Module) -> Tensor | None:
        if self.task.evaluate_on is None:
            return None
        outputs = self.outputs(trained, self.task.evaluate_on, None)
        targets = torch.cat(
            [b.targets.cpu() for b in Batches(self.task.evaluate_on, EXAMPLES_AT_ONCE)]
        )
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
        np.random.seed(seed % 2**32)  # numpy's seeds have 32 bits
        yield

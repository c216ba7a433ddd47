"""The worker of a recipe, which trains a stack of copies at a time.

It gives the same parts of a run as one by one: the refits with nothing left out, then the left-out
copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from engram.core.data.batches import Batch
from engram.core.progress import Bar
from engram.core.state.copies import private_copy
from engram.errors import TrainingError
from engram.problem import Opener
from engram.retraining.pace import say_cost
from engram.retraining.recipes import Recipe, Report, Trained
from engram.retraining.run_folder import Part
from engram.retraining.selection import NOTHING, Task
from engram.retraining.stack import Objective, Stack

PERTURBATION = 1e-3  # share of |theta| by which the starts of repeated refits differ
# Said beforehand of the refit with everything: where the gradient is more than this share of
# the regulariser's own, it has a minimum to find, which took some hundreds of gradients
SETTLED = 1e-3
FIRST_REFIT = 500
BASELINE_ROUNDS = 4  # refits with everything, each from the last one, until one has converged


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

    @property
    def num_refits(self) -> int:
        """Trainings with nothing left out."""
        return self.task.refits

    def say_cost(self, trainings: int, shown: bool) -> None:
        """What they will take at least, from the time of one gradient.

        Products with the Hessian and preconditioning come on top, and take longer for small nets.
        """
        stack, gradients = self.stack, float(self.recipe.gradients)
        everything = torch.ones(1, stack.num_data).to(stack.start)
        for _ in range(2):  # the first one sets things up
            began = time.perf_counter()
            gradient = stack.value_and_gradient(stack.start[None], everything)[1]
        each = time.perf_counter() - began
        how = f"some {gradients:.0f} gradients over the data"
        pull = (stack.prior_precision * stack.start).norm()
        if self.recipe.converges and bool(gradient.norm() > SETTLED * pull):
            gradients += FIRST_REFIT / trainings
            how += f", and {FIRST_REFIT} to find a minimum first"
        say_cost(trainings, gradients * each, how, shown, "at least")

    def refit(self, bar: Bar) -> Part:
        """Trainings with nothing left out: outputs on all data, and the baseline's parameters."""
        start, watched = self.stack.start[None], self._watched(bar)
        began = time.perf_counter()
        baseline = watched._baseline(start, bar.update)
        trained = [baseline, *watched._repeats(baseline.flat, start, bar.update)]
        flat = torch.cat([t.flat for t in trained])
        part: Part = {
            "refit_outputs": _finite(self.stack.predict(flat).detach(), self.recipe),
            "gradient_norm": torch.cat([t.gradient_norm for t in trained]),
            "wanted_norm": torch.cat([t.wanted_norm for t in trained]),
            "baseline": trained[0].flat[0],
            "seconds": torch.tensor([time.perf_counter() - began], dtype=torch.float64),
        }
        return part | self._evaluated(flat, "refit_evaluation")

    def _watched(self, bar: Bar) -> RecipeWorker:
        """The same, telling a bar of every gradient: the first copies take long to be done."""
        number = count(1)

        def told() -> None:
            bar.tell(f"{next(number):,} gradients over the data")

        return replace(self, stack=replace(self.stack, on_gradient=told))

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

    def copies(self, numbers: Sequence[int], baseline: Tensor, bar: Bar) -> Iterator[Part]:
        """Left-out copies, a stack at a time."""
        watched = self._watched(bar)
        first = baseline.to(self.stack.start) if self.recipe.converges else self.stack.start
        recipe = self._recipe_at(first)
        for chosen in torch.tensor(numbers).split(self.stack.copies_at_once()):
            began = time.perf_counter()
            members = tuple(self.task.selection.members[int(n)] for n in chosen)
            start = first.expand(len(members), -1)
            trained = watched._train(recipe, members, start, self.task.seed, bar.update)
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

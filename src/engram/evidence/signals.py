r"""The signals that cost some passes over the data: curvature, tangent and a second opinion.

- *curvature*: how well S stands in for the Hessian H, by the ends of the spectrum of
  :math:`S^{-1} H`. All of it is 1 where S is H; below 0 H is indefinite: the parameters are at a
  saddle, or not yet near a minimum;
- *tangent*: an example's own outputs when the parameters really move, and along the tangent;
- *second opinion*: scores by steps of the exact Hessian of the remaining data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.core.progress import progress_over
from engram.core.storage.kinds import checked, numbers, positions
from engram.evidence.correlation import agreement
from engram.evidence.exact_newton_steps import second_steps
from engram.evidence.objective import Objective
from engram.sensitivity.effects import effect
from engram.sensitivity.result import Result

#: Length of a new Lanczos vector over the largest curvature below which it is rounding.
BREAKDOWN = 1e-10


@dataclass(frozen=True, eq=False)
class Signals:
    """What an assessment measures, over a sample of n examples.

    Args:
        smallest_curvature, largest_curvature: ends of the spectrum of S^-1 H that were found. Both
            are 1 where the posterior's precision is the exact Hessian; below 0 it is indefinite.
        linearisation: how far the model at theta + delta_theta is from its tangent there: sum over
            the sample of the predictions' errors over the sum of their deviations.
        residual: median over the sample of what the posterior's step leaves unsolved of the exact
            system H step = gradient; 0 where it solves it, 1 as bad as no step.
        spearman, pearson: of the result's scores with those of the second opinion.
        negative_share: share of the sample whose exact system has negative curvature.
        positions, indices: the sample's rows in the result, and examples of the data, [n].
        score, second_score: the result's, and those of the second opinion, [n].
        linearisation_error, residuals: of each example of the sample, [n].
    """

    smallest_curvature: float
    largest_curvature: float
    linearisation: float
    residual: float
    spearman: float
    pearson: float
    negative_share: float
    positions: Tensor = field(repr=False)
    indices: Tensor = field(repr=False)
    score: Tensor = field(repr=False)
    second_score: Tensor = field(repr=False)
    linearisation_error: Tensor = field(repr=False)
    residuals: Tensor = field(repr=False)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"second opinion        Spearman {self.spearman:.3f}, Pearson {self.pearson:.3f}"
                f" on {len(self.indices)} examples",
                f"linearisation error   {self.linearisation:.2g} of the deviation",
                f"curvature             {self.smallest_curvature:.2g} to"
                f" {self.largest_curvature:.2g} times the posterior's (1 where it is exact,"
                " below 0 at a saddle)",
                f"left unsolved         {self.residual:.2g} of the gradient, median",
            ]
        )


SAMPLED = {
    "positions": positions("n"),
    "indices": positions("n"),
    "score": numbers("n"),
    "second_score": numbers("n"),
    "linearisation_error": numbers("n", finite=False),
    "residuals": numbers("n", finite=False),
}
checked(Signals, SAMPLED)


def measure(
    objective: Objective, result: Result, sample: int, rounds: int, seed: int, progress: bool
) -> Signals:
    """All signals; the sample is spread evenly over the ranks of the score."""
    order = result.score.argsort(stable=True)
    spread = torch.linspace(0, len(order) - 1, sample).round().long()
    positions = order[spread]
    indices = result.indices[positions]
    ends = spectrum(objective, 2 * rounds, seed, progress)
    steps = second_steps(objective, indices, rounds, progress)
    own = displacement(objective, indices, steps.first)
    other = displacement(objective, indices, steps.second)
    size = own.tangent.abs().sum()
    score = other.displaced.abs().sum(1).cpu()
    agreed = agreement(result.score[positions], score, torch.zeros_like(indices), seed)
    return Signals(
        smallest_curvature=ends.smallest,
        largest_curvature=ends.largest,
        linearisation=float((own.displaced - own.tangent).abs().sum() / size) if size > 0 else 0.0,
        residual=float(steps.residual.median()),
        spearman=agreed.spearman.value,
        pearson=agreed.pearson.value,
        negative_share=float(steps.negative.double().mean()),
        positions=positions,
        indices=indices,
        score=result.score[positions],
        second_score=score,
        linearisation_error=own.error.cpu(),
        residuals=steps.residual.cpu(),
    )


@dataclass(frozen=True, eq=False)
class Displacement:
    """Change of the predictions of n examples, each with its own step, [n, K]."""

    tangent: Tensor
    displaced: Tensor

    @property
    def error(self) -> Tensor:
        """How far the tangent is off, relative to what it says, L1 over outputs, [n]."""
        off = (self.displaced - self.tangent).abs().sum(1)
        size = self.tangent.abs().sum(1)
        return off / size.clamp(min=torch.finfo(size.dtype).tiny)


def displacement(objective: Objective, indices: Tensor, steps: Tensor) -> Displacement:
    """Each example at theta + its step: linearised, and run."""
    opened = objective.opened
    found: dict[str, list[Tensor]] = {"linearised": [], "displaced": []}
    for index, step in zip(indices, steps, strict=True):
        delta = objective.layout.unflatten(step)
        for place, rows in found.items():
            batches = opened.batches.subset(index[None])
            moved = effect(opened, batches, 1, delta, place)
            mean = opened.likelihood.mean
            rows.append(mean(moved.outputs_without) - mean(moved.outputs))
    return Displacement(torch.cat(found["linearised"]), torch.cat(found["displaced"]))


@dataclass(frozen=True)
class Spectrum:
    """Smallest and largest value found; the true ends lie at these or further out."""

    smallest: float
    largest: float


def spectrum(objective: Objective, steps: int, seed: int, progress: bool) -> Spectrum:
    """Lanczos in the inner product of S, from a random draw of the posterior.

    Args:
        steps: products with the Hessian, one pass over the data each.
    """
    vector = _draw(objective, seed)
    basis: list[Tensor] = []
    images: list[Tensor] = []  # S times the basis
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in progress_over(range(steps), "curvature", progress):
        image = objective.multiply(vector[None])[0]
        length = math.sqrt(max(float(vector @ image), 0.0))
        if basis:
            if length <= BREAKDOWN * max(map(abs, diagonal)):
                break
            beside.append(length)
        basis.append(vector / length)
        images.append(image / length)
        product = objective.hessian_times(basis[-1][None])[0]
        diagonal.append(float(basis[-1] @ product))
        vector = objective.solve(product[None])[0]
        for _ in range(2):  # rounding takes orthogonality away
            known, weighted = torch.stack(basis), torch.stack(images)
            vector = vector - (weighted @ vector) @ known
        if len(basis) == objective.layout.num_params:
            break
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    outer = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
    values = torch.linalg.eigvalsh(matrix + outer + outer.T)
    return Spectrum(float(values[0]), float(values[-1]))


def _draw(objective: Objective, seed: int) -> Tensor:
    posterior = objective.posterior
    device = objective.prior.device
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = posterior.sample(1, generator)
    moved = {name: drawn[name] - posterior.mean[name] for name in objective.layout.names}
    return objective.layout.flatten(moved)[0]

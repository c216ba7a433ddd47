r"""Signals of an assessment, from passes over the data: curvature, linearisation, exact steps.

- *curvature*: how well S stands in for the Hessian H, by the ends of the spectrum of
  :math:`S^{-1} H`. All of it is 1 where S is H; below 0 H is indefinite: the parameters are at a
  saddle, or not yet near a minimum;
- *tangent*: an example's own outputs when the parameters really move, and along the tangent;
- *second opinion*: scores by steps of the exact Hessian of the remaining data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.core.progress import Bar, progress_over
from engram.core.storage.kinds import checked, numbers, positions
from engram.curvature.operators import GaussNewton, Hessian
from engram.curvature.per_example import (
    PerExampleCurvature,
    PerExampleGaussNewton,
    PerExampleHessian,
)
from engram.engine.session import Session
from engram.evidence.correlation import agreement
from engram.linalg.cg import Limits
from engram.linalg.krylov import ritz_values
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.effects import effect
from engram.sensitivity.exact_steps import solve_without
from engram.sensitivity.result import Result

TOLERANCE = 1e-3  # relative residual, in the norm of S^-1, at which exact steps end before `rounds`


class Objective:
    """The Hessian H of what was minimised, and the S in its place, over what S covers.

    Args:
        opened: model, data and likelihood.
        posterior: gives S.
        prior_share: times the posterior's delta, the delta of the training. Of a training that was
            stopped its time counts instead, N / C, which holds the weights where they are; and
            the Gauss-Newton matrix stands for H, which is rarely positive definite there.
    """

    def __init__(self, opened: Session, posterior: Posterior, prior_share: float = 1.0) -> None:
        self.opened, self.posterior = opened, posterior
        self.layout = posterior.layout
        prior = prior_share * posterior.prior_vector
        if posterior.training is not None:
            prior = posterior.prior_with_time
        kind = Hessian if posterior.training is None else GaussNewton
        self.hessian = kind(opened, self.layout, prior.to(posterior.mean[self.layout.names[0]]))

    def solve(self, vectors: Tensor) -> Tensor:
        """S^-1 v for every row."""
        return self.posterior.solve_rows(vectors, self.layout)

    def multiply(self, vectors: Tensor) -> Tensor:
        """S v for every row."""
        return self.posterior.multiply_rows(vectors, self.layout)


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
    agreed = agreement(result.score[positions], score)
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
class Steps:
    """Steps of the parameters for n examples, [n, P].

    Args:
        first: S^-1 g, the posterior's own.
        second: after the rounds of conjugate gradients.
        residual: what the first step leaves of H step = g, relative, [n].
        negative: where a direction of negative curvature was met, [n].
    """

    first: Tensor
    second: Tensor
    residual: Tensor
    negative: Tensor


def second_steps(objective: Objective, indices: Tensor, rounds: int, progress: bool) -> Steps:
    r"""Both steps of these examples, the second by rounds of conjugate gradients on

    .. math:: (H - H_i)\, \delta_i = \nabla \ell_i

    preconditioned with S, which gives the first step; a round is a product with H per example.
    """
    opened, layout = objective.opened, objective.layout
    gradients, targets = [], []
    for observed in opened.passes("gradients", indices):
        gradients.append(observed.trace.own_gradient_rows(observed.residual, layout))
        targets.append(observed.targets)
    gradient, batch = torch.cat(gradients), opened.placed(opened.batches.take(indices))
    first = objective.solve(gradient)
    off = gradient - objective.hessian @ first
    left = _inner(off, objective.solve(off)) / _inner(gradient, first)
    own: PerExampleCurvature
    if objective.posterior.training is None:
        own = PerExampleHessian(opened, batch, torch.cat(targets), layout)
    else:
        own = PerExampleGaussNewton(opened, opened.observe(batch), layout)
    bar = Bar(rounds, "second opinion", progress)
    limits = Limits(TOLERANCE, rounds, after_each=bar.update)
    found = solve_without(objective.posterior, own.of, gradient, limits, objective.hessian)
    bar.close()
    untouched = (found.vectors == 0).all(1, keepdim=True)
    second = torch.where(untouched, first, found.vectors)
    return Steps(first, second, left.clamp(min=0).sqrt(), found.indefinite)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(1)


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
            moved = effect(opened, index[None], delta, place)
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

    def rows(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda vector: product(vector[None])[0]

    values = ritz_values(
        rows(lambda v: objective.hessian @ v),
        rows(objective.multiply),
        rows(objective.solve),
        _draw(objective, seed),
        progress_over(range(steps), "curvature", progress),
    )
    return Spectrum(float(values[0]), float(values[-1]))


def _draw(objective: Objective, seed: int) -> Tensor:
    posterior = objective.posterior
    device = posterior.mean[objective.layout.names[0]].device
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = posterior.sample(1, generator)
    moved = {name: drawn[name] - posterior.mean[name] for name in objective.layout.names}
    return objective.layout.flatten(moved)[0]

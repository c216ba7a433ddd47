"""The signals that cost some passes over the data: curvature, tangent and a second opinion."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.evidence.correlation import agreement
from engram.evidence.displacement import displacement
from engram.evidence.exact_newton_steps import second_steps
from engram.evidence.objective import Objective
from engram.evidence.spectrum import spectrum
from engram.sensitivity.result import Result


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

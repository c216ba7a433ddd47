"""The signals that cost some passes over the data: curvature, tangent and a second opinion."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from engram.retraining.agreement import agreement
from engram.sensitivity.result import Result
from engram.trust.displacement import displacement
from engram.trust.objective import Objective
from engram.trust.second_opinion import second_steps
from engram.trust.spectrum import spectrum


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
        indices: the sample, [n].
        second_score: scores of the second opinion, [n].
        linearisation_error, residuals: of each example of the sample, [n].
    """

    smallest_curvature: float
    largest_curvature: float
    linearisation: float
    residual: float
    spearman: float
    pearson: float
    negative_share: float
    indices: Tensor = field(repr=False)
    second_score: Tensor = field(repr=False)
    linearisation_error: Tensor = field(repr=False)
    residuals: Tensor = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists by name."""
        return {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in asdict(self).items()
        }


def measure(
    objective: Objective, result: Result, sample: int, rounds: int, seed: int, progress: bool
) -> Signals:
    """All signals; the sample is spread evenly over the ranks of the score."""
    order = result.score.argsort(stable=True)
    spread = torch.linspace(0, len(order) - 1, min(sample, len(order))).round().long()
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
        indices=indices,
        second_score=score,
        linearisation_error=own.error.cpu(),
        residuals=steps.residual.cpu(),
    )

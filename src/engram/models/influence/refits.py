"""The few examples that one Newton step is least sure of, left out by fitting again."""

from __future__ import annotations

import torch
from tqdm.auto import tqdm

from engram.models.predictor.fit import Fit
from engram.sensitivity.estimators import Estimate


def with_refits(fit: Fit, estimate: Estimate, above: float, progress: bool) -> Estimate:
    """The estimate, with the truth in place of it for examples of a leverage above the number.

    A refit that does not come to a minimum (nothing holds a coefficient without the example) leaves
    the estimate as it is, flagged.
    """
    chosen = (fit.leverage > above).nonzero()[:, 0].tolist()
    deviation, flagged = estimate.deviation.clone(), estimate.flagged.clone()
    for i in tqdm(chosen, "refits", disable=not progress, delay=2.0, leave=False):
        again = fit.moved_without([i])
        row = fit.objective.design.rows(torch.tensor([i]))
        flagged[i] = not again.converged
        if again.converged:
            deviation[i] = row.outputs(again.coefficients)[0] - fit.outputs[i]
    moved = fit.outputs + deviation
    change = fit.likelihood.mean(moved) - fit.means
    return Estimate(
        deviation,
        change,
        fit.weighted.loss(moved, fit.targets),
        flagged,
        estimate.eigenvalues,
    )

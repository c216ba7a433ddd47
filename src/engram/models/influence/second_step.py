r"""How far a second step would go after the first: what one Newton step leaves undone.

The first step leads to :math:`\theta_i = \theta + \Delta_i`. Where the curvature of the remaining
examples is another one there, the gradient of their objective does not vanish, and

.. math:: d_2 = -J_i S_{\setminus i}^{-1} \nabla F_{\setminus i}(\theta_i)

is what the example's outputs would still move by. It needs a pass over all data for every example,
and is done for those that can matter: a large leverage, and a loss that rises when left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.models.predictor.fit import Fit
from engram.sensitivity.estimators import Estimate

PRODUCTS = 1e9  # multiplications that all second steps may take together
FEWEST = 64  # examples that are looked at, whatever it takes
ENTRIES = 4_000_000  # outputs at a time


def candidates(fit: Fit, step: Estimate) -> Tensor:
    """The examples to look at, those first whose loss can be wrong by most."""
    design = fit.objective.design
    each = design.num_data * design.width * len(fit.coefficients)
    count = max(FEWEST, int(PRODUCTS / each))
    rise = (step.loo_loss - fit.weighted.loss(fit.outputs, fit.targets)).abs()
    priority = torch.where(step.flagged | (design.weights == 0), -1.0, fit.leverage.abs() * rise)
    chosen = priority.argsort(descending=True)[:count]
    return chosen[priority[chosen] >= 0]


def second_step(fit: Fit, step: Estimate, chosen: Tensor, share: float) -> Tensor:
    """What the second step changes the losses of the chosen examples by, [M]."""
    size = max(1, ENTRIES // (fit.objective.design.num_data * len(fit.coefficients)))
    parts = [_second(fit, step, part, share) for part in chosen.split(size)]
    return torch.cat(parts) if parts else step.loo_loss[:0]


def _second(fit: Fit, step: Estimate, chosen: Tensor, share: float) -> Tensor:
    design, likelihood = fit.objective.design, fit.objective.likelihood
    delta = fit.parameter_deviation(share, chosen)  # [M, K, P]
    moved = fit.coefficients + delta
    outputs = fit.outputs + (design.matrix @ delta.mT)  # [M, N, K]
    flat = outputs.reshape(-1, outputs.shape[2])
    targets = fit.targets.repeat(len(chosen), 1)
    residual = likelihood.residual(flat, targets).reshape(outputs.shape)
    row = torch.arange(len(chosen))
    weights = design.weights.repeat(len(chosen), 1)
    weights[row, chosen] -= share * design.taken[chosen]
    # a fit that stopped early has a gradient of its own, which is no doing of the example
    held = fit.objective.gradient(fit.coefficients, fit.outputs)
    gradient = (weights[:, :, None] * residual).mT @ design.matrix + design.penalty * moved - held
    solved = fit.factor.solve(gradient.reshape(len(chosen), -1)).reshape(gradient.shape)
    pulled = (solved * design.matrix[chosen, None, :]).sum(2)
    further = -torch.linalg.solve(fit.kept_share(chosen, share), pulled)
    first = outputs[row, chosen]
    return _losses(fit, chosen, first + further) - step.loo_loss[chosen]


def _losses(fit: Fit, chosen: Tensor, outputs: Tensor) -> Tensor:
    """Of some examples at other outputs; NaN outside the support."""
    everywhere = fit.outputs.index_copy(0, chosen, outputs)
    losses = fit.weighted.loss(everywhere, fit.targets)
    return torch.where(fit.objective.inside(everywhere), losses, torch.nan)[chosen]

r"""How far a second step would go after the first: what one Newton step leaves undone.

The first step leads to :math:`\theta_i = \theta + \Delta_i`. Where the curvature of the remaining
examples is another one there, the gradient of their objective does not vanish, and

.. math:: d_2 = -J_i S_{\setminus i}^{-1} \nabla F_{\setminus i}(\theta_i)

is what the example's outputs would still move by, with the curvature from before. Where targets
are nearly separated gradient and curvature vanish together on the way out, so that a step with the
curvature from before sees nothing; along the first step the present one is had as easily,

.. math:: d_2' = -J_i\Delta_i\, \frac{\Delta_i'\nabla F_{\setminus i}(\theta_i)}
    {\Delta_i' S_{\setminus i}(\theta_i) \Delta_i}

and the larger change of the two is taken. This needs a pass over all data for every example, and is
done for those that can matter: a large leverage, and a loss that rises when left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.models.predictor.fit import Fit
from engram.sensitivity.estimators.base import Estimate

PRODUCTS = 1e9  # multiplications that all second steps may take together
FEWEST = 64  # examples that may be looked at, whatever it takes
AT_FIRST = 8  # of these; the others only where one of the first goes on, or it costs little
CHEAP = 1e8  # multiplications
SMALLEST = 1e-5  # leverage times change of loss, relative to the mean loss
UNSEEN = 0.1  # of the largest change by a step of this size: it may pass the example by at first
ENTRIES = 4_000_000  # outputs at a time


def candidates(fit: Fit, step: Estimate) -> Tensor:
    """The examples to look at, those first whose loss can be wrong by most."""
    design = fit.objective.design
    count = max(FEWEST, int(PRODUCTS / _products(fit)))
    losses = fit.weighted.loss(fit.outputs, fit.targets)
    # what one step leaves undone is of the size of its own change times the leverage
    priority = _leverage(fit) * (step.loo_loss - losses).abs()
    lowest = SMALLEST * float((design.used * losses.abs()).sum() / design.used.sum())
    priority = torch.where(step.flagged | (design.weights == 0), -1.0, priority)
    chosen = priority.argsort(descending=True)[:count]
    return chosen[priority[chosen] > lowest]


def _products(fit: Fit) -> int:
    """Multiplications of a pass over all data."""
    return fit.objective.design.num_data * fit.objective.design.width * len(fit.coefficients)


def _leverage(fit: Fit) -> Tensor:
    """The own leverage, or the expected one: a loss without curvature is held by the others."""
    if len(fit.coefficients) > 1:
        return fit.leverage.abs()
    factor = fit.weighted.hessian_factor(fit.outputs, fit.targets)
    return torch.maximum(fit.leverage.abs(), (factor.square() * fit.variances)[:, 0, 0])


@dataclass(frozen=True, eq=False)
class Look:
    """Coefficients without each of some examples, and what is left to do from there.

    Attributes:
        coefficients: where it is, [M, K, P].
        outputs: of the examples themselves, [M, K].
        step: the next one, with the curvature of the fit, [M, K, P].
        change: of the examples' losses, by that step or by one along the way from the fit, or a
            tenth of what a step of that size can change, whichever is largest, [M]; NaN where there
            is no telling.
    """

    coefficients: Tensor
    outputs: Tensor
    step: Tensor
    change: Tensor


def first_look(fit: Fit, chosen: Tensor, share: float, scale: Tensor) -> Look:
    """What one step leaves undone, of the first of these examples or of all.

    They come in the order of how far they can go on, so that the others are left alone where none
    of the first changes by more than the scale.
    """

    def of(part: Tensor) -> Look:
        return look(fit, fit.coefficients + fit.parameter_deviation(share, part), part, share)

    count = max(AT_FIRST, int(CHEAP / _products(fit)))
    found = of(chosen[:count])
    if len(chosen) <= count or bool((found.change.abs() <= scale[:count]).all()):
        return found
    return _joined([found, of(chosen[count:])])


def look(fit: Fit, coefficients: Tensor, chosen: Tensor, share: float) -> Look:
    """What a further step from these coefficients [M, K, P] would change."""
    size = max(1, ENTRIES // (fit.objective.design.num_data * len(fit.coefficients)))
    pairs = zip(coefficients.split(size), chosen.split(size), strict=True)
    return _joined([_look(fit, moved, part, share) for moved, part in pairs])


def _joined(parts: Sequence[Look]) -> Look:
    names = ("coefficients", "outputs", "step", "change")
    return Look(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _look(fit: Fit, moved: Tensor, chosen: Tensor, share: float) -> Look:
    design, row = fit.objective.design, torch.arange(len(chosen))
    delta = moved - fit.coefficients
    moves = design.matrix @ delta.mT  # of all outputs, [M, N, K]
    outputs = fit.outputs + moves
    weights = design.weights.repeat(len(chosen), 1)
    weights[row, chosen] -= share * design.taken[chosen]
    residual, curved = _derivatives(fit, outputs, moves)
    # a fit that stopped early has a gradient of its own, which is no doing of the example
    held = fit.objective.gradient(fit.coefficients, fit.outputs)
    gradient = (weights[:, :, None] * residual).mT @ design.matrix + design.penalty * moved - held
    step = -_solved(fit, gradient, chosen, share)
    further = (step * design.matrix[chosen, None, :]).sum(2)
    bend = (weights * (moves * curved).sum(2)).sum(1)
    bend = bend + (design.penalty * delta.square()).sum((1, 2))
    along = -(gradient * delta).sum((1, 2)) / torch.where(bend > 0, bend, torch.nan)
    along = torch.where(bend == 0, 0.0, along)  # an example that moves nothing
    own = outputs[row, chosen]
    here = _losses(fit, chosen, own)
    changes = [
        _losses(fit, chosen, own + more) - here
        for more in (further, along[:, None] * moves[row, chosen])
    ]
    reach = _reach(fit, chosen, share, -(gradient * step).sum((1, 2)), residual[row, chosen])
    larger = torch.stack([changes[0].abs(), changes[1].abs(), UNSEEN * reach]).amax(0)
    # a minimum that pushes others out of their support is none
    inside = fit.objective.inside(outputs.flatten(0, 1)).reshape(weights.shape)
    unknown = changes[0].isnan() | changes[1].isnan() | ~(inside | (weights == 0)).all(1)
    change = torch.where(unknown, torch.nan, larger)
    return Look(moved, own, step, change)


def _reach(fit: Fit, chosen: Tensor, share: float, decrement: Tensor, residual: Tensor) -> Tensor:
    """The largest change of the own loss, to first order, by any step of this Newton decrement."""
    inverse = torch.linalg.inv(fit.kept_share(chosen, share))
    variance = torch.einsum("mkl,mlk->m", inverse, fit.unit_variances[chosen])
    slope = residual.norm(dim=1) / fit.dispersion
    return slope * (variance * decrement.clamp(min=0)).clamp(min=0).sqrt()


def _solved(fit: Fit, gradient: Tensor, chosen: Tensor, share: float) -> Tensor:
    """S without each example, as it was at the fit, applied inversely to rows [M, K, P]."""
    design, shape = fit.objective.design, gradient.shape
    solved = fit.factor.solve(gradient.reshape(len(chosen), -1)).reshape(shape)
    rows = design.matrix[chosen, None, :]
    pulled = torch.linalg.solve(fit.kept_share(chosen, share), (solved * rows).sum(2))
    likelihood, outputs = fit.likelihood, fit.outputs[chosen]
    back = likelihood.hessian_times(outputs, fit.targets[chosen], pulled) * fit.dispersion
    seeds = share * design.taken[chosen, None] * back
    return solved + fit.factor.solve((seeds[:, :, None] * rows).reshape(len(chosen), -1)).reshape(
        shape
    )


def _derivatives(fit: Fit, outputs: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
    """Residuals at other outputs of all data, [M, N, K], and their Hessians times the moves."""
    likelihood, targets = fit.objective.likelihood, fit.targets.repeat(len(outputs), 1)
    flat = outputs.reshape(-1, outputs.shape[2])
    residual = likelihood.residual(flat, targets)
    curved = likelihood.hessian_times(flat, targets, moves.reshape(flat.shape))
    return residual.reshape(outputs.shape), curved.reshape(outputs.shape)


def _losses(fit: Fit, chosen: Tensor, outputs: Tensor) -> Tensor:
    """Of some examples at other outputs; NaN outside the support."""
    everywhere = fit.outputs.index_copy(0, chosen, outputs)
    losses = fit.weighted.loss(everywhere, fit.targets)
    return torch.where(fit.objective.inside(everywhere), losses, torch.nan)[chosen]

r"""Leave-one-out by fitting again, for the examples that one Newton step does not settle.

Most arrive by a few more steps with the curvature of the fit, which all examples take together; the
others by Newton's method, one after another. Where the other examples do not determine the
coefficients:

- the remaining targets are *separated*: the coefficients go to infinity in a direction in which no
  other example's loss rises. The whole data were not separated, so it is the left-out example that
  this direction is wrong for, and its loss is infinite;
- the mean of the example leaves its support, as a link like ``identity`` lets it: no density;
- the example alone determines some combination of columns (leverage 1): its output without it can
  be any number, and is NaN.

Which examples these are a second step says: how far it would go after the first.
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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.core.progress import progress_over
from engram.errors import DesignError, SeparationError
from engram.models.glm.fit import Fit
from engram.models.glm.newton import minimise
from engram.models.glm.reduced_objective import objective_without
from engram.sensitivity.estimators.base import Estimate

# the look for examples that a second step would move: time against what may be missed
LOOK_PRODUCTS = 1e9  # multiplications that all looks may take together: about a second
FEWEST_LOOKS = 64  # examples that may be looked at, whatever it takes
AT_FIRST = 8  # of these; the others only where one of the first goes on, or it costs little
# (measured in docs/decisions.md: 0.33 of a fit of 100,000 rows, where 64 would be 1.28)
CHEAP = 1e8  # multiplications of looks that are made without asking: a tenth of a second
SMALLEST = 1e-5  # leverage times change of loss, relative to the mean loss, that is looked at
UNSEEN = 0.1  # share of the largest change by a step of its size that a look counts at least: the
# step may pass the example by at first
ENTRIES = 4_000_000  # outputs at a time: 32 MB
# following them: time against digits
NEGLIGIBLE = 3e-4  # change by the second step, relative to the loss and to the mean loss
FINE = 1e-4  # share of that below which steps with the curvature of the fit have arrived
SHRINKING = 0.6  # of the change before, or Newton's method takes over
SIMPLIFIED_STEPS = 25  # such steps at most: the change is then below 1e-5 of the first
REFIT_PRODUCTS = 2e11  # multiplications that all refits may take together: minutes
FEWEST_REFITS = 256  # refits that are made, whatever it takes
ITERATIONS = 6  # Newton steps of a refit, about, for that budget
ENDLESS = 1e-3  # output over the largest one of an example: the others go to infinity with it


@dataclass(frozen=True, eq=False)
class Settled:
    """Leave-one-out followed to the minimum.

    Attributes:
        estimate: one Newton step, with the truth in its place where that matters.
        refitted: where it stands, [N].
        left: sum of the absolute changes of losses by a second step where it was not followed.
    """

    estimate: Estimate
    refitted: Tensor
    left: float

    def distance(self, other: Estimate, counts: Tensor) -> float:
        """Error of another estimate's losses, relative to the sum of these.

        Args:
            counts: how many examples each row stands for, [N].
        """
        known = ~self.estimate.loo_loss.isnan() & (counts > 0)
        ours, theirs = self.estimate.loo_loss[known], other.loo_loss[known]
        gaps = torch.where(ours == theirs, 0.0, (ours - theirs).abs())
        apart = (counts[known] * gaps).sum() + self.left
        total = (counts[known] * torch.where(torch.isfinite(ours), ours, 0.0).abs()).sum()
        return float(apart / total) if float(total) > 0 else math.nan


def settle(fit: Fit, step: Estimate, share: float, progress: bool) -> Settled:
    """Follow every example to its minimum that a second step moves, or whose first was held.

    Args:
        fit: of all data.
        step: one Newton step for every example, from the fit.
        share: of each example that is taken out.
        progress: show a bar when refits take longer than a few seconds.
    """
    used = fit.objective.design.used
    chosen = candidates(fit, step)
    if len(chosen) == 0:
        return _followed(fit, step, step.flagged.nonzero()[:, 0], share, progress)
    typical = (used * fit.weighted.loss(fit.outputs, fit.targets).abs()).sum() / used.sum()
    scale = NEGLIGIBLE * torch.maximum(step.loo_loss[chosen].abs(), typical)
    first = first_look(fit, chosen, share, scale)
    chosen, scale = chosen[: len(first.change)], scale[: len(first.change)]
    moving = (~(first.change.abs() <= scale)).nonzero()[:, 0]  # also where it left the support
    arrived, outputs = _by_simplified_newton(fit, first, moving, chosen, scale, share)
    estimate = _arrived(fit, step, chosen[moving[arrived]], outputs[arrived])
    held = (step.flagged & ~step.deviation.isnan().any(1)).nonzero()[:, 0]
    settled = _followed(fit, estimate, torch.cat([held, chosen[moving[~arrived]]]), share, progress)
    refitted = settled.refitted.index_fill(0, chosen[moving[arrived]], True)
    left = torch.where(refitted[chosen] | first.change.isnan(), 0.0, first.change.abs())
    return Settled(settled.estimate, refitted, float((used[chosen] * left).sum()))


def _by_simplified_newton(
    fit: Fit, first: Look, moving: Tensor, chosen: Tensor, scale: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Simplified Newton steps (curvature of the fit), all examples together, while they shrink.

    Returns:
        Where they arrived, [M], and the examples' outputs, [M, K].
    """
    arrived, outputs = torch.zeros(len(moving), dtype=torch.bool), first.outputs[moving].clone()
    active = first.change[moving].isfinite().nonzero()[:, 0]
    position, before = first.coefficients[moving] + first.step[moving], first.change[moving].abs()
    for _ in range(SIMPLIFIED_STEPS):
        if len(active) == 0:
            break
        now = look(fit, position[active], chosen[moving[active]], share)
        outputs[active], size = now.outputs, now.change.abs()
        arrived[active] = size <= FINE * scale[moving[active]]
        going = (size < SHRINKING * before[active]) & ~arrived[active]
        before[active], position[active] = size, now.coefficients + now.step
        active = active[going]
    return arrived, outputs


def _arrived(fit: Fit, estimate: Estimate, chosen: Tensor, outputs: Tensor) -> Estimate:
    """Other outputs for some examples."""
    everywhere = fit.outputs.index_copy(0, chosen, outputs)
    change = fit.likelihood.mean(everywhere) - fit.means
    loss = fit.weighted.loss(everywhere, fit.targets)
    return replace(
        estimate,
        deviation=estimate.deviation.index_copy(0, chosen, outputs - fit.outputs[chosen]),
        prediction_deviation=estimate.prediction_deviation.index_copy(0, chosen, change[chosen]),
        loo_loss=estimate.loo_loss.index_copy(0, chosen, loss[chosen]),
    )


def _followed(
    fit: Fit, estimate: Estimate, wanted: Tensor, share: float, progress: bool
) -> Settled:
    """Newton's method for one example after another."""
    refitted = torch.zeros_like(estimate.flagged)
    wanted = wanted[: _affordable(fit)]
    for i in progress_over(wanted.tolist(), "refits", progress):
        again = _refitted(fit, estimate, i, share)
        refitted[i] = again is not None
        estimate = _held(estimate, i) if again is None else again
    return Settled(estimate, refitted, 0.0)


def _affordable(fit: Fit) -> int:
    size = len(fit.coefficients) * fit.objective.design.width
    return max(
        FEWEST_REFITS, int(REFIT_PRODUCTS / (ITERATIONS * fit.objective.design.num_data * size**2))
    )


def _held(estimate: Estimate, i: int) -> Estimate:
    """One step for example i, flagged: it is not where Newton's method would have gone."""
    return replace(estimate, flagged=estimate.flagged.index_fill(0, torch.tensor([i]), True))


def _refitted(fit: Fit, estimate: Estimate, i: int, share: float) -> Estimate | None:
    """The estimate with the truth for example i; None where Newton's method does not arrive."""
    index = torch.tensor([i])
    try:
        again = fit.moved_without(index, torch.tensor([share]))
    except SeparationError:
        return _infinite(fit, estimate, index, share)
    except DesignError:  # the others do not determine the coefficients
        nothing = torch.full_like(fit.outputs[:1], math.nan)
        return _put(estimate, index, nothing, nothing, math.nan)
    if not again.converged:
        return None
    moved = fit.objective.design.rows(index).outputs(again.coefficients)
    change = fit.likelihood.mean(moved) - fit.means[index]
    everywhere = fit.outputs.index_copy(0, index, moved)
    inside = bool(fit.likelihood.inside(everywhere)[i])
    loss = float(fit.weighted.loss(everywhere, fit.targets)[i]) if inside else math.inf
    return _put(estimate, index, moved - fit.outputs[index], change, loss)


def _infinite(fit: Fit, estimate: Estimate, index: Tensor, share: float) -> Estimate:
    """Coefficients without end: outputs in the direction that Newton's method takes."""
    rest = objective_without(fit.objective, index, torch.tensor([share], dtype=torch.float64))
    far = minimise(rest, fit.coefficients).coefficients
    moved = fit.objective.design.rows(index).outputs(far)
    gap = moved - fit.outputs[index]
    endless = torch.where(gap.abs() > ENDLESS * gap.abs().max(), gap.sign() * math.inf, gap)
    return _put(estimate, index, endless, fit.likelihood.mean(moved) - fit.means[index], math.inf)


def _put(
    estimate: Estimate, index: Tensor, deviation: Tensor, change: Tensor, loss: float
) -> Estimate:
    """Other numbers for one example, flagged where they are not finite."""
    return replace(
        estimate,
        deviation=estimate.deviation.index_copy(0, index, deviation),
        prediction_deviation=estimate.prediction_deviation.index_copy(0, index, change),
        loo_loss=estimate.loo_loss.index_fill(0, index, loss),
        flagged=estimate.flagged.index_fill(0, index, not math.isfinite(loss)),
    )


def candidates(fit: Fit, step: Estimate) -> Tensor:
    """The examples to look at, those first whose loss can be wrong by most."""
    design = fit.objective.design
    count = max(FEWEST_LOOKS, int(LOOK_PRODUCTS / _products(fit)))
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
    inside = fit.likelihood.inside(outputs.flatten(0, 1)).reshape(weights.shape)
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
    return torch.where(fit.likelihood.inside(everywhere), losses, torch.nan)[chosen]

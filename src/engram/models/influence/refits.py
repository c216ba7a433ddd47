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
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.core.errors import DesignError, SeparationError
from engram.core.progress import progress_over
from engram.models.influence.second_step import Look, candidates, first_look, look
from engram.models.predictor.fit import Fit
from engram.models.predictor.leaving_out import objective_without
from engram.models.predictor.newton import minimise
from engram.sensitivity.estimators.base import Estimate

NEGLIGIBLE = 3e-4  # change by the second step, relative to the loss and to the mean loss
FINE = 1e-4  # of that, where steps with the curvature of the fit have arrived
SHRINKING = 0.6  # of the change before, or they are given up
CHORDS = 25
PRODUCTS = 2e11  # multiplications that all refits may take together
FEWEST = 256  # refits that are made, whatever it takes
ITERATIONS = 6  # that a refit takes, about


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
    arrived, outputs = _by_chords(fit, first, moving, chosen, scale, share)
    estimate = _arrived(fit, step, chosen[moving[arrived]], outputs[arrived])
    held = (step.flagged & ~step.deviation.isnan().any(1)).nonzero()[:, 0]
    settled = _followed(fit, estimate, torch.cat([held, chosen[moving[~arrived]]]), share, progress)
    refitted = settled.refitted.index_fill(0, chosen[moving[arrived]], True)
    left = torch.where(refitted[chosen] | first.change.isnan(), 0.0, first.change.abs())
    return Settled(settled.estimate, refitted, float((used[chosen] * left).sum()))


def _by_chords(
    fit: Fit, first: Look, moving: Tensor, chosen: Tensor, scale: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Steps with the curvature of the fit, all examples together, for as long as they shrink.

    Returns:
        Where they arrived, [M], and the examples' outputs, [M, K].
    """
    arrived, outputs = torch.zeros(len(moving), dtype=torch.bool), first.outputs[moving].clone()
    active = first.change[moving].isfinite().nonzero()[:, 0]
    position, before = first.coefficients[moving] + first.step[moving], first.change[moving].abs()
    for _ in range(CHORDS):
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
    return max(FEWEST, int(PRODUCTS / (ITERATIONS * fit.objective.design.num_data * size**2)))


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
    inside = bool(fit.objective.inside(everywhere)[i])
    loss = float(fit.weighted.loss(everywhere, fit.targets)[i]) if inside else math.inf
    return _put(estimate, index, moved - fit.outputs[index], change, loss)


def _infinite(fit: Fit, estimate: Estimate, index: Tensor, share: float) -> Estimate:
    """Coefficients without end: outputs in the direction that Newton's method takes."""
    rest = objective_without(fit.objective, index, torch.tensor([share], dtype=torch.float64))
    far = minimise(rest, fit.coefficients).coefficients
    moved = fit.objective.design.rows(index).outputs(far)
    gap = moved - fit.outputs[index]
    endless = torch.where(gap.abs() > 1e-3 * gap.abs().max(), gap.sign() * math.inf, gap)
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

r"""``newton``: the Newton step of the remaining data, for posteriors with the exact Hessian.

.. math:: d = J \,(S - H_i)^{-1} \nabla \ell_i

``corrected`` takes only the Gauss-Newton part of the example's own Hessian :math:`H_i` out of S.
Where S is the Hessian of the objective, all of it can be taken out: what is left is the Hessian of
the remaining data, and the step is Newton's towards their minimum. Where what remains is not
positive definite, or the step is far longer than that of ``corrected``, the latter is kept. Where S
is known in some directions only, what is in the latter's place is too short for examples that bring
most of the curvature along it: of these, a step that is far longer is shortened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.core.parameters import Layout, Named
from engram.curvature.per_example import PerExampleHessian
from engram.engine.session import Observed as ObservedByNet
from engram.engine.session import Session
from engram.linalg.cg import Solution
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators.base import (
    Estimate,
    Estimator,
    Observed,
    Setting,
    displaced,
    estimate_at,
)
from engram.sensitivity.estimators.corrected import corrected
from engram.sensitivity.estimators.linear import linear
from engram.sensitivity.exact_steps import TOLERANCE, own_limits, solve_without

# When the cautious step of `corrected` is taken instead (measured: docs/decisions.md)
LARGEST_GAIN = 2.0  # length of a step over that of `corrected`; beyond, S - H_i is nearly singular
MOSTLY_OWN = 0.5  # share of the curvature along the cautious step that is the example's own


def has_own_hessians(posterior: Posterior) -> bool:
    """Whether every example's own Hessian is in the precision, so that it can be taken out."""
    return posterior.exact and len(posterior.blocks) == 1 and posterior.blocks[0].couples_all


@dataclass(frozen=True)
class Decided:
    """Which examples of a batch take the Newton step, and which the cautious one.

    Args:
        cautious: the estimate where the step is not taken.
        vectors: the steps, [B, P].
        deviation: that they give, [B, K].
        taken: where they are taken, [B].
    """

    cautious: Estimate
    vectors: Tensor
    deviation: Tensor
    taken: Tensor


def newton(observed: Observed, setting: Setting) -> Estimate:
    """d of every example of a batch.

    Example:
        For linear regression the step is exact, as that of ``corrected``: V e / (1 - V) with
        V = x^2 / (x'x + 1).

        >>> import engram
        >>> x, y = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[3.0], [1.0]]).double()
        >>> model = torch.nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(5 / 6)  # ridge: x'y / (x'x + 1)
        >>> posterior = engram.laplace(
        ...     model, (x, y), likelihood="gaussian", curvature="hessian", prior_precision=1.0
        ... )
        >>> found = engram.sensitivities(model, (x, y), posterior, estimator="newton")
        >>> v, e = x**2 / 6, 5 / 6 * x - y
        >>> torch.allclose(found.deviation, v * e / (1 - v))
        True
    """
    assert isinstance(observed, ObservedByNet), "only nets have own Hessians"
    found = _decided(observed, setting)
    deviation = torch.where(found.taken[:, None], found.deviation, found.cautious.deviation)
    change, loo_loss = displaced(setting.likelihood, observed.outputs, observed.targets, deviation)
    return replace(
        found.cautious,
        deviation=deviation,
        prediction_deviation=change,
        loo_loss=loo_loss,
        pull=None,
    )


def newton_step(observed: ObservedByNet, setting: Setting) -> tuple[Named, bool, bool]:
    """The step of the parameters for one example, whether it is Newton's, and the flag."""
    layout, found = setting.posterior.layout, _decided(observed, setting)
    flagged, taken = bool(found.cautious.flagged[0]), bool(found.taken[0])
    if taken:
        return _first(layout, found.vectors), taken, flagged
    assert found.cautious.pull is not None
    pulled = observed.trace.own_gradient_rows(found.cautious.pull, layout)
    return setting.posterior.solve(_first(layout, pulled)), taken, flagged


def _first(layout: Layout, rows: Tensor) -> Named:
    return {name: value[0] for name, value in layout.unflatten(rows).items()}


def _decided(observed: ObservedByNet, setting: Setting) -> Decided:
    layout = setting.posterior.layout
    if setting.posterior.is_partial:
        cautious, own_share = cautious_step(observed, setting)
    else:
        cautious = corrected(observed, setting)
        own_share = torch.zeros_like(cautious.loo_loss)
    solution = _solve(observed, setting, layout)
    steps = layout.unflatten(solution.vectors)
    deviation = observed.trace.own_tangents(steps)
    gain = (observed.residual * deviation).sum(1)
    largest = LARGEST_GAIN * (observed.residual * cautious.deviation).sum(1)
    solved = ~solution.indefinite & (solution.residual <= TOLERANCE)
    long = solved & (gain > largest) & (own_share > MOSTLY_OWN)
    scale = torch.where(long, largest / gain, 1.0)[:, None]
    taken = long | (solved & (gain >= 0) & (gain <= largest))  # false for NaN too
    return Decided(cautious, scale * solution.vectors, scale * deviation, taken)


def _solve(observed: ObservedByNet, setting: Setting, layout: Layout) -> Solution:
    """(S - H_i)^-1 grad loss_i of every example."""
    assert isinstance(setting.opened, Session), "the products with own Hessians need the model"
    right = observed.trace.own_gradient_rows(observed.residual, layout)
    own = PerExampleHessian(setting.opened, observed.batch, observed.targets, layout)
    limits = own_limits(setting.posterior, right)
    return solve_without(setting.posterior, own.of, right, limits)


def cautious_step(observed: Observed, setting: Setting) -> tuple[Estimate, Tensor]:
    r"""``corrected`` along the step itself: :math:`d / (1 - h)` for d = V e, h = d' L d / e' d.

    The whole of V would take as many solves as there are outputs. Beside it h [B], the share of
    the curvature along the step that is the example's own.
    """
    plain = linear(observed, setting)
    weighted = setting.likelihood.hessian_times(observed.outputs, observed.targets, plain.deviation)
    gain = (observed.residual * plain.deviation).sum(1)
    share = (plain.deviation * weighted).sum(1) / gain.clamp_min(torch.finfo(gain.dtype).tiny)
    held = share.clamp(0, setting.guard)
    deviation = plain.deviation / (1 - held)[:, None]
    pull = observed.residual / (1 - held)[:, None]
    return estimate_at(observed, setting, deviation, share > setting.guard, None, pull), share


ESTIMATOR = Estimator(
    "newton",
    newton,
    from_variance=False,
    fits=has_own_hessians,
    asks_for="a posterior with the exact Hessian",
    remedy='fit it with engram.laplace(..., curvature="hessian"), or use "corrected"',
)

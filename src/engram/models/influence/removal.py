r"""Leaving out a group, with all cross terms.

.. math:: \Delta\theta = \Big(S - \sum_{j \in M} \epsilon_j w_j J_j'\Lambda_j J_j\Big)^{-1}
    \sum_{j \in M} \epsilon_j w_j \nabla\ell_j

In whitened rows :math:`Z = X_M R^{-1}` with :math:`A = \mathrm{diag}(\epsilon w \Lambda)` and
:math:`V = ZZ'` the inverse is one of the group's size, by Woodbury:
:math:`\Delta\theta = R^{-1} Z' (I - A V)^{-1} (\epsilon w e)`. Exact for least squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.core.arguments import one_of
from engram.core.selection import check_group
from engram.errors import DataError, PosteriorError
from engram.likelihoods.weighted import Weighted
from engram.models.glm.design import Design, check_rank
from engram.models.glm.factor import curvature
from engram.models.glm.fit import Fit
from engram.models.glm.frames import check_rows
from engram.models.glm.reduced_objective import objective_without
from engram.sensitivity.effects import Effect
from engram.sensitivity.group_steps import Matrix
from engram.sensitivity.groups import Removal
from engram.sensitivity.step_signals import StepSignals

ESTIMATORS = ("exact", "corrected")
SMALLEST = 1e-300  # of what is divided by
SMALLEST_LEFT = 1e-10  # share of the precision along some direction; less is lost in rounding


def remove_group(
    fit: Fit,
    indices: Sequence[int] | Tensor,
    *,
    shares: float | Sequence[float] | Tensor = 1.0,
    estimator: str = "exact",
    evaluate_on: tuple[Any, ...] | None = None,
) -> Removal:
    """The effect of leaving out, or reweighting, a group of examples.

    Args:
        fit: of a linear, generalised linear or multinomial model.
        indices: the group.
        shares: how much of each is taken out, one number or one each: 1 is removal, -1 counts an
            example twice. Of a row that stands for several examples 1 takes out one of them, its
            frequency the whole row.
        estimator: ``exact`` fits again without the group, from where the model is; ``corrected`` is
            one Newton step with the precision of the remaining data. The same for least squares.
        evaluate_on: inputs and targets of other data to see the effect on, each of weight 1; and
            their offset, which a fit with an offset needs.

    Returns:
        A removal, as from :func:`engram.remove`. Losses as in :func:`sensitivities_of`.

    Example:
        >>> from engram.models import fit_linear
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [5.0], [6.0]]), torch.arange(5.0) ** 2
        >>> removal = remove_group(fit := fit_linear(x, y), [3, 4])
        >>> moved = fit.coefficients + removal.delta["coefficients"]
        >>> torch.allclose(moved, fit_linear(x[:3], y[:3], dispersion=1.0).coefficients)
        True
    """
    chosen, _ = check_group(indices, None, len(fit.targets))
    each: Any = [shares] * len(chosen) if np.ndim(shares) == 0 else shares
    chosen, taken = check_group(chosen, each, len(fit.targets))
    one_of("estimator", estimator, ESTIMATORS, 'use "exact"')
    one_step = estimator == "corrected" or fit.likelihood.is_quadratic
    delta = _step(fit, chosen, taken) if one_step else _refitted(fit, chosen, taken)
    rows = fit.objective.design.rows(chosen)
    group = _effect(fit, rows, fit.targets[chosen], chosen, delta)
    evaluation = None
    if evaluate_on is not None:
        evaluation = _effect(fit, *_other_data(fit, evaluate_on), delta)
    step, exact = {"coefficients": delta}, fit.posterior.exact
    own = Matrix.WITHOUT_HESSIAN if exact else Matrix.WITHOUT_GAUSS_NEWTON
    matrix = own if one_step else None  # a refit has none
    facts = (False, estimator, "displaced", matrix)
    true = not one_step or fit.likelihood.is_quadratic
    signals = None if true else _signals(fit, chosen, taken, delta)
    return Removal(chosen, taken, step, group, evaluation, *facts, signals=signals, exact=true)


def _other_data(fit: Fit, data: tuple[Any, ...]) -> tuple[Design, Tensor, Tensor]:
    """Design, targets and numbers of data that the fit has not seen."""
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise DataError(
            "evaluate_on as (X, y) or (X, y, offset)", type(data).__name__, "pass one tuple"
        )
    check_rows(**dict(zip(("X", "y", "offset"), data, strict=False)))
    design = fit.objective.design
    matrix, targets = design.read_inputs(data[0]), fit.read_targets(data[1])
    if len(matrix) != len(targets):
        raise DataError(
            "as many rows of X as targets",
            f"{len(matrix)} and {len(targets)}",
            "pass X and y of the same examples",
        )
    offset = design.read_offset(data[2] if len(data) == 3 else None, len(matrix))
    ones = torch.ones_like(offset[:, 0])
    other = Design(matrix, False, design.names, design.penalty, ones, offset)
    return other, targets, torch.arange(len(matrix))


def _refitted(fit: Fit, chosen: Tensor, shares: Tensor) -> Tensor:
    """Delta theta by fitting again, [K, P]; an error where the rest has no coefficients."""
    again = fit.moved_without(chosen, shares)
    if not again.converged:
        raise PosteriorError(
            "a refit without the group that comes to a minimum",
            f"none after {again.iterations} iterations",
            'use penalty > 0, leave out fewer, or estimator="corrected"',
        )
    return again.coefficients - fit.coefficients


def _step(fit: Fit, chosen: Tensor, shares: Tensor) -> Tensor:
    """Delta theta, [K, P]."""
    design = fit.objective.design.rows(chosen)
    outputs, targets = fit.outputs[chosen], fit.targets[chosen]
    weights = shares * design.taken
    of_row = shares / design.counts.clamp(min=1.0)
    likelihood = fit.likelihood
    pull = weights[:, None] * likelihood.residual(outputs, targets) * fit.dispersion
    hessian = likelihood.output_hessian(outputs, targets) * fit.dispersion
    if len(fit.coefficients) > 1 or len(chosen) >= design.width:
        taken = curvature(design, of_row[:, None, None] * hessian)
        return _dense(fit, taken, design.pull_back(pull), chosen, shares)
    rows = fit.factor.whiten(design.matrix)
    variance, removed = rows @ rows.mT, weights * hessian[:, 0, 0]
    values, vectors = torch.linalg.eigh(variance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    lost = torch.linalg.eigvalsh(root @ (removed[:, None] * root))
    _check_left(fit, float(lost[-1]), chosen, shares)
    identity = torch.eye(len(chosen), dtype=torch.float64)
    inner = torch.linalg.solve(identity - removed[:, None] * variance, pull)
    return inner.mT @ rows @ fit.factor.inverse.mT


def _dense(fit: Fit, taken: Tensor, pull: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """The same with an inverse of the parameters' size, for large groups and several outputs."""
    inverse = fit.factor.inverse
    values, vectors = torch.linalg.eigh(inverse.mT @ taken @ inverse)
    _check_left(fit, float(values[-1]), chosen, shares)
    whitened = vectors.mT @ (inverse.mT @ pull.reshape(-1))
    return (inverse @ (vectors @ (whitened / (1 - values)))).reshape(pull.shape)


def _check_left(fit: Fit, lost: float, chosen: Tensor, shares: Tensor) -> None:
    """Raise unless a proper posterior is left when the share ``lost`` of some direction goes."""
    if lost < 1 - SMALLEST_LEFT:
        return
    if bool((shares >= 1).all()):
        counts = fit.objective.design.counts
        kept = counts.index_add(0, chosen, -shares) > 0
        remedy = "leave out fewer examples, or use penalty > 0"
        if kept.any():
            check_rank(fit.objective.design.rows(kept.nonzero()[:, 0]), remedy)
    raise PosteriorError(
        "a proper posterior of the data that remains",
        f"a precision that is singular or negative without these {len(chosen)} examples "
        f"({lost:.6g} of the information on some combination of columns is taken out)",
        "take out fewer examples or smaller shares, or use penalty > 0",
    )


def _signals(fit: Fit, chosen: Tensor, shares: Tensor, delta: Tensor) -> StepSignals | None:
    r"""What tells whether one Newton step is enough: a second one, taken where the first led.

    .. math:: d_2 = -S_{\setminus M}(\theta + \Delta)^{-1} \nabla F_{\setminus M}(\theta + \Delta)

    None where shares above 1 leave an objective that has no minimum to step to.
    """
    try:
        rest = objective_without(fit.objective, chosen, shares)
    except PosteriorError:
        return None
    moved = fit.coefficients + delta
    before, after = rest.design.outputs(fit.coefficients), rest.design.outputs(moved)
    factor = rest.factor(after) if bool(fit.likelihood.inside(after).all()) else None
    if factor is None:
        return StepSignals(math.inf, second_step=math.inf)
    # a fit that stopped early has a gradient of its own, which is no doing of the group
    held = fit.objective.gradient(fit.coefficients, fit.outputs)
    own = float(((held - rest.gradient(fit.coefficients, before)) * delta).sum())
    left = (rest.gradient(moved, after) - held).reshape(1, -1)
    further = delta - factor.solve(left).reshape(delta.shape)
    pulled = float((held * delta).sum())
    fallen = rest.value(fit.coefficients, before) - rest.value(moved, after) + pulled
    rows, targets = fit.objective.design.rows(chosen), fit.targets[chosen]
    first, second = (_effect(fit, rows, targets, chosen, d).change for d in (delta, further))
    others = _effect(fit, rest.design, rest.targets, torch.arange(len(before)), delta)
    return StepSignals(
        others.change,
        agreement=fallen / max(own / 2, SMALLEST),
        drift=abs(pulled) / max(abs(own), SMALLEST),
        second_step=abs(second - first) / max(abs(second), SMALLEST),
    )


def _effect(fit: Fit, rows: Design, targets: Tensor, indices: Tensor, delta: Tensor) -> Effect:
    outputs = rows.outputs(fit.coefficients)
    moved = outputs + rows.matrix @ delta.mT
    likelihood = Weighted(fit.likelihood, rows.weights, rows.precisions)
    without = torch.where(fit.likelihood.inside(moved), likelihood.loss(moved, targets), torch.inf)
    loss = likelihood.loss(outputs, targets)
    return Effect(indices, outputs, moved, loss, without, fit.likelihood)

r"""Linear, generalised linear and multinomial models, fitted by Newton's method.

.. math:: \min_\theta \sum_i w_i \ell(y_i, \mu(x_i'\theta + o_i)) + \tfrac12 \theta'D\theta

For least squares leaving out is exact. With :math:`S = X'WX + D`, the residual
:math:`r_i = y_i - f_i`, the variance
:math:`v_i = x_i'S^{-1}x_i` and the leverage :math:`h_i = w_i v_i`, the memory-perturbation equation
with the precision of the remaining data is training again:

.. math:: \theta^{\setminus i} - \theta = -\frac{S^{-1} x_i w_i r_i}{1 - h_i}, \qquad
    f_i^{\setminus i} - f_i = -\frac{h_i r_i}{1 - h_i}
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.core.arguments import truth
from engram.errors import ArgumentError, PosteriorError, TargetError
from engram.likelihoods import ELEMENTWISE, Categorical, ElementwiseLikelihood, Gaussian, Link
from engram.models.glm.design import as_column, check_rank, count_of, read_design
from engram.models.glm.fit import Fit, fit_at
from engram.models.glm.frames import MENTIONED, check_rows
from engram.models.glm.newton import Objective, minimise, starting_point
from engram.models.glm.separation import check_one_class, check_separation

RENUMBER = "number the classes: numpy.unique(y, return_inverse=True)[1]"


def fit_glm(
    inputs: Any,
    targets: Any,
    likelihood: str | ElementwiseLikelihood = "bernoulli",
    *,
    link: str | Link | None = None,
    penalty: float | Sequence[float] = 0.0,
    intercept: bool = True,
    penalise_intercept: bool = False,
    weights: Any = None,
    offset: Any = None,
    dispersion: float | None = None,
    hessian: str = "observed",
) -> Fit:
    """Fit a generalised linear model.

    Args:
        inputs: X, [N, P]: tensor, array, data frame or sparse matrix.
        targets: y, [N]; for shares of trials the share, with the trials as weights.
        likelihood: ``gaussian``, ``bernoulli``, ``poisson``, ``gamma``, ``inverse_gaussian``,
            ``negative_binomial``, ``tweedie``, or an object such as
            ``NegativeBinomial(0.7)``, with its link inside.
        link: ``identity``, ``log``, ``logit``, ``probit``, ``cloglog``, ``loglog``, ``cauchit``,
            ``inverse``, ``inverse_squared``, ``sqrt``; the likelihood's usual one if not given.
        penalty: penalty/2 theta^2 is added to the sum of losses at dispersion 1; one number or one
            per column of X.
        penalise_intercept: give the intercept the penalty too (one number).
        weights: of each example's loss; what a dispersion is divided by, where there is one.
        offset: added to the linear predictor, for instance a log exposure.
        dispersion: if not given, that of a likelihood object where it is not 1, else Pearson's
            estimate where the likelihood has one.
        hessian: ``observed`` or ``expected`` curvature in the precision; they are the same for
            canonical links.

    Example:
        >>> x, y = torch.tensor([[0.0], [0.0], [1.0], [1.0]]), torch.tensor([1.0, 3.0, 6.0, 10.0])
        >>> fit_glm(x, y, "poisson").coefficients.exp()  # mean of the first two, then the ratio
        tensor([[2., 4.]], dtype=torch.float64)

    Reference:
        D. Pregibon, *Logistic regression diagnostics*, Annals of Statistics 9, 1981.
    """
    kind = _elementwise(likelihood, link)
    if dispersion is None and kind.dispersion != 1:
        dispersion = kind.dispersion
    count = count_of(targets)
    check_rows(X=inputs, y=targets)
    if truth("penalise_intercept", penalise_intercept) and not isinstance(penalty, Real):
        raise ArgumentError(
            "one number as penalty with penalise_intercept=True",
            repr(penalty),
            "for one per column pass intercept=False, and a column of ones with its own penalty",
        )
    design = read_design(
        inputs,
        count,
        penalty=penalty,
        intercept=intercept,
        intercept_penalty=float(penalty) if isinstance(penalty, Real) and penalise_intercept else 0,
        weights=weights,
        offset=offset,
    )
    column = as_column("targets", targets, count, 0.0)[:, None]
    unscaled = kind.at(1.0, expected_hessian=False)
    objective = Objective(design, unscaled, unscaled.prepare(column, column))
    return _fitted(objective, dispersion, hessian)


def fit_multinomial(
    inputs: Any,
    targets: Any,
    *,
    penalty: float | Sequence[float] = 0.0,
    intercept: bool = True,
    weights: Any = None,
) -> Fit:
    """Fit a multinomial logistic regression, one row of coefficients per class.

    Every class has coefficients, so that adding the same vector to all of them changes nothing; the
    fit is the one whose rows sum to zero wherever the penalty does not decide.

    Args:
        inputs: X, [N, P].
        targets: whole class numbers from 0, or probabilities [N, K].
        penalty, intercept, weights: as for :func:`fit_glm`.

    Example:
        >>> x, y = torch.zeros(4, 0), torch.tensor([0, 0, 1, 2])
        >>> fit_multinomial(x, y).means[0]
        tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """
    count = count_of(targets)
    check_rows(X=inputs, y=targets)
    design = read_design(inputs, count, penalty=penalty, intercept=intercept, weights=weights)
    return _fitted(Objective(design, Categorical(), class_shares(targets)), None, "observed")


def _elementwise(
    likelihood: str | ElementwiseLikelihood, link: str | Link | None
) -> ElementwiseLikelihood:
    """The likelihood with this name and link; an object stands for itself."""
    if isinstance(likelihood, ElementwiseLikelihood) and link is None:
        return likelihood
    if isinstance(likelihood, str) and likelihood in ELEMENTWISE:
        return ELEMENTWISE[likelihood](link=link)
    raise ArgumentError(
        f"likelihood to be one of {', '.join(ELEMENTWISE)}, or an object with its link inside",
        f"{likelihood!r} with link {link!r}",
        'use likelihood="bernoulli", link="probit", or Bernoulli(link="probit")',
    )


def class_shares(targets: Any) -> Tensor:
    """Class numbers [N] as one-hot rows [N, K]; probabilities as they are."""
    values = _numbers(targets)
    if values.dim() == 2:
        return Categorical().prepare(values.double(), values.double())
    if values.is_floating_point() and not bool((values.frac() == 0).all()):
        strange = values[values.frac() != 0][0]
        raise TargetError("whole class numbers", f"{float(strange):g}", RENUMBER)
    numbers = values.long()
    found = numbers.unique()
    if len(found) < 2 or found[0] < 0:
        raise TargetError(
            "class numbers from 0, of at least two classes",
            f"{found[:MENTIONED].tolist()}",
            RENUMBER,
        )
    missing = (found != torch.arange(len(found))).nonzero()[:, 0]
    if len(missing):
        raise TargetError(
            "class numbers without gaps",
            f"no example of class {int(missing[0])}",
            "renumber the classes that occur",
        )
    return Categorical().form(torch.zeros(len(numbers), len(found)).double(), numbers)


def _numbers(targets: Any) -> Tensor:
    if isinstance(targets, Tensor):
        return targets.detach().cpu()
    try:
        return torch.as_tensor(np.array(targets))
    except (TypeError, ValueError) as error:
        raise TargetError(
            "whole class numbers from 0, or probabilities",
            f"{np.asarray(targets).dtype} values",
            RENUMBER,
        ) from error


def _fitted(objective: Objective, dispersion: float | None, hessian: str) -> Fit:
    check_one_class(objective)
    minimum = minimise(objective, starting_point(objective))
    check_separation(objective, minimum.coefficients)
    if not minimum.converged:
        raise PosteriorError(
            "a minimum that Newton's method reaches",
            f"none after {minimum.iterations} iterations, {minimum.scored} of them by Fisher "
            f"scoring ({objective.likelihood!r})",
            "scale the columns alike, use penalty > 0, or a link that keeps means in the support",
        )
    return fit_at(objective, minimum.coefficients, hessian=hessian, dispersion=dispersion)


def fit_linear(
    inputs: Any,
    targets: Any,
    *,
    penalty: float | Sequence[float] = 0.0,
    intercept: bool = True,
    weights: Any = None,
    offset: Any = None,
    dispersion: float | None = None,
) -> Fit:
    r"""Fit a linear regression.

    .. math:: \min_\theta \tfrac12 \sum_i w_i (y_i - x_i'\theta)^2 + \tfrac12 \theta'D\theta

    Args:
        inputs: X, [N, P]: tensor, array, data frame or sparse matrix.
        targets: y, [N].
        penalty: ridge's alpha, one number or one per column of X; the intercept has none (with
            ``intercept=False`` and a column of ones it has its own).
        weights: w, for instance inverse variances.
        dispersion: noise variance at weight 1; the weighted mean square of the residuals over
            N minus the effective number of parameters if not given.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [6.0]])
        >>> fit = fit_linear(x, x[:, 0] * 2 + torch.tensor([1.0, 1.0, 1.5, 0.0]))
        >>> refit = fit_linear(x[:3], x[:3, 0] * 2 + torch.tensor([1.0, 1.0, 1.5]))
        >>> moved = fit.coefficients + fit.parameter_deviation()[3]
        >>> torch.allclose(moved, refit.coefficients)
        True

    Reference:
        R. D. Cook and S. Weisberg, *Residuals and Influence in Regression*, 1982.
    """
    count = count_of(targets)
    check_rows(X=inputs, y=targets)
    design = read_design(
        inputs, count, penalty=penalty, intercept=intercept, weights=weights, offset=offset
    )
    column = as_column("targets", targets, count, 0.0)[:, None]
    objective = Objective(design, Gaussian(), column)
    factor = objective.factor(design.offset)
    if factor is None:
        check_rank(design)
        raise PosteriorError(
            "a design that determines the coefficients",
            "columns that are dependent but for rounding",
            "drop some of them, or use penalty > 0",
        )
    coefficients = torch.zeros(1, design.width, dtype=torch.float64)
    for _ in range(2):  # the second step restores the digits lost in X'X
        gradient = objective.gradient(coefficients, design.outputs(coefficients))
        coefficients = coefficients - factor.solve(gradient)
    return fit_at(objective, coefficients, dispersion=dispersion, factor=factor)

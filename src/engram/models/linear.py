r"""Least squares, ridge and weighted regression, for which leaving out is exact.

With :math:`S = X'WX + D`, the residual :math:`r_i = y_i - f_i`, the variance
:math:`v_i = x_i'S^{-1}x_i` and the leverage :math:`h_i = w_i v_i`, the memory-perturbation equation
with the precision of the remaining data is training again:

.. math:: \theta^{\setminus i} - \theta = -\frac{S^{-1} x_i w_i r_i}{1 - h_i}, \qquad
    f_i^{\setminus i} - f_i = -\frac{h_i r_i}{1 - h_i}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engram.core.errors import PosteriorError
from engram.likelihoods import Gaussian
from engram.models.predictor.design import as_column, count_of, read_design
from engram.models.predictor.fit import Fit, fit_at
from engram.models.predictor.frames import check_rows
from engram.models.predictor.newton import Objective
from engram.models.predictor.rank import check_rank


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

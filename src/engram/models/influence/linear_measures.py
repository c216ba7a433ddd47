r"""The measures of influence that textbooks name, for least squares, ridge and weighted regression.

All are the leave-one-out deviation in some unit. Named measures keep the sign of the textbooks,
*with the example minus without it*; engram's own deviations have the other one. With the leverage
:math:`h_i`, the residual :math:`r_i` and :math:`s_{(i)}^2`, the dispersion of the fit without i:

.. math:: \mathrm{DFFITS}_i = \frac{f_i - f_i^{\setminus i}}{s_{(i)} \sqrt{v_i}}, \quad
    C_i = \frac{\Delta_i' S \Delta_i}{p\, s^2}, \quad
    \mathrm{DFBETAS}_{ip} = \frac{-\Delta_{ip}}{s_{(i)} \sqrt{(S^{-1})_{pp}}}
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from engram.core.errors import ArgumentError, PosteriorError
from engram.models.influence.leverages import remaining
from engram.models.influence.sensitivities import is_least_squares
from engram.models.influence.tables import measures_frame
from engram.models.predictor.fit import Fit


@dataclass(frozen=True, eq=False)
class LinearMeasures:
    """Measures of every example, [N] unless said otherwise; all equal to fitting again without it.

    Of a row that stands for several examples they are those of one; NaN where an example alone
    determines some combination of columns.

    Attributes:
        leverage: h.
        residual: y - f.
        residual_without: y - f of the fit without the example; PRESS is its sum of squares.
        studentised_internal: residual over its standard error, with s of all data.
        studentised_external: the same with s of the fit without the example.
        dispersion_without: s^2 of that fit.
        cooks_distance: per effective parameter.
        dffits, dffits_internal: change of the own fitted value in standard errors.
        dfbeta: change of the coefficients, [N, P].
        dfbetas: the same in standard errors, [N, P].
        covariance_ratio: determinant of the coefficients' covariance without it over with it.
    """

    leverage: Tensor
    residual: Tensor
    residual_without: Tensor
    studentised_internal: Tensor
    studentised_external: Tensor
    dispersion_without: Tensor
    cooks_distance: Tensor
    dffits: Tensor
    dffits_internal: Tensor
    dfbeta: Tensor
    dfbetas: Tensor
    covariance_ratio: Tensor
    names: tuple[str, ...]

    @property
    def press(self) -> float:
        """The predicted residual sum of squares."""
        return float(self.residual_without.square().sum())

    def to_frame(self) -> pd.DataFrame:
        """One row per example; DFBETAS by column name."""
        return measures_frame(vars(self), self.names)


def linear_measures(fit: Fit) -> LinearMeasures:
    """The measures of a linear fit.

    Args:
        fit: from :func:`engram.models.fit_linear`, with any weights and penalty.

    Example:
        >>> import torch
        >>> from engram.models import fit_linear
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [6.0]]), torch.tensor([1.0, 3.0, 5.5, 12.0])
        >>> measures = linear_measures(fit_linear(x, y))
        >>> without = fit_linear(x[1:], y[1:])
        >>> float(measures.dispersion_without[0] / without.dispersion)
        1.0

    Reference:
        D. A. Belsley, E. Kuh and R. E. Welsch, *Regression Diagnostics*, 1980.
    """
    if not is_least_squares(fit):
        raise ArgumentError(
            "a linear regression", repr(fit.likelihood), "use engram.models.influence.glm_measures"
        )
    design = fit.objective.design
    leverage = fit.leverage / design.counts.clamp(min=1.0)
    variance = fit.variances[:, 0, 0] / fit.dispersion
    residual = (fit.targets - fit.outputs)[:, 0]
    left = remaining(leverage, fit.factor.nothing_left)
    scale = fit.dispersion**0.5
    internal = design.taken.sqrt() * residual / (scale * left.sqrt())
    steps = fit.factor.solve(design.matrix) * (design.taken * residual / left)[:, None]
    dispersion = _dispersion_without(fit, residual, left, steps)
    external = internal * scale / dispersion.sqrt()
    moved = leverage * residual / left
    count = float(fit.leverage.sum())
    log_ratio = design.width * (dispersion / fit.dispersion).log() - left.log()
    unit = fit.factor.covariance.diagonal().sqrt()
    return LinearMeasures(
        leverage=leverage,
        residual=residual,
        residual_without=residual / left,
        studentised_internal=internal,
        studentised_external=external,
        dispersion_without=dispersion,
        cooks_distance=internal.square() * leverage / (left * count),
        dffits=moved / (dispersion * variance).sqrt(),
        dffits_internal=moved / (fit.dispersion * variance).sqrt(),
        dfbeta=steps,
        dfbetas=steps / (dispersion.sqrt()[:, None] * unit),
        covariance_ratio=log_ratio.exp(),
        names=fit.names,
    )


def _dispersion_without(fit: Fit, residual: Tensor, left: Tensor, steps: Tensor) -> Tensor:
    """s^2 of each fit without one example, as that fit would estimate it.

    The penalised sum of squares falls by w r^2 / (1 - h); its penalty is that of the coefficients
    without the example, which are theta minus the step.
    """
    design = fit.objective.design
    taken, penalty, theta = design.taken, design.penalty, fit.coefficients[0]
    moved = theta - steps
    objective = (design.weights * residual.square()).sum() + (penalty * theta.square()).sum()
    squares = objective - taken * residual.square() / left - moved.square() @ penalty
    # tr H = P - tr(D S^-1), and S^-1 without i gains S^-1 x w x' S^-1 / (1 - h)
    solved = fit.factor.solve(design.matrix)
    held = (penalty * fit.factor.covariance.diagonal()).sum()
    held_without = held + taken * (solved.square() @ penalty) / left
    freedom = design.used.sum() - design.used.clamp(max=1.0) - (len(theta) - held_without)
    if bool((freedom <= 1e-8).any()):
        raise PosteriorError(
            "a degree of freedom left when an example is out, to estimate the dispersion with",
            f"{float(freedom[freedom <= 1e-8][0]):.3g} for example "
            f"{int((freedom <= 1e-8).nonzero()[0])}",
            "use more examples, fewer columns or a penalty",
        )
    return squares / freedom

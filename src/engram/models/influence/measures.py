r"""The measures of influence that textbooks name, for linear and generalised linear models.

All are the leave-one-out deviation in some unit. Named measures keep the sign of the textbooks,
*with the example minus without it*; engram's own deviations have the other one. With the leverage
:math:`h_i`, the residual :math:`r_i` and :math:`s_{(i)}^2`, the dispersion of the fit without i:

.. math:: \mathrm{DFFITS}_i = \frac{f_i - f_i^{\setminus i}}{s_{(i)} \sqrt{v_i}}, \quad
    C_i = \frac{\Delta_i' S \Delta_i}{p\, s^2}, \quad
    \mathrm{DFBETAS}_{ip} = \frac{-\Delta_{ip}}{s_{(i)} \sqrt{(S^{-1})_{pp}}}

For least squares, ridge and weighted regression they are exact. For generalised linear models they
are one Newton step from the fit, :math:`\Delta_i = S^{-1} x_i w_i e_i / (1 - h_i)` with
:math:`h_i = w_i \Lambda_i v_i`; the residual e and the Hessian are those of the likelihood *and its
link*, and with the expected Hessian these are Pregibon's measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.errors import ArgumentError, PosteriorError
from engram.models.glm.fit import SMALLEST_FREEDOM, Fit

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class LinearMeasures:
    """Measures of every example, [N] unless said otherwise; all equal to fitting again without it.

    Of a row that stands for several examples they are those of one; NaN where an example alone
    determines some combination of columns.

    Attributes:
        leverage: h, the diagonal of the hat matrix.
        residual: y - f.
        residual_without: y - f of the fit without the example; PRESS is its sum of squares.
        studentised_internal: residual over its standard error, with s of all data.
        studentised_external: the same with s of the fit without the example.
        dispersion_without: s^2 of that fit.
        cooks_distance: per effective parameter.
        dffits: change of the own fitted value in standard errors, with s without the example.
        dffits_internal: the same with s of all data.
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
    if not fit.likelihood.is_quadratic:
        raise ArgumentError(
            "a linear regression", repr(fit.likelihood), "use engram.models.glm_measures"
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
    short = freedom <= SMALLEST_FREEDOM
    if bool(short.any()):
        raise PosteriorError(
            "a degree of freedom left when an example is out, to estimate the dispersion with",
            f"{float(freedom[short][0]):.3g} for example {int(short.nonzero()[0])}",
            "use more examples, fewer columns or a penalty",
        )
    return squares / freedom


def measures_frame(measures: Mapping[str, object], names: tuple[str, ...]) -> pd.DataFrame:
    """One row per example; vectors by their name, DFBETAS by column name."""
    columns = {k: v.numpy() for k, v in measures.items() if isinstance(v, Tensor) and v.dim() == 1}
    scaled = measures["dfbetas"]
    assert isinstance(scaled, Tensor)
    columns |= {f"dfbetas_{name}": scaled[:, k].numpy() for k, name in enumerate(names)}
    import pandas as pd

    return pd.DataFrame(columns).rename_axis("example")


def remaining(leverage: Tensor, nothing: float) -> Tensor:
    """1 - h; NaN where nothing remains, for without it some combination of columns is free."""
    left = 1 - leverage
    return torch.where(left < nothing, torch.nan, left)


@dataclass(frozen=True, eq=False)
class GlmMeasures:
    """One-step measures of every example, [N] unless said otherwise.

    Of a row that stands for several examples they are those of one; NaN where they would be of an
    example that alone determines some combination of columns.

    Attributes:
        leverage: h, by the Hessian that the fit uses.
        residual_pearson: over the root of the variance function, dispersion not included.
        residual_deviance: signed root of the unit deviance times the weight.
        studentised: Pearson residual over its standard error.
        cooks_distance: per effective parameter.
        confidence_interval_displacement: SAS's C, effective parameters times Cook's distance.
        displacement_bar: SAS's CBAR, that times 1 - h.
        deviance_change: of the fit when the example goes, SAS's DIFDEV.
        chi_square_change: of Pearson's statistic, SAS's DIFCHISQ.
        dfbeta: change of the coefficients, [N, P].
        dfbetas: the same in standard errors, [N, P].
        predictor_change: x'theta with the example minus without it.
    """

    leverage: Tensor
    residual_pearson: Tensor
    residual_deviance: Tensor
    studentised: Tensor
    cooks_distance: Tensor
    confidence_interval_displacement: Tensor
    displacement_bar: Tensor
    deviance_change: Tensor
    chi_square_change: Tensor
    dfbeta: Tensor
    dfbetas: Tensor
    predictor_change: Tensor
    names: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row per example; DFBETAS by column name."""
        return measures_frame(vars(self), self.names)


def glm_measures(fit: Fit) -> GlmMeasures:
    """The measures of a generalised linear fit.

    Args:
        fit: from :func:`engram.models.fit_glm`, with any weights, offset and penalty.

    Example:
        >>> from engram.models import fit_glm
        >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0.0, 1.0, 0.0, 1.0])
        >>> float(glm_measures(fit_glm(x, y)).leverage.sum())
        2.0

    Reference:
        D. Pregibon, *Logistic regression diagnostics*, Annals of Statistics 9, 1981.
    """
    likelihood, targets, means = fit.objective.likelihood, fit.targets, fit.means
    spread = likelihood.variance(means)
    unit_deviance = likelihood.unit_deviance(fit.outputs, targets)
    if spread is None or unit_deviance is None:
        raise ArgumentError(
            "a model with one output", repr(likelihood), "use engram.models.sensitivities_of"
        )
    design = fit.objective.design
    weights = design.taken
    leverage = fit.leverage / design.counts.clamp(min=1.0)
    left = remaining(leverage, fit.factor.nothing_left)
    raw = (targets - means)[:, 0]
    pearson = raw * (weights / spread[:, 0]).sqrt()
    deviance = (weights * unit_deviance[:, 0]).sqrt() * torch.sign(raw)
    pull = -weights * likelihood.residual(fit.outputs, targets)[:, 0]
    steps = fit.factor.solve(design.matrix) * (pull / left)[:, None]
    variance = fit.variances[:, 0, 0] / fit.dispersion
    displacement = variance * (pull / left).square() / fit.dispersion
    bar = displacement * left
    return GlmMeasures(
        leverage=leverage,
        residual_pearson=pearson,
        residual_deviance=deviance,
        studentised=pearson / (fit.dispersion * left).sqrt(),
        cooks_distance=displacement / float(fit.leverage.sum()),
        confidence_interval_displacement=displacement,
        displacement_bar=bar,
        deviance_change=deviance.square() / fit.dispersion + bar,
        chi_square_change=pearson.square() / (fit.dispersion * left),
        dfbeta=steps,
        dfbetas=steps / fit.standard_errors[0],
        predictor_change=variance * pull / left,
        names=fit.names,
    )

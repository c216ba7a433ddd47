r"""The measures of influence of generalised linear models: one Newton step from the fit.

.. math:: \Delta_i = \frac{S^{-1} x_i w_i e_i}{1 - h_i}, \qquad h_i = w_i \Lambda_i v_i, \qquad
    C_i = \frac{\Delta_i' S \Delta_i}{p\,\phi}

The residual e and the Hessian are those of the likelihood *and its link*; with the expected Hessian
these are Pregibon's measures. Signs are those of the textbooks, with the example minus without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from engram.core.errors import ArgumentError
from engram.likelihoods import ElementwiseLikelihood
from engram.models.influence.leverages import remaining
from engram.models.influence.tables import measures_frame
from engram.models.predictor.fit import Fit


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
        deviance_change, chi_square_change: of the fit when the example goes, SAS's DIFDEV and
            DIFCHISQ.
        dfbeta, dfbetas: change of the coefficients and the same in standard errors, [N, P].
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
    likelihood = fit.objective.likelihood
    if not isinstance(likelihood, ElementwiseLikelihood):
        raise ArgumentError(
            "a model with one output", repr(likelihood), "use engram.models.sensitivities_of"
        )
    design = fit.objective.design
    targets, means, weights = fit.targets, fit.means, design.taken
    leverage = fit.leverage / design.counts.clamp(min=1.0)
    left = remaining(leverage, fit.factor.nothing_left)
    raw = (targets - means)[:, 0]
    pearson = raw * (weights / likelihood.variance(means)[:, 0]).sqrt()
    kernel = likelihood.kernel(fit.outputs, targets) - likelihood.saturated(targets)
    deviance = (2 * weights * kernel[:, 0].clamp(min=0)).sqrt() * torch.sign(raw)
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

"""A fitted linear predictor: coefficients, precision, dispersion, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engram.core import equation
from engram.core.arguments import one_of, positive
from engram.core.parameters import Layout
from engram.core.selection import check_group
from engram.curvature.kinds import Curvature
from engram.errors import PosteriorError
from engram.likelihoods import Likelihood
from engram.likelihoods.weighted import Weighted
from engram.linalg.dense import DenseBlock
from engram.models.glm.design import as_column, check_rank, count_of
from engram.models.glm.factor import Factor
from engram.models.glm.frames import check_rows
from engram.models.glm.newton import Minimum, Objective
from engram.models.glm.reduced_objective import minimise_again, objective_without
from engram.models.glm.separation import check_separation, check_separation_elsewhere
from engram.posteriors.gaussian import Posterior

if TYPE_CHECKING:
    import pandas as pd

HESSIANS = ("observed", "expected")
SMALLEST_FREEDOM = 1e-6  # degrees of freedom; fewer are rounding, and no dispersion comes of them
FITTED_EXACTLY = 1e-24  # mean square of residuals over that of targets: twelve digits agree


@dataclass(frozen=True, eq=False)
class Fit:
    """A linear, generalised linear or multinomial model at its coefficients.

    Attributes:
        objective: design, likelihood at dispersion 1 and targets.
        coefficients: theta, [K, P]; one row per output.
        factor: root of the precision S at dispersion 1.
        dispersion: of the likelihood; 1 where it has none.
        hessian: ``observed`` or ``expected``, what S sums.
        converged: whether it came to a minimum.
        source: the model of another library that it was read from, if any.
    """

    objective: Objective
    coefficients: Tensor
    factor: Factor = field(repr=False)
    dispersion: float
    hessian: str = "observed"
    converged: bool = True
    source: object = field(default=None, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, as a data frame has them or x0, x1, ..."""
        return self.objective.design.names

    @property
    def targets(self) -> Tensor:
        """y as the likelihood takes it, [N, K]."""
        return self.objective.targets

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood at the fit's dispersion, with the Hessian chosen."""
        return self.objective.likelihood.at(self.dispersion, self.hessian == "expected")

    @cached_property
    def outputs(self) -> Tensor:
        """f = X theta + offset, [N, K]."""
        return self.objective.design.outputs(self.coefficients)

    @cached_property
    def means(self) -> Tensor:
        """Predictions, [N, K]."""
        return self.likelihood.mean(self.outputs)

    @cached_property
    def variances(self) -> Tensor:
        """V_i, the covariance of an example's outputs, [N, K, K], dispersion included."""
        return self.dispersion * self.unit_variances

    @cached_property
    def unit_variances(self) -> Tensor:
        """The same at dispersion 1, [N, K, K]."""
        return self.factor.variances(self.objective.design, len(self.coefficients))

    @cached_property
    def leverage(self) -> Tensor:
        """tr(V_i w_i Lambda_i), [N]; the sum is the effective number of parameters."""
        if len(self.coefficients) == 1:
            return self.weighted.hessian_times(self.outputs, self.targets, self.variances[:, :, 0])[
                :, 0
            ]
        hessian = self.likelihood.output_hessian(self.outputs, self.targets)
        return self.objective.design.weights * (self.variances * hessian.mT).sum((1, 2))

    @cached_property
    def largest_leverage(self) -> Tensor:
        """The largest eigenvalue of an example's own V w Lambda, [N]; 1 leaves nothing over."""
        if len(self.coefficients) == 1:
            return self.leverage / self.objective.design.counts.clamp(min=1.0)
        factor = self.likelihood.hessian_factor(self.outputs, self.targets)
        own = factor.mT @ self.variances @ factor
        return self.objective.design.taken * torch.linalg.eigvalsh(own)[:, -1]

    @property
    def weighted(self) -> Weighted:
        """The likelihood with the examples' weights."""
        design = self.objective.design
        return Weighted(self.likelihood, design.weights, design.precisions)

    @cached_property
    def covariance(self) -> Tensor:
        """Covariance of the coefficients, dispersion times S^-1, [K P, K P]; outputs first."""
        return self.dispersion * self.factor.covariance

    @property
    def standard_errors(self) -> Tensor:
        """Standard errors of the coefficients, [K, P]."""
        return self.covariance.diagonal().sqrt().reshape(self.coefficients.shape)

    @cached_property
    def posterior(self) -> Posterior:
        """N(theta, dispersion S^-1) as any other posterior of engram."""
        mean = {"coefficients": self.coefficients}
        root = self.factor.upper.mT / math.sqrt(self.dispersion)
        return Posterior(
            structure="full",
            mean=mean,
            blocks=(DenseBlock(Layout.of(mean), root),),
            prior_precision=float(self.objective.design.penalty.max()) / self.dispersion,
            num_data=round(float(self.objective.design.used.sum())),
            settings={"curvature": self.hessian, "likelihood": repr(self.likelihood)},
            curvature=Curvature.GGN if self.hessian == "expected" else Curvature.HESSIAN,
            exact=self.hessian != "expected",
            likelihood=self.likelihood,
        )

    def predictor(self, inputs: Any, offset: Any = None) -> Tensor:
        """f of other inputs, [N, K]; with an offset if the fit has one.

        The columns of a data frame are found by name.
        """
        check_rows(X=inputs, offset=offset)
        design = self.objective.design
        matrix = design.read_inputs(inputs)
        return matrix @ self.coefficients.mT + design.read_offset(offset, len(matrix))

    def read_targets(self, targets: Any) -> Tensor:
        """Other targets as the likelihood takes them, [N, K]."""
        count, num_outputs = count_of(targets), len(self.coefficients)
        if num_outputs == 1:
            column = as_column("targets", targets, count, 0.0)[:, None]
            return self.likelihood.prepare(column, column)
        values = targets if isinstance(targets, Tensor) else torch.as_tensor(np.asarray(targets))
        return self.likelihood.prepare(values.new_zeros(count, num_outputs).double(), values)

    def parameter_deviation(
        self, share: float = 1.0, indices: Sequence[int] | Tensor | None = None
    ) -> Tensor:
        r"""theta without a share of each example minus theta with it, [M, K, P].

        .. math:: \Delta_i = S_{\setminus i}^{-1} \epsilon\, w_i \nabla \ell_i, \qquad
            S_{\setminus i} = S - \epsilon\, w_i J_i' \Lambda_i J_i

        Exact for least squares, else one Newton step. NaN for an example that alone determines some
        combination of columns.

        Args:
            share: eps; 1 leaves the example out, -1 counts it twice.
            indices: of the examples; all if not given.
        """
        chosen = check_group(indices, None, len(self.targets))[0]
        return share * self._steps(chosen, share, times=1)

    def parameter_derivative(self, share: float = 0.0) -> Tensor:
        r"""d theta / d eps where a share of each example is already out, [N, K, P].

        .. math:: \frac{d\theta}{d\epsilon} = S^{-1} J_i'
            (I - \epsilon w_i \Lambda_i V_i)^{-2} w_i e_i

        At eps = 0 the influence function of the data, at 1 that of the leave-one-out fit; exact for
        least squares.
        """
        return self._steps(torch.arange(len(self.targets)), share, times=2)

    def _steps(self, chosen: Tensor, share: float, times: int) -> Tensor:
        """S^-1 J' (I - eps w Lambda V)^-times w e for every example, [M, K, P].

        One inverse, in the space of outputs, makes S that of the remaining data.
        """
        design = self.objective.design
        outputs, targets = self.outputs[chosen], self.targets[chosen]
        inner = self.kept_share(chosen, share).mT
        seeds = design.taken[chosen, None] * self.likelihood.residual(outputs, targets)
        for _ in range(times):
            seeds = torch.linalg.solve(inner, seeds)
        gradients = seeds[:, :, None] * design.matrix[chosen, None, :]
        solve = self.posterior.solve
        return equation.mean_deviation(solve, {"coefficients": gradients})["coefficients"]

    def kept_share(self, chosen: Tensor, share: float) -> Tensor:
        """I - eps w V Lambda of some examples, [M, K, K]; NaN where nothing is left.

        PosteriorError where a share leaves a precision that is singular or negative, unless that is
        a whole example which alone determines some combination of columns.
        """
        hessian = self.likelihood.output_hessian(self.outputs[chosen], self.targets[chosen])
        taken = share * self.objective.design.taken[chosen, None, None]
        product = taken * (self.variances[chosen] @ hessian)
        if product.shape[1] == 1:
            largest = product[:, 0, 0]
        else:
            largest = torch.linalg.eigvals(product).real.amax(1)
        gone = largest > 1 - self.factor.nothing_left
        alone = self.factor.determined_alone(largest) & (share == 1)
        if not math.isfinite(share) or bool((gone & ~alone).any()):
            where = int(torch.where(alone, -math.inf, largest).argmax())
            raise PosteriorError(
                f"a share that leaves a proper posterior (share {share:g} here)",
                f"example {int(chosen[where])}, without which the precision is singular or "
                f"negative (share times leverage is {float(largest[where]):.6g})",
                "use a smaller share, or penalty > 0",
            )
        kept = torch.eye(hessian.shape[1], dtype=hessian.dtype) - product
        return torch.where(alone[:, None, None], math.nan, kept)

    def without(self, indices: Sequence[int] | Tensor) -> Fit:
        """The model fitted again without some examples, starting at its present coefficients.

        Of a row that stands for several examples one is left out. SeparationError where the rest
        has no finite coefficients.
        """
        minimum = self.moved_without(indices)
        return fit_at(
            minimum.objective,
            minimum.coefficients,
            hessian=self.hessian,
            converged=minimum.converged,
            dispersion=self.dispersion,
        )

    def moved_without(
        self, indices: Sequence[int] | Tensor, shares: Sequence[float] | Tensor | None = None
    ) -> Minimum:
        """The minimum without some examples, or shares of them, by Newton's method from here."""
        chosen, taken = check_group(indices, shares, len(self.targets))
        rest = objective_without(self.objective, chosen, taken)
        return minimise_again(rest, self.coefficients)

    def to_frame(self) -> pd.DataFrame:
        """Coefficients, one column per output."""
        import pandas as pd

        return pd.DataFrame(self.coefficients.mT.numpy(), index=list(self.names))

    def __repr__(self) -> str:
        shape = tuple(self.coefficients.shape)
        return (
            f"Fit of {self.likelihood!r}: N={len(self.targets):,}, coefficients {shape}, "
            f"effective parameters {float(self.leverage.sum()):.4g}"
            + ("" if self.converged else ", NOT converged")
        )


def fit_at(
    objective: Objective,
    coefficients: Tensor,
    *,
    hessian: str = "observed",
    dispersion: float | None = None,
    converged: bool = True,
    factor: Factor | None = None,
    source: object = None,
) -> Fit:
    """The fit with these coefficients, wherever they come from."""
    one_of("hessian", hessian, HESSIANS, 'use "observed"')
    if factor is None:
        outputs = objective.design.outputs(coefficients)
        factor = objective.factor(outputs, expected=hessian == "expected")
    if factor is None:
        check_rank(objective.design)
        check_separation(objective, coefficients)
        raise PosteriorError(
            "a Hessian that is positive definite at the coefficients",
            f"an indefinite or singular one ({objective.likelihood!r})",
            'fit to convergence, use penalty > 0, or hessian="expected"',
        )
    if source is not None:
        check_separation_elsewhere(objective, coefficients)
    fit = Fit(objective, coefficients, factor, 1.0, hessian, converged, source)
    remedy = "leave it out to estimate it"
    scale = _dispersion(fit) if dispersion is None else positive("dispersion", dispersion, remedy)
    scaled = replace(fit, dispersion=scale)
    for name in ("outputs", "unit_variances"):  # what the dispersion does not change
        if name in vars(fit):
            vars(scaled)[name] = vars(fit)[name]
    return scaled


def _dispersion(fit: Fit) -> float:
    """Pearson's estimate, with the effective number of parameters taken off N."""
    likelihood = fit.objective.likelihood
    variance = likelihood.variance(fit.means)
    if variance is None or not likelihood.has_dispersion:
        return 1.0
    weights = fit.objective.design.weights / variance[:, 0]
    squares = weights * (fit.means - fit.targets)[:, 0].square()
    sizes = weights * fit.targets[:, 0].square()
    freedom = float(fit.objective.design.used.sum()) - float(fit.leverage.sum())
    scale = float(squares.sum()) / freedom if freedom > SMALLEST_FREEDOM else 0.0
    if not scale > FITTED_EXACTLY * float(sizes.mean()):
        raise PosteriorError(
            "more examples than effective parameters, and targets that are not fitted exactly",
            f"{freedom:.3g} degrees of freedom left, with which the dispersion is estimated",
            "give dispersion=, a penalty, or more data",
        )
    return scale

r"""``corrected``: the precision of the remaining data, without the example's Gauss-Newton matrix.

.. math:: d = J (S - J' \Lambda J)^{-1} \nabla \ell_i = (I - V \Lambda)^{-1} V e

Exact for linear regression. Where an eigenvalue of :math:`V \Lambda` nears or passes 1 the
posterior is not consistent with that example: it is held by the guard, and flagged. With many
outputs V is not built, and the system is solved by conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.linalg.cg import Limits, conjugate_gradients, for_some
from engram.sensitivity.estimators.base import (
    GUARD,
    Estimate,
    Estimator,
    Observed,
    Setting,
    eigen,
    estimate_at,
    only_eigenvalue,
)
from engram.sensitivity.variance import DENSE_OUTPUTS, variance

#: Products with V that conjugate gradients may take for one batch. They end by their residual long
#: before, unless leverages are close to 1.
LARGEST_ITERATION = 30
#: Relative residual at which conjugate gradients end, in double and single precision.
DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 1e-6, 1e-4


@dataclass(frozen=True)
class Correction:
    """Solutions d = V w of a batch.

    Args:
        deviation: d, [B, K].
        pull: w, [B, K].
        flagged: where the guard held, [B].
        eigenvalues: of V Lambda, [B, R].
    """

    deviation: Tensor
    pull: Tensor
    flagged: Tensor
    eigenvalues: Tensor


def solved(variance: Tensor, residual: Tensor, factor: Tensor, guard: float = GUARD) -> Correction:
    r"""(I - V L)^-1 V e for L = F F', with eigenvalues of V L held at the guard.

    .. math:: (I - V F F')^{-1} V e = V e + V F (I - F' V F)^{-1} F' V e

    with a symmetric inverse.

    Args:
        variance: V, [B, K, K].
        residual: e, [B, K].
        factor: F, [B, K, R].
        guard: largest eigenvalue that is inverted as it is.

    Example:
        >>> v, e = torch.tensor([[[0.5, 0.0], [0.0, 0.2]]]), torch.tensor([[1.0, 1.0]])
        >>> found = solved(v, e, torch.eye(2)[None])  # 0.5 / (1 - 0.5) and 0.2 / (1 - 0.2)
        >>> found.deviation, found.flagged
        (tensor([[1.0000, 0.2500]]), tensor([False]))
    """
    plain = (variance @ residual[:, :, None])[:, :, 0]
    spread = variance @ factor
    eigenvalues, vectors = eigen(factor.mT @ spread)
    inner = vectors.mT @ (factor.mT @ plain[:, :, None])
    turned = vectors @ (_held(eigenvalues, guard)[:, :, None] * inner)
    pull = residual + (factor @ turned)[:, :, 0]
    deviation = plain + (spread @ turned)[:, :, 0]
    return Correction(deviation, pull, (eigenvalues > guard).any(1), eigenvalues)


def solved_for_one(
    variance: Tensor, residual: Tensor, eigenvalues: Tensor, guard: float = GUARD
) -> Correction:
    """The same for one output, where V L is a number, and may be below 0.

    Args:
        variance: V, [B, 1].
        residual: e, [B, 1].
        eigenvalues: V L, [B, 1].
        guard: largest of them that is inverted as it is.

    Example:
        >>> v, e = torch.tensor([[0.5]]), torch.tensor([[1.0]])
        >>> solved_for_one(v, e, v).deviation, solved_for_one(v, e, -v).deviation
        (tensor([[1.]]), tensor([[0.3333]]))
    """
    pull = residual * (1 + eigenvalues * _held(eigenvalues, guard))
    return Correction(variance * pull, pull, (eigenvalues > guard)[:, 0], eigenvalues)


def _held(eigenvalues: Tensor, guard: float) -> Tensor:
    """An eigenvalue m of V L multiplies its direction by 1 / (1 - m) = 1 + m * held."""
    return torch.where(
        eigenvalues > guard,
        guard / ((1 - guard) * eigenvalues.clamp(min=guard)),
        1 / (1 - eigenvalues.clamp(max=guard)),
    )


def solved_by_products(
    times_variance: Callable[[Tensor], Tensor],
    times_hessian: Callable[[Tensor], Tensor],
    error: Tensor,
    guard: float = GUARD,
) -> tuple[Tensor, Tensor]:
    """The pull w of d = V w, by conjugate gradients on (I - V L) d = V e, and where the guard held.

    They are self-adjoint in the inner product <u, L v>. Never builds V; an example whose curvature
    falls below 1 - guard is flagged and stops there.

    Args:
        times_variance: V u for u [B, K].
        times_hessian: L u for u [B, K].
        error: e, [B, K].
        guard: as above.

    Example:
        >>> e = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
        >>> v = torch.tensor([0.5, 0.2], dtype=torch.float64)
        >>> pull, flagged = solved_by_products(lambda u: v * u, torch.clone, e)
        >>> v * pull
        tensor([[1.0000, 0.2500]], dtype=torch.float64)
    """
    some_variance, some_hessian = for_some(times_variance, error), for_some(times_hessian, error)

    def times(vectors: Tensor, rows: Tensor, weighted: Tensor) -> Tensor:
        return vectors - some_variance(weighted, rows)

    tolerance = DOUBLE_TOLERANCE if error.dtype == torch.float64 else SINGLE_TOLERANCE
    limits = Limits(tolerance, LARGEST_ITERATION, smallest_curvature=1 - guard)
    found = conjugate_gradients(times, times_variance(error), limits, weigh=some_hessian)
    # d = V (e + L d) restores what L cannot see: in its null space V e alone moves the outputs
    return error + times_hessian(found.vectors), found.indefinite


def corrected(observed: Observed, setting: Setting) -> Estimate:
    """d = (I - V Lambda)^-1 V e of every example of a batch, held by the guard."""
    observed.trace.add_gradient(observed.residual, setting.posterior, setting.total)
    if observed.outputs.shape[1] > DENSE_OUTPUTS:
        return _by_products(observed, setting)
    covariance = variance(observed.trace, observed.outputs, setting.posterior)
    if observed.outputs.shape[1] == 1:
        eigenvalues = only_eigenvalue(observed, setting, covariance)
        found = solved_for_one(covariance[:, :, 0], observed.residual, eigenvalues, setting.guard)
    else:
        factor = setting.likelihood.hessian_factor(observed.outputs, observed.targets)
        found = solved(covariance, observed.residual, factor, setting.guard)
    return estimate_at(
        observed, setting, found.deviation, found.flagged, found.eigenvalues, found.pull
    )


def _by_products(observed: Observed, setting: Setting) -> Estimate:
    def times_variance(vector: Tensor) -> Tensor:
        return observed.trace.deviation(vector, setting.posterior)

    def times_hessian(vector: Tensor) -> Tensor:
        return setting.likelihood.hessian_times(observed.outputs, observed.targets, vector)

    pull, flagged = solved_by_products(
        times_variance, times_hessian, observed.residual, setting.guard
    )
    return estimate_at(observed, setting, times_variance(pull), flagged, None, pull)


ESTIMATOR = Estimator("corrected", corrected)

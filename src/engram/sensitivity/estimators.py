r"""Four rules for the deviation of an example's outputs when it is left out.

With the prediction variance V, the residual e and the output Hessian :math:`\Lambda`:

- ``linear``: :math:`d = V e`, the memory-perturbation equation with the precision of all data;
- ``corrected``: :math:`d = (I - V \Lambda)^{-1} V e`, with the precision of the remaining data;
- ``iterated``: :math:`d \leftarrow V e(f + d)`, the residual of the left-out prediction;
- ``paper``: :math:`d = \mathrm{diag}(V)\, e` with predictions linearised, as the authors compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engram.core.errors import ArgumentError
from engram.engine.gradient_accumulator import Totals
from engram.engine.pace import QUICKER, Pace
from engram.likelihoods import Likelihood
from engram.posteriors.gaussian import Posterior

GUARD = 0.99  # largest eigenvalue of V Lambda that is taken at its word
DENSE_OUTPUTS = 32  # up to here V [K, K] is built; beyond, it is only applied
LARGEST_ITERATION = 30


class Products(Protocol):
    """Products with V = J S^-1 J': the engine's trace, or V itself where it is known."""

    def deviation(
        self, residual: Tensor, posterior: Posterior, total: Totals | None = None
    ) -> Tensor:
        """V e, [B, K]."""

    def inner_products(self, vectors: Tensor, posterior: Posterior) -> Tensor:
        """F' V F for vectors F [B, K, R]."""

    def add_gradient(self, residual: Tensor, posterior: Posterior, total: Totals) -> None:
        """Add the gradient of the batch to the total."""


class Observed(Protocol):
    """A batch of examples at their present outputs."""

    @property
    def trace(self) -> Products: ...
    @property
    def outputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def residual(self) -> Tensor: ...


@dataclass(frozen=True)
class Estimate:
    """What an estimator says about a batch."""

    deviation: Tensor
    prediction_deviation: Tensor
    loo_loss: Tensor
    flagged: Tensor
    eigenvalues: Tensor | None = None  # of V Lambda, [B, R], where the rule has them
    pull: Tensor | None = None  # w with d = V w, [B, K]: the step of the parameters is S^-1 J' w


@dataclass(frozen=True)
class Setting:
    """What every estimator is given besides the batch."""

    likelihood: Likelihood
    posterior: Posterior
    rounds: int
    total: Totals  # the sum of gradients over the data is collected here, if it is wanted
    guard: float = GUARD  # nearer to 1 where the precision is known to be exact


def displaced(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    """Change of the predictions and the losses at the displaced outputs f + d."""
    moved = outputs + deviation
    change = likelihood.mean(moved) - likelihood.mean(outputs)
    return change, likelihood.loss(moved, targets).detach()


def linearised(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    """The paper's change of the predictions, sigma'(f) d elementwise, and the losses at f + d."""
    change = likelihood.mean_derivative(outputs) * deviation
    return change, likelihood.loss(outputs + deviation, targets).detach()


def _displaced(
    observed: Observed,
    setting: Setting,
    deviation: Tensor,
    flagged: Tensor,
    eigenvalues: Tensor | None,
    pull: Tensor | None = None,
) -> Estimate:
    change, loo_loss = displaced(setting.likelihood, observed.outputs, observed.targets, deviation)
    return Estimate(deviation, change, loo_loss, flagged, eigenvalues, pull)


def _none_flagged(observed: Observed) -> Tensor:
    return torch.zeros(len(observed.outputs), dtype=torch.bool, device=observed.outputs.device)


def linear(observed: Observed, setting: Setting) -> Estimate:
    """d = V e: one backward and one tangent pass, whatever the number of outputs."""
    deviation = observed.trace.deviation(observed.residual, setting.posterior, setting.total)
    none = _none_flagged(observed)
    return _displaced(observed, setting, deviation, none, None, observed.residual)


def iterated(observed: Observed, setting: Setting) -> Estimate:
    """d <- V e(f + d), from d = V e, for a few rounds.

    An example whose rounds grow apart is flagged, and stays where they began to.
    """
    likelihood, posterior = setting.likelihood, setting.posterior
    deviation = observed.trace.deviation(observed.residual, posterior, setting.total)
    smallest = deviation.norm(dim=1)
    diverging = _none_flagged(observed)
    for _ in range(setting.rounds):
        residual = likelihood.residual(observed.outputs + deviation, observed.targets).detach()
        moved = observed.trace.deviation(residual, posterior)
        change = (moved - deviation).norm(dim=1)
        diverging = diverging | ~(change <= smallest)  # also true for NaN
        smallest = torch.where(diverging, smallest, change)
        deviation = torch.where(diverging[:, None], deviation, moved)
    return _displaced(observed, setting, deviation, diverging, None)


def variance(trace: Products, outputs: Tensor, posterior: Posterior) -> Tensor:
    """V = J S^-1 J', [B, K, K], contracted layer by layer."""
    identity = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    return trace.inner_products(identity.expand(len(outputs), -1, -1), posterior)


def output_variances(trace: Products, outputs: Tensor, posterior: Posterior) -> Tensor:
    """The diagonal of V, [B, K], without V: some outputs at a time."""
    parts = torch.arange(outputs.shape[1], device=outputs.device).split(DENSE_OUTPUTS)
    pace = Pace(len(parts), f"times {DENSE_OUTPUTS} backward passes for a batch", QUICKER)
    found = []
    for part in parts:
        vectors = torch.zeros(*outputs.shape, len(part), dtype=outputs.dtype, device=outputs.device)
        vectors[:, part, torch.arange(len(part))] = 1
        products = trace.inner_products(vectors, posterior)
        found.append(torch.diagonal(products, dim1=1, dim2=2))
        pace.step()
    return torch.cat(found, dim=1)


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of symmetric matrices; half precision is widened for it."""
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    values, vectors = torch.linalg.eigh(wide)
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def corrected(observed: Observed, setting: Setting) -> Estimate:
    """d = (I - V Lambda)^-1 V e, with eigenvalues of V Lambda held below the guard."""
    observed.trace.add_gradient(observed.residual, setting.posterior, setting.total)
    if observed.outputs.shape[1] > DENSE_OUTPUTS:
        pull, flagged = _corrected_by_iteration(observed, setting)
        deviation = observed.trace.deviation(pull, setting.posterior)
        return _displaced(observed, setting, deviation, flagged, None, pull)
    covariance = variance(observed.trace, observed.outputs, setting.posterior)
    if observed.outputs.shape[1] == 1:
        eigenvalues = _only_eigenvalue(observed, setting, covariance)
        pull = observed.residual * (1 + eigenvalues * _held(eigenvalues, setting.guard))
        flagged = (eigenvalues > setting.guard)[:, 0]
        deviation = covariance[:, :, 0] * pull
        return _displaced(observed, setting, deviation, flagged, eigenvalues, pull)
    factor = setting.likelihood.hessian_factor(observed.outputs, observed.targets)
    plain = (covariance @ observed.residual[:, :, None])[:, :, 0]
    # (I - V L)^-1 V e = V e + V F (I - F' V F)^-1 F' V e for L = F F', with a symmetric inverse
    spread = covariance @ factor
    eigenvalues, vectors = eigen(factor.mT @ spread)
    flagged = (eigenvalues > setting.guard).any(1)
    held = _held(eigenvalues, setting.guard)
    inner = vectors.mT @ (factor.mT @ plain[:, :, None])
    turned = vectors @ (held[:, :, None] * inner)
    pull = observed.residual + (factor @ turned)[:, :, 0]
    deviation = plain + (spread @ turned)[:, :, 0]
    return _displaced(observed, setting, deviation, flagged, eigenvalues, pull)


def _held(eigenvalues: Tensor, guard: float) -> Tensor:
    """An eigenvalue m of V L multiplies its direction by 1 / (1 - m) = 1 + m * held."""
    return torch.where(
        eigenvalues > guard,
        guard / ((1 - guard) * eigenvalues.clamp(min=guard)),
        1 / (1 - eigenvalues.clamp(max=guard)),
    )


def _only_eigenvalue(observed: Observed, setting: Setting, covariance: Tensor) -> Tensor:
    """V Lambda of one output, [B, 1]; below 0 where a loss is not convex there."""
    return setting.likelihood.hessian_times(observed.outputs, observed.targets, covariance[:, :, 0])


def _corrected_by_iteration(observed: Observed, setting: Setting) -> tuple[Tensor, Tensor]:
    """The pull w of d = V w, by conjugate gradients on (I - V L) d = V e.

    They are self-adjoint in the inner product <u, L v>. Never builds V; an example whose curvature
    falls below 1 - guard is flagged and stops there.
    """
    outputs, targets, posterior = observed.outputs, observed.targets, setting.posterior

    def times_hessian(vector: Tensor) -> Tensor:
        return setting.likelihood.hessian_times(outputs, targets, vector)

    solution = torch.zeros_like(outputs)
    residual = observed.trace.deviation(observed.residual, posterior)
    direction = residual.clone()
    weighted = times_hessian(residual)
    square = (residual * weighted).sum(1)
    goal = 1e-12 * square if outputs.dtype == torch.float64 else 1e-8 * square
    flagged = torch.zeros_like(square, dtype=torch.bool)
    for _ in range(LARGEST_ITERATION):
        weighted_direction = times_hessian(direction)
        image = direction - observed.trace.deviation(weighted_direction, posterior)
        length = (direction * weighted_direction).sum(1)
        curvature = (image * weighted_direction).sum(1)
        active = (square > goal) & ~flagged
        flagged |= active & (curvature <= (1 - setting.guard) * length)
        active &= ~flagged
        if not active.any():
            break
        step = torch.where(active, square / curvature, torch.zeros_like(square))[:, None]
        solution = solution + step * direction
        residual = residual - step * image
        before, square = square, (residual * times_hessian(residual)).sum(1)
        ratio = torch.where(active, square / before, torch.zeros_like(square))[:, None]
        direction = residual + ratio * direction
    # d = V (e + L d) restores what L cannot see: in its null space V e alone moves the outputs
    return observed.residual + times_hessian(solution), flagged


def paper(observed: Observed, setting: Setting) -> Estimate:
    """d = diag(V) e and predictions moved by sigma'(f) d, elementwise."""
    observed.trace.add_gradient(observed.residual, setting.posterior, setting.total)
    if observed.outputs.shape[1] > DENSE_OUTPUTS:
        variances = output_variances(observed.trace, observed.outputs, setting.posterior)
        return _paper(observed, setting, variances, None)
    covariance = variance(observed.trace, observed.outputs, setting.posterior)
    if observed.outputs.shape[1] == 1:
        eigenvalues = _only_eigenvalue(observed, setting, covariance)
    else:
        factor = setting.likelihood.hessian_factor(observed.outputs, observed.targets)
        eigenvalues = eigen(factor.mT @ covariance @ factor)[0]
    return _paper(observed, setting, torch.diagonal(covariance, dim1=1, dim2=2), eigenvalues)


def _paper(
    observed: Observed, setting: Setting, variances: Tensor, eigenvalues: Tensor | None
) -> Estimate:
    deviation = variances * observed.residual
    change, loss = linearised(setting.likelihood, observed.outputs, observed.targets, deviation)
    return Estimate(deviation, change, loss, _none_flagged(observed), eigenvalues)


Estimator = Callable[[Observed, Setting], Estimate]

ESTIMATORS: dict[str, Estimator] = {
    "linear": linear,
    "corrected": corrected,
    "iterated": iterated,
    "paper": paper,
}


def estimator_named(name: str | None, also: Sequence[str] = ()) -> Estimator:
    """The rule with this name; ``also`` are names that the caller knows besides."""
    if not isinstance(name, str) or name not in ESTIMATORS:
        names = ", ".join([*ESTIMATORS, *also])
        raise ArgumentError(f"estimator to be one of {names}", repr(name), 'use "linear"')
    return ESTIMATORS[name]


def default_estimator(posterior: Posterior) -> str:
    """``corrected`` where the precision is dense, else ``linear``.

    What is subtracted from an approximate precision may not be in it, and leaves nothing sensible.
    """
    return "corrected" if posterior.is_dense else "linear"

r"""The Bayesian learning rule for any exponential family, and the equation for its posterior.

.. math:: \lambda_t = (1 - \rho)\, \lambda_{t-1} + \rho \Bigl( \lambda_0
    - \sum_j \tilde g_j(\lambda_{t-1}) \Bigr), \qquad
    \tilde g_j(\lambda) = F(\lambda)^{-1} \nabla_\lambda \mathbb{E}_q[\ell_j]
    = \nabla_\mu \mathbb{E}_q[\ell_j]

The natural gradient is the gradient by the mean parameter (:class:`MeanLosses`). Where expected
losses are a function of the natural parameter (:class:`ExactLosses`) it is their gradient, solved
with the Fisher matrix, which is the Hessian of A. Where only losses of drawn parameters are known
(:class:`SampledLosses`) it is the regression of the losses on the statistics,
:math:`\mathrm{Cov}(T)^{-1} \mathrm{Cov}(T, \ell_j)`: without error where a loss is linear in T,
as that of a conjugate likelihood is, and no derivative of a loss is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engram.core import equation
from engram.core.arguments import MANY, fraction, positive, whole
from engram.core.parameters import Layout, Named
from engram.core.selection import check_group
from engram.errors import ArgumentError, NonFiniteError
from engram.families.exponential import ExponentialFamily

# Eigenvalues of a Fisher matrix over its largest below which a direction is none: a symmetric
# matrix has entries twice, and their differences are no parameters
NO_DIRECTION = 1e-12


class Losses(Protocol):
    """Expected losses of N examples under a family."""

    def expected(self, family: ExponentialFamily, natural: Mapping[str, Tensor]) -> Tensor:
        """E_q of every loss, [N]."""

    def natural_gradients(
        self, family: ExponentialFamily, natural: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Of every expected loss, [N, *shape] by component."""


@dataclass(frozen=True)
class ExactLosses:
    """Expected losses [N] as a differentiable function of the natural parameter.

    Args:
        function: of the natural parameter, by component.
    """

    function: Callable[[Mapping[str, Tensor]], Tensor]

    def expected(self, family: ExponentialFamily, natural: Mapping[str, Tensor]) -> Tensor:
        return self.function(natural).detach()

    def natural_gradients(
        self, family: ExponentialFamily, natural: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        layout = Layout.of(natural)
        flat = layout.flatten(natural)

        def losses(at: Tensor) -> Tensor:
            return self.function(layout.unflatten(at))

        def partition(at: Tensor) -> Tensor:
            return family.log_partition(layout.unflatten(at))

        gradients = torch.autograd.functional.jacobian(losses, flat)
        fisher = torch.autograd.functional.hessian(partition, flat)
        return layout.unflatten(_solved(fisher, gradients))


@dataclass(frozen=True)
class MeanLosses:
    """Expected losses [N] as a differentiable function of the mean parameter.

    The natural gradient is its gradient, and no Fisher matrix is needed.

    Args:
        function: of the mean parameter, by component.
    """

    function: Callable[[Mapping[str, Tensor]], Tensor]

    def expected(self, family: ExponentialFamily, natural: Mapping[str, Tensor]) -> Tensor:
        return self.function(family.mean_parameter(natural)).detach()

    def natural_gradients(
        self, family: ExponentialFamily, natural: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        mean = family.mean_parameter(natural)
        layout = Layout.of(mean)

        def losses(at: Tensor) -> Tensor:
            return self.function(layout.unflatten(at))

        found = torch.autograd.functional.jacobian(losses, layout.flatten(mean))
        return layout.unflatten(found)


@dataclass(frozen=True)
class SampledLosses:
    """Losses [S, N] of drawn parameters [S, ...].

    Args:
        function: of the draws; it need not be differentiable.
        samples: draws; more than the statistics have entries.
        seed: of the draws, the same at every call.
    """

    function: Callable[[Tensor], Tensor]
    samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        whole("number of samples", self.samples, 2, MANY * MANY, "use samples=1000")

    def _drawn(
        self, family: ExponentialFamily, natural: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        values = family.sample(natural, self.samples, generator)
        losses = self.function(values).detach()
        if losses.dim() != 2 or len(losses) != self.samples:
            raise ArgumentError(
                f"losses of shape [{self.samples}, N], a row a draw",
                f"shape {list(losses.shape)}",
                "return the loss of every example at every draw",
            )
        return values, losses

    def expected(self, family: ExponentialFamily, natural: Mapping[str, Tensor]) -> Tensor:
        return self._drawn(family, natural)[1].mean(0)

    def natural_gradients(
        self, family: ExponentialFamily, natural: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        values, losses = self._drawn(family, natural)
        layout = Layout.of(natural)
        rows = layout.flatten(family.statistics(values)).to(losses)
        if self.samples <= rows.shape[1]:
            raise ArgumentError(
                f"more samples than the {rows.shape[1]} entries of the statistics",
                f"samples={self.samples}",
                f"use samples={10 * rows.shape[1]}",
            )
        rows, losses = rows - rows.mean(0), losses - losses.mean(0)
        moments, crossed = rows.mT @ rows, losses.mT @ rows
        return layout.unflatten(_solved(moments, crossed))


def _solved(matrix: Tensor, rows: Tensor) -> Tensor:
    """Rows times the inverse of a symmetric matrix, within the directions that it has."""
    values, vectors = torch.linalg.eigh(matrix)
    known = values > NO_DIRECTION * values[-1]
    basis = vectors[:, known]
    return (rows @ basis / values[known]) @ basis.mT


@dataclass(frozen=True)
class LearningRule:
    """The rule for a family, a prior of it and N losses.

    Args:
        family: of the posterior.
        prior: natural parameter of the prior, by component.
        losses: :class:`ExactLosses`, :class:`MeanLosses` or :class:`SampledLosses`.

    Example:
        For a conjugate model one step of 1 is Bayes' rule, here of three coin flips:

        >>> from engram.families.exponential import Beta
        >>> flips = torch.tensor([1.0, 1.0, 0.0]).double()
        >>> def losses(theta):
        ...     return -(flips * theta[:, None].log() + (1 - flips) * (1 - theta[:, None]).log())
        >>> prior = {name: torch.tensor(0.0).double() for name in ("log", "log_rest")}
        >>> rule = LearningRule(Beta(), prior, SampledLosses(losses, samples=50))
        >>> posterior = rule.step(prior, step_size=1.0)
        >>> {name: round(float(value), 6) for name, value in posterior.items()}
        {'log': 2.0, 'log_rest': 1.0}
        >>> without = rule.remove(posterior, [2])
        >>> {name: round(abs(float(value)), 6) for name, value in without.items()}
        {'log': 2.0, 'log_rest': 0.0}

    Reference:
        Khan and Rue, *The Bayesian Learning Rule*, JMLR 2023; Salimans and Knowles, *Fixed-Form
        Variational Posterior Approximation through Stochastic Linear Regression*, 2013.
    """

    family: ExponentialFamily
    prior: Named
    losses: Losses

    def natural_gradients(self, natural: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of every example's expected loss, [N, *shape] by component."""
        return self.losses.natural_gradients(self.family, natural)

    def step(self, natural: Mapping[str, Tensor], step_size: float) -> Named:
        """One step of the rule.

        Args:
            natural: of the posterior, by component.
            step_size: rho, up to 1.
        """
        rho = positive("step_size", step_size)
        gradients = self.natural_gradients(natural)
        kept = {n: (1 - rho) * value + rho * self.prior[n] for n, value in natural.items()}
        ones = torch.ones(len(next(iter(gradients.values()))), dtype=torch.float64)
        towards = {name: equation.rows(-rows) for name, rows in gradients.items()}
        moved = equation.perturbed(kept, towards, ones, rho)
        self._check(moved)
        return moved

    def fit(
        self,
        natural: Mapping[str, Tensor] | None = None,
        *,
        step_size: float = 0.5,
        steps: int = 100,
    ) -> Named:
        """The posterior after some steps, from the prior if nothing is given."""
        current: Named = dict(self.prior if natural is None else natural)
        if step_size != 1:
            fraction("step_size", step_size)
        for _ in range(whole("steps", steps, remedy="use steps=100")):
            current = self.step(current, step_size)
        return current

    def remove(
        self,
        natural: Mapping[str, Tensor],
        indices: Sequence[int] | Tensor | None = None,
        weights: Sequence[float] | Tensor | None = None,
        step_size: float = 1.0,
    ) -> Named:
        r""":math:`\lambda + \rho \sum_j \epsilon_j \tilde g_j(\lambda)`: the equation.

        Args:
            natural: of the posterior, by component.
            indices: the examples; all if not given.
            weights: share of each that is taken out; 1 is removal.
            step_size: rho.
        """
        gradients = self.natural_gradients(natural)
        count = len(next(iter(gradients.values())))
        chosen, shares = check_group(indices, weights, count)
        towards = {name: equation.rows(rows[chosen]) for name, rows in gradients.items()}
        moved = equation.perturbed(natural, towards, shares, positive("step_size", step_size))
        self._check(moved)
        return moved

    def elbo(self, natural: Mapping[str, Tensor]) -> float:
        """The evidence lower bound in nats: minus the expected losses and KL(q || prior)."""
        losses = float(self.losses.expected(self.family, natural).sum())
        return -losses - self.family.kl(natural, self.prior)

    def _check(self, natural: Named) -> None:
        for name, value in natural.items():
            if not torch.isfinite(value).all():
                raise NonFiniteError(
                    "a finite natural parameter",
                    f"NaN or infinity in {name!r}",
                    "use a smaller step size, or more samples",
                )
        self.family.check(natural)

r"""A linear classifier with weights of -1 and 1: the equation for a Bernoulli posterior.

The weights have :math:`q(w) \propto \exp(\lambda' w)`, with means :math:`\mu = \tanh \lambda`. The
natural gradient is the derivative by the means, so the Bayesian learning rule is

.. math:: \lambda \leftarrow (1 - \rho) \lambda
    + \rho \Big(\lambda_0 - \sum_i \nabla_\mu \mathbb{E}_q[\ell_i]\Big)

and leaving an example out gives back :math:`\lambda^{\setminus i} - \lambda
= \nabla_\mu \mathbb{E}_q[\ell_i]`. There is no gradient by the weights anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from engram.core import equation
from engram.core.arguments import one_of
from engram.core.selection import check_group
from engram.errors import ArgumentError, NonFiniteError
from engram.likelihoods import ExpectedLoss, Likelihood, expected_loss
from engram.models.diagnosis import Convergence, diagnose, finished
from engram.models.numbers import checked_inputs
from engram.models.variational.binary_expectations import (
    Examples,
    Expectation,
    expectation_named,
)
from engram.models.variational.natural_gradient import fit
from engram.sensitivity.basis import Basis
from engram.sensitivity.provenance import provenance
from engram.sensitivity.result import Result

ESTIMATORS = ("linear", "response")
GUARD = 0.01  # smallest eigenvalue of the remaining curvature that is taken at its word
# length of the natural gradient at which a fit stops: what rounding leaves
TOLERANCE = 1e-9  # in double precision
SINGLE_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class BinaryPosterior:
    """Independent weights of -1 and 1.

    Attributes:
        examples: inputs, targets and loss.
        natural: lambda, [D].
        prior_natural: lambda of the prior, [D].
        expectation: how expected losses are taken.
    """

    examples: Examples
    natural: Tensor
    prior_natural: Tensor = field(repr=False)
    expectation: Expectation = field(repr=False)

    @property
    def mean(self) -> Tensor:
        """Means of the weights, [D]."""
        return self.natural.tanh()

    @cached_property
    def natural_gradients(self) -> Tensor:
        """Of every example's expected loss, [N, D]."""
        return self.expectation.gradients(self.examples, self.natural)

    @cached_property
    def hessians(self) -> Tensor:
        """Second derivatives of every expected loss by the means, [N, D, D]."""
        return self.expectation.hessians(self.examples, self.natural)

    @cached_property
    def natural_gradient_length(self) -> float:
        """Of the objective, in the metric of the posterior; 0 at a stationary point."""
        excess = self.natural - self.prior_natural + self.natural_gradients.sum(0)
        return float(((1 - self.mean**2) * excess**2).sum().sqrt())

    @cached_property
    def objective(self) -> float:
        """Sum of expected losses plus the divergence of the posterior from the prior."""
        each = self.expectation.losses(self.examples, self.natural.expand_as(self.examples.inputs))
        inner = ((self.natural - self.prior_natural) * self.mean).sum()
        return float(each.sum() + inner - _log_cosh(self.natural) + _log_cosh(self.prior_natural))

    def step(self, step_size: float) -> BinaryPosterior:
        """One step of the Bayesian learning rule."""
        target = self.prior_natural - self.natural_gradients.sum(0)
        return replace(self, natural=(1 - step_size) * self.natural + step_size * target)

    def remove(
        self,
        indices: Sequence[int] | Tensor,
        weights: Sequence[float] | Tensor | None = None,
        estimator: str = "linear",
        step_size: float = 1.0,
    ) -> BinaryPosterior:
        r"""The posterior without a group, :math:`\lambda + \rho \sum_j \epsilon_j \tilde g_j`.

        Args:
            indices: the group.
            weights: share of each that is taken out; 1 is removal.
            estimator: ``linear`` is the equation itself; ``response`` also lets the natural
                gradients of the remaining examples follow, to first order.
            step_size: rho.
        """
        one_of("estimator", estimator, ESTIMATORS, 'use "linear"')
        chosen, shares = check_group(indices, weights, len(self.examples.inputs))
        if len(chosen) == len(self.examples.inputs) and bool((shares == 1).all()):
            raise ArgumentError("some data to remain", "all examples removed", "keep at least one")
        share = shares.to(self.natural)
        step = equation.natural_deviation(self.natural_gradients[chosen], share, step_size)
        if estimator == "response":
            group = torch.tensordot(share, self.hessians[chosen], dims=1)
            step = self._followed(self.hessians.sum(0) - group, step)[0]
        return replace(self, natural=self.natural + step)

    def leave_one_out(self, estimator: str = "linear") -> tuple[Tensor, Tensor]:
        """Natural parameters without each example, [N, D], and where the guard held, [N]."""
        one_of("estimator", estimator, ESTIMATORS, 'use "linear"')
        steps = self.natural_gradients
        flagged = torch.zeros(len(steps), dtype=torch.bool, device=steps.device)
        if estimator == "response":
            steps, flagged = self._followed(self.hessians.sum(0) - self.hessians, steps)
        return self.natural + steps, flagged

    def sensitivities(self, estimator: str = "linear") -> Result:
        """How far each example's mean output and expected loss would move without it.

        Args:
            estimator: as in :meth:`remove`.
        """
        without, flagged = self.leave_one_out(estimator)
        examples, expectation = self.examples, self.expectation
        inputs = examples.inputs
        deviation = (inputs * (without.tanh() - self.mean)).sum(1, keepdim=True)
        columns = {
            "indices": torch.arange(len(inputs)),
            "targets": examples.targets[:, 0],
            "outputs": (inputs @ self.mean)[:, None],
            "deviation": deviation,
            "prediction_deviation": deviation,
            "score": deviation.abs()[:, 0],
            "loss": expectation.losses(examples, self.natural.expand_as(inputs)),
            "loo_loss": expectation.losses(examples, without),
            "leverage": torch.full_like(inputs[:, 0], math.nan),
            "flagged": flagged,
        }
        settings = {
            "estimator": estimator,
            "structure": "Bernoulli",
            "expectation": type(expectation).__name__,
            "natural_gradient_length": self.natural_gradient_length,
            "likelihood": repr(examples.loss),
            "num_data": len(inputs),
        }
        return Result(
            **finished(columns),
            diagnostics=diagnose(columns["leverage"][:, None], flagged, self._convergence()),
            coverage={},
            provenance=provenance(self, settings),
            basis=Basis(estimator=estimator, structure="Bernoulli"),
        )

    def _followed(self, hessian: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        r"""(I + H F)^-1 g with F = diag(1 - mu^2), for one or many H [..., D, D] and g [..., D].

        Written as :math:`g - H F^{1/2} (I + F^{1/2} H F^{1/2})^{-1} F^{1/2} g`, whose inverse is
        symmetric: eigenvalues below the guard are held there.
        """
        root = (1 - self.mean**2).clamp(min=0).sqrt()
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        values, vectors = torch.linalg.eigh(identity + root[:, None] * hessian * root)
        inner = vectors.mT @ (root * steps)[..., None]
        solved = vectors @ (inner / values.clamp(min=GUARD)[..., None])
        followed = steps - (hessian @ (root[:, None] * solved))[..., 0]
        return followed, (values < GUARD).any(-1)

    def _convergence(self) -> Convergence:
        losses = self.natural_gradients.sum(0)
        prior = self.natural - self.prior_natural
        norm, parts = float((losses + prior).norm()), float(losses.norm() + prior.norm())
        return Convergence(norm, norm / parts if parts > 0 else 0.0)


def fit_binary_linear(
    inputs: Tensor,
    targets: Tensor,
    loss: str | Likelihood | ExpectedLoss = "hinge",
    *,
    prior_natural: float | Tensor = 0.0,
    expectation: str | Expectation | None = None,
    max_steps: int = 500,
    progress: bool = True,
) -> BinaryPosterior:
    """Fit a Bernoulli posterior over weights of -1 and 1 by the Bayesian learning rule.

    Args:
        inputs: [N, D]; append a column of ones for an intercept.
        targets: [N], labels -1 and 1 (or 0 and 1) for the losses of classification.
        loss: a name or an expected loss; ``Hinge(margin=0)`` makes it a perceptron.
        prior_natural: lambda of the prior, 0 for fair coins.
        expectation: ``enumerated`` (exact, up to 16 weights), ``gaussian``, ``sampled``, or an
            object; exact up to 12 weights and ``gaussian`` beyond if not given.
        max_steps: at most so many.
        progress: show a bar when it takes longer than a few seconds.

    Example:
        One weight and one example: the conditional difference of the losses is 2, halved.

        >>> x, y = torch.ones(1, 1), torch.ones(1)
        >>> fit_binary_linear(x, y, "hinge").natural
        tensor([1.])

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, 2023, on discrete parameters; Meng,
        Bachmann and Khan, *Training Binary Neural Networks using the Bayesian Learning Rule*, 2020.
    """
    inputs, targets = checked_inputs(inputs, targets)
    averaged = expected_loss(loss)
    prior = torch.as_tensor(prior_natural, dtype=inputs.dtype, device=inputs.device).detach()
    if prior.dim() > 1 or (prior.dim() == 1 and len(prior) != inputs.shape[1]):
        raise ArgumentError(
            f"one prior natural parameter, or {inputs.shape[1]}",
            f"shape {tuple(prior.shape)}",
            "give one per weight",
        )
    if not torch.isfinite(prior).all():
        raise NonFiniteError("finite prior natural parameters", "NaN or infinity", "use 0.0")
    prior = prior.expand(inputs.shape[1]).clone()
    way = expectation_named(expectation, inputs.shape[1])
    prepared = averaged.prepare(inputs[:, :1], targets)
    start = BinaryPosterior(Examples(inputs, prepared, averaged), prior, prior, way)
    tolerance = TOLERANCE if inputs.dtype == torch.float64 else SINGLE_TOLERANCE
    return fit(start, 1.0, max_steps, tolerance, progress)


def _log_cosh(natural: Tensor) -> Tensor:
    """Sum of log cosh, which is the log-partition function up to a constant."""
    return (natural.abs() + torch.log1p(torch.exp(-2 * natural.abs())) - math.log(2)).sum()

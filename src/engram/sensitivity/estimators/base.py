r"""The interface of all estimators: the batch, the setting and the estimate.

An estimator says how far the outputs f of an example would move without it, from the prediction
variance :math:`V = J S^{-1} J'`, the residual :math:`e = \partial\ell / \partial f` and the output
Hessian :math:`\Lambda = \partial^2 \ell / \partial f^2`. Each is a file of the same shape: the
equation, its mathematics as a function of arrays, the rule for a batch, and ``ESTIMATOR``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engram.engine.gradient_accumulator import GradientSink
from engram.engine.session import Session
from engram.errors import ArgumentError, NonFiniteError
from engram.likelihoods import Likelihood
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.trajectory.full import FullStage
from engram.sensitivity.trajectory.stages import Stage
from engram.sensitivity.variance import KnownVariance, Products

#: Largest eigenvalue of V Lambda that is taken at its word. It is below 1 where the precision holds
#: the example's own curvature; at 0.99 a direction is lengthened 100 times. A larger guard lets an
#: inconsistent posterior explode, a smaller one holds examples that truly have a leverage near 1.
GUARD = 0.99


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


@dataclass(frozen=True, eq=False)
class KnownBatch:
    """Examples whose V is known, at their present outputs [B, K]."""

    trace: KnownVariance
    outputs: Tensor
    targets: Tensor
    residual: Tensor


@dataclass(frozen=True)
class Estimate:
    """The estimate of an estimator for a batch.

    Args:
        deviation: d, of the outputs, [B, K].
        prediction_deviation: of the predictions, [B, K].
        loo_loss: at f + d, [B].
        flagged: where a guard held, or rounds grew apart, [B].
        eigenvalues: of V Lambda, [B, R], where the rule has them.
        pull: w with d = V w, [B, K], where there is one: the step of the parameters is S^-1 J' w.
        readouts: losses without the example at several times of the training, [B, R].
    """

    deviation: Tensor
    prediction_deviation: Tensor
    loo_loss: Tensor
    flagged: Tensor
    eigenvalues: Tensor | None = None
    pull: Tensor | None = None
    readouts: Tensor | None = None


@dataclass(frozen=True)
class Setting:
    """What every estimator is given besides the batch.

    Args:
        likelihood: of the examples.
        posterior: with the precision S.
        rounds: of ``iterated``.
        total: the sum of gradients over the data is collected here, if it is wanted.
        guard: nearer to 1 where the precision is known to be exact.
        opened: model and data, where the examples are those of a net.
        walk: the stages of the recorded training, for the rule that goes along it.
        full_walk: the same with full matrices.
        segments: how many stages are asked for; None leaves it to the rule.
    """

    likelihood: Likelihood
    posterior: Posterior
    rounds: int
    total: GradientSink
    guard: float = GUARD
    opened: Session | None = None
    walk: Sequence[Stage] = ()
    full_walk: Sequence[FullStage] = ()
    segments: int | None = None


Rule = Callable[[Observed, Setting], Estimate]


def _any_posterior(posterior: Posterior) -> bool:
    return True


def _unchanged(setting: Setting) -> Setting:
    return setting


@dataclass(frozen=True)
class Estimator:
    """A rule with its name and what it asks for.

    Args:
        name: by which users ask for it.
        rule: d of every example of a batch.
        from_variance: whether V is all it needs of a model, so that models in closed form have it.
        fits: whether a posterior has what the rule needs.
        asks_for: that, in words.
        remedy: what to do with a posterior that does not fit.
        prepare: what is done once, before all batches.
        along_training: whether it goes along the checkpoints of a recorded training.
    """

    name: str
    rule: Rule
    from_variance: bool = True
    fits: Callable[[Posterior], bool] = _any_posterior
    asks_for: str = "a posterior"
    remedy: str = ""
    prepare: Callable[[Setting], Setting] = _unchanged
    along_training: bool = False

    def __call__(self, observed: Observed, setting: Setting) -> Estimate:
        """The estimate for a batch, with a setting that :meth:`prepared` gave."""
        return self.rule(observed, setting)

    def check(self, posterior: Posterior) -> None:
        """ArgumentError for a posterior that lacks what the rule needs."""
        if not self.fits(posterior):
            raise ArgumentError(
                f'{self.asks_for} for estimator="{self.name}"', repr(posterior), self.remedy
            )

    def prepared(self, setting: Setting) -> Setting:
        """The setting made ready for the rule; ArgumentError where the posterior does not fit."""
        self.check(setting.posterior)
        return self.prepare(setting)


def displaced(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, deviation: Tensor
) -> tuple[Tensor, Tensor]:
    """Change of the predictions and the losses at the displaced outputs f + d."""
    moved = outputs + deviation
    change = likelihood.mean(moved) - likelihood.mean(outputs)
    return change, likelihood.loss(moved, targets).detach()


def estimate_at(
    observed: Observed,
    setting: Setting,
    deviation: Tensor,
    flagged: Tensor,
    eigenvalues: Tensor | None = None,
    pull: Tensor | None = None,
) -> Estimate:
    """The estimate with predictions and losses at the displaced outputs f + d."""
    change, loo_loss = displaced(setting.likelihood, observed.outputs, observed.targets, deviation)
    return Estimate(deviation, change, loo_loss, flagged, eigenvalues, pull)


def none_flagged(observed: Observed) -> Tensor:
    """False for every example of the batch."""
    return torch.zeros(len(observed.outputs), dtype=torch.bool, device=observed.outputs.device)


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of symmetric matrices; half precision is widened for it."""
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    try:
        values, vectors = torch.linalg.eigh(wide)
    except RuntimeError as error:  # what LinAlgError is
        if wide.isfinite().all():
            raise
        raise NonFiniteError(
            "finite prediction variances",
            f"NaN or infinity, in {wide.dtype}",
            "look whether the training has diverged; else use float64",
        ) from error
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def only_eigenvalue(observed: Observed, setting: Setting, covariance: Tensor) -> Tensor:
    """V Lambda of one output, [B, 1]; below 0 where a loss is not convex there."""
    return setting.likelihood.hessian_times(observed.outputs, observed.targets, covariance[:, :, 0])

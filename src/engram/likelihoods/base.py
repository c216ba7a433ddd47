r"""What a loss can do: at an output (:class:`Likelihood`), and averaged over a Gaussian one.

A likelihood is a batch of functions of the model outputs f [N, K] and the targets y. Losses are
negative log likelihoods in nats, with their constants; for the exponential families in their
canonical form the residual is mean minus target.

An :class:`ExpectedLoss` is the average of a loss over independent outputs
:math:`f_k \sim N(m_k, v_k)`. It is smooth in m even where the loss itself has kinks or jumps, and
the natural gradient of a Gaussian posterior needs only

.. math:: e_k = \partial_{m_k} \mathbb{E}[\ell(f)], \qquad
    \beta_k = \partial^2_{m_k} \mathbb{E}[\ell(f)] = 2\, \partial_{v_k} \mathbb{E}[\ell(f)]

(the identities of Bonnet and Price). ``likelihood.expectation()`` is that of a likelihood.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from engram.core.errors import LikelihoodError
from engram.core.identity.description import Description
from engram.likelihoods.draws import Draws

LossFunction = Callable[[Tensor, Tensor], Tensor]
MeanFunction = Callable[[Tensor], Tensor]
Kind = TypeVar("Kind", bound="Likelihood")


class Loss(ABC):
    """What every loss has: a name, and targets that it has a meaning for."""

    name: str

    @abstractmethod
    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets in the one form that the other methods take; TargetError if they have none."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(frozen=True)
class Recession:
    """Directions of the outputs along which losses never rise: its directions of recession.

    A change d of an example's outputs never raises its loss if ``directions @ d`` is at least 0 in
    every row and d is 0 in every output that is held; where a row is above 0 it falls for ever.

    Attributes:
        directions: [N, R, K]; a row of zeros asks for nothing.
        held: outputs in which the loss has a minimum, [N, K].
    """

    directions: Tensor
    held: Tensor


class Likelihood(Loss):
    """A loss per example as a function of the outputs, with its first two derivatives.

    What a likelihood of one's own must have is abstract. The methods that only a fitted generalised
    linear model asks for have an answer already, that of a likelihood without dispersion or link.

    Attributes:
        has_dispersion: whether there is a scale to be estimated beside the mean.
        shift_invariant: whether a constant added to all outputs of an example changes nothing.
    """

    has_dispersion = False
    shift_invariant = False

    @property
    def unit(self) -> str:
        """Of losses."""
        return "nats"

    @abstractmethod
    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets in that form, unchecked; what is already in it comes back as it is."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log likelihood, [N]."""

    @abstractmethod
    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """e = d loss / d f, [N, K]."""

    @abstractmethod
    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        """Lambda u without building Lambda = d2 loss / d f2, [N, K]."""

    @abstractmethod
    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """L with L L' = Lambda, [N, K, R]; R is the rank of Lambda where that is known."""

    def num_leading(self, outputs: Tensor, share: float) -> int | None:
        """Outputs to take exactly, so that the others carry at most a share of the trace.

        None where a likelihood knows no shorter factor than the exact one.
        """
        return None

    def leading_factor(self, outputs: Tensor, targets: Tensor, count: int, draws: Draws) -> Tensor:
        """L with L L' = Lambda in the mean, [N, K, R], exact in so many outputs of each example."""
        return self.hessian_factor(outputs, targets)

    @abstractmethod
    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        """A random residual with mean zero and covariance Lambda, [N, K]."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """The prediction sigma(f), [N, K]."""

    @abstractmethod
    def mean_derivative(self, outputs: Tensor) -> Tensor:
        """sigma'(f) taken elementwise, as the paper does, [N, K]."""

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Lambda, [N, K, K]."""
        factor = self.hessian_factor(outputs, targets)
        return factor @ factor.mT

    # what a fitted generalised linear model asks for besides

    @property
    def is_quadratic(self) -> bool:
        """Whether the loss is quadratic in the outputs: one Newton step is then exact."""
        return False

    @property
    def threshold(self) -> float | None:
        """The output above which a binary classifier says 1; None for all else."""
        return None

    def at(self: Kind, dispersion: float, expected_hessian: bool) -> Kind:
        """The same at another dispersion, Lambda as observed or as expected over targets."""
        return self

    def inside(self, outputs: Tensor) -> Tensor:
        """Where the outputs of an example give a mean that its distribution can have, [N]."""
        return torch.isfinite(outputs).all(1)

    def fitted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What a fit minimises: the loss at dispersion 1, but for a constant, [N]."""
        return self.loss(outputs, targets)

    def loss_at(self, outputs: Tensor, targets: Tensor, precisions: Tensor) -> Tensor:
        """Loss where each example has the dispersion over its precision [N, 1], [N]."""
        return self.loss(outputs, targets)

    def variance(self, mean: Tensor) -> Tensor | None:
        """Of a target with this mean, at dispersion 1; None where outputs share one target."""
        return None

    def unit_deviance(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Twice the loss above its least value, at dispersion 1, [N, K]; None likewise."""
        return None

    def starting_outputs(self, targets: Tensor) -> Tensor | None:
        """Outputs near the targets for a fit to start from, [N, K]; None where 0 will do."""
        return None

    def at_limit(self, targets: Tensor) -> Tensor:
        """Targets at an end of the support, which a mean comes near but never reaches, [N]."""
        return torch.zeros(len(targets), dtype=torch.bool, device=targets.device)

    def recession(self, targets: Tensor) -> Recession | None:
        """Where losses fall for ever, for targets [N, K]; None where none does."""
        return None

    def expectation(self) -> ExpectedLoss:
        """The same loss averaged over Gaussian outputs, for variational posteriors."""
        raise LikelihoodError(
            "a likelihood whose average over Gaussian outputs is known",
            repr(self),
            "average it by sampling: engram.likelihoods.Sampled(likelihood.loss)",
        )

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        """What makes the same likelihood again: plain values; None where there are no such."""
        return vars(self)

    @property
    def identity(self) -> str:
        """The same text for the same likelihood, in any process; another one for any other.

        Where something of it cannot be seen, only the very same object has the same text.
        """
        description = Description()
        text = f"{self!r} {description.of(self, 'likelihood')}"
        return f"{text} {id(self)}" if description.unseen else text


class ExpectedLoss(Loss):
    """E[loss] under independent Gaussian outputs, with its derivatives by their means [N, K]."""

    @abstractmethod
    def pointwise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss itself, without an expectation, [N]."""

    @abstractmethod
    def loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """E[loss], [N]."""

    @abstractmethod
    def residual(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """e = d E[loss] / d mean, [N, K]."""

    @abstractmethod
    def curvature(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """beta, the diagonal of d2 E[loss] / d mean2, [N, K]."""

    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """-log E[exp(-loss)] for a likelihood, E[loss] for a loss that is none, [N]."""
        return self.loss(mean, variance, targets)

    @abstractmethod
    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        """What is predicted for a new target: its expectation or its probabilities."""

    def on(self, indices: Tensor) -> ExpectedLoss:
        """The loss for some of the examples; the same unless it has numbers of its own for each."""
        return self

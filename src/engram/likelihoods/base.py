r"""What every loss can do: at an output (:class:`Likelihood`), or averaged over Gaussian outputs.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from engram.core.identity.description import Description
from engram.errors import DataError, LikelihoodError
from engram.likelihoods.draws import Draws

LossFunction = Callable[[Tensor, Tensor], Tensor]
MeanFunction = Callable[[Tensor], Tensor]
Kind = TypeVar("Kind", bound="Likelihood")


class Loss(ABC):
    """What every loss has: a name, and the check of its targets."""

    name: str

    @abstractmethod
    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets checked and converted to the form that the other methods take.

        TargetError where they are none of this loss: class numbers out of range, negative counts.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(frozen=True)
class Recession:
    """Directions of the outputs in which losses never rise (convex analysis: of recession).

    Coefficients that move all examples along such directions have no finite best value: targets are
    separated.

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
        keeps_outputs: whether a result has all outputs of an example, or less of them
            (:meth:`kept_columns`), where there are too many.
        samples_curvature: whether curvature is sampled where nobody asks for another.
    """

    has_dispersion = False
    shift_invariant = False
    keeps_outputs = True
    samples_curvature = False

    @property
    def unit(self) -> str:
        """The unit of losses, as results print it."""
        return "nats"

    def for_outputs(self: Kind, shape: Sequence[int]) -> Kind:
        """The likelihood for a model whose outputs have this shape, without the examples.

        DataError where it is not one for such outputs.
        """
        if len(shape) > 1:
            raise DataError(
                "model outputs of shape [N, K], one row per example",
                f"shape {('N', *shape)}".replace("'", ""),
                "reduce or reshape the outputs inside the model; for the logits of every token of "
                'a sequence use likelihood="tokens"',
            )
        return self

    def kept(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What a result has of the outputs, [N, ...]: all of them, unless there are too many."""
        return outputs

    def kept_columns(
        self, outputs: Tensor, targets: Tensor, deviation: Tensor, prediction_deviation: Tensor
    ) -> dict[str, Tensor]:
        """What a result has of outputs, their deviation and that of the predictions, by name."""
        return {
            "outputs": outputs,
            "deviation": deviation,
            "prediction_deviation": prediction_deviation,
        }

    @property
    def padding(self) -> Mapping[str, float]:
        """Columns of a result whose rows may differ in width, with what they are filled up by."""
        return {}

    @abstractmethod
    def form(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The same conversion without the checks; converted targets come back as they are."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log likelihood, [N]."""

    @abstractmethod
    def residual(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """e = d loss / d f, [N, K]."""

    @abstractmethod
    def hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        """The output Hessian Lambda = d2 loss / d f2 times vectors [N, K], without building it."""

    @abstractmethod
    def hessian_factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """L with L L' = Lambda, [N, K, R]; R is the rank of Lambda where that is known.

        Where the observed Hessian can have negative eigenvalues, that of its expectation.
        """

    def hessian_rank(self, num_outputs: int) -> int:
        """R, the columns of that factor."""
        return num_outputs

    def num_leading(self, outputs: Tensor, share: float) -> int | None:
        """Outputs that a shorter factor takes exactly, sampling at most a share of tr Lambda.

        None where a likelihood has no shorter factor than the exact one.
        """
        return None

    def leading_factor(self, outputs: Tensor, targets: Tensor, count: int, draws: Draws) -> Tensor:
        """That shorter factor: E[L L'] = Lambda, [N, K, R], exact in ``count`` outputs.

        For many classes: the likeliest are taken exactly, one of the others is sampled.
        """
        return self.hessian_factor(outputs, targets)

    def signed_factor(
        self, outputs: Tensor, targets: Tensor, count: int, draws: Draws
    ) -> Tensor | None:
        """The same with a random sign for each of the others, in place of the one that is sampled.

        For a trace: its spread does not depend on how much the others differ among themselves.
        None where a likelihood takes no outputs exactly.
        """
        return None

    @abstractmethod
    def sampled_residual(self, outputs: Tensor, targets: Tensor, draws: Draws) -> Tensor:
        """A random residual with mean zero and covariance Lambda, [N, K]."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """The prediction sigma(f), [N, K]."""

    @abstractmethod
    def mean_derivative(self, outputs: Tensor) -> Tensor:
        """sigma'(f) output by output, which the ``paper`` estimator linearises with, [N, K]."""

    def target_probability(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """The probability of an example's own label, [N]; None where targets are no labels."""
        return None

    def labels(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """The class that each target names, [N]; None where targets are no classes."""
        return None

    def observed(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Targets as numbers that a mean is compared with, [N, K]; None where there are none."""
        found = self.form(outputs, targets)
        found = found[:, None] if found.dim() == 1 else found
        return found.to(outputs.dtype) if found.shape == outputs.shape else None

    def loss_statistics(self, outputs: Tensor) -> Tensor | None:
        """Numbers [N, M] that the loss is an affine function of, whatever the target turns out.

        Their mean over several outputs gives the mean loss: outputs can be averaged before targets
        are known. None where there are no such numbers.
        """
        return None

    def loss_from_statistics(self, statistics: Tensor, targets: Tensor) -> Tensor:
        """The loss at these statistics, or the mean loss at their mean; targets prepared; [N]."""
        raise LikelihoodError(
            "a likelihood that is affine in numbers of its outputs",
            repr(self),
            "give the targets together with the outputs",
        )

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Lambda = d2 loss / d f2, [N, K, K]."""
        factor = self.hessian_factor(outputs, targets)
        return factor @ factor.mT

    # what a fitted generalised linear model asks for besides

    @property
    def is_quadratic(self) -> bool:
        """Whether the loss is quadratic in the outputs, so that one Newton step is exact."""
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
        """The same loss averaged over Gaussian outputs, which variational posteriors are fitted to.

        Example:
            >>> from engram.likelihoods import Poisson
            >>> mean, variance = torch.zeros(1, 1), torch.ones(1, 1)
            >>> Poisson().expectation().loss(mean, variance, torch.zeros(1, 1))  # E[exp(f)]
            tensor([1.6487])
        """
        raise LikelihoodError(
            "a likelihood whose average over Gaussian outputs is known",
            repr(self),
            "average it by sampling: engram.likelihoods.Sampled(likelihood.loss)",
        )

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        """Arguments with which its class makes it again; None where they are not plain values."""
        return vars(self)

    @property
    def identity(self) -> str:
        """A text by which the same likelihood is known again, in any process.

        Where part of it cannot be compared, only the very same object has the same text.
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
        """-log E[exp(-loss)] of a likelihood, whose predictive loss it is; else E[loss]; [N]."""
        return self.loss(mean, variance, targets)

    @abstractmethod
    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        """What is predicted for a new target: its expectation or its probabilities."""

    def on(self, indices: Tensor) -> ExpectedLoss:
        """The loss of some examples; another one only where it has a number for each example."""
        return self

r"""What an output says about its target: loss, residual, output Hessian and mean.

Every likelihood is a batch of functions of the model outputs f [N, K] and the targets y; losses
are negative log likelihoods in nats, with their constants. For the exponential families in their
canonical form the residual is mean minus target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from engram.core.errors import TargetError
from engram.core.identity.description import Description
from engram.likelihoods.draws import Draws


def check_numbers(targets: Tensor, kind: str) -> None:
    """TargetError if a target is NaN or infinite."""
    bad = ~targets.isfinite().reshape(len(targets), -1).all(1)
    if bad.any():
        where = int(bad.nonzero()[0])
        raise TargetError(
            f"finite {kind} targets",
            f"NaN or infinity at position {where} of the batch",
            "drop the examples without a target",
        )


class Likelihood(ABC):
    """A loss per example as a function of the outputs, with its first two derivatives."""

    name: str

    @property
    def unit(self) -> str:
        """Of losses."""
        return "nats"

    @abstractmethod
    def prepare(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets in the one form that the other methods take; TargetError if they have none."""

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

    @property
    def identity(self) -> str:
        """The same text for the same likelihood, in any process; another one for any other.

        Where something of it cannot be seen, only the very same object has the same text.
        """
        description = Description()
        text = f"{self!r} {description.of(self, 'likelihood')}"
        return f"{text} {id(self)}" if description.unseen else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

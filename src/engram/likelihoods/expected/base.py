r"""A loss averaged over a Gaussian output: its value and its first two derivatives by the mean.

For independent outputs :math:`f_k \sim N(m_k, v_k)` the expectation of a loss is smooth in m even
where the loss itself has kinks or jumps. The natural gradient of a Gaussian posterior needs only

.. math:: e_k = \partial_{m_k} \mathbb{E}[\ell(f)], \qquad
    \beta_k = \partial^2_{m_k} \mathbb{E}[\ell(f)] = 2\, \partial_{v_k} \mathbb{E}[\ell(f)]

(the identities of Bonnet and Price). Means and variances are [N, K].
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class ExpectedLoss(ABC):
    """E[loss] under independent Gaussian outputs, with its derivatives by their means."""

    name: str

    @abstractmethod
    def prepare(self, mean: Tensor, targets: Tensor) -> Tensor:
        """Targets in the one form that the other methods take; TargetError if they have none."""

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

    @abstractmethod
    def predictive_loss(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """-log E[exp(-loss)] for a likelihood, E[loss] for a loss that is none, [N]."""

    @abstractmethod
    def prediction(self, mean: Tensor, variance: Tensor) -> Tensor:
        """What is predicted for a new target: its expectation or its probabilities."""

    def on(self, indices: Tensor) -> ExpectedLoss:
        """The loss for some of the examples; the same unless it has numbers of its own for each."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

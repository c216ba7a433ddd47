r"""A conjugate exponential family, and the posterior that it gives for some data.

.. math:: q(\theta) = \exp(\langle\lambda, T(\theta)\rangle - A(\lambda)), \qquad
    p(y_j|\theta) \propto \exp(\langle\tilde\lambda_j, T(\theta)\rangle)

Fitting, removing and reweighting are one subtraction of natural parameters, which stands in
:mod:`engram.core.equation`. What is left to a family is its support, its
:math:`\tilde\lambda_j`, its :math:`A`, and its predictive density.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engram.core import equation
from engram.core.equation import WeightedSum
from engram.core.parameters import Named
from engram.core.selection import check_group
from engram.errors import ArgumentError, DataError, PosteriorError
from engram.families.reading import read_array

#: arrays that belong together, one row of each per example
Observations = tuple[Tensor, ...]


class Family(ABC):
    """Prior and likelihood of a conjugate model; every family has these methods in this order."""

    @abstractmethod
    def read(self, data: Any) -> Observations:
        """Data checked and converted to the form that the other methods take."""

    @abstractmethod
    def prior(self) -> Named:
        """Natural parameter of the prior, by component."""

    @abstractmethod
    def likelihoods(self, observations: Observations) -> dict[str, WeightedSum]:
        """Natural parameters of the examples' likelihoods, as their weighted sum."""

    @abstractmethod
    def check(self, natural: Mapping[str, Tensor]) -> None:
        """PosteriorError unless the natural parameter belongs to a proper distribution."""

    @abstractmethod
    def standard(self, natural: Mapping[str, Tensor]) -> Named:
        """The parameters by their textbook names."""

    @abstractmethod
    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        """A, the logarithm of the normaliser; its gradient is the expectation of T."""

    @abstractmethod
    def moments(self, natural: Mapping[str, Tensor]) -> Named:
        """Mean and variance of the model's parameters under the posterior."""

    def log_predictive(self, natural: Mapping[str, Tensor], observations: Observations) -> Tensor:
        """log p(y | data) of new examples, each by itself, [M]."""
        none = torch.zeros(len(observations[0]), dtype=torch.float64)
        return self.loo_log_predictive(natural, observations, none)

    @abstractmethod
    def loo_log_predictive(
        self, natural: Mapping[str, Tensor], observations: Observations, weights: Tensor
    ) -> Tensor:
        """log p(y_i | data without i) of each example, which the data hold with weights_i, [N]."""

    def read_new(self, data: Any) -> Observations:
        """Data to predict: as those to fit, without what only a fit needs (responsibilities)."""
        return self.read(data)

    def translated(self, natural: Named, source: Family) -> Named:
        """The natural parameter of a family with another origin, in sums from this one's origin."""
        return natural

    def around(self, observations: Observations, weights: Tensor) -> Family:
        """The same family, its sums of squares taken from amid these data: they lose no digits."""
        return self

    def fit(self, data: Any, weights: Sequence[float] | Tensor | None = None) -> FamilyPosterior:
        r"""The posterior, :math:`\lambda = \lambda_0 + \sum_j w_j \tilde\lambda_j`.

        Args:
            data: as the family's own docstring says; none at all gives the prior.
            weights: how often each example counts; 1 if not given.
        """
        observations = self.read(data)
        counted = check_weights(weights, len(observations[0]))
        family = self.around(observations, counted)
        natural = equation.divided(family.prior(), family.likelihoods(observations), -counted)
        check_proper(family, natural)
        return FamilyPosterior(family, natural, observations, counted)


@dataclass(frozen=True, eq=False)
class FamilyPosterior:
    """The posterior of a family, with the data it has seen.

    Attributes:
        family: prior and likelihood.
        natural: the natural parameter, by component.
        observations: the examples, removed ones included.
        weights: how much of each example the posterior holds; 0 is a removed one, [N].

    Example:
        >>> from engram.families import BetaBernoulli
        >>> posterior = BetaBernoulli(1.0, 1.0).fit([1, 1, 0])
        >>> posterior.remove([2]).standard()
        {'a': tensor(3., dtype=torch.float64), 'b': tensor(1., dtype=torch.float64)}
        >>> posterior.loo_log_predictive().exp()
        tensor([0.5000, 0.5000, 0.2500], dtype=torch.float64)
    """

    family: Family
    natural: Named = field(repr=False)
    observations: Observations = field(repr=False)
    weights: Tensor = field(repr=False)

    @property
    def num_data(self) -> int:
        """N, the examples it was fitted to, removed ones included."""
        return len(self.weights)

    def remove(
        self,
        indices: Sequence[int] | Tensor | None = None,
        weights: Sequence[float] | Tensor | None = None,
    ) -> FamilyPosterior:
        r"""The posterior without some examples, or with other weights for them.

        .. math:: \lambda^{\setminus M} = \lambda - \sum_{j \in M} \epsilon_j \tilde\lambda_j

        Args:
            indices: the examples; all if not given.
            weights: the share of each that is taken out; whatever is left of it if not given. A
                negative share counts the example more often. Any shares are allowed that leave a
                proper posterior.

        Returns:
            A new posterior; this one stays as it is.
        """
        chosen, shares = check_group(indices, weights, self.num_data)
        if weights is None:
            shares = self.weights[chosen]
            gone = chosen[shares <= 0]
            if len(gone) > 0:
                raise ArgumentError(
                    "examples that the posterior still holds",
                    f"example {int(gone[0])}, of which nothing is left",
                    "remove each example once, or give weights",
                )
        subset = tuple(array[chosen] for array in self.observations)
        natural = equation.divided(self.natural, self.family.likelihoods(subset), shares)
        check_proper(self.family, natural)
        left = self.weights.index_add(0, chosen, -shares)
        return FamilyPosterior(self.family, natural, self.observations, left)

    def standard(self) -> Named:
        """The parameters by their textbook names."""
        return self.family.standard(self.natural)

    def moments(self) -> Named:
        """Mean and variance of the model's parameters."""
        return self.family.moments(self.natural)

    def expected_statistics(self) -> Named:
        """E[T(theta)], the gradient of the log-partition function, by component."""
        _, gradient = _partition_and_gradient(self.family, self.natural)
        return gradient

    def kl(self, other: FamilyPosterior) -> float:
        r"""KL(self || other) in nats.

        .. math:: \langle\lambda - \lambda', \nabla A(\lambda)\rangle - A(\lambda) + A(\lambda')

        Args:
            other: a posterior of the same family, for instance the one without some examples. Its
                prior may be another one.
        """
        _check_same_family(self, other)
        theirs = self.family.translated(other.natural, other.family)
        value, expected = _partition_and_gradient(self.family, self.natural)
        inner = sum(
            float(((self.natural[name] - theirs[name]) * expected[name]).sum())
            for name in self.natural
        )
        # it cannot be negative; a difference of large numbers can, by rounding
        return max(0.0, inner - value + float(self.family.log_partition(theirs)))

    def log_predictive(self, data: Any) -> Tensor:
        """Log density of each new example by itself, in nats, [M]."""
        return self.family.log_predictive(self.natural, self.family.read_new(data))

    def loo_log_predictive(self) -> Tensor:
        """Log density of each example given all the others, in nats, [N]."""
        return self.family.loo_log_predictive(self.natural, self.observations, self.weights)

    def __repr__(self) -> str:
        held = int((self.weights != 0).sum())
        return f"FamilyPosterior({type(self.family).__name__}, {held:,} of {self.num_data:,} held)"


def check_cavities(proper: Tensor) -> None:
    """PosteriorError naming an example without which no proper posterior is left, [..., N]."""
    if not proper.all():
        raise PosteriorError(
            "a proper posterior without each of the examples",
            f"none without example {int((~proper).nonzero()[0, -1])}",
            "use a proper prior, more data, or weights that are not negative",
        )


def check_proper(family: Family, natural: Named) -> None:
    """PosteriorError unless the natural parameter is finite and belongs to a proper posterior."""
    for name, value in natural.items():
        if not torch.isfinite(value).all():
            raise PosteriorError(
                "data and weights whose sums are finite",
                f"an overflow in the component {name!r}",
                "scale the data down",
            )
    family.check(natural)


def improper(expected: str, got: str) -> PosteriorError:
    """The error of a posterior from which more was taken out than it held."""
    return PosteriorError(expected, got, "take out less, or choose a stronger prior")


def _partition_and_gradient(family: Family, natural: Named) -> tuple[float, Named]:
    leaves = {name: value.detach().clone().requires_grad_() for name, value in natural.items()}
    with torch.enable_grad():
        partition = family.log_partition(leaves)
    gradients = torch.autograd.grad(partition, list(leaves.values()))
    return float(partition.detach()), dict(zip(leaves, gradients, strict=True))


def _check_same_family(first: FamilyPosterior, second: FamilyPosterior) -> None:
    if not isinstance(second, FamilyPosterior):
        raise ArgumentError(
            "the posterior of a family to compare with",
            type(second).__name__,
            "pass what fit or remove returns",
        )
    same = type(first.family) is type(second.family) and all(
        value.shape == second.natural[name].shape for name, value in first.natural.items()
    )
    if not same:
        raise ArgumentError(
            f"two posteriors of one family, {type(first.family).__name__}, and of one size",
            type(second.family).__name__,
            "compare posteriors that share their parameters",
        )


def check_weights(weights: Any, num_data: int) -> Tensor:
    """How often each example counts: 1 if not given."""
    if weights is None:
        return torch.ones(num_data, dtype=torch.float64)
    counted = read_array(weights, "weights")
    if counted.shape != (num_data,):
        raise DataError(
            f"{num_data} weights, one per example",
            f"shape {tuple(counted.shape)}",
            "give one weight per example",
        )
    return counted

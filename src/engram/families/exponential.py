r"""Exponential families as posteriors of the Bayesian learning rule.

.. math:: q_\lambda(\theta) = \exp(\langle\lambda, T(\theta)\rangle - A(\lambda)), \qquad
    \mu = \nabla A(\lambda) = \mathbb{E}_q[T(\theta)], \qquad F(\lambda) = \nabla^2 A(\lambda)

A family gives its statistics T, its log partition A and draws; the rest follows by differentiating
A. Natural parameters are tensors by component, as in :mod:`engram.core.equation`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.core.arguments import whole
from engram.core.parameters import Named
from engram.errors import PosteriorError


class ExponentialFamily(ABC):
    """A minimal exponential family with base measure 1; every one has these methods."""

    @abstractmethod
    def check(self, natural: Mapping[str, Tensor]) -> None:
        """PosteriorError unless the natural parameter belongs to a proper distribution."""

    @abstractmethod
    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        """A, a number that can be differentiated."""

    @abstractmethod
    def statistics(self, values: Tensor) -> Named:
        """T of values [n, ...], [n, *shape] by component."""

    @abstractmethod
    def sample(
        self, natural: Mapping[str, Tensor], count: int, generator: torch.Generator
    ) -> Tensor:
        """Draws [count, ...]."""

    def mean_parameter(self, natural: Mapping[str, Tensor]) -> Named:
        """mu, the expectation of T: the gradient of A."""
        leaves = {name: v.detach().clone().requires_grad_() for name, v in natural.items()}
        with torch.enable_grad():
            partition = self.log_partition(leaves)
            found = torch.autograd.grad(partition, list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    def entropy(self, natural: Mapping[str, Tensor]) -> float:
        """A - <lambda, mu>, in nats."""
        return float(self.log_partition(natural)) - inner(natural, self.mean_parameter(natural))

    def kl(self, natural: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        """KL(natural || other) in nats."""
        difference = {name: value - other[name] for name, value in natural.items()}
        along = inner(difference, self.mean_parameter(natural))
        partitions = float(self.log_partition(other)) - float(self.log_partition(natural))
        return max(0.0, along + partitions)


def inner(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The inner product of two parameters."""
    return float(sum((left[name] * right[name]).sum() for name in left))


def _improper(what: str, got: str) -> PosteriorError:
    return PosteriorError(f"a proper {what}", got, "take out less, or use a smaller step size")


@dataclass(frozen=True)
class Gaussian(ExponentialFamily):
    """N(m, S^-1) over D numbers: ``linear`` S m and ``quadratic`` -S/2.

    Example:
        >>> family = Gaussian(1)
        >>> one = torch.ones(1).double()
        >>> family.mean_parameter({"linear": 6 * one, "quadratic": -torch.eye(1).double()})
        {'linear': tensor([3.], dtype=torch.float64), 'quadratic': tensor([[9.5000]], ...)}
    """

    size: int

    def __post_init__(self) -> None:
        whole("size", self.size, remedy="use the number of parameters")

    def _precision(self, natural: Mapping[str, Tensor]) -> Tensor:
        quadratic = natural["quadratic"]
        return -(quadratic + quadratic.mT)

    def check(self, natural: Mapping[str, Tensor]) -> None:
        lowest = float(torch.linalg.eigvalsh(self._precision(natural))[0])
        if not lowest > 0:
            raise _improper("Gaussian", f"a precision with the eigenvalue {lowest:.4g}")

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        precision, linear = self._precision(natural), natural["linear"]
        mean = torch.linalg.solve(precision, linear)
        constant = self.size * math.log(2 * math.pi)
        return 0.5 * (linear @ mean + constant - torch.logdet(precision))

    def statistics(self, values: Tensor) -> Named:
        return {"linear": values, "quadratic": values[:, :, None] * values[:, None, :]}

    def sample(
        self, natural: Mapping[str, Tensor], count: int, generator: torch.Generator
    ) -> Tensor:
        precision = self._precision(natural)
        root = torch.linalg.cholesky(precision)
        noise = torch.randn(count, self.size, generator=generator, dtype=precision.dtype)
        mean = torch.cholesky_solve(natural["linear"][:, None], root)[:, 0]
        return mean + torch.linalg.solve_triangular(root.mT, noise.mT, upper=True).mT


@dataclass(frozen=True)
class Bernoulli(ExponentialFamily):
    """Independent signs -1 and 1: ``signs`` with mean tanh of it.

    Example:
        >>> round(Bernoulli().entropy({"signs": torch.zeros(3).double()}) / math.log(2), 6)
        3.0
    """

    def check(self, natural: Mapping[str, Tensor]) -> None:
        """Any finite number."""

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        signs = natural["signs"]
        return torch.logaddexp(signs, -signs).sum()

    def statistics(self, values: Tensor) -> Named:
        return {"signs": values}

    def sample(
        self, natural: Mapping[str, Tensor], count: int, generator: torch.Generator
    ) -> Tensor:
        signs = natural["signs"]
        chance = torch.rand(count, *signs.shape, generator=generator, dtype=signs.dtype)
        return torch.where(chance < torch.sigmoid(2 * signs), 1.0, -1.0).to(signs)


@dataclass(frozen=True)
class Categorical(ExponentialFamily):
    """One of K classes: ``logits`` [K - 1] against the last; values are class numbers.

    Example:
        >>> family = Categorical(3)
        >>> family.mean_parameter({"logits": torch.zeros(2).double()})
        {'logits': tensor([0.3333, 0.3333], dtype=torch.float64)}
    """

    classes: int

    def __post_init__(self) -> None:
        whole("classes", self.classes, 2, remedy="use the number of classes")

    def _whole(self, natural: Mapping[str, Tensor]) -> Tensor:
        logits = natural["logits"]
        return torch.cat([logits, logits.new_zeros(1)])

    def check(self, natural: Mapping[str, Tensor]) -> None:
        """Any finite number."""

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        return torch.logsumexp(self._whole(natural), 0)

    def statistics(self, values: Tensor) -> Named:
        hot = torch.nn.functional.one_hot(values.long(), self.classes)
        return {"logits": hot[:, :-1].double()}

    def sample(
        self, natural: Mapping[str, Tensor], count: int, generator: torch.Generator
    ) -> Tensor:
        share = self._whole(natural).softmax(0)
        return torch.multinomial(share, count, replacement=True, generator=generator)


@dataclass(frozen=True)
class Beta(ExponentialFamily):
    """A probability: ``log`` a - 1 and ``log_rest`` b - 1.

    Example:
        >>> one = torch.tensor(1.0).double()
        >>> round(Beta().entropy({"log": 0 * one, "log_rest": 0 * one}), 6)  # uniform
        0.0
    """

    def check(self, natural: Mapping[str, Tensor]) -> None:
        a, b = (float(natural[name]) + 1 for name in ("log", "log_rest"))
        if not (a > 0 and b > 0):
            raise _improper("Beta", f"a={a:.4g}, b={b:.4g}")

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        a, b = natural["log"] + 1, natural["log_rest"] + 1
        return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)

    def statistics(self, values: Tensor) -> Named:
        return {"log": values.log(), "log_rest": torch.log1p(-values)}

    def sample(
        self, natural: Mapping[str, Tensor], count: int, generator: torch.Generator
    ) -> Tensor:
        first, second = (
            _gammas(natural[name] + 1, count, generator) for name in ("log", "log_rest")
        )
        return first / (first + second)


@dataclass(frozen=True)
class Gamma(ExponentialFamily):
    """A positive number with shape a and rate b: ``log`` a - 1 and ``linear`` -b.

    Example:
        >>> family, two = Gamma(), torch.tensor(2.0).double()
        >>> family.mean_parameter({"log": two, "linear": -two})["linear"]  # a / b = 3 / 2
        tensor(1.5000, dtype=torch.float64)
    """

    def check(self, natural: Mapping[str, Tensor]) -> None:
        shape, rate = float(natural["log"]) + 1, -float(natural["linear"])
        if not (shape > 0 and rate > 0):
            raise _improper("Gamma", f"shape {shape:.4g}, rate {rate:.4g}")

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        shape, rate = natural["log"] + 1, -natural["linear"]
        return torch.lgamma(shape) - shape * rate.log()

    def statistics(self, values: Tensor) -> Named:
        return {"log": values.log(), "linear": values}

    def sample(
        self, natural: Mapping[str, Tensor], count: int, generator: torch.Generator
    ) -> Tensor:
        return _gammas(natural["log"] + 1, count, generator) / -natural["linear"]


@dataclass(frozen=True)
class Wishart(ExponentialFamily):
    """A precision matrix: ``log_det`` (nu - D - 1)/2 and ``linear`` -V^-1/2.

    Example:
        >>> family, eye = Wishart(2), torch.eye(2).double()
        >>> natural = {"log_det": torch.tensor(1.0).double(), "linear": -0.5 * eye}
        >>> family.mean_parameter(natural)["linear"]  # nu V with nu = 5
        tensor([[5., 0.],
                [0., 5.]], dtype=torch.float64)
    """

    size: int

    def __post_init__(self) -> None:
        whole("size", self.size, remedy="use the number of rows")

    def _standard(self, natural: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """nu, and the inverse of V."""
        linear = natural["linear"]
        return 2 * natural["log_det"] + self.size + 1, -(linear + linear.mT)

    def check(self, natural: Mapping[str, Tensor]) -> None:
        degrees, inverse = self._standard(natural)
        lowest = float(torch.linalg.eigvalsh(inverse)[0])
        if not (float(degrees) > self.size - 1 and lowest > 0):
            got = f"{float(degrees):.4g} degrees of freedom and an eigenvalue {lowest:.4g}"
            raise _improper("Wishart", got)

    def log_partition(self, natural: Mapping[str, Tensor]) -> Tensor:
        degrees, inverse = self._standard(natural)
        scale = degrees * (self.size * math.log(2) - torch.logdet(inverse))
        return 0.5 * scale + torch.mvlgamma(degrees / 2, self.size)

    def statistics(self, values: Tensor) -> Named:
        return {"log_det": torch.logdet(values), "linear": values}

    def sample(
        self, natural: Mapping[str, Tensor], count: int, generator: torch.Generator
    ) -> Tensor:
        """By Bartlett's decomposition."""
        degrees, inverse = self._standard(natural)
        freedom = (degrees - torch.arange(self.size).to(degrees)) / 2
        noise = torch.randn(count, self.size, self.size, generator=generator, dtype=inverse.dtype)
        lengths = (2 * _gammas(freedom, count, generator)).sqrt()
        lower = noise.tril(-1) + torch.diag_embed(lengths)
        root = torch.linalg.cholesky(torch.linalg.inv(inverse)) @ lower
        return root @ root.mT


def _gammas(shape: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draws with rate 1, [count, *shape]."""
    wide = shape.double().expand(count, *shape.shape).contiguous()
    return torch._standard_gamma(wide, generator=generator)

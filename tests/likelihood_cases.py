"""Every likelihood twice: the public one, and the loss of one example written out by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import DenseLikelihood

NOISE_VARIANCE = 0.5


def log_cosh(outputs: Tensor, target: Tensor) -> Tensor:
    """A robust regression loss that couples the outputs through their mean; [N]."""
    difference = outputs - target
    # log(2 cosh(2 z)), which does not overflow far from the target.
    total = torch.logaddexp(2 * difference, -2 * difference).sum(-1)
    return total + 0.5 * difference.mean(-1).square()


@dataclass(frozen=True)
class LikelihoodCase:
    name: str
    num_outputs: int
    targets: Callable[[int, int, torch.Generator], Tensor]
    dense: DenseLikelihood
    make: Callable[[], Any]
    prior_precision: float = 1.3
    """Of the posteriors; strong enough for `iterated` to settle where the loss is exponential."""


def _public(name: str, *arguments: Any, **settings: Any) -> Callable[[], Any]:
    """Built only when used, so that the reference does not need the library."""

    def make() -> Any:
        from engram import likelihoods

        return getattr(likelihoods, name)(*arguments, **settings)

    return make


def _categorical(f: Tensor, y: Tensor) -> Tensor:
    soft = F.one_hot(y, len(f)).to(f.dtype) if y.ndim == 0 else y
    return -(soft * (f - f.logsumexp(0))).sum()


def _bernoulli(f: Tensor, y: Tensor) -> Tensor:
    y = y.reshape(()).to(f.dtype)
    return (1 + f.exp()).log().sum() - y * f.sum()


def _gaussian(f: Tensor, y: Tensor) -> Tensor:
    y = y.reshape(-1)
    constant = 0.5 * len(f) * math.log(2 * math.pi * NOISE_VARIANCE)
    return (f - y).square().sum() / (2 * NOISE_VARIANCE) + constant


def _poisson(f: Tensor, y: Tensor) -> Tensor:
    y = y.reshape(-1).to(f.dtype)
    return (f.exp() - y * f + torch.lgamma(y + 1)).sum()


def _classes(n: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.randint(k, (n,), generator=generator)


def _normal(n: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, k, generator=generator, dtype=torch.float64)


CATEGORICAL = LikelihoodCase(
    "categorical",
    3,
    _classes,
    DenseLikelihood(_categorical, lambda f: f.softmax(0)),
    _public("Categorical"),
)
SOFT_CATEGORICAL = LikelihoodCase(
    "soft_categorical",
    3,
    lambda n, k, g: _normal(n, k, g).softmax(1),
    CATEGORICAL.dense,
    _public("Categorical"),
)
BERNOULLI = LikelihoodCase(
    "bernoulli",
    1,
    lambda n, k, g: _classes(n, 2, g),
    DenseLikelihood(_bernoulli, torch.sigmoid),
    _public("Bernoulli"),
)
SOFT_BERNOULLI = LikelihoodCase(
    "soft_bernoulli",
    1,
    lambda n, k, g: _normal(n, 1, g).sigmoid(),
    BERNOULLI.dense,
    _public("Bernoulli"),
)
GAUSSIAN = LikelihoodCase(
    "gaussian",
    2,
    _normal,
    DenseLikelihood(_gaussian, lambda f: 1.0 * f),
    _public("Gaussian", noise_variance=NOISE_VARIANCE),
)
GAUSSIAN_ONE = LikelihoodCase(
    "gaussian_one",
    1,
    lambda n, k, g: _normal(n, 1, g)[:, 0],
    GAUSSIAN.dense,
    _public("Gaussian", noise_variance=NOISE_VARIANCE),
)
POISSON = LikelihoodCase(
    "poisson",
    2,
    lambda n, k, g: torch.randint(4, (n, k), generator=g).double(),
    DenseLikelihood(_poisson, torch.exp),
    _public("Poisson"),
    prior_precision=60.0,
)
FROM_LOSS = LikelihoodCase(
    "from_loss",
    2,
    _normal,
    DenseLikelihood(log_cosh, lambda f: 1.0 * f),
    _public("from_loss", log_cosh),
)
FROM_LOSS_WITH_MEAN = LikelihoodCase(
    "from_loss_with_mean",
    2,
    _normal,
    DenseLikelihood(log_cosh, torch.tanh),
    _public("from_loss", log_cosh, mean=torch.tanh),
)

WEIGHTS = (0.5, 2.0, 1.3)
SMOOTHING = 0.15


def _smoothed(f: Tensor, y: Tensor) -> Tensor:
    """Class weights and smoothing as torch's own loss has them."""
    weight = f.new_tensor(WEIGHTS)
    return F.cross_entropy(f[None], y[None], weight, reduction="none", label_smoothing=SMOOTHING)[0]


def _class_weighted(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f[None], y[None], f.new_tensor(WEIGHTS), reduction="none")[0]


def _sample_weighted(f: Tensor, y: Tensor) -> Tensor:
    return y[1] * F.cross_entropy(f[None], y[None, 0].long(), reduction="none")[0]


def _weighted_classes(n: int, k: int, generator: torch.Generator) -> Tensor:
    weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.2
    return torch.stack([_classes(n, k, generator).double(), weights], 1)


def _weighted_numbers(n: int, k: int, generator: torch.Generator) -> Tensor:
    weights = torch.rand(n, 1, generator=generator, dtype=torch.float64) + 0.2
    return torch.cat([_normal(n, k, generator), weights], 1)


SMOOTHED = LikelihoodCase(
    "smoothed",
    3,
    _classes,
    DenseLikelihood(_smoothed, lambda f: f.softmax(0)),
    _public("Categorical", label_smoothing=SMOOTHING, class_weights=WEIGHTS),
)
SOFT_SMOOTHED = LikelihoodCase(
    "soft_smoothed",
    3,
    SOFT_CATEGORICAL.targets,
    SMOOTHED.dense,
    _public(
        "Categorical",
        label_smoothing=SMOOTHING,
        class_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
    ),
)
CLASS_WEIGHTED = LikelihoodCase(
    "class_weighted",
    3,
    _classes,
    DenseLikelihood(_class_weighted, lambda f: f.softmax(0)),
    _public("Categorical", class_weights=list(WEIGHTS)),
)
SAMPLE_WEIGHTED = LikelihoodCase(
    "sample_weighted",
    3,
    _weighted_classes,
    DenseLikelihood(_sample_weighted, lambda f: f.softmax(0)),
    _public("SampleWeighted"),
)
SAMPLE_WEIGHTED_GAUSSIAN = LikelihoodCase(
    "sample_weighted_gaussian",
    2,
    _weighted_numbers,
    DenseLikelihood(lambda f, y: y[-1] * _gaussian(f, y[:-1]), lambda f: 1.0 * f),
    lambda: _public("SampleWeighted", _public("Gaussian", noise_variance=NOISE_VARIANCE)())(),
)

LIKELIHOODS = (
    SMOOTHED,
    SOFT_SMOOTHED,
    CLASS_WEIGHTED,
    SAMPLE_WEIGHTED,
    SAMPLE_WEIGHTED_GAUSSIAN,
    CATEGORICAL,
    SOFT_CATEGORICAL,
    BERNOULLI,
    SOFT_BERNOULLI,
    GAUSSIAN,
    GAUSSIAN_ONE,
    POISSON,
    FROM_LOSS,
    FROM_LOSS_WITH_MEAN,
)

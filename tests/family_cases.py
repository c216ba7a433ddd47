"""A table of families with data that they have a meaning for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram.families import (
    BetaBernoulli,
    DirichletCategorical,
    Family,
    GammaExponential,
    GammaPoisson,
    GaussianMixture,
    LinearRegression,
    LinearStateSpace,
    NormalInverseGamma,
    NormalInverseWishart,
    NormalKnownVariance,
    ProbabilisticPCA,
)

SCALE = np.array([[2.0, 0.3, 0.0], [0.3, 1.5, -0.2], [0.0, -0.2, 1.0]])
TRANSITION = np.array([[0.9, 0.2], [-0.1, 0.8]])
TRANSITION_NOISE = np.array([[0.5, 0.1], [0.1, 0.3]])
EMISSION = np.array([[1.0, 0.5], [0.0, 1.0], [0.3, -0.4]])
EMISSION_NOISE = np.array([[0.4, 0.1, 0.0], [0.1, 0.6, 0.0], [0.0, 0.0, 0.5]])
INITIAL_MEAN = np.array([0.5, -0.5])
INITIAL_COVARIANCE = np.array([[1.0, 0.2], [0.2, 2.0]])
NUM_TIMES = 11


@dataclass(frozen=True)
class Case:
    """A family and data of any size; ``smallest`` are as many examples as it needs."""

    family: Family
    draw: Callable[[np.random.Generator, int], Any]
    smallest: int = 0

    def data(self, seed: int, num_data: int) -> Any:
        return self.draw(np.random.default_rng(seed), num_data)


def take(data: Any, kept: Any) -> Any:
    """The same data with some examples only."""
    return tuple(part[kept] for part in data) if isinstance(data, tuple) else data[kept]


def mixture_data(random: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    return random.normal(size=(num, 3)), random.dirichlet([0.7, 0.7], size=num)


def regression_data(random: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    return random.normal(size=(num, 4)), random.normal(size=num)


def chain_data(random: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    return random.integers(0, NUM_TIMES, size=num), random.normal(size=(num, 3))


COMPONENT = NormalInverseWishart([0.2, 0.0, -0.3], 0.7, 4.5, SCALE)
STATE_SPACE = LinearStateSpace(
    NUM_TIMES,
    TRANSITION,
    TRANSITION_NOISE,
    EMISSION,
    EMISSION_NOISE,
    INITIAL_MEAN,
    INITIAL_COVARIANCE,
)
CASES = {
    "beta_bernoulli": Case(BetaBernoulli(0.8, 1.7), lambda r, n: r.integers(0, 2, n)),
    "gamma_poisson": Case(
        GammaPoisson(0.6, 1.3), lambda r, n: (r.poisson(2.0, n), r.uniform(0.5, 2.0, n))
    ),
    "gamma_exponential": Case(GammaExponential(1.4, 0.7), lambda r, n: r.exponential(2.0, n)),
    "dirichlet_categorical": Case(
        DirichletCategorical([0.5, 1.0, 2.0, 0.2]), lambda r, n: r.integers(0, 4, n)
    ),
    "normal_known_variance": Case(
        NormalKnownVariance(0.6, 0.4, 2.5), lambda r, n: r.normal(1.0, 1.0, n)
    ),
    "normal_inverse_gamma": Case(
        NormalInverseGamma(0.3, 0.6, 1.2, 0.9), lambda r, n: r.normal(1.0, 1.0, n)
    ),
    "normal_inverse_wishart": Case(COMPONENT, lambda r, n: r.normal(0.5, 1.0, (n, 3))),
    "linear_regression": Case(LinearRegression(4, 0.4, 0.7), regression_data),
    "gaussian_mixture": Case(GaussianMixture([0.9, 1.6], COMPONENT), mixture_data),
    "linear_state_space": Case(STATE_SPACE, chain_data),
    "probabilistic_pca": Case(ProbabilisticPCA(4, 2), lambda r, n: r.normal(size=(n, 4)), 7),
}

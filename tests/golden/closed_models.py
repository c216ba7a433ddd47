"""Golden results of what is not a net: linear models, fits of other libraries, families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from torch import Tensor

import engram
from engram import families, models
from golden.problems import wave
from golden.record import GROUPS, Record

NUM_ROWS = 9
ESTIMATORS = ("exact", "linear", "corrected", "iterated", "paper")
X = 1.3 * wave((NUM_ROWS, 3), 0.0)
REAL = wave((NUM_ROWS,), 0.3) + X[:, 0]
BINARY = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1]).double()
COUNTS = torch.tensor([0, 2, 1, 4, 0, 3, 1, 1, 5]).double()
CLASSES = torch.tensor([0, 1, 2, 1, 0, 2, 2, 1, 0])


def _logistic() -> Any:
    return LogisticRegression(C=0.5, solver="newton-cholesky", tol=1e-14).fit(X.numpy(), BINARY)


FITS: dict[str, Callable[[], models.Fit]] = {
    "fit_linear": lambda: models.fit_linear(X, REAL, penalty=0.5),
    "logit": lambda: models.fit_glm(X, BINARY, "bernoulli", penalty=1.0),
    "probit": lambda: models.fit_glm(X, BINARY, "bernoulli", link="probit", penalty=1.0),
    "poisson": lambda: models.fit_glm(X, COUNTS, "poisson", penalty=1.0),
    "gamma": lambda: models.fit_glm(X, REAL.exp(), "gamma", link="log", penalty=1.0),
    "multinomial": lambda: models.fit_multinomial(X, CLASSES, penalty=1.0),
    "scikit-learn least squares": lambda: models.read(
        LinearRegression().fit(X.numpy(), REAL.numpy()), X.numpy(), REAL.numpy()
    ),
    "scikit-learn ridge": lambda: models.read(
        Ridge(alpha=0.7).fit(X.numpy(), REAL.numpy()), X.numpy(), REAL.numpy()
    ),
    "scikit-learn logistic": lambda: models.read(_logistic(), X.numpy(), BINARY.numpy()),
}

SCALE = np.array([[2.0, 0.3, 0.0], [0.3, 1.5, -0.2], [0.0, -0.2, 1.0]])
FAMILIES: dict[str, tuple[families.Family, Any]] = {
    "beta_bernoulli": (families.BetaBernoulli(0.8, 1.7), BINARY),
    "gamma_poisson": (families.GammaPoisson(0.6, 1.3), (COUNTS, 1.5 + 0.5 * REAL.sin())),
    "gamma_exponential": (families.GammaExponential(1.4, 0.7), REAL.exp()),
    "dirichlet_categorical": (families.DirichletCategorical([0.5, 1.0, 2.0]), CLASSES),
    "normal_known_variance": (families.NormalKnownVariance(0.6, 0.4, 2.5), REAL),
    "normal_inverse_gamma": (families.NormalInverseGamma(0.3, 0.6, 1.2, 0.9), REAL),
    "normal_inverse_wishart": (
        families.NormalInverseWishart([0.2, 0.0, -0.3], 0.7, 4.5, SCALE),
        X,
    ),
    "linear_regression": (families.LinearRegression(3, 0.4, 0.7), (X, REAL)),
}


def glms() -> Record:
    """Every fit with every estimator and two groups."""
    record = Record()
    for name, make in FITS.items():
        record.attempt(name, lambda name=name, make=make: _ask_fit(record, name, make()))
    return record


def _ask_fit(record: Record, name: str, fit: models.Fit) -> None:
    record.numbers[f"{name}/fit/coefficients"] = fit.coefficients
    for estimator in ESTIMATORS:

        def ask(estimator: str = estimator) -> None:
            record.result(f"{name}/{estimator}", engram.from_estimator(fit, estimator=estimator))

        record.attempt(f"{name}/{estimator}", ask)
    for group, chosen in GROUPS.items():
        shares = chosen.get("weights", 1.0)
        removal = models.remove_group(fit, chosen["indices"], shares=shares)
        record.removal(f"{name}/{group}", removal)


def conjugate() -> Record:
    """Every family fitted, without a group, and without each example."""
    record = Record()
    for name, (family, data) in FAMILIES.items():
        posterior = family.fit(data)
        for variant, held in (("all", posterior), ("without", posterior.remove([1, 3]))):
            record.numbers[f"{name}/{variant}/standard"] = _flat(held.standard())
            record.numbers[f"{name}/{variant}/log_predictive"] = held.log_predictive(data)
        record.numbers[f"{name}/all/loo_log_predictive"] = posterior.loo_log_predictive()
        divergence = posterior.kl(posterior.remove([1, 3]))
        record.numbers[f"{name}/without/divergence"] = torch.tensor([divergence]).double()
    return record


def _flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.double().reshape(-1) for value in named.values()])


MODELS: dict[str, Callable[[], Record]] = {"glms": glms, "families": conjugate}

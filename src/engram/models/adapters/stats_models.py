"""Fitted results of statsmodels, which carry their data with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.errors import DataError, UnsupportedModelError
from engram.likelihoods import (
    Bernoulli,
    Categorical,
    ElementwiseLikelihood,
    Gamma,
    Gaussian,
    InverseGaussian,
    NegativeBinomial,
    Poisson,
)
from engram.likelihoods.tweedie import power_likelihood
from engram.models.glm.design import Design, as_matrix, read_design
from engram.models.glm.fit import Fit, fit_at
from engram.models.glm.frames import check_names
from engram.models.glm.newton import Objective

LINKS = {
    "Identity": "identity",
    "Log": "log",
    "Logit": "logit",
    "Probit": "probit",
    "CLogLog": "cloglog",
    "LogLog": "loglog",
    "Cauchy": "cauchit",
    "InversePower": "inverse",
    "InverseSquared": "inverse_squared",
    "Sqrt": "sqrt",
}
FAMILIES: dict[str, Callable[[Any, str], ElementwiseLikelihood]] = {
    "Gaussian": lambda family, link: Gaussian(link=link),
    "Binomial": lambda family, link: Bernoulli(link),
    "Poisson": lambda family, link: Poisson(link),
    "Gamma": lambda family, link: Gamma(link),
    "InverseGaussian": lambda family, link: InverseGaussian(link),
    "NegativeBinomial": lambda family, link: NegativeBinomial(float(family.alpha), link),
    "Tweedie": lambda family, link: power_likelihood(float(family.var_power), link),
}


def check_own_data(results: Any, inputs: Any, targets: Any) -> None:
    """DataError if inputs or targets are given that are not those of the results, or none are."""
    if results.model.exog is None or results.model.endog is None:
        raise DataError(
            "results that carry their data",
            "results without, after remove_data()",
            "pass what model.fit() returned before its data were removed",
        )
    for what, given, own in (
        ("X", inputs, results.model.exog),
        ("y", targets, results.model.endog),
    ):
        if given is None:
            continue
        values = np.asarray(given, dtype=float)
        if values.shape != np.shape(own) or not np.allclose(values, own):
            raise DataError(
                f"{what} as the statsmodels results carry it, of shape {np.shape(own)}",
                f"other values, of shape {values.shape}",
                "leave X and y out: engram.from_estimator(results)",
            )


def read_regression(results: Any) -> Fit:
    """OLS and WLS."""
    model = results.model
    if type(model).__name__ not in ("OLS", "WLS"):
        raise _unsupported(f"{type(model).__name__} results")
    if np.ndim(model.endog) != 1:
        raise _unsupported(f"{np.shape(model.endog)[1]} targets at once")
    weights = np.broadcast_to(np.asarray(model.weights, dtype=float), len(model.endog))
    design = _design(results, weights=weights)
    return _fit(results, design, Gaussian(), model.endog, float(results.scale))


def read_generalised(results: Any) -> Fit:
    """GLM with any of the usual families and links."""
    model, family = results.model, results.model.family
    link = LINKS.get(type(family.link).__name__)
    kind = FAMILIES.get(type(family).__name__)
    if link is None or kind is None:
        raise _unsupported(f"{type(family).__name__} with link {type(family.link).__name__}")
    likelihood = kind(family, link)
    frequencies = np.array(model.freq_weights, dtype=float)
    weights = frequencies * np.asarray(model.var_weights, float)
    if likelihood.name == "bernoulli":
        weights = weights * np.asarray(model.n_trials, float)
    shift = np.broadcast_to(np.asarray(model._offset_exposure, float), len(model.endog))
    design = _design(results, weights=weights, offset=shift)
    design = replace(design, frequencies=torch.from_numpy(frequencies))
    return _fit(results, design, likelihood, model.endog, float(results.scale))


def read_binary(results: Any) -> Fit:
    """Logit and Probit."""
    link = {"Logit": "logit", "Probit": "probit"}[type(results.model).__name__]
    shift = getattr(results.model, "offset", None)
    return _fit(results, _design(results, offset=shift), Bernoulli(link), results.model.endog, 1.0)


def read_counts(results: Any) -> Fit:
    """Poisson."""
    model = results.model
    shift = np.zeros(len(model.endog))
    for part in ("offset", "exposure"):  # the model keeps the logarithm of the exposure
        value = getattr(model, part, None)
        shift = shift if value is None else shift + np.asarray(value, float)
    return _fit(results, _design(results, offset=shift), Poisson(), model.endog, 1.0)


def read_multinomial(results: Any) -> Fit:
    """MNLogit; the first class, whose coefficients it sets to 0, has its own row here."""
    theta = np.asarray(results.params, dtype=np.float64).T
    coefficients = torch.from_numpy(np.concatenate([np.zeros((1, theta.shape[1])), theta]))
    shares = torch.from_numpy(np.array(results.model.wendog, dtype=np.float64))
    objective = Objective(_design(results), Categorical(), shares)
    return fit_at(objective, coefficients, source=results)


def _design(results: Any, weights: Any = None, offset: Any = None) -> Design:
    model, kept = results.model, _kept(results)
    matrix = as_matrix(model.exog)[:, kept]
    design = read_design(matrix, len(model.endog), intercept=False, weights=weights, offset=offset)
    names = tuple(str(model.exog_names[column]) for column in kept)
    check_names(names)
    return replace(design, names=names)


def _kept(results: Any) -> list[int]:
    """The columns that were fitted: those a selection left, where one came before the fit.

    ``fit_regularized(refit=True)`` fits again on the columns that the penalty left and fills up
    with zeros, which are no minimum of anything.
    """
    count = np.shape(results.model.exog)[1]
    if not getattr(results, "regularized", False):
        return list(range(count))
    kept = np.flatnonzero(np.asarray(results.params))
    if len(kept) == 0:
        raise _unsupported("a regularised fit that left no column")
    return [int(column) for column in kept]


def _fit(
    results: Any, design: Design, likelihood: ElementwiseLikelihood, targets: Any, scale: float
) -> Fit:
    if getattr(results, "constraints", None) is not None:
        raise _unsupported("a constrained fit")
    params = np.array(results.params, dtype=np.float64)
    column = torch.from_numpy(np.array(targets, dtype=np.float64).reshape(-1, 1))
    theta: Tensor = torch.from_numpy(params[None, _kept(results)])
    objective = Objective(design, likelihood, likelihood.prepare(column, column))
    return fit_at(objective, theta, dispersion=scale, source=results)


def _unsupported(got: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"statsmodels results of {', '.join(SUPPORTED)}; GLM families {', '.join(FAMILIES)}; "
        f"links {', '.join(LINKS)}",
        got,
        "refit without regularisation or constraints, or use engram.models.fit_glm",
    )


SUPPORTED = ("OLS", "WLS", "GLM", "Logit", "Probit", "Poisson", "MNLogit")
READERS: dict[str, Callable[[Any], Fit]] = {
    "OLSResults": read_regression,
    "RegressionResults": read_regression,
    "GLMResults": read_generalised,
    "LogitResults": read_binary,
    "ProbitResults": read_binary,
    "PoissonResults": read_counts,
    "MultinomialResults": read_multinomial,
}

"""Sensitivities of models that scikit-learn or statsmodels fitted."""

from __future__ import annotations

from typing import Any

from torch import nn

from engram.errors import ArgumentError, UnsupportedModelError
from engram.models.adapters import scikit_learn, stats_models
from engram.models.glm.fit import Fit
from engram.models.glm.frames import check_rows
from engram.models.influence.leave_one_out import sensitivities_of
from engram.sensitivity.result import Result


def from_estimator(
    model: Any,
    X: Any = None,
    y: Any = None,
    *,
    sample_weight: Any = None,
    estimator: str = "exact",
    rounds: int = 3,
    progress: bool = True,
) -> Result:
    """Sensitivities of a fitted scikit-learn estimator or statsmodels result.

    Nothing is fitted again: the precision is the Hessian of the model's own objective at its
    coefficients. ``result.diagnostics.relative_gradient`` says how near that is to a minimum. What
    was computed from the data beforehand is held fixed when an example goes: the steps of a
    pipeline before the last, the weights of ``class_weight="balanced"``, a penalty that was chosen
    by cross-validation or that stands beside a mean of losses, alpha times the number of examples.

    Args:
        model: LinearRegression, Ridge, LogisticRegression, PoissonRegressor, GammaRegressor,
            TweedieRegressor, SGDClassifier, SGDRegressor, or a Pipeline that ends in one; results
            of OLS, WLS, GLM, Logit, Probit, Poisson or MNLogit; or a :class:`engram.models.Fit`.
        X, y: the data the estimator was fitted on; statsmodels results carry theirs.
        sample_weight: as it was given to the estimator's ``fit``.
        estimator: ``exact``, or ``corrected`` (one Newton step), ``linear``, ``iterated`` or
            ``paper``; see :func:`engram.models.sensitivities_of`.
        rounds: of ``iterated``.
        progress: show a bar when refits take longer than a few seconds.

    Returns:
        A result; losses as in :func:`engram.models.sensitivities_of`.

    Example:
        >>> import numpy as np
        >>> from sklearn.linear_model import LinearRegression
        >>> X, y = np.array([[0.0], [1.0], [2.0], [6.0]]), np.array([1.0, 3.0, 5.5, 12.0])
        >>> result = from_estimator(LinearRegression().fit(X, y), X, y)
        >>> without = LinearRegression().fit(X[:3], y[:3]).predict(X[3:])
        >>> np.allclose((result.outputs + result.deviation)[3], without)
        True
    """
    fit = read(model, X, y, sample_weight)
    return sensitivities_of(fit, estimator=estimator, rounds=rounds, progress=progress)


def read(model: Any, X: Any = None, y: Any = None, sample_weight: Any = None) -> Fit:
    """The model as a fit of engram, with parameter deviations, groups and measures.

    Args:
        model, X, y, sample_weight: as for :func:`from_estimator`.
    """
    if isinstance(model, Fit):
        return model
    if _from("sklearn", model):
        if X is None or y is None:
            raise ArgumentError(
                "the data that the estimator was fitted on",
                f"X={'None' if X is None else 'given'}, y={'None' if y is None else 'given'}",
                "call engram.from_estimator(estimator, X, y)",
            )
        check_rows(X=X, y=y, sample_weight=sample_weight)
        return _read_estimator(model, X, y, sample_weight)
    if _from("statsmodels", model):
        return _read_results(model, X, y, sample_weight)
    remedy = "fit one of these, or use engram.models.fit_glm"
    if isinstance(model, nn.Module):
        remedy = "for a neural net use engram.laplace and engram.sensitivities"
    raise UnsupportedModelError(_supported(), f"a {type(model).__qualname__}", remedy)


def _from(library: str, model: Any) -> bool:
    """Whether a class of this library is among the model's: nothing is imported to find out."""
    return any(kind.__module__.split(".")[0] == library for kind in type(model).__mro__)


def _read_estimator(model: Any, X: Any, y: Any, sample_weight: Any) -> Fit:
    names = [kind.__name__ for kind in type(model).__mro__]
    if "Pipeline" in names:
        return scikit_learn.read_pipeline(model, X, y, sample_weight, read)
    name = next((name for name in names if name in scikit_learn.READERS), None)
    if name is None:
        raise UnsupportedModelError(
            _supported(), f"a {type(model).__name__}", "fit one of these, or use fit_glm"
        )
    if not hasattr(model, "coef_"):
        raise ArgumentError(
            f"a fitted {type(model).__name__}", "one that is not fitted", "call its fit(X, y) first"
        )
    return scikit_learn.READERS[name](model, X, y, sample_weight)


def _read_results(results: Any, X: Any, y: Any, sample_weight: Any) -> Fit:
    name = type(getattr(results, "_results", results)).__name__
    if name not in stats_models.READERS or not hasattr(results, "params"):
        raise UnsupportedModelError(
            _supported(), f"statsmodels' {name}", "pass what model.fit() returns for one of these"
        )
    if sample_weight is not None:
        raise ArgumentError(
            "no sample_weight with statsmodels results, which carry their weights",
            "sample_weight",
            "give the weights to the model",
        )
    stats_models.check_own_data(results, X, y)
    return stats_models.READERS[name](results)


def _supported() -> str:
    return (
        f"scikit-learn's {', '.join(scikit_learn.READERS)} or a Pipeline that ends in one, or "
        f"statsmodels results of {', '.join(stats_models.SUPPORTED)}"
    )

r"""Fitted estimators of scikit-learn, and pipelines that end in one.

Each minimises the objective of a :class:`~engram.models.glm.fit.Fit` up to a factor; with
that factor divided out, the penalty is:

- ``Ridge``: alpha; ``LogisticRegression``: 1 / C;
- ``PoissonRegressor``, ``GammaRegressor``, ``TweedieRegressor``: alpha times the sum of weights;
- ``SGDClassifier``, ``SGDRegressor``: alpha times the number of examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.errors import DataError, TargetError, UnsupportedModelError
from engram.likelihoods import (
    Bernoulli,
    Categorical,
    ElementwiseLikelihood,
    Gamma,
    Gaussian,
    Likelihood,
    Poisson,
)
from engram.likelihoods.tweedie import power_likelihood
from engram.models.glm.design import as_column, as_weights, count_of, read_design
from engram.models.glm.fit import Fit, fit_at
from engram.models.glm.frames import MENTIONED, frame_names, in_order, row_index
from engram.models.glm.newton import Objective

MANY = "many classes are read from LogisticRegression with a multinomial loss, two from any other"
Read = Callable[[Any, Any, Any, Any], Fit]


def read_pipeline(model: Any, inputs: Any, targets: Any, weights: Any, read: Read) -> Fit:
    """The last step of a pipeline, on what the steps before make of the inputs."""
    last = model.steps[-1][1]
    if not hasattr(last, "coef_") and not hasattr(last, "steps"):
        return read(last, inputs, targets, weights)  # which says what is wrong with it
    if len(model.steps) > 1:
        index = row_index(inputs)
        try:
            inputs = model[:-1].transform(_in_order(model, inputs))
        except (TypeError, ValueError) as error:
            raise DataError(
                "inputs that the steps of the pipeline can transform",
                f"{type(error).__name__}: {error}",
                "fit all steps, and pass the inputs the pipeline was fitted on",
            ) from error
        inputs = _named(model[:-1], inputs, index)
    return read(last, inputs, targets, weights)


def _named(steps: Any, values: Any, index: Any) -> Any:
    """What the steps gave as a data frame with their names for its columns, if they have any."""
    if frame_names(values) is not None:
        return values
    try:
        names = [str(name) for name in steps.get_feature_names_out()]
    except (AttributeError, TypeError, ValueError):  # some step has none
        return values
    matrix = values.toarray() if hasattr(values, "toarray") else np.asarray(values)
    if matrix.shape[1:] != (len(names),):
        return values
    import pandas as pd

    return pd.DataFrame(matrix, index=index, columns=names)


def _in_order(model: Any, inputs: Any) -> Any:
    """A data frame's columns in the order the model was fitted with."""
    names = getattr(model, "feature_names_in_", None)
    return inputs if names is None else in_order(inputs, [str(name) for name in names])


def read_least_squares(model: Any, inputs: Any, targets: Any, weights: Any) -> Fit:
    """LinearRegression, Ridge and RidgeCV."""
    if getattr(model, "positive", False):
        raise _unsupported(model, "positive=True, whose bounds are not part of the equation")
    alpha = np.asarray(getattr(model, "alpha_", getattr(model, "alpha", 0.0)), dtype=float)
    if alpha.size != 1:
        raise _unsupported(model, "one alpha per target")
    return _regression(model, inputs, targets, weights, Gaussian(), float(alpha.reshape(-1)[0]))


def read_generalised(model: Any, inputs: Any, targets: Any, weights: Any) -> Fit:
    """PoissonRegressor, GammaRegressor and TweedieRegressor."""
    name = _kind(model, ("PoissonRegressor", "GammaRegressor", "TweedieRegressor"))
    likelihood: ElementwiseLikelihood = Poisson() if name == "PoissonRegressor" else Gamma()
    if name == "TweedieRegressor":
        likelihood = _tweedie(model)
    column = as_weights(weights, count_of(targets))
    return _regression(
        model, inputs, targets, weights, likelihood, model.alpha * float(column.sum())
    )


def _tweedie(model: Any) -> ElementwiseLikelihood:
    power = float(model.power)
    link = model.link
    if link == "auto":
        link = "identity" if power <= 0 else "log"
    if power < 0:
        raise _unsupported(model, f"power={power:g}")
    return Poisson(link) if power == 1 else power_likelihood(power, link)


def read_stochastic_regression(model: Any, inputs: Any, targets: Any, weights: Any) -> Fit:
    """SGDRegressor with the squared error and an L2 penalty."""
    if model.loss != "squared_error":
        raise _unsupported(model, f"loss={model.loss!r}; loss='squared_error' is supported")
    return _regression(model, inputs, targets, weights, Gaussian(), _stochastic(model, targets))


def read_stochastic_classifier(model: Any, inputs: Any, targets: Any, weights: Any) -> Fit:
    """SGDClassifier with the logistic loss, an L2 penalty and two classes."""
    if model.loss != "log_loss":
        raise _unsupported(model, f"loss={model.loss!r}; loss='log_loss' is supported")
    if len(model.classes_) > 2:
        raise _unsupported(model, f"more than two classes, each fitted against the rest; {MANY}")
    return _classification(model, inputs, targets, weights, _stochastic(model, targets))


def _stochastic(model: Any, targets: Any) -> float:
    if model.penalty not in ("l2", None):
        raise _unsupported(model, f"penalty={model.penalty!r}; penalty='l2' is supported")
    return 0.0 if model.penalty is None else float(model.alpha) * count_of(targets)


def read_logistic(model: Any, inputs: Any, targets: Any, weights: Any) -> Fit:
    """LogisticRegression and LogisticRegressionCV, binary and multinomial."""
    penalty = getattr(model, "penalty", "l2")
    ratio = getattr(model, "l1_ratio_", getattr(model, "l1_ratio", 0.0))
    mixed = penalty in ("elasticnet", "deprecated") and np.any(np.asarray(ratio, dtype=float) > 0)
    if penalty == "l1" or mixed:
        raise _unsupported(model, "an L1 penalty, which has no Hessian at 0; L2 is supported")
    if len(model.classes_) > 2 and len(model.coef_) > 1:
        each = getattr(model, "multi_class", "multinomial") == "ovr" or model.solver == "liblinear"
        if each:
            raise _unsupported(model, f"classes fitted one against the rest; {MANY}")
    strength = np.unique(np.asarray(getattr(model, "C_", getattr(model, "C", 1.0)), dtype=float))
    if strength.size != 1:
        raise _unsupported(model, "another C for every class")
    precision = 0.0 if penalty in (None, "none") else 1.0 / float(strength[0])
    held = 0.0
    if model.solver == "liblinear" and model.fit_intercept:
        held = precision / float(model.intercept_scaling) ** 2  # its intercept is a column too
    return _classification(model, inputs, targets, weights, precision, held)


def _regression(
    model: Any,
    inputs: Any,
    targets: Any,
    weights: Any,
    likelihood: ElementwiseLikelihood,
    penalty: float,
) -> Fit:
    count = count_of(targets)
    if np.ndim(targets) == 2 and np.shape(targets)[1] > 1:
        raise _unsupported(model, f"{np.shape(targets)[1]} targets at once; fit one at a time")
    column = as_column("targets", targets, count, 0.0)[:, None]
    return _fit(model, inputs, likelihood.prepare(column, column), weights, likelihood, penalty)


def _classification(
    model: Any,
    inputs: Any,
    targets: Any,
    weights: Any,
    penalty: float,
    intercept_penalty: float = 0.0,
) -> Fit:
    numbers = _class_numbers(model, targets)
    column = as_weights(weights, len(numbers))
    if model.class_weight is not None:
        column = column * _class_weights(model, targets, weights)[numbers]
    if len(model.coef_) == 1:
        values = numbers.double()[:, None]
        binary = Bernoulli()
        return _fit(model, inputs, values, column, binary, penalty, intercept_penalty)
    shares = torch.nn.functional.one_hot(numbers, len(model.classes_)).double()
    return _fit(model, inputs, shares, column, Categorical(), penalty, intercept_penalty)


def _class_numbers(model: Any, targets: Any) -> Tensor:
    labels = np.asarray(targets).reshape(-1)
    known = np.asarray(model.classes_)  # in order
    try:
        numbers = np.searchsorted(known, labels).clip(max=len(known) - 1)
        strange = labels[known[numbers] != labels]
    except TypeError:  # labels that have no order among the classes
        numbers, strange = np.zeros(len(labels), int), labels[~np.isin(labels, known)]
    if len(strange):
        shown = known[:MENTIONED].tolist()
        raise TargetError(
            f"labels among the classes that the model was fitted with, {shown}",
            f"{strange[0]!r}",
            "pass the targets that it was fitted on",
        )
    return torch.from_numpy(numbers)


def _class_weights(model: Any, targets: Any, weights: Any) -> Tensor:
    from sklearn.utils.class_weight import compute_class_weight

    more: dict[str, Any] = {}
    if (
        weights is not None
        and "sample_weight" in inspect.signature(compute_class_weight).parameters
    ):
        more["sample_weight"] = np.asarray(weights)  # newer versions balance the weighted classes
    found = compute_class_weight(
        model.class_weight, classes=model.classes_, y=np.asarray(targets).reshape(-1), **more
    )
    return torch.from_numpy(np.asarray(found, dtype=np.float64))


def _fit(
    model: Any,
    inputs: Any,
    targets: Tensor,
    weights: Any,
    likelihood: Likelihood,
    penalty: float,
    intercept_penalty: float = 0.0,
) -> Fit:
    coefficients = np.atleast_2d(np.asarray(model.coef_, dtype=np.float64))
    if len(coefficients) != targets.shape[1]:
        raise _unsupported(model, f"{len(coefficients)} targets at once")
    design = read_design(
        _in_order(model, inputs),
        len(targets),
        penalty=penalty,
        intercept=bool(model.fit_intercept),
        intercept_penalty=intercept_penalty,
        weights=weights,
    )
    if model.fit_intercept:
        constant = np.broadcast_to(np.reshape(model.intercept_, (-1, 1)), (len(coefficients), 1))
        coefficients = np.concatenate([constant, coefficients], 1)
    if coefficients.shape[1] != design.width:
        raise DataError(
            f"inputs with the {np.atleast_2d(model.coef_).shape[1]} columns of the fitted model",
            f"{design.width - int(bool(model.fit_intercept))} columns",
            "pass the inputs it was fitted on",
        )
    theta = torch.from_numpy(np.ascontiguousarray(coefficients))
    return fit_at(Objective(design, likelihood, targets), theta, source=model)


def _kind(model: Any, names: tuple[str, ...]) -> str:
    return next(kind.__name__ for kind in type(model).__mro__ if kind.__name__ in names)


def _unsupported(model: Any, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a {type(model).__name__} that minimises a smooth loss with an L2 penalty",
        what,
        f"use one of: {', '.join(READERS)}, in a form that is supported",
    )


READERS: dict[str, Read] = {
    "LinearRegression": read_least_squares,
    "Ridge": read_least_squares,
    "RidgeCV": read_least_squares,
    "LogisticRegression": read_logistic,
    "LogisticRegressionCV": read_logistic,
    "PoissonRegressor": read_generalised,
    "GammaRegressor": read_generalised,
    "TweedieRegressor": read_generalised,
    "SGDClassifier": read_stochastic_classifier,
    "SGDRegressor": read_stochastic_regression,
}

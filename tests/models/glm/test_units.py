"""Units of weights and targets change nothing, and what has no unit at all is refused by name."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, PoissonRegressor

import engram
from engram.errors import ArgumentError, DataError, EngramError, TargetError
from engram.models import fit_glm, fit_linear, fit_multinomial, sensitivities_of

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(40, 3))
MEAN = np.exp(X @ [0.6, -0.4, 0.2] + 0.3)
COUNTS = RANDOM.poisson(MEAN).astype(float)
SIZES = RANDOM.gamma(3, MEAN / 3)


@pytest.mark.parametrize("unit", [1e-150, 1e-20, 1e20, 1e150])
def test_weights_in_any_unit(unit):
    weights = np.full(40, unit)
    counts = fit_glm(X, COUNTS, "poisson", weights=weights)
    assert torch.allclose(counts.coefficients, fit_glm(X, COUNTS, "poisson").coefficients)
    plain, scaled = fit_linear(X, SIZES), fit_linear(X, SIZES, weights=weights)
    assert scaled.dispersion / unit == pytest.approx(plain.dispersion)
    truth = sensitivities_of(plain).deviation
    assert torch.allclose(sensitivities_of(scaled).deviation, truth)


@pytest.mark.parametrize("unit", [1e-100, 1e14, 1e100])
def test_positive_targets_in_any_unit(unit):
    plain = fit_glm(X, SIZES, "gamma", link="log")
    scaled = fit_glm(X, unit * SIZES, "gamma", link="log")
    assert scaled.dispersion == pytest.approx(plain.dispersion)
    assert torch.allclose(scaled.coefficients[:, 1:], plain.coefficients[:, 1:])


def test_a_perfect_fit_has_no_dispersion_in_any_unit():
    for unit in (1e-100, 1.0, 1e100):
        with pytest.raises(EngramError, match="not fitted exactly"):
            fit_linear(X, unit * (X @ [1.0, 2.0, 3.0]))


def test_a_penalty_beside_a_mean_of_losses_is_held():
    settings = {"tol": 1e-10, "max_iter": 1000}
    model = PoissonRegressor(alpha=0.3, **settings).fit(X, COUNTS)
    result = engram.from_estimator(model, X, COUNTS)
    held = 0.3 * 40 / 39  # the same times 39 as 0.3 times 40
    again = PoissonRegressor(alpha=held, **settings).fit(X[1:], COUNTS[1:])
    mean = float((result.outputs + result.deviation)[0].exp())
    assert mean == pytest.approx(again.predict(X[:1])[0], rel=2e-3)


@pytest.mark.parametrize("number", [10**15, 2**62])
def test_a_class_number_out_of_all_reach(number):
    classes = np.where(COUNTS > 1, number, 0)
    with pytest.raises(TargetError, match="no example of class 1"):
        fit_multinomial(X, classes)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 0.5])
def test_class_numbers_that_are_none(value):
    with pytest.raises(TargetError, match=f"got {value:g}"):
        fit_multinomial(X, np.where(COUNTS > 1, value, 0.0))


@pytest.mark.parametrize("value", ["no", None, 1, 0.0])
@pytest.mark.parametrize("name", ["intercept", "penalise_intercept"])
def test_truth_values(name, value):
    with pytest.raises(ArgumentError, match=f"{name} to be True or False"):
        fit_glm(X, COUNTS, "poisson", penalty=1.0, **{name: value})
    fit_glm(X, COUNTS, "poisson", penalty=1.0, **{name: np.True_})


@pytest.mark.parametrize("dispersion", ["1", True, -1.0, np.nan, [1.0]])
def test_dispersions(dispersion):
    with pytest.raises(ArgumentError, match="positive dispersion"):
        fit_linear(X, SIZES, dispersion=dispersion)


def test_numbers_that_are_too_large_or_complex():
    with pytest.raises(DataError, match="squares are numbers"):
        fit_linear(1e300 * X, SIZES)
    with pytest.raises(DataError, match="too large"):
        fit_linear(X, [10**400] * 40)
    for inputs in (X + 1j, torch.from_numpy(X + 1j)):
        with pytest.raises(DataError, match="complex"):
            fit_linear(inputs, SIZES)


def test_labels_without_an_order():
    labels = (COUNTS > 1).astype(int)
    model = LogisticRegression().fit(X, labels)
    with pytest.raises(TargetError, match="got None"):
        engram.from_estimator(model, X, np.where(labels == 1, 1, None))

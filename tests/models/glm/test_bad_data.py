"""Targets, data and choices that a model cannot have."""

import numpy as np
import pytest
import torch

from drawn_responses import BINARY, COUNTS, X, Y
from engram import likelihoods
from engram.errors import (
    ArgumentError,
    DataError,
    NonFiniteError,
    PosteriorError,
    TargetError,
)
from engram.models import (
    fit_glm,
    fit_linear,
    fit_multinomial,
    glm_measures,
    linear_measures,
    sensitivities_of,
)


@pytest.mark.parametrize(
    ("response", "targets", "text"),
    [
        ("bernoulli", np.r_[BINARY[:-1], 2.0], "between 0 and 1"),
        ("poisson", np.r_[COUNTS[:-1], -1.0], r"not negative; got -1 at position 39"),
        ("gamma", np.r_[COUNTS[:-1] + 1, 0.0], "positive"),
        ("negative_binomial", np.r_[COUNTS[:-1], -3.0], "not negative"),
        ("inverse_gaussian", np.r_[COUNTS[:-1] + 1, 0.0], "positive"),
    ],
)
def test_support(response, targets, text):
    with pytest.raises(TargetError, match=text):
        fit_glm(X, targets, response)


def test_classes():
    with pytest.raises(TargetError, match="no example of class 1"):
        fit_multinomial(X, np.where(BINARY > 0, 2, 0))
    with pytest.raises(TargetError, match="whole class numbers"):
        fit_multinomial(X, Y)
    with pytest.raises(TargetError, match="class numbers from 0"):
        fit_multinomial(X, BINARY.astype(int) - 1)
    with pytest.raises(TargetError, match="at least two classes"):
        fit_multinomial(X, np.zeros(40, dtype=int))


@pytest.mark.parametrize("fit", [fit_linear, fit_glm])
class TestData:
    def test_lengths(self, fit):
        with pytest.raises(DataError, match="40 rows and 39 targets"):
            fit(X, BINARY[:-1])
        with pytest.raises(DataError, match=r"weights .* each of 40 examples"):
            fit(X, BINARY, weights=np.ones(39))
        with pytest.raises(DataError, match=r"offset .* each of 40 examples"):
            fit(X, BINARY, offset=np.ones(41))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_non_finite(self, fit, value):
        inputs, targets = X.copy(), BINARY.copy()
        inputs[3, 1] = targets[5] = value
        with pytest.raises(NonFiniteError, match="example 3 in column 'x1'"):
            fit(inputs, BINARY)
        with pytest.raises(NonFiniteError, match="example 5"):
            fit(X, targets)

    def test_weights_and_penalties(self, fit):
        with pytest.raises(ArgumentError, match="not negative"):
            fit(X, BINARY, weights=-np.ones(40))
        for penalty in (-1.0, np.nan, [1.0, 2.0], [], "a", None):
            with pytest.raises(ArgumentError, match="penalty of 0 or more"):
                fit(X, BINARY, penalty=penalty)

    def test_no_targets(self, fit):
        for targets in (None, 1.0):
            with pytest.raises(DataError, match="one per row of X"):
                fit(X, targets)

    def test_shape(self, fit):
        with pytest.raises(DataError, match="reshape"):
            fit(X[:, 0], BINARY)
        with pytest.raises(DataError, match="matrix of numbers"):
            fit(np.array([["a"]] * 40), BINARY)


@pytest.mark.parametrize(
    ("response", "link"),
    [("poisson", "logit"), ("bernoulli", "sqrt"), ("gamma", "probit"), ("bernoulli", "inverse")],
)
def test_links_that_a_response_cannot_have(response, link):
    with pytest.raises(ArgumentError, match=f"link for a {response} likelihood: .*got '{link}'"):
        fit_glm(X, BINARY + 1, response, link=link)


def test_numbers_that_are_none():
    for kind in (likelihoods.NegativeBinomial, likelihoods.Tweedie):
        with pytest.raises(ArgumentError, match="'log'"):
            kind("log")
    with pytest.raises(TargetError, match="whole class numbers"):
        fit_multinomial(X, np.where(BINARY > 0, "a", "b"))
    with pytest.raises(ArgumentError, match="one number as penalty"):
        fit_glm(X, BINARY, penalty=[1.0, 2.0, 3.0], penalise_intercept=True)


def test_names_and_choices():
    with pytest.raises(ArgumentError, match="likelihood to be one of bernoulli, gaussian"):
        fit_glm(X, BINARY, "binomial")
    with pytest.raises(ArgumentError, match="link to be one of identity"):
        fit_glm(X, BINARY, link="logistic")
    with pytest.raises(ArgumentError, match="observed, expected"):
        fit_glm(X, BINARY, hessian="empirical")
    fit = fit_glm(X, BINARY)
    with pytest.raises(ArgumentError, match="estimator to be one of"):
        sensitivities_of(fit, estimator="newton")
    with pytest.raises(ArgumentError, match="share above 0"):
        sensitivities_of(fit, share=0.0)
    with pytest.raises(ArgumentError, match="linear regression"):
        linear_measures(fit)
    with pytest.raises(ArgumentError, match="one output"):
        glm_measures(fit_multinomial(X, BINARY.astype(int), penalty=1.0))


def test_targets_fitted_exactly():
    with pytest.raises(PosteriorError, match="degrees of freedom"):
        fit_linear(X[:4], Y[:4])
    with pytest.raises(PosteriorError, match="fitted exactly"):
        fit_linear(X, X @ [1.0, 2.0, 3.0])
    assert fit_linear(X[:4], Y[:4], dispersion=1.0).dispersion == 1.0


def test_inputs_are_not_changed():
    inputs, targets = torch.from_numpy(X.copy()), torch.from_numpy(BINARY.copy())
    sensitivities_of(fit_glm(inputs, targets, intercept=False))
    assert torch.equal(inputs, torch.from_numpy(X))
    assert torch.equal(targets, torch.from_numpy(BINARY))


def test_link_that_leaves_the_support():
    """The refit has a negative mean, which no target has a density at; a step is held inside."""
    inputs = np.r_[np.linspace(0.5, 3, 30), 30.0][:, None]
    targets = np.r_[2.0 + 0.1 * np.cos(9 * inputs[:30, 0]) - 0.1 * inputs[:30, 0], 9.0]
    fit = fit_glm(inputs, targets, "poisson", link="identity")
    exact = sensitivities_of(fit)
    assert exact.loo_loss[-1] == torch.inf
    assert exact.flagged[-1]
    assert (exact.outputs + exact.deviation)[-1] < 0
    result = sensitivities_of(fit, estimator="corrected")
    assert torch.isfinite(result.loo_loss).all()
    assert (fit.outputs + result.deviation > 0).all()

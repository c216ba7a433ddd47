"""Fits of other libraries that are easily misread: read right, called unreliable, or refused."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import statsmodels.api as sm
import statsmodels.formula.api as smf
import torch
from sklearn import linear_model

import engram
from engram.errors import DataError, UnsupportedModelError
from engram.models import fit_glm, fit_linear, read, sensitivities_of

RANDOM = np.random.default_rng(0)
NUM = 60
X = RANDOM.normal(size=(NUM, 4))
Y = X[:, 0] + RANDOM.normal(size=NUM)
BINARY = (RANDOM.random(NUM) < 1 / (1 + np.exp(-X[:, 0]))).astype(float)
COUNTS = RANDOM.poisson(np.exp(0.3 * X[:, 0])).astype(float)
WEIGHTS = RANDOM.uniform(2.0, 10.0, NUM)
DESIGN = sm.add_constant(X)
NAMED = pd.DataFrame(DESIGN, columns=list("abcde"))
POISSON = sm.families.Poisson()


def assert_same(left, right):
    ours, theirs = sensitivities_of(left), sensitivities_of(right)
    assert ours.verdict.level == "good"
    for column in ("outputs", "deviation", "loss", "loo_loss", "leverage"):
        np.testing.assert_allclose(
            getattr(ours, column), getattr(theirs, column), rtol=1e-5, atol=1e-7, err_msg=column
        )


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (lambda y, x: sm.OLS(y, x), Y),
        (lambda y, x: sm.GLM(y, x, family=POISSON), COUNTS),
    ],
)
def test_a_refit_after_selection_has_the_columns_that_were_left(model, targets):
    refit = model(targets, DESIGN).fit_regularized(alpha=0.2, L1_wt=1.0, refit=True)
    kept = np.flatnonzero(refit.params)
    assert 0 < len(kept) < 5
    fit = read(refit)
    assert fit.names == tuple(refit.model.exog_names[k] for k in kept)
    assert_same(fit, read(model(targets, DESIGN[:, kept]).fit()))


@pytest.mark.parametrize(
    ("results", "text"),
    [
        (lambda: sm.GLM(COUNTS, NAMED, family=POISSON).fit_constrained("b = 0.3"), "constrained"),
        (lambda: sm.Poisson(COUNTS, NAMED).fit_constrained("b = 0.3", disp=0), "constrained"),
        (lambda: sm.GLS(Y, DESIGN, sigma=WEIGHTS).fit(), "GLS results"),
        (lambda: sm.OLS(np.c_[Y, Y], DESIGN).fit(), "2 targets at once"),
        (lambda: sm.NegativeBinomial(COUNTS, DESIGN).fit(disp=0), "NegativeBinomialResults"),
        (lambda: sm.Logit(BINARY, DESIGN).fit_regularized(alpha=1.0, disp=0), "L1BinaryResults"),
        (lambda: sm.QuantReg(Y, DESIGN).fit(), "QuantRegResults"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_results_that_are_refused_by_name(results, text):
    with pytest.raises(UnsupportedModelError, match=text):
        engram.from_estimator(results())


def test_results_without_their_data():
    results = sm.OLS(Y, DESIGN).fit()
    results.remove_data()
    with pytest.raises(DataError, match="remove_data"):
        engram.from_estimator(results)


def test_missing_rows_are_gone_from_everything():
    targets = COUNTS.copy()
    targets[3] = np.nan
    kept = np.arange(NUM) != 3
    shift, frequencies = 0.1 * WEIGHTS, np.r_[np.ones(30), np.full(30, 2.0)]
    results = sm.GLM(
        targets,
        DESIGN,
        family=POISSON,
        offset=shift,
        freq_weights=frequencies,
        missing="drop",
    ).fit()
    whole = sm.GLM(
        targets[kept],
        DESIGN[kept],
        family=POISSON,
        offset=shift[kept],
        freq_weights=frequencies[kept],
    ).fit()
    assert_same(read(results), read(whole))
    rate = sm.Poisson(targets, DESIGN, exposure=WEIGHTS, missing="drop").fit(disp=0)
    ours = fit_glm(X[kept], COUNTS[kept], "poisson", offset=np.log(WEIGHTS[kept]))
    assert_same(read(rate), ours)


def test_formulas_robust_errors_and_given_scales():
    frame = pd.DataFrame(X, columns=list("pqrs")).assign(y=Y, g=np.tile(["u", "v", "w"], 20))
    results = smf.ols("y ~ p + C(g)", frame).fit(cov_type="HC3")
    dummies = np.c_[frame["g"] == "v", frame["g"] == "w", X[:, 0]].astype(float)
    assert_same(read(results), fit_linear(dummies, Y))
    scaled = sm.GLM(Y, DESIGN).fit(scale=2.0)
    assert_same(read(scaled), fit_linear(X, Y, dispersion=2.0))
    normal = sm.families.Tweedie(sm.families.links.Identity(), var_power=0.0)
    assert_same(read(sm.GLM(Y, DESIGN, family=normal).fit()), fit_linear(X, Y))


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (linear_model.LinearRegression(), Y),
        (linear_model.Ridge(), Y),
        (linear_model.LogisticRegression(tol=1e-8), BINARY),
        (linear_model.PoissonRegressor(tol=1e-8), COUNTS),
    ],
)
def test_weights_that_are_not_told_are_seen(model, targets):
    """An estimator does not keep them; without them it is at no minimum."""
    fitted = model.fit(X, targets, sample_weight=WEIGHTS)
    assert engram.from_estimator(fitted, X, targets).verdict.level == "unreliable"
    assert engram.from_estimator(fitted, X, targets, sample_weight=WEIGHTS).verdict.level == "good"


def test_other_rows_than_those_of_the_fit_are_seen():
    fitted = linear_model.Ridge().fit(X, Y)
    assert engram.from_estimator(fitted, X[::-1].copy(), Y).verdict.level == "unreliable"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (linear_model.Ridge(), "2 targets at once"),
        (linear_model.LinearRegression(), "2 targets at once"),
        (linear_model.Ridge(alpha=[1.0, 2.0]), "one alpha per target"),
        (linear_model.RidgeCV(alpha_per_target=True), "one alpha per target"),
    ],
)
def test_several_targets(model, text):
    both = np.c_[Y, Y**2]
    with pytest.raises(UnsupportedModelError, match=text):
        engram.from_estimator(model.fit(X, both), X, both)
    column = Y[:, None]
    assert_same(read(linear_model.Ridge().fit(X, column), X, column), fit_linear(X, Y, penalty=1.0))


@pytest.mark.parametrize(
    "settings",
    [
        {"fit_intercept": False},
        {"C": np.inf},
        {"class_weight": {0: 1.0, 1: 3.0}},
        {"solver": "liblinear", "intercept_scaling": 3.0},
    ],
)
def test_logistic_settings_against_fits_of_our_own(settings):
    model = linear_model.LogisticRegression(tol=1e-10, max_iter=1000).set_params(**settings)
    fit = read(model.fit(X, BINARY), X, BINARY)
    penalty = 0.0 if settings.get("C") else 1.0
    inputs, weights = X, np.where(BINARY > 0, 3.0, 1.0) if "class_weight" in settings else None
    intercept = settings.get("fit_intercept", True)
    if "solver" in settings:  # its intercept is a column of threes, penalised as the others
        inputs, intercept = np.c_[np.full(NUM, 3.0), X], False
    ours = fit_glm(inputs, BINARY, penalty=penalty, weights=weights, intercept=intercept)
    assert_same(fit, ours)


def test_sparse_inputs():
    for form in (scipy.sparse.csr_matrix, scipy.sparse.csr_array):
        model = linear_model.LogisticRegression(tol=1e-10).fit(form(X), BINARY)
        assert_same(read(model, form(X), BINARY), fit_glm(X, BINARY, penalty=1.0))
    assert torch.isfinite(read(model, form(X), BINARY).leverage).all()

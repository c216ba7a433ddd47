"""Adapters: the coefficients, penalty and weights of other libraries, checked by refitting them."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch
from scipy import stats
from sklearn import linear_model
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import engram
from engram import models
from engram.errors import ArgumentError, DataError, DesignError, TargetError, UnsupportedModelError

RANDOM = np.random.default_rng(0)


def scaled(loader, count):
    inputs, targets = loader(return_X_y=True)
    rows = RANDOM.permutation(len(targets))[:count]
    inputs = inputs[rows][:, :6]
    return (inputs - inputs.mean(0)) / inputs.std(0), targets[rows]


DIABETES = scaled(load_diabetes, 80)
CANCER = scaled(load_breast_cancer, 120)
IRIS = scaled(load_iris, 150)
NAMED = (CANCER[0], np.where(CANCER[1] == 1, "benign", "malignant"))
WEIGHTS = RANDOM.uniform(0.5, 2.0, 150)
TIGHT = {"tol": 1e-9, "max_iter": 100_000}

# estimator, data, sample weights, largest error of the leave-one-out outputs relative to their move
ESTIMATORS = {
    "LinearRegression": (linear_model.LinearRegression(), DIABETES, False, 1e-8),
    "no intercept": (linear_model.LinearRegression(fit_intercept=False), DIABETES, True, 1e-8),
    "Ridge": (linear_model.Ridge(alpha=3.0), DIABETES, True, 1e-8),
    "LogisticRegression": (linear_model.LogisticRegression(C=0.3, **TIGHT), CANCER, True, 0.1),
    "class_weight": (
        linear_model.LogisticRegression(C=0.3, class_weight={0: 2.0, 1: 0.7}, **TIGHT),
        CANCER,
        True,
        0.1,
    ),
    "named classes": (
        linear_model.LogisticRegression(C=0.3, class_weight={"benign": 2.0}, **TIGHT),
        NAMED,
        False,
        0.1,
    ),
    "liblinear": (
        linear_model.LogisticRegression(
            C=0.3, solver="liblinear", intercept_scaling=2.0, tol=1e-9, max_iter=10_000
        ),
        CANCER,
        False,
        0.1,
    ),
    "multinomial": (linear_model.LogisticRegression(C=0.3, **TIGHT), IRIS, True, 0.12),
    "PoissonRegressor": (linear_model.PoissonRegressor(alpha=0.1, **TIGHT), DIABETES, True, 0.05),
    "GammaRegressor": (linear_model.GammaRegressor(alpha=0.1, **TIGHT), DIABETES, True, 0.1),
    "TweedieRegressor": (
        linear_model.TweedieRegressor(power=1.5, alpha=0.1, **TIGHT),
        DIABETES,
        False,
        0.05,
    ),
    "Tweedie of power 0": (
        linear_model.TweedieRegressor(power=0, alpha=0.1, **TIGHT),
        DIABETES,
        True,
        1e-3,
    ),
    "Pipeline": (
        make_pipeline(StandardScaler(), linear_model.Ridge(alpha=1.0)),
        DIABETES,
        False,
        None,
    ),
}


def fitted(estimator, inputs, targets, weights):
    more = {} if weights is None else {"sample_weight": weights}
    return clone(estimator).fit(inputs, targets, **more)


def outputs_of(estimator, inputs):
    if hasattr(estimator, "decision_function"):
        return estimator.decision_function(inputs)
    return estimator.predict(inputs)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scikit_learn(name):
    estimator, (inputs, targets), weighted, tolerance = ESTIMATORS[name]
    weights = WEIGHTS[: len(targets)] if weighted else None
    model = fitted(estimator, inputs, targets, weights)
    result = engram.of(model, inputs, targets, sample_weight=weights)
    assert result.diagnostics.relative_gradient < 1e-4  # its penalty and weights are the model's
    assert not torch.isnan(result.leverage).any()
    if tolerance is None:
        return
    several = result.num_outputs > 1
    means = result.outputs if several or hasattr(model, "classes_") else None
    for i in result.score.argsort(descending=True)[:3].tolist():
        kept = np.arange(len(targets)) != i
        # penalties on the mean loss are those of N examples, also when one of them is gone
        again = clone(estimator)
        if "alpha" in again.get_params() and not name.startswith("Ridge"):
            total = np.ones(len(targets)) if weights is None else weights
            again.set_params(alpha=again.alpha * total.sum() / total[kept].sum())
        again = fitted(
            again, inputs[kept], targets[kept], None if weights is None else weights[kept]
        )
        truth = outputs_of(again, inputs[i : i + 1]) - outputs_of(model, inputs[i : i + 1])
        found = result.deviation[i] if means is not None else result.prediction_deviation[i]
        error = np.abs(found.numpy() - truth.reshape(-1)).max()
        assert error < tolerance * np.abs(truth).max()


def test_balanced_classes_and_stochastic_gradients():
    inputs, targets = CANCER
    model = linear_model.LogisticRegression(class_weight="balanced", **TIGHT)
    model.fit(inputs, targets, sample_weight=WEIGHTS[:120])
    result = engram.of(model, inputs, targets, sample_weight=WEIGHTS[:120])
    assert result.diagnostics.relative_gradient < 1e-5
    chosen = {"alpha": 0.05, "max_iter": 20_000, "tol": None, "random_state": 0, "average": True}
    near = linear_model.SGDClassifier(loss="log_loss", **{**chosen, "max_iter": 2000})
    near.fit(inputs, targets)
    result = engram.of(near, inputs, targets)
    exact = models.fit_glm(inputs, targets, penalty=0.05 * len(targets))
    assert result.diagnostics.relative_gradient < 0.05
    np.testing.assert_allclose(result.loo_loss, engram.of(exact).loo_loss, atol=0.05)
    steps = linear_model.SGDRegressor(**{**chosen, "max_iter": 500})
    scaled_targets = DIABETES[1] / 100
    result = engram.of(steps.fit(DIABETES[0], scaled_targets), DIABETES[0], scaled_targets)
    exact = models.fit_linear(DIABETES[0], scaled_targets, penalty=0.05 * 80)
    np.testing.assert_allclose(result.deviation, engram.of(exact).deviation, atol=0.01)


def test_cross_validated_and_unpenalised():
    inputs, targets = DIABETES
    ridge = linear_model.RidgeCV(alphas=[0.1, 1.0, 10.0]).fit(inputs, targets)
    assert engram.of(ridge, inputs, targets).diagnostics.relative_gradient < 1e-8
    free = linear_model.LogisticRegression(C=np.inf, **TIGHT).fit(*IRIS_PAIR)
    result = engram.of(free, *IRIS_PAIR)
    np.testing.assert_allclose(result.diagnostics.effective_parameters, 3, rtol=1e-3)


IRIS_PAIR = (IRIS[0][IRIS[1] > 0][:, :2], IRIS[1][IRIS[1] > 0])


def test_pipeline_equals_its_last_step():
    inputs, targets = CANCER
    pipeline = make_pipeline(
        StandardScaler(), "passthrough", linear_model.LogisticRegression(**TIGHT)
    ).fit(inputs, targets)
    seen = pipeline[:-1].transform(inputs)
    left = engram.of(pipeline, inputs, targets)
    right = engram.of(pipeline[-1], seen, targets)
    assert torch.equal(left.loo_loss, right.loo_loss)


def test_data_frames_keep_their_names():
    frame = pd.DataFrame(DIABETES[0], columns=list("abcdef"))
    model = linear_model.Ridge().fit(frame, DIABETES[1])
    fit = models.read(model, frame, DIABETES[1])
    assert fit.names == ("intercept", *"abcdef")
    assert engram.of(fit).provenance["settings"]["columns"][1] == "a"
    assert engram.of(fit).provenance["model"] == "Ridge"


def test_predictions_of_a_binary_classifier(tmp_path):
    inputs, targets = NAMED
    model = linear_model.LogisticRegression().fit(inputs, targets)
    result = engram.of(model, inputs, targets)
    predicted = model.classes_[result.to_frame()["predicted"].to_numpy()]
    assert (predicted == model.predict(inputs)).all()
    assert "predicted" in engram.load(result.save(tmp_path)).to_frame()
    assert "predicted" not in engram.of(linear_model.Ridge().fit(*DIABETES), *DIABETES).to_frame()


def test_columns_in_another_order():
    frame = pd.DataFrame(DIABETES[0], columns=list("abcdef"))
    ridge = linear_model.Ridge().fit(frame, DIABETES[1])
    pipeline = make_pipeline(StandardScaler(), linear_model.Ridge()).fit(frame, DIABETES[1])
    for model in (ridge, pipeline):
        swapped, plain = (
            models.read(model, f, DIABETES[1]) for f in (frame[list("fedcba")], frame)
        )
        assert swapped.names == plain.names == ("intercept", *"abcdef")
        assert torch.equal(swapped.outputs, plain.outputs)
        with pytest.raises(DataError, match="differ in c, z"):
            models.read(model, frame.rename(columns={"c": "z"}), DIABETES[1])
    with pytest.raises(ArgumentError, match="not fitted"):
        engram.of(make_pipeline(StandardScaler(), linear_model.Ridge()), *DIABETES)


X = sm.add_constant(CANCER[0][:, :3])
COUNTS = RANDOM.poisson(np.exp(X @ [0.5, 0.2, -0.1, 0.3])).astype(float)
TRIALS = RANDOM.integers(1, 20, len(X))
HITS = RANDOM.binomial(TRIALS, 0.4)
RESULTS = {
    "OLS": lambda: sm.OLS(COUNTS, X).fit(),
    "WLS": lambda: sm.WLS(COUNTS, X, weights=WEIGHTS[: len(X)]).fit(),
    "GLM": lambda: sm.GLM(COUNTS + 1, X, family=sm.families.Gamma(sm.families.links.Log())).fit(),
    "GLM with exposure": lambda: sm.GLM(
        COUNTS, X, family=sm.families.Poisson(), exposure=TRIALS, offset=X[:, 1]
    ).fit(),
    "GLM of trials": lambda: sm.GLM(
        np.column_stack([HITS, TRIALS - HITS]), X, family=sm.families.Binomial()
    ).fit(),
    "GLM with weights": lambda: sm.GLM(
        COUNTS, X, family=sm.families.NegativeBinomial(alpha=0.5), freq_weights=TRIALS
    ).fit(),
    "Logit": lambda: sm.Logit(CANCER[1], X).fit(disp=0),
    "Probit": lambda: sm.Probit(CANCER[1], X).fit(disp=0),
    "Poisson": lambda: sm.Poisson(COUNTS, X, exposure=TRIALS, offset=X[:, 1]).fit(disp=0),
    "MNLogit": lambda: sm.MNLogit(IRIS_THREE, sm.add_constant(IRIS[0][:, 1:2])).fit(disp=0),
}
IRIS_THREE = IRIS[1]


@pytest.mark.parametrize("name", RESULTS)
def test_statsmodels(name):
    results = RESULTS[name]()
    fit = models.read(results)
    result = engram.of(results)
    assert result.diagnostics.relative_gradient < 1e-5
    np.testing.assert_allclose(
        result.diagnostics.effective_parameters, np.size(results.params), rtol=1e-6
    )
    if name != "MNLogit":
        errors = results.bse
        if name.startswith("GLM"):  # whose own are by the expected Hessian
            hessian = results.model.hessian(results.params, scale=results.scale, observed=True)
            errors = np.sqrt(np.diag(np.linalg.inv(-hessian)))
        np.testing.assert_allclose(fit.standard_errors[0], errors, rtol=1e-5)
        assert fit.names == tuple(results.model.exog_names)
    if name in ("Logit", "Probit", "Poisson", "MNLogit"):
        np.testing.assert_allclose(-result.loss.sum(), results.llf, rtol=1e-8)


@pytest.mark.parametrize(
    "family",
    [
        sm.families.Gaussian(),
        sm.families.Gamma(sm.families.links.Log()),
        sm.families.InverseGaussian(sm.families.links.Log()),
        sm.families.Poisson(),
    ],
    ids=lambda family: type(family).__name__,
)
def test_losses_are_densities_of_weighted_examples(family):
    """Variance weights divide the dispersion, frequency weights count examples."""
    spread = WEIGHTS[: len(X)]
    model = sm.GLM(COUNTS + 1, X, family=family, var_weights=spread, freq_weights=TRIALS)
    results = model.fit()
    loss = engram.of(results).loss.numpy()
    weights = TRIALS * (spread if isinstance(family, sm.families.Poisson) else 1.0)
    total = model.loglike(results.params, scale=results.scale)
    np.testing.assert_allclose(-(weights * loss).sum(), total, rtol=1e-8)


def test_losses_of_weighted_least_squares():
    results = RESULTS["WLS"]()
    deviation = np.sqrt(results.scale / WEIGHTS[: len(X)])
    expected = -stats.norm(results.fittedvalues, deviation).logpdf(COUNTS)
    np.testing.assert_allclose(engram.of(results).loss, expected, rtol=1e-8)


@pytest.mark.parametrize("family", [sm.families.Poisson(), sm.families.Binomial()])
def test_quasi_likelihood(family):
    targets = COUNTS if isinstance(family, sm.families.Poisson) else HITS / TRIALS
    results = sm.GLM(targets, X, family=family).fit(scale="X2")
    fit, peer = models.read(results), results.get_influence()
    measures = models.glm_measures(fit)
    np.testing.assert_allclose(fit.standard_errors[0], results.bse, rtol=1e-6)
    np.testing.assert_allclose(measures.cooks_distance, peer.cooks_distance[0], rtol=1e-5)
    np.testing.assert_allclose(measures.dfbetas, peer.dfbetas, rtol=1e-5, atol=1e-10)
    np.testing.assert_allclose(measures.studentised, peer.resid_studentized, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of statsmodels, which stops without an error
def test_separation_elsewhere():
    apart = (CANCER[0][:, 0] > 0).astype(float)
    constant = sm.add_constant(CANCER[0][:, :2])
    binomial = sm.families.Binomial()
    stopped = [
        sm.GLM(apart, constant, family=binomial).fit(maxiter=8),
        sm.GLM(apart, constant, family=binomial).fit(maxiter=25),
        sm.Logit(apart, constant).fit(disp=0, maxiter=12),
    ]
    for results in stopped:
        with pytest.raises(DesignError, match="complete separation"):
            engram.of(results)
    free = linear_model.LogisticRegression(C=np.inf).fit(CANCER[0][:, :2], apart)
    with pytest.raises(DesignError, match="complete separation"):
        engram.of(free, CANCER[0][:, :2], apart)
    held = linear_model.LogisticRegression().fit(CANCER[0][:, :2], apart)
    assert engram.of(held, CANCER[0][:, :2], apart).num_data == 120


def test_statsmodels_leverage():
    results = RESULTS["GLM of trials"]()
    theirs = results.get_influence().hat_matrix_diag
    np.testing.assert_allclose(engram.of(results).leverage, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (linear_model.Lasso().fit(*DIABETES), "LinearRegression, Ridge"),
        (linear_model.SGDClassifier(loss="hinge").fit(*CANCER), "log_loss"),
        (linear_model.SGDRegressor(loss="huber").fit(*DIABETES), "squared_error"),
        (linear_model.SGDClassifier(loss="log_loss", penalty="l1").fit(*CANCER), "l2"),
        (linear_model.SGDClassifier(loss="log_loss").fit(*IRIS), "many classes are read from"),
        (
            linear_model.LogisticRegression(l1_ratio=1.0, solver="saga", tol=0.1).fit(*CANCER),
            "L1 penalty",
        ),
        (linear_model.LinearRegression(positive=True).fit(*DIABETES), "positive=True"),
        (torch.nn.Linear(2, 1), "engram.sensitivities"),
        (object(), "MNLogit"),
        (sm.OLS(COUNTS, X).fit_regularized(alpha=0.1), "Probit"),
        (sm.RLM(COUNTS, X).fit(), "Probit"),
    ],
)
def test_what_is_not_supported(model, text):
    with pytest.raises(UnsupportedModelError, match=text):
        engram.of(model, *CANCER)


def test_misuse():
    model = linear_model.Ridge().fit(*DIABETES)
    with pytest.raises(ArgumentError, match=r"engram\.of\(estimator, X, y\)"):
        engram.of(model)
    with pytest.raises(ArgumentError, match="not fitted"):
        engram.of(linear_model.Ridge(), *DIABETES)
    with pytest.raises(DataError, match="6 columns"):
        engram.of(model, DIABETES[0][:, :4], DIABETES[1])
    with pytest.raises(DataError, match="80 rows and 79 targets"):
        engram.of(model, DIABETES[0], DIABETES[1][:-1])
    with pytest.raises(TargetError, match="labels among the classes"):
        engram.of(linear_model.LogisticRegression().fit(*CANCER), CANCER[0], CANCER[1] + 5)
    for kind in (linear_model.PoissonRegressor(), linear_model.LinearRegression()):
        with pytest.raises(ArgumentError, match="weights that are not negative"):
            engram.of(kind.fit(*DIABETES), *DIABETES, sample_weight=-np.ones(80))
    with pytest.raises(DataError, match="one per row of X"):
        engram.of(model, DIABETES[0], 3.0)
    with pytest.raises(DataError, match="leave X and y out"):
        engram.of(RESULTS["OLS"](), X + 1, COUNTS)
    with pytest.raises(ArgumentError, match="carry their weights"):
        engram.of(RESULTS["OLS"](), sample_weight=WEIGHTS)
    assert engram.of(RESULTS["OLS"](), X, COUNTS).num_data == len(X)


def test_libraries_are_not_imported():
    code = "import sys, engram; print({'sklearn', 'statsmodels'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

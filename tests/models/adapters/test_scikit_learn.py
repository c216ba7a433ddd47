"""Estimators of scikit-learn against refits and our own models."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import linear_model
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import engram
from engram import models
from engram.errors import ArgumentError, DataError
from tabular_data import CANCER, DIABETES, IRIS, WEIGHTS

NAMED = (CANCER[0], np.where(CANCER[1] == 1, "benign", "malignant"))
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
    result = engram.from_estimator(model, inputs, targets, sample_weight=weights)
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
    result = engram.from_estimator(model, inputs, targets, sample_weight=WEIGHTS[:120])
    assert result.diagnostics.relative_gradient < 1e-5
    chosen = {"alpha": 0.05, "max_iter": 20_000, "tol": None, "random_state": 0, "average": True}
    near = linear_model.SGDClassifier(loss="log_loss", **{**chosen, "max_iter": 2000})
    near.fit(inputs, targets)
    result = engram.from_estimator(near, inputs, targets)
    exact = models.fit_glm(inputs, targets, penalty=0.05 * len(targets))
    assert result.diagnostics.relative_gradient < 0.05
    np.testing.assert_allclose(result.loo_loss, engram.from_estimator(exact).loo_loss, atol=0.05)
    steps = linear_model.SGDRegressor(**{**chosen, "max_iter": 500})
    scaled_targets = DIABETES[1] / 100
    result = engram.from_estimator(
        steps.fit(DIABETES[0], scaled_targets), DIABETES[0], scaled_targets
    )
    exact = models.fit_linear(DIABETES[0], scaled_targets, penalty=0.05 * 80)
    np.testing.assert_allclose(result.deviation, engram.from_estimator(exact).deviation, atol=0.01)


def test_cross_validated_and_unpenalised():
    inputs, targets = DIABETES
    ridge = linear_model.RidgeCV(alphas=[0.1, 1.0, 10.0]).fit(inputs, targets)
    assert engram.from_estimator(ridge, inputs, targets).diagnostics.relative_gradient < 1e-8
    free = linear_model.LogisticRegression(C=np.inf, **TIGHT).fit(*IRIS_PAIR)
    result = engram.from_estimator(free, *IRIS_PAIR)
    np.testing.assert_allclose(result.diagnostics.effective_parameters, 3, rtol=1e-3)


IRIS_PAIR = (IRIS[0][IRIS[1] > 0][:, :2], IRIS[1][IRIS[1] > 0])


def test_pipeline_equals_its_last_step():
    inputs, targets = CANCER
    pipeline = make_pipeline(
        StandardScaler(), "passthrough", linear_model.LogisticRegression(**TIGHT)
    ).fit(inputs, targets)
    seen = pipeline[:-1].transform(inputs)
    left = engram.from_estimator(pipeline, inputs, targets)
    right = engram.from_estimator(pipeline[-1], seen, targets)
    assert torch.equal(left.loo_loss, right.loo_loss)


def test_data_frames_keep_their_names():
    frame = pd.DataFrame(DIABETES[0], columns=list("abcdef"))
    model = linear_model.Ridge().fit(frame, DIABETES[1])
    fit = models.read(model, frame, DIABETES[1])
    assert fit.names == ("intercept", *"abcdef")
    assert engram.from_estimator(fit).provenance["settings"]["columns"][1] == "a"
    assert engram.from_estimator(fit).provenance["model"] == "Ridge"


def test_predictions_of_a_binary_classifier(tmp_path):
    inputs, targets = NAMED
    model = linear_model.LogisticRegression().fit(inputs, targets)
    result = engram.from_estimator(model, inputs, targets)
    predicted = model.classes_[result.to_frame()["predicted"].to_numpy()]
    assert (predicted == model.predict(inputs)).all()
    assert "predicted" in engram.load(result.save(tmp_path)).to_frame()
    assert (
        "predicted"
        not in engram.from_estimator(linear_model.Ridge().fit(*DIABETES), *DIABETES).to_frame()
    )


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
        engram.from_estimator(make_pipeline(StandardScaler(), linear_model.Ridge()), *DIABETES)

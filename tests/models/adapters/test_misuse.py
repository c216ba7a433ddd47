"""Models that cannot be read, and data that do not fit them."""

import subprocess
import sys

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from sklearn import linear_model

import engram
from engram.errors import ArgumentError, DataError, TargetError, UnsupportedModelError
from tabular_data import CANCER, COUNTS, DIABETES, IRIS, WEIGHTS, X


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
        engram.from_estimator(model, *CANCER)


def test_misuse():
    model = linear_model.Ridge().fit(*DIABETES)
    with pytest.raises(ArgumentError, match=r"engram\.from_estimator\(estimator, X, y\)"):
        engram.from_estimator(model)
    with pytest.raises(ArgumentError, match="not fitted"):
        engram.from_estimator(linear_model.Ridge(), *DIABETES)
    with pytest.raises(DataError, match="6 columns"):
        engram.from_estimator(model, DIABETES[0][:, :4], DIABETES[1])
    with pytest.raises(DataError, match="80 rows and 79 targets"):
        engram.from_estimator(model, DIABETES[0], DIABETES[1][:-1])
    with pytest.raises(TargetError, match="labels among the classes"):
        engram.from_estimator(
            linear_model.LogisticRegression().fit(*CANCER), CANCER[0], CANCER[1] + 5
        )
    for kind in (linear_model.PoissonRegressor(), linear_model.LinearRegression()):
        with pytest.raises(ArgumentError, match="weights that are not negative"):
            engram.from_estimator(kind.fit(*DIABETES), *DIABETES, sample_weight=-np.ones(80))
    with pytest.raises(DataError, match="one per row of X"):
        engram.from_estimator(model, DIABETES[0], 3.0)
    with pytest.raises(DataError, match="leave X and y out"):
        engram.from_estimator(sm.OLS(COUNTS, X).fit(), X + 1, COUNTS)
    with pytest.raises(ArgumentError, match="carry their weights"):
        engram.from_estimator(sm.OLS(COUNTS, X).fit(), sample_weight=WEIGHTS)
    assert engram.from_estimator(sm.OLS(COUNTS, X).fit(), X, COUNTS).num_data == len(X)


def test_libraries_are_not_imported():
    code = "import sys, engram; print({'sklearn', 'statsmodels'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

"""Tables of pandas whose rows or columns do not say what belongs together."""

import pandas as pd
import pytest
from sklearn import linear_model
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import engram
from drawn_responses import BINARY, X, Y
from engram.errors import DataError
from engram.models import fit_glm, fit_linear, fit_multinomial, read, remove_group

LABELS = [f"row{number}" for number in range(40)]
FRAME = pd.DataFrame(X, index=LABELS, columns=["a", "b", "c"])
TARGETS = pd.Series(Y, index=LABELS)
CLASSES = pd.Series(BINARY, index=LABELS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.iloc[::-1], "another order"),
        (lambda s: s.reset_index(drop=True), "different"),
        (lambda s: s.rename({"row3": "row99"}), "different"),
    ],
)
def test_rows_of_another_index_are_refused(change, text):
    with pytest.raises(DataError, match=text):
        fit_linear(FRAME, change(TARGETS))
    with pytest.raises(DataError, match=text):
        fit_glm(FRAME, change(CLASSES), "bernoulli")
    with pytest.raises(DataError, match=text):
        fit_multinomial(FRAME, change(CLASSES.astype(int)))
    ones = pd.Series(1.0, index=LABELS)
    with pytest.raises(DataError, match=text):
        fit_linear(FRAME, TARGETS, weights=change(ones))
    with pytest.raises(DataError, match=text):
        fit_linear(FRAME, TARGETS, offset=change(ones))
    fit = fit_linear(FRAME, TARGETS)
    with pytest.raises(DataError, match=text):
        fit.predictor(FRAME, offset=change(ones))
    with pytest.raises(DataError, match=text):
        remove_group(fit, [1], evaluate_on=(FRAME, change(TARGETS)))
    ridge = linear_model.Ridge().fit(FRAME, TARGETS)
    pipeline = make_pipeline(StandardScaler(), linear_model.Ridge()).fit(FRAME, TARGETS)
    for model in (ridge, pipeline):
        with pytest.raises(DataError, match=text):
            engram.from_estimator(model, FRAME, change(TARGETS))
        with pytest.raises(DataError, match=text):
            engram.from_estimator(model, FRAME, TARGETS, sample_weight=change(ones))


def test_the_remedy_aligns():
    turned = TARGETS.iloc[::-1]
    with pytest.raises(DataError, match=r"y = y\.loc\[X\.index\]"):
        fit_linear(FRAME, turned)
    again = fit_linear(FRAME, turned.loc[FRAME.index])
    assert again.coefficients.equal(fit_linear(FRAME, TARGETS).coefficients)


def test_what_has_no_index_goes_by_position():
    expected = fit_linear(X, Y).coefficients
    assert fit_linear(FRAME, Y).coefficients.equal(expected)
    assert fit_linear(X, TARGETS).coefficients.equal(expected)
    pipeline = make_pipeline(StandardScaler(), linear_model.Ridge()).fit(FRAME, TARGETS)
    assert read(pipeline, FRAME, TARGETS).names == ("intercept", "a", "b", "c")


def test_repeated_column_names_are_refused():
    twice = FRAME.set_axis(["a", "a", "b"], axis=1)
    with pytest.raises(DataError, match=r"repeated names .first: a"):
        fit_linear(twice, TARGETS)
    with pytest.raises(DataError, match="repeated names"):
        engram.from_estimator(
            linear_model.LinearRegression().fit(twice.to_numpy(), Y), twice, TARGETS
        )
    named = FRAME.set_axis(["intercept", "(intercept)", "b"], axis=1)
    with pytest.raises(DataError, match="repeated names"):
        fit_linear(named, TARGETS)

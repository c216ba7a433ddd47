"""The covariance of every example's outputs."""

import pytest

import engram
from cases import CASES
from dense_deviation import variance
from fitted import PARAMETERS, assert_close, posterior, precision


@pytest.mark.parametrize(("name", "structure"), PARAMETERS)
def test_against_the_dense_reference(name, structure):
    case = CASES[name]
    fitted = posterior(name, structure)
    got = engram.prediction_variance(case.model, case.data, fitted, progress=False)
    assert_close(got, variance(case.dense, precision(name, structure)))

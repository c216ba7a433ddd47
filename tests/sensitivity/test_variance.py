"""The covariance of every example's outputs."""

import pytest

import engram
from cases import CASES
from dense_deviation import variance
from fitted import PARAMETERS, assert_close, posterior, precision

LAST_LAYER = [(n, "last_layer") for n in ("mlp", "positions", "conv2d_groups", "attention_fused")]


@pytest.mark.parametrize(("name", "structure"), [*PARAMETERS, *LAST_LAYER])
def test_against_the_dense_reference(name, structure):
    case = CASES[name]
    fitted = posterior(name, structure)
    got = engram.prediction_variance(case.model, case.data, fitted, progress=False)
    assert_close(got, variance(case.dense, precision(name, structure)))

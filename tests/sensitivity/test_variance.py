"""The covariance of every example's outputs, which needs inputs and no targets."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import engram
from cases import CASES, MLP
from dense_deviation import variance
from engram.errors import DataError
from fitted import PARAMETERS, assert_close, posterior, precision
from refusal import Refusal

LAST_LAYER = [(n, "last_layer") for n in ("mlp", "positions", "conv2d_groups", "attention_fused")]


@pytest.mark.parametrize(("name", "structure"), [*PARAMETERS, *LAST_LAYER])
def test_against_the_dense_reference(name, structure):
    case = CASES[name]
    fitted = posterior(name, structure)
    got = engram.prediction_variance(case.model, case.data, fitted, progress=False)
    assert_close(got, variance(case.dense, precision(name, structure)))


X, Y = MLP.data


FORMS = {
    "tensor": X,
    "tuple": (X,),
    "dataset": TensorDataset(X),
    "loader": DataLoader(TensorDataset(X), 3),
    "dict": {"x": X},
    "dict with labels": {"x": X, "labels": Y},
    "targets of another kind": (X, torch.full((7, 9), float("nan"))),
}


@pytest.mark.parametrize("form", FORMS)
def test_inputs_alone(form):
    fitted = posterior("mlp", "full")
    expected = engram.prediction_variance(MLP.model, (X, Y), fitted, progress=False)
    found = engram.prediction_variance(MLP.model, FORMS[form], fitted, progress=False)
    torch.testing.assert_close(found, expected)


def test_estimates_about_losses_need_targets():
    with Refusal(DataError, "target|tuple of tensors"):
        engram.laplace(MLP.model, X, progress=False, prior_precision=1.0)
    with Refusal(DataError, "labels"):
        engram.laplace(MLP.model, {"x": X}, progress=False, prior_precision=1.0)

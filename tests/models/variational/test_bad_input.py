"""What is no matrix, precision or tolerance is refused by name."""

import pytest
import torch

from engram.errors import ArgumentError, DataError
from engram.families import GaussianMixture, VariationalGaussianMixture
from engram.models.variational.binary import fit_binary_linear
from engram.models.variational.linear import fit_variational_linear

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
Y = X[:, 0].sign()


@pytest.mark.parametrize("fit", [fit_variational_linear, fit_binary_linear])
@pytest.mark.parametrize("inputs", [None, "a", {}, X.half(), X.long(), X + 0j])
def test_no_matrix(fit, inputs):
    with pytest.raises(DataError, match="inputs"):
        fit(inputs, Y, "hinge")


@pytest.mark.parametrize("value", ["a", True, -1.0, 0.0, float("nan"), [1.0]])
@pytest.mark.parametrize("name", ["prior_precision", "tolerance"])
def test_no_positive_number(name, value):
    with pytest.raises(ArgumentError, match=f"a positive {name.replace('_', ' ')}"):
        fit_variational_linear(X, Y, **{name: value})


def test_no_mixture():
    with pytest.raises(ArgumentError, match="NormalInverseWishart"):
        GaussianMixture([1.0, 1.0], None)
    with pytest.raises(ArgumentError, match="a GaussianMixture"):
        VariationalGaussianMixture(None)

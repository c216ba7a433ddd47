"""What is no covariance, noise, mean or point is refused by name; every precision fits."""

import gpytorch
import numpy as np
import pytest
import torch

from engram.errors import ArgumentError, DataError
from engram.models.gaussian_process import (
    NewPoints,
    exact_gaussian_process,
    points_of,
    read_sparse,
)
from sparse_processes import STRATEGIES

X = torch.linspace(0, 3, 6, dtype=torch.float64)
Y = X.sin()
K = torch.exp(-0.5 * (X[:, None] - X) ** 2)


class Exact(gpytorch.models.ExactGP):
    def __init__(self):
        super().__init__(X[:, None], Y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel()

    def forward(self, inputs):
        mean = self.mean_module(inputs)
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(inputs))


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self):
        distribution = gpytorch.variational.NaturalVariationalDistribution(6)
        super().__init__(STRATEGIES[0](self, X[:, None], distribution))
        self.covar_module = gpytorch.kernels.RBFKernel()

    def forward(self, inputs):
        zeros = torch.zeros(len(inputs)).to(inputs)
        return gpytorch.distributions.MultivariateNormal(zeros, self.covar_module(inputs))


@pytest.mark.parametrize("value", ["a", None, {}, object(), torch.ones(6, dtype=torch.complex64)])
@pytest.mark.parametrize("place", range(4))
def test_no_numbers(place, value):
    arguments = [K, Y, 0.1, 0.0]
    arguments[place] = value
    with pytest.raises(DataError, match="numbers"):
        exact_gaussian_process(*arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_precisions_that_cannot_be_factorised(dtype):
    with pytest.raises(DataError, match="single or double"):
        exact_gaussian_process(K.to(dtype), Y, 0.1)


def test_plain_numbers_keep_their_digits():
    listed = exact_gaussian_process(K.tolist(), Y.tolist(), 0.1, 0.3)
    array = exact_gaussian_process(K.numpy(), Y.numpy(), np.float64(0.1), 0.3)
    truth = torch.linalg.solve(K + 0.1 * torch.eye(6).double(), Y - 0.3)
    for process in (listed, array):
        assert torch.allclose(process.weights, truth, rtol=1e-12)


def test_points_of_another_kind_or_precision():
    process = exact_gaussian_process(K, Y, 0.1)
    points = NewPoints(torch.zeros(2), K[:2].float(), torch.ones(2))
    assert torch.allclose(process.predict(points)[0], process.mean[:2], atol=1e-6)
    with pytest.raises(ArgumentError, match="NewPoints"):
        process.remove([1], evaluate_on=(K[:2], Y[:2]))


@pytest.mark.parametrize("inputs", [None, "a", torch.zeros(3, 2), torch.zeros(2, 2, 1)])
def test_inputs_of_another_width(inputs):
    with pytest.raises(DataError, match="inputs"):
        points_of(Exact().double(), inputs)


def test_sparse_inputs_of_another_width():
    with pytest.raises(DataError, match=r"inputs \[N, 1\]"):
        read_sparse(
            Sparse().double(),
            gpytorch.likelihoods.GaussianLikelihood(),
            (torch.stack([X, X], 1), Y),
        )

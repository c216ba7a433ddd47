"""Sparse processes that cannot be read, and data that do not fit them."""

from __future__ import annotations

import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpytorch.variational import (
    DeltaVariationalDistribution,
    LMCVariationalStrategy,
)

from engram.errors import (
    ArgumentError,
    DataError,
    LikelihoodError,
    MissingExtraError,
    ModelMismatchError,
    NonFiniteError,
    PosteriorError,
    TargetError,
)
from engram.models.gaussian_process import (
    fit_sparse,
    read_sparse,
)
from sparse_processes import (
    GRID,
    N,
    Sparse,
    gaussian_noise,
    targets_for,
)


@pytest.fixture
def inputs():
    return torch.rand(N, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6


def fresh(**settings):
    model = Sparse(GRID, **settings)
    model(GRID + 0.1)
    return model


def test_unsupported(inputs):
    y = targets_for("gaussian", inputs)
    with pytest.raises(LikelihoodError, match=r"GaussianLikelihood.*SoftmaxLikelihood.*StudentT"):
        read_sparse(fresh(), StudentTLikelihood(), (inputs, y))
    with pytest.raises(PosteriorError, match="not initialised"):
        read_sparse(Sparse(GRID), gaussian_noise(), (inputs, y))
    model = fresh(distribution=DeltaVariationalDistribution)
    with pytest.raises(PosteriorError, match="Gaussian variational distribution"):
        read_sparse(model, gaussian_noise(), (inputs, y))
    model = Sparse(GRID, tasks=3, wrap=LMCVariationalStrategy)
    with pytest.raises(ModelMismatchError, match="LMCVariationalStrategy"):
        read_sparse(model, gaussian_noise(), (inputs, y))
    with pytest.raises(ModelMismatchError, match="ApproximateGP"):
        read_sparse(torch.nn.Linear(1, 1), gaussian_noise(), (inputs, y))


def test_bad_data(inputs):
    y = targets_for("gaussian", inputs)
    model, likelihood = fresh(), gaussian_noise()
    with pytest.raises(DataError, match=r"inputs \[N, D\] and N targets"):
        read_sparse(model, likelihood, (inputs, y[1:]))
    with pytest.raises(DataError, match="pair of tensors"):
        read_sparse(model, likelihood, inputs)
    with pytest.raises(NonFiniteError, match="finite inputs"):
        read_sparse(model, likelihood, (inputs / 0, y))
    with pytest.raises(TargetError, match="finite gaussian targets"):
        read_sparse(model, likelihood, (inputs, y / 0))
    with pytest.raises(TargetError, match="between 0 and 1"):
        read_sparse(model, BernoulliLikelihood(), (inputs, y))
    with pytest.raises(TargetError, match="poisson targets that are not negative"):
        read_sparse(model, PoissonLikelihood(), (inputs, y))
    with pytest.raises(ArgumentError, match="at least 1 step"):
        fit_sparse(model, likelihood, (inputs, y), num_steps=0)
    with pytest.raises(ArgumentError, match="step size"):
        fit_sparse(model, likelihood, (inputs, y), step_size=2.0)
    with pytest.raises(ArgumentError, match="some data to remain"):
        read_sparse(model, likelihood, (inputs, y)).latent.remove(range(N))
    fitted = fit_sparse(model, likelihood, (inputs, y), num_steps=1).latent
    with pytest.raises(PosteriorError, match="more was taken out"):
        fitted.remove(range(30), weights=[5.0] * 30)


def test_without_the_library(inputs, monkeypatch):
    """As if GPyTorch were not installed: an import of it fails."""
    import sys

    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(MissingExtraError, match=r"pip install it.*extra 'gp'"):
        read_sparse(object(), "gaussian", (inputs, inputs[:, 0]))

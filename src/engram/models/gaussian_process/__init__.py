"""Gaussian processes: exact regression in closed form, and sparse variational ones of GPyTorch."""

from __future__ import annotations

from engram.models.gaussian_process.exact import (
    ExactGaussianProcess,
    NewPoints,
    Removed,
    exact_gaussian_process,
)
from engram.models.gaussian_process.from_gpytorch import from_exact_gp, points_of
from engram.models.gaussian_process.sparse import (
    SparseGaussianProcess,
    fit_sparse,
    read_sparse,
    sparse_sensitivities,
)

__all__ = [
    "ExactGaussianProcess",
    "NewPoints",
    "Removed",
    "SparseGaussianProcess",
    "exact_gaussian_process",
    "fit_sparse",
    "from_exact_gp",
    "points_of",
    "read_sparse",
    "sparse_sensitivities",
]

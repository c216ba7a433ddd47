"""Log densities that several families predict with, in nats."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def normal_log_density(difference: Tensor, variance: Tensor) -> Tensor:
    """log N(y; m, v) from y - m."""
    return -0.5 * (difference**2 / variance + (2 * math.pi * variance).log())


def multivariate_normal_log_density(difference: Tensor, covariance: Tensor) -> Tensor:
    """log N(y; m, C) from y - m [..., D] and C [..., D, D]."""
    factor = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(factor, difference[..., None], upper=False)[..., 0]
    half_determinant = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    constant = 0.5 * difference.shape[-1] * math.log(2 * math.pi)
    return -0.5 * (whitened**2).sum(-1) - half_determinant - constant


def student_log_density(
    quadratic: Tensor, log_determinant: Tensor, dof: Tensor, size: int
) -> Tensor:
    """Log density of a Student t in size dimensions.

    Args:
        quadratic: (y - m)' C^-1 (y - m) with C the scale matrix.
        log_determinant: log |C|.
        dof: degrees of freedom.
    """
    gammas = torch.lgamma(0.5 * (dof + size)) - torch.lgamma(0.5 * dof)
    scale = 0.5 * (size * (math.pi * dof).log() + log_determinant)
    return gammas - scale - 0.5 * (dof + size) * torch.log1p(quadratic / dof)

"""A fitted GPyTorch ExactGP, read as an exact Gaussian process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.core.errors import LikelihoodError, ModelMismatchError
from engram.core.optional import require
from engram.models.gaussian_process.covariance import as_points
from engram.models.gaussian_process.exact import (
    ExactGaussianProcess,
    NewPoints,
    exact_gaussian_process,
)


def from_exact_gp(model: Any) -> ExactGaussianProcess:
    """Read prior, noise and data off an ``ExactGP`` at its present hyperparameters.

    Args:
        model: a ``gpytorch.models.ExactGP`` with one output and a ``GaussianLikelihood`` or
            ``FixedNoiseGaussianLikelihood``; it is not changed.
    """
    inputs = _train_inputs(model)
    with torch.no_grad():
        prior = model.forward(*inputs)
        covariance = prior.lazy_covariance_matrix.to_dense()
    if covariance.dim() != 2 or prior.mean.dim() != 1:
        raise ModelMismatchError(
            "one Gaussian process with one output",
            f"a prior mean of shape {tuple(prior.mean.shape)}",
            "take each process of the batch by itself",
        )
    return exact_gaussian_process(
        covariance, model.train_targets, _noise(model.likelihood), prior.mean
    )


def points_of(model: Any, inputs: Tensor) -> NewPoints:
    """The prior of an ``ExactGP`` at test inputs, and its covariance with the training inputs."""
    train = _train_inputs(model)
    if len(train) != 1:
        raise ModelMismatchError("one input tensor", f"{len(train)}", "concatenate the features")
    points, count = as_points(inputs, train[0]), len(train[0])
    with torch.no_grad():
        joint = model.forward(torch.cat([train[0], points]))
        covariance = joint.lazy_covariance_matrix
        cross = covariance[count:, :count].to_dense()
        variance = covariance.diagonal(dim1=-1, dim2=-2)[count:]
    return NewPoints(joint.mean[count:].detach(), cross, variance)


def _train_inputs(model: Any) -> tuple[Tensor, ...]:
    if not isinstance(model, require("gpytorch", extra="gp").models.ExactGP):
        raise ModelMismatchError(
            "a gpytorch.models.ExactGP", type(model).__name__, "use read_sparse for ApproximateGP"
        )
    if model.train_inputs is None or model.train_targets is None:
        raise ModelMismatchError(
            "a model with training data", "one without", "call set_train_data first"
        )
    return tuple(model.train_inputs)


def _noise(likelihood: Any) -> Tensor:
    known = require("gpytorch", extra="gp").likelihoods
    if not isinstance(
        likelihood, known.GaussianLikelihood | known.FixedNoiseGaussianLikelihood
    ) or isinstance(likelihood, known.DirichletClassificationLikelihood):
        raise LikelihoodError(
            "GaussianLikelihood or FixedNoiseGaussianLikelihood for an exact Gaussian process",
            type(likelihood).__name__,
            "use one of these, or a sparse variational Gaussian process",
        )
    with torch.no_grad():
        noise = likelihood.noise
        extra = getattr(likelihood, "second_noise", 0.0)
        return (noise + extra).reshape(-1)

r"""Sparse variational Gaussian processes of GPyTorch: sensitivities at any time of the training.

For inducing values :math:`u \sim N(m, S^{-1})` and :math:`a_i = K_{ZZ}^{-1} k_{Zi}`, leaving i out
moves the inducing values by :math:`S^{-1} a_i e_i` and the function at i by
:math:`a_i' S^{-1} a_i\, e_i = v_i e_i`, with
:math:`e_i = \mathbb{E}_{q(f_i)}[-\nabla \log p(y_i | f_i)]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engram.core.arguments import whole
from engram.core.progress import progress_over
from engram.errors import DataError, NonFiniteError
from engram.models.gaussian_process.from_gpytorch import (
    Inducing,
    as_expected_loss,
    base_strategy,
    check_writable,
    inducing,
    read_distribution,
    write_distribution,
)
from engram.models.latent.latent_gaussian import LatentGaussian, at_prior
from engram.sensitivity.result import Result


@dataclass(frozen=True, eq=False)
class SparseGaussianProcess:
    """The posterior in whitened coordinates, with what leads back to the inducing values."""

    latent: LatentGaussian
    prior: Inducing = field(repr=False)

    def inducing_deviations(self, indices: Sequence[int] | Tensor | None = None) -> Tensor:
        """S^-1 a_i e_i in units of the function: how the inducing values move, [n, G, M]."""
        whitened = self.latent.mean_deviations(indices)
        return torch.einsum("gml,ngl->ngm", self.prior.factor, whitened)

    def sensitivities(self, estimator: str = "corrected") -> Result:
        """See :meth:`engram.models.latent.latent_gaussian.LatentGaussian.sensitivities`."""
        return self.latent.sensitivities(estimator)


def read_sparse(model: Any, likelihood: Any, data: tuple[Tensor, Tensor]) -> SparseGaussianProcess:
    """Read the posterior of an ``ApproximateGP`` at its present parameters.

    Args:
        model: with a ``VariationalStrategy`` or ``UnwhitenedVariationalStrategy``, alone or in an
            ``IndependentMultitaskVariationalStrategy``; it is not changed.
        likelihood: Gaussian, fixed-noise Gaussian, Bernoulli, Poisson or softmax of GPyTorch, or
            a loss of :mod:`engram.likelihoods` on the latent functions.
        data: the training data, (inputs [N, D], targets [N]).
    """
    inputs, targets = _checked(data)
    prior = inducing(model, inputs)
    mean, precision = read_distribution(model, prior)
    start = _at_prior(prior, likelihood, targets, model)
    return SparseGaussianProcess(replace(start, mean=mean, precision=precision), prior)


def sparse_sensitivities(
    model: Any, likelihood: Any, data: tuple[Tensor, Tensor], estimator: str = "corrected"
) -> Result:
    """Sensitivities of a sparse variational Gaussian process, trained or in training.

    Args:
        model, likelihood, data: as in :func:`read_sparse`.
        estimator: ``linear`` is the paper's v e; ``corrected`` takes the example's curvature out
            of the precision too and is exact for Gaussian noise at the optimum.

    Reference:
        Nickl et al., *The Memory-Perturbation Equation*, 2023, appendix on sparse variational
        Gaussian processes.
    """
    return read_sparse(model, likelihood, data).sensitivities(estimator)


def fit_sparse(
    model: Any,
    likelihood: Any,
    data: tuple[Tensor, Tensor],
    *,
    num_steps: int = 100,
    step_size: float = 1.0,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> SparseGaussianProcess:
    r"""Train the variational distribution by natural gradients and write it into the model.

    .. math:: S \leftarrow (1 - \rho) S + \rho (A' \mathrm{diag}(\beta) A + K_{ZZ}^{-1}), \qquad
        m \leftarrow m - \rho\, S^{-1} (A' e + K_{ZZ}^{-1} m)

    Hyperparameters and inducing points stay as they are: alternate with any optimizer for these.

    Args:
        model: with a Cholesky or natural variational distribution; only that is changed.
        likelihood, data: as in :func:`read_sparse`.
        num_steps: how many updates.
        step_size: rho; 1 converges in one step for Gaussian noise and all data.
        batch_size: examples a step, drawn without replacement; all if not given.
        seed: of these draws.
        progress: show a bar when it takes longer than a few seconds.

    Returns:
        The posterior after the last step, as :func:`read_sparse` would give it.
    """
    inputs, targets = _checked(data)
    _check_steps(num_steps, batch_size)
    check_writable(model)
    prior = inducing(model, inputs)
    state = _at_prior(prior, likelihood, targets, model)
    if bool(base_strategy(model).variational_params_initialized):
        mean, precision = read_distribution(model, prior)
        state = replace(state, mean=mean, precision=precision)
    generator = torch.Generator().manual_seed(seed)
    count = len(targets) if batch_size is None else min(batch_size, len(targets))
    for _ in progress_over(range(num_steps), "SVGP", progress):
        drawn = torch.randperm(len(targets), generator=generator)[:count]
        part = state if count == len(targets) else state.on(drawn)
        after = part.step(step_size, scale=len(targets) / count)
        state = replace(state, mean=after.mean, precision=after.precision)
    write_distribution(model, prior, state.mean, state.precision)
    return SparseGaussianProcess(state, prior)


def _at_prior(prior: Inducing, likelihood: Any, targets: Tensor, model: Any) -> LatentGaussian:
    return at_prior(
        prior.features,
        targets,
        as_expected_loss(likelihood),
        1.0,
        prior.offset,
        prior.conditional_variance,
        {"model": type(model).__name__, "inducing_points": prior.factor.shape[1]},
    )


def _check_steps(num_steps: int, batch_size: int | None) -> None:
    whole("num_steps", num_steps, remedy="use num_steps=100, at least 1 step")
    if batch_size is not None:
        whole("batch_size", batch_size, remedy="leave it out; at least 1 example a step")


def _checked(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError("(inputs, targets)", type(data).__name__, "pass a pair of tensors")
    inputs, targets = torch.as_tensor(data[0]).detach(), torch.as_tensor(data[1]).detach()
    if inputs.dim() not in (1, 2) or targets.dim() == 0 or len(inputs) != len(targets):
        raise DataError(
            "inputs [N, D] and N targets",
            f"shapes {tuple(inputs.shape)} and {tuple(targets.shape)}",
            "check the lengths",
        )
    if len(inputs) == 0:
        raise DataError("at least 1 example", "none", "check the data")
    if not torch.isfinite(inputs).all():
        raise NonFiniteError("finite inputs", "NaN or infinity", "clean the data")
    return inputs, targets

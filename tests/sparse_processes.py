"""Sparse Gaussian processes of GPyTorch, small enough to be solved exactly."""

from __future__ import annotations

import gpytorch
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    NaturalVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)

N = 40
STRATEGIES = (VariationalStrategy, UnwhitenedVariationalStrategy)
DISTRIBUTIONS = (NaturalVariationalDistribution, CholeskyVariationalDistribution)


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(
        self,
        points,
        strategy=VariationalStrategy,
        distribution=NaturalVariationalDistribution,
        tasks=None,
        wrap=IndependentMultitaskVariationalStrategy,
    ):
        batch = torch.Size([tasks] if tasks else [])
        held = strategy(
            self,
            points.clone(),
            distribution(points.shape[-2], batch_shape=batch),
            learn_inducing_locations=False,
            jitter_val=1e-10,
        )
        if tasks and wrap is LMCVariationalStrategy:
            held = wrap(held, num_tasks=tasks, num_latents=tasks)
        elif tasks:
            held = wrap(held, num_tasks=tasks)
        super().__init__(held)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.mean_module.initialize(constant=0.3)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def gaussian_noise(variance=0.1):
    likelihood = GaussianLikelihood().double()
    likelihood.noise = variance
    return likelihood


def function(inputs):
    return torch.sin(2 * inputs[:, 0])


def targets_for(kind, inputs):
    generator = torch.Generator().manual_seed(3)
    f = function(inputs)
    if kind == "gaussian":
        return f + 0.3 * torch.randn(N, generator=generator, dtype=torch.float64)
    if kind == "bernoulli":
        return torch.bernoulli(torch.special.ndtr(1.5 * f), generator=generator)
    if kind == "poisson":
        return torch.poisson(torch.nn.functional.softplus(2 * f + 1), generator=generator)
    logits = torch.stack([2 * f, torch.zeros_like(f), -2 * f], 1)
    return torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


LIKELIHOODS = {
    "gaussian": (gaussian_noise, None),
    "bernoulli": (BernoulliLikelihood, None),
    "poisson": (PoissonLikelihood, None),
    "softmax": (lambda: SoftmaxLikelihood(num_classes=3, mixing_weights=False), 3),
}
GRID = torch.linspace(0, 6, 10, dtype=torch.float64)[:, None]

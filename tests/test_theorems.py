r"""The theorems of the memory-perturbation paper, each as a test that reads like its statement.

.. math:: \hat\lambda^{\setminus M} - \lambda = \rho \sum_{j \in M} \tilde g_j(\lambda)  \quad (MPE)
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

import engram
from engram.core import equation
from engram.families import BetaBernoulli, GammaExponential, GammaPoisson, NormalKnownVariance
from engram.likelihoods import Gaussian

REMOVED, KEPT = [1, 4, 5], [0, 2, 3, 6, 7]
RANDOM = np.random.default_rng(0)

# family, data, density of q by its textbook parameters, log likelihood of y, grid over theta
CONJUGATE = {
    "beta_bernoulli": (
        BetaBernoulli(1.5, 2.0),
        RANDOM.integers(0, 2, 8),
        lambda theta, a, b: stats.beta.pdf(theta, a, b),
        lambda y, theta: y * torch.log(theta) + (1 - y) * torch.log(1 - theta),
        torch.linspace(0, 1, 40_001, dtype=torch.float64)[1:-1],
        lambda theta: (theta.log(), (1 - theta).log()),
    ),
    "gamma_poisson": (
        GammaPoisson(2.5, 1.5),
        RANDOM.poisson(2.0, 8),
        lambda theta, a, b: stats.gamma.pdf(theta, a, scale=1 / b),
        lambda y, theta: y * torch.log(theta) - theta - torch.lgamma(y + 1),
        torch.linspace(0, 30, 60_001, dtype=torch.float64)[1:],
        lambda theta: (theta.log(), -theta),
    ),
    "gamma_exponential": (
        GammaExponential(2.5, 3.5),
        RANDOM.exponential(1.0, 8),
        lambda theta, a, b: stats.gamma.pdf(theta, a, scale=1 / b),
        lambda y, theta: torch.log(theta) - theta * y,
        torch.linspace(0, 30, 60_001, dtype=torch.float64)[1:],
        lambda theta: (theta.log(), -theta),
    ),
    "normal_known_variance": (
        NormalKnownVariance(0.7, 0.2, 1.5),
        RANDOM.normal(size=8),
        lambda theta, mean, variance: stats.norm.pdf(theta, mean, variance**0.5),
        lambda y, theta: -0.5 * (y - theta) ** 2 / 0.7,
        torch.linspace(-15, 15, 60_001, dtype=torch.float64),
        lambda theta: (theta, theta**2),
    ),
}
conjugate_models = pytest.mark.parametrize("model", CONJUGATE.values(), ids=CONJUGATE)


@conjugate_models
def test_theorem_1_a_posterior_divided_by_likelihoods_has_natural_parameters_subtracted(model):
    r"""q without M is proportional to q / prod_j p_j, so lambda changes by -sum_j lambda_j."""
    family, data, density, log_likelihood, theta, _ = model
    posterior = family.fit(data)

    q = torch.as_tensor(density(theta.numpy(), *map(float, posterior.standard().values())))
    likelihood = sum(
        log_likelihood(y, theta) for y in torch.as_tensor(data[REMOVED]).double()
    ).exp()
    inside = (q > 1e-12) & (likelihood > 1e-12)
    divided = (q[inside] / likelihood[inside]).log()

    without = posterior.remove(REMOVED)
    q_without = density(theta.numpy(), *map(float, without.standard().values()))
    difference = divided - torch.as_tensor(q_without)[inside].log()
    assert (difference - difference.mean()).abs().max() < 1e-9  # proportional: a constant in log

    refitted = family.fit(data[KEPT])
    for name, value in without.natural.items():
        assert abs(float(value - refitted.natural[name])) < 1e-10


@conjugate_models
def test_theorem_2_the_mpe_recovers_the_exact_deviation_of_conjugate_models(model):
    r"""At lambda of the exact posterior, with loss_j = -log p_j and rho = 1.

    The natural gradient is computed from its definition, F^-1 grad E_q[loss_j], by integrating
    over theta: nothing here knows that it is minus the likelihood's natural parameter.
    """
    family, data, _, log_likelihood, theta, statistics = model
    posterior = family.fit(data)
    names = list(posterior.natural)
    T = torch.stack(statistics(theta))

    def log_density(natural: Tensor) -> Tensor:
        unnormalised = natural @ T
        return unnormalised - torch.logsumexp(unnormalised, 0)

    def expected_loss(natural: Tensor, y: Tensor) -> Tensor:
        return -(log_density(natural).exp() * log_likelihood(y, theta)).sum()

    natural = torch.stack([posterior.natural[name] for name in names])
    fisher = hessian(lambda value: torch.logsumexp(value @ T, 0))(natural)
    natural_gradients = torch.stack(
        [
            torch.linalg.solve(fisher, grad(expected_loss)(natural, y))
            for y in torch.as_tensor(data[REMOVED]).double()
        ]
    )
    estimate = natural + equation.natural_deviation(natural_gradients, step_size=1.0)

    refitted = family.fit(data[KEPT])
    expected = torch.stack([refitted.natural[name] for name in names])
    assert torch.allclose(estimate, expected, rtol=0, atol=1e-8)


class LinearProblem:
    """Least squares with the regulariser delta/2 |theta|^2, as in the paper."""

    delta = 0.6

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(15, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randn(15, generator=generator, dtype=torch.float64)
        self.theta = self.fit(torch.ones(15, dtype=torch.float64))

    def hessian(self, weights: Tensor) -> Tensor:
        return self.x.T @ (weights[:, None] * self.x) + self.delta * torch.eye(4).double()

    def fit(self, weights: Tensor) -> Tensor:
        return torch.linalg.solve(self.hessian(weights), self.x.T @ (weights * self.y))


@pytest.mark.parametrize("i", range(15))
def test_theorem_3_the_mpe_recovers_cooks_influence_of_linear_regression(i):
    r"""theta_without - theta = H_without^-1 x_i e_i and f_i moves by v_i e_i."""
    problem = LinearProblem()
    everything = torch.ones(15, dtype=torch.float64)
    without = everything.clone()
    without[i] = 0
    x, theta = problem.x[i], problem.theta
    error = x @ theta - problem.y[i]

    # the MPE at q = N(theta, H^-1), where E_q[grad loss] = x e and E_q[hess loss] = x x'
    natural = equation.gaussian_natural(theta, problem.hessian(everything))
    gradients = equation.gaussian_natural_gradients(
        (x * error)[None], (x[:, None] * x)[None], theta
    )
    perturbed = equation.perturbed(natural, gradients, torch.ones(1).double())
    hessian_without = -2 * perturbed["quadratic"]
    theta_without = torch.linalg.solve(hessian_without, perturbed["linear"])

    cook = torch.linalg.solve(problem.hessian(without), x * error)
    variance = x @ torch.linalg.solve(problem.hessian(without), x)
    assert torch.allclose(theta_without - theta, cook, rtol=0, atol=1e-12)
    assert torch.allclose(theta_without, problem.fit(without), rtol=0, atol=1e-12)
    assert torch.allclose(x @ theta_without - x @ theta, variance * error, rtol=0, atol=1e-12)

    # the same, seen in the mean, as the estimates for neural nets are made
    deviation = equation.mean_deviation(
        lambda v: {"theta": torch.linalg.solve(hessian_without, v["theta"])}, {"theta": x * error}
    )
    assert torch.allclose(deviation["theta"], cook, rtol=0, atol=1e-12)


def test_theorem_3_holds_in_engram_sensitivities():
    """The deviation v_i e_i for all examples at once, with the full posterior."""
    problem = LinearProblem()
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(problem.theta[None])
    data, likelihood = (problem.x, problem.y[:, None]), Gaussian(1.0)
    posterior = engram.laplace(
        model,
        data,
        likelihood=likelihood,
        structure="full",
        prior_precision=problem.delta,
        progress=False,
    )
    result = engram.sensitivities(model, data, posterior, estimator="corrected", progress=False)
    for i in range(15):
        without = torch.ones(15, dtype=torch.float64)
        without[i] = 0
        variance = problem.x[i] @ torch.linalg.solve(problem.hessian(without), problem.x[i])
        error = problem.x[i] @ problem.theta - problem.y[i]
        assert abs(float(result.deviation[i, 0] - variance * error)) < 1e-10


class NetProblem:
    """A small net at a strict minimum of sum_j loss_j + delta/2 |theta|^2."""

    delta = 0.3

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(25, 2, dtype=torch.float64)
        self.y = (self.x.prod(1, keepdim=True) > 0).double()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.layout = engram.core.parameters.Layout.of(dict(self.net.named_parameters()))
        start = self.layout.flatten({n: p.detach() for n, p in self.net.named_parameters()})
        everything = torch.ones(25, dtype=torch.float64)
        self.theta = self.minimise(everything, start)

    def losses(self, theta: Tensor) -> Tensor:
        outputs = functional_call(self.net, self.layout.unflatten(theta), self.x)
        return nn.functional.binary_cross_entropy_with_logits(outputs, self.y, reduction="none")[
            :, 0
        ]

    def objective(self, theta: Tensor, weights: Tensor) -> Tensor:
        return weights @ self.losses(theta) + 0.5 * self.delta * theta @ theta

    def minimise(self, weights: Tensor, theta: Tensor) -> Tensor:
        """Newton with the curvature made positive, which does not stop at a saddle."""
        for _ in range(200):
            slope = grad(self.objective)(theta, weights)
            if slope.norm() < 1e-11:
                break
            values, vectors = torch.linalg.eigh(hessian(self.objective)(theta, weights))
            step = vectors @ ((vectors.T @ slope) / values.abs().clamp(min=0.05))
            now = self.objective(theta, weights) + 1e-13
            while self.objective(theta - step, weights) > now:
                step = 0.5 * step
            theta = theta - step
        return theta


@pytest.fixture(scope="module")
def net():
    return NetProblem()


@pytest.mark.parametrize("i", [0, 7, 19])
def test_theorem_4_the_mpe_with_the_delta_method_recovers_the_influence_function(net, i):
    r"""d theta / d eps at eps = 0 is H^-1 grad loss_i, for q = N(theta, H^-1)."""
    everything = torch.ones(25, dtype=torch.float64)
    theta = net.theta
    H = hessian(net.objective)(theta, everything)
    assert torch.linalg.eigvalsh(H)[0] > 0

    # delta method: the expectations under q are taken at theta
    gradient = jacrev(lambda value: net.losses(value)[i])(theta)
    curvature = hessian(lambda value: net.losses(value)[i])(theta)
    natural = equation.gaussian_natural(theta, H)
    gradients = equation.gaussian_natural_gradients(gradient[None], curvature[None], theta)

    def mean(epsilon: Tensor) -> Tensor:
        perturbed = equation.perturbed(natural, gradients, epsilon[None])
        return torch.linalg.solve(-2 * perturbed["quadratic"], perturbed["linear"])

    derivative = jacrev(mean)(torch.tensor(0.0, dtype=torch.float64))
    influence = torch.linalg.solve(H, gradient)
    assert torch.allclose(derivative, influence, rtol=0, atol=1e-10)

    # and that is how the trained net moves: minimise again with weights 1 - eps and 1 + eps
    shift = torch.zeros(25, dtype=torch.float64)
    shift[i] = 1e-4
    moved = net.minimise(everything - shift, theta) - net.minimise(everything + shift, theta)
    assert torch.allclose(moved / 2e-4, influence, rtol=1e-4, atol=1e-6)


def test_theorem_4_holds_in_engram_remove():
    """For a small share eps the step is eps times the influence function."""
    torch.manual_seed(0)
    x = torch.randn(30, 3, dtype=torch.float64)
    y = (x[:, :1] + torch.randn(30, 1).double() > 0).double()
    model = nn.Linear(3, 1, bias=False).double()
    objective = lambda w: (  # noqa: E731
        nn.functional.binary_cross_entropy_with_logits(x @ w[:, None], y, reduction="sum")
        + 0.5 * w @ w
    )
    theta = torch.zeros(3, dtype=torch.float64)
    for _ in range(20):
        theta = theta - torch.linalg.solve(hessian(objective)(theta), grad(objective)(theta))
    with torch.no_grad():
        model.weight.copy_(theta[None])
    posterior = engram.laplace(
        model, (x, y), likelihood="bernoulli", structure="full", prior_precision=1.0, progress=False
    )
    epsilon = 1e-6
    removal = engram.remove(model, (x, y), posterior, [4], weights=[epsilon], progress=False)
    error = torch.sigmoid(x[4] @ theta) - y[4, 0]
    influence = torch.linalg.solve(hessian(objective)(theta), x[4] * error)
    assert torch.allclose(removal.delta["weight"][0] / epsilon, influence, rtol=1e-5)

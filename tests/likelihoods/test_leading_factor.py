"""The curvature of the outputs, exact for the likeliest classes and sampled for the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import engram
from engram.likelihoods import Categorical, resolve
from engram.likelihoods.draws import Draws

OUTPUTS = torch.tensor(
    [[4.0, 1.0, 0.0, -1.0, -2.0, 0.5, -3.0], [0.0, 5.0, 1.0, 2.0, -4.0, -1.0, 0.3]],
    dtype=torch.float64,
)
TARGETS = torch.tensor([0, 3])


def curvature(outputs: Tensor) -> Tensor:
    probability = outputs.softmax(1)
    return torch.diag_embed(probability) - probability[:, :, None] * probability[:, None, :]


def leading(outputs: Tensor, share: float, seed: int) -> Tensor:
    likelihood = Categorical()
    count = likelihood.num_leading(outputs, share)
    if count is None:
        return likelihood.hessian_factor(outputs, TARGETS)
    return likelihood.leading_factor(outputs, TARGETS, count, Draws(seed, torch.arange(2)))


def test_the_mean_over_draws_is_the_curvature() -> None:
    outputs = OUTPUTS.repeat(20_000, 1)
    count = Categorical().num_leading(outputs, 0.2)
    draws = Draws(0, torch.arange(40_000))
    factor = Categorical().leading_factor(outputs, TARGETS.repeat(20_000), count, draws)
    assert 2 <= factor.shape[2] < 6
    mean = (factor @ factor.mT).reshape(20_000, 2, 7, 7).mean(0)
    torch.testing.assert_close(mean, curvature(OUTPUTS), atol=2e-3, rtol=0.0)


def test_only_the_sampled_share_is_random() -> None:
    share = 0.1
    factors = [leading(OUTPUTS, share, seed) for seed in range(200)]
    head = [factor[:, :, :-1] for factor in factors]
    assert all(torch.equal(one, head[0]) for one in head)
    exact = curvature(OUTPUTS)
    left = (exact - head[0] @ head[0].mT).diagonal(dim1=1, dim2=2).sum(1)
    assert (left > 0).all()
    assert float(left.sum()) <= share * float(exact.diagonal(dim1=1, dim2=2).sum())


def test_nothing_is_sampled_where_it_would_save_nothing() -> None:
    exact = Categorical().hessian_factor(OUTPUTS, TARGETS)
    torch.testing.assert_close(leading(OUTPUTS, 1e-9, 0), exact)
    flat = torch.zeros(2, 7, dtype=torch.float64)
    torch.testing.assert_close(leading(flat, 0.05, 0), Categorical().hessian_factor(flat, TARGETS))


def test_a_certain_prediction_has_a_finite_factor() -> None:
    certain = torch.tensor([[900.0, 0.0, 0.0, 0.0], [0.0, -900.0, 0.0, 0.0]])
    factor = leading(certain, 0.5, 0)
    assert torch.isfinite(factor).all()
    torch.testing.assert_close((factor @ factor.mT)[0], torch.zeros(4, 4))


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson"])
def test_other_likelihoods_keep_the_exact_factor(name: str) -> None:
    likelihood = resolve(name)
    outputs, targets = torch.randn(5, 1), torch.ones(5, 1)
    assert likelihood.num_leading(outputs, 0.5) is None
    torch.testing.assert_close(
        likelihood.leading_factor(outputs, targets, 1, Draws(0, torch.arange(5))),
        likelihood.hessian_factor(outputs, targets),
    )


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "ekfac"])
def test_a_fit_within_the_tolerance(structure: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2000, 8), torch.randint(0, 6, (2000,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 6))
    with torch.no_grad():
        model[2].weight *= 25  # confident, so that few classes matter
    scores = [
        engram.sensitivities(
            model,
            (x, y),
            engram.laplace(
                model, (x, y), structure=structure, tolerance=tolerance, prior_precision=1.0
            ),
            estimator="linear",
        ).score
        for tolerance in (0.0, 0.03)
    ]
    difference = (scores[1] - scores[0]).norm() / scores[0].norm()
    assert 0 < float(difference) < 0.03

"""The posterior without a group, its entropy and divergence, and the conjugate factors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import engram
from engram.core import equation
from engram.errors import ModelMismatchError, PosteriorError
from sampled import SAMPLES, SEED, drawn, pieces, precision

DELTA, GROUP = 1.5, [2, 3, 11]


def ridge() -> tuple[nn.Module, tuple[Tensor, Tensor], engram.Posterior]:
    torch.manual_seed(0)
    x = torch.randn(14, 3).double()
    y = x.sum(1, keepdim=True) + torch.randn(14, 1).double()
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data = fitted(x, y)
    posterior = engram.laplace(
        model, (x, y), likelihood="gaussian", structure="full", prior_precision=DELTA
    )
    return model, (x, y), posterior


def fitted(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.solve(x.T @ x + DELTA * torch.eye(3).double(), x.T @ y).T


def net(
    structure: str, curvature: str = "ggn", prior: float = 3.0
) -> tuple[nn.Module, tuple[Tensor, Tensor], engram.Posterior]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    data = (torch.randn(12, 4).double(), torch.arange(12) % 3)
    posterior = engram.laplace(
        model,
        data,
        structure=structure,
        curvature=curvature,
        prior_precision=prior,
        tolerance=0,
    )
    return model, data, posterior


def normal(posterior: engram.Posterior) -> MultivariateNormal:
    layout = posterior.layout
    mean = layout.flatten({name: posterior.mean[name] for name in layout.names})
    return MultivariateNormal(mean, precision_matrix=precision(posterior))


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, -1.0]])
def test_ridge_has_the_posterior_of_the_remaining_data(weights: list[float] | None) -> None:
    model, (x, y), posterior = ridge()
    found = engram.posterior_without(model, (x, y), posterior, GROUP, weights=weights)
    share = torch.ones(14, 1).double()
    share[GROUP, 0] -= torch.tensor(weights or [1.0] * 3).double()
    gram = (share * x).T @ x + DELTA * torch.eye(3).double()
    torch.testing.assert_close(precision(found), gram)
    mean = torch.linalg.solve(gram, (share * x).T @ y).T
    torch.testing.assert_close(found.mean["weight"], mean, rtol=1e-10, atol=1e-10)
    told = engram.information(model, (x, y), posterior, GROUP, weights=weights)
    assert told.kl == pytest.approx(float(kl_divergence(normal(posterior), normal(found))))
    assert told.kl_back == pytest.approx(float(kl_divergence(normal(found), normal(posterior))))
    change = float(normal(found).entropy() - normal(posterior).entropy())
    assert told.entropy_change == pytest.approx(change)
    assert "nats" in repr(told)


def test_a_net_has_its_group_taken_out_of_the_matrix() -> None:
    model, data, posterior = net("full")
    jacobian, error, hessian = pieces(model, data[0][GROUP], data[1][GROUP])
    taken = torch.einsum("nkp,nkl,nlq->pq", jacobian, hessian, jacobian)
    gradient = torch.einsum("nkp,nk->p", jacobian, error)
    found = engram.posterior_without(model, data, posterior, GROUP, step_size=0.5)
    left = precision(posterior) - 0.5 * taken
    torch.testing.assert_close(precision(found), left)
    layout = posterior.layout
    mean = layout.flatten({n: found.mean[n] - posterior.mean[n] for n in layout.names})
    torch.testing.assert_close(mean, torch.linalg.solve(left, 0.5 * gradient))
    moved = engram.remove(model, data, posterior, GROUP, estimator="corrected", step_size=0.5)
    assert moved.delta is not None
    torch.testing.assert_close(mean, layout.flatten(moved.delta))


def test_expected_curvature_is_taken_out_over_samples() -> None:
    model, data, posterior = net("full", prior=30.0)
    taken = torch.zeros(27, 27).double()
    for other in drawn(model, posterior):
        jacobian, _, hessian = pieces(other, data[0][GROUP], data[1][GROUP])
        taken += torch.einsum("nkp,nkl,nlq->pq", jacobian, hessian, jacobian) / SAMPLES
    found = engram.posterior_without(model, data, posterior, GROUP, samples=SAMPLES, seed=SEED)
    torch.testing.assert_close(precision(found), precision(posterior) - taken)


def test_the_hessian_is_taken_out_where_it_is_in() -> None:
    model, data, posterior = net("full", "hessian", prior=30.0)
    found = engram.posterior_without(model, data, posterior, GROUP)

    def losses(flat: Tensor) -> Tensor:
        named = {
            n: v.reshape(p.shape)
            for (n, p), v in zip(model.named_parameters(), flat.split([12, 3, 9, 3]), strict=True)
        }
        outputs = torch.func.functional_call(model, named, data[0][GROUP])
        return nn.functional.cross_entropy(outputs, data[1][GROUP], reduction="sum")

    at = torch.cat([p.detach().flatten() for p in model.parameters()])
    hessian = torch.autograd.functional.hessian(losses, at)
    torch.testing.assert_close(precision(found), precision(posterior) - hessian)


@pytest.mark.parametrize("structure", ["diagonal", "isotropic", "kronecker", "ekfac", "last_layer"])
def test_other_structures_hold_their_part(structure: str) -> None:
    model, data, posterior = net(structure)
    found = engram.posterior_without(model, data, posterior, GROUP)
    if structure == "diagonal":
        jacobian, _, hessian = pieces(model, data[0][GROUP], data[1][GROUP])
        taken = torch.einsum("nkp,nkl,nlp->p", jacobian, hessian, jacobian)
        torch.testing.assert_close(
            precision(found).diagonal(), precision(posterior).diagonal() - taken
        )
    assert torch.linalg.eigvalsh(precision(found))[0] > 0
    assert posterior.kl(posterior) == pytest.approx(0.0, abs=1e-9)
    if structure != "last_layer":  # which covers some of the parameters
        assert posterior.entropy == pytest.approx(float(normal(posterior).entropy()))
    truth = kl_divergence(normal(posterior), normal(found))
    assert posterior.kl(found) == pytest.approx(float(truth), rel=1e-8)
    assert found.kl(posterior) == pytest.approx(
        float(kl_divergence(normal(found), normal(posterior))), rel=1e-8
    )


def test_kronecker_factors_without_a_group_are_those_of_the_others() -> None:
    """At one layer with one output the input factor is all there is."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 3).double(), torch.randn(9, 1).double()
    model = nn.Linear(3, 1, bias=False).double()
    given = {"likelihood": "gaussian", "structure": "kronecker", "prior_precision": 1.0}
    posterior = engram.laplace(model, (x, y), tolerance=0, **given)
    found = engram.posterior_without(model, (x, y), posterior, [0, 4])
    rest = [1, 2, 3, 5, 6, 7, 8]
    gram = x[rest].T @ x[rest] + torch.eye(3).double()
    torch.testing.assert_close(precision(found), gram)


def test_factors_and_prior_add_up_to_the_posterior() -> None:
    """The conjugate model of the paper's appendix, at a minimum."""
    model, data, _ = net("full")
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        total = loss + DELTA / 2 * sum(p.square().sum() for p in model.parameters())
        total.backward()
        return total

    for _ in range(8):
        optimizer.step(objective)
    posterior = engram.laplace(model, data, structure="full", prior_precision=DELTA)
    factors = engram.likelihood_factors(model, data, posterior)
    count, size = factors.linear.shape
    assert repr(factors) == f"LikelihoodFactors({count} examples, {size} parameters)"
    layout, matrix = posterior.layout, precision(posterior)
    mean = layout.flatten({name: posterior.mean[name] for name in layout.names})
    whole = equation.gaussian_natural(mean, matrix)
    prior = equation.gaussian_natural(0 * mean, DELTA * torch.eye(len(mean)).double())
    for name, total in factors.natural().items():
        torch.testing.assert_close(prior[name] + total, whole[name], atol=1e-6, rtol=1e-6)
    # taking some away is the equation
    some = engram.likelihood_factors(model, data, posterior, GROUP).natural()
    without = engram.posterior_without(model, data, posterior, GROUP)
    left = equation.gaussian_natural(
        layout.flatten({n: without.mean[n] for n in layout.names}), precision(without)
    )
    for name, part in some.items():
        torch.testing.assert_close(whole[name] - part, left[name], atol=1e-8, rtol=1e-8)


def test_factors_are_expectations_over_samples() -> None:
    model, data, posterior = net("full", prior=10.0)
    found = engram.likelihood_factors(
        model, data, posterior, GROUP, samples=SAMPLES, seed=SEED, step_size=0.5
    )
    layout = posterior.layout
    mean = layout.flatten({name: posterior.mean[name] for name in layout.names})
    gradient, curvature = torch.zeros(3, 27).double(), torch.zeros(3, 27, 27).double()
    for other in drawn(model, posterior):
        jacobian, error, hessian = pieces(other, data[0][GROUP], data[1][GROUP])
        gradient += torch.einsum("nkp,nk->np", jacobian, error) / SAMPLES
        curvature += torch.einsum("nkp,nkl,nlq->npq", jacobian, hessian, jacobian) / SAMPLES
    torch.testing.assert_close(found.linear, 0.5 * (curvature @ mean - gradient))
    for number in range(3):
        torch.testing.assert_close(found.information(number), 0.5 * curvature[number])


def test_what_has_no_such_posterior_says_so() -> None:
    model, data, posterior = net("low_rank")
    with pytest.raises(PosteriorError, match="curvature can be taken out of"):
        engram.posterior_without(model, data, posterior, GROUP)
    with pytest.raises(ModelMismatchError, match="same blocks of parameters"):
        posterior.kl(net("diagonal")[2])


def test_the_marginal_likelihood_of_linear_regression_is_exact() -> None:
    model, (x, y), posterior = ridge()
    covariance = torch.eye(14).double() + x @ x.T / DELTA
    exact = MultivariateNormal(torch.zeros(14).double(), covariance).log_prob(y[:, 0])
    found = engram.marginal_likelihood(model, (x, y), posterior)
    assert found.value == pytest.approx(float(exact), rel=1e-10)
    assert found.per_example == pytest.approx(-float(exact) / 14)
    assert "log p(D)" in repr(found)


def test_the_marginal_likelihood_of_a_net_is_laplaces_formula() -> None:
    model, data, posterior = net("full")
    loss = nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
    squares = sum(float(p.square().sum()) for p in model.parameters())
    log_det = float(torch.logdet(precision(posterior)))
    expected = -float(loss) - 1.5 * squares + 27 / 2 * math.log(3.0) - 0.5 * log_det
    assert engram.marginal_likelihood(model, data, posterior).value == pytest.approx(expected)


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_sharpness_against_the_dense_matrix(curvature: str) -> None:
    model, data, posterior = net("full", curvature, prior=30.0)
    dense = (precision(posterior) - 30.0 * torch.eye(27).double()) / 12
    found = engram.sharpness(
        model, data, posterior, curvature=curvature, samples=SAMPLES, seed=SEED
    )
    assert found.trace == pytest.approx(float(dense.trace()))
    assert found.trace_error == 0
    assert found.largest_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]))
    loss = nn.functional.cross_entropy
    rises = [
        float(loss(m(data[0]), data[1]) - loss(model(data[0]), data[1]))
        for m in drawn(model, posterior)
    ]
    assert found.expected_increase == pytest.approx(sum(rises) / SAMPLES)


def test_the_trace_of_many_parameters_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, posterior = net("full", prior=30.0)
    monkeypatch.setattr("engram.sensitivity.generalisation.FEW_PARAMETERS", 3)
    found = engram.sharpness(model, data, posterior, curvature="ggn", products=200)
    dense = float((precision(posterior) - 30.0 * torch.eye(27).double()).trace()) / 12
    assert abs(found.trace - dense) < 4 * found.trace_error
    assert 0 < found.trace_error < 0.1 * dense

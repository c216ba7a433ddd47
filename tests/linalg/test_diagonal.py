"""Diagonal covariances as short sums: the error they bring, and where they are used."""

from __future__ import annotations

import pytest
import torch
from benchmarks import torch_func
from torch import Tensor, nn

import engram
from engram.linalg.diagonal import DiagonalBlock, factorised

OUTPUTS, INPUTS, NUM_DATA = 150, 200, 400


def curvature(prior: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The precision of a linear layer, sum g^2 x^2 + delta, and its inputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(10, INPUTS, generator=generator)
    inputs = torch.relu(torch.randn(NUM_DATA, 10, generator=generator) @ mixing)
    gradients = torch.randn(NUM_DATA, OUTPUTS, generator=generator)
    gradients *= torch.rand(OUTPUTS, generator=generator)
    return gradients.square().T @ inputs.square() / 100 + prior, inputs


@pytest.mark.parametrize("prior", [30.0, 300.0])
@pytest.mark.parametrize("tolerance", [0.03, 0.2])
def test_no_gain_is_off_by_more_than_any_entry_may_be(prior: float, tolerance: float) -> None:
    precision, inputs = curvature(prior)
    factors = factorised(precision.reciprocal(), tolerance)
    assert factors is not None
    left, right = factors
    assert left.shape[1] < OUTPUTS / 4
    squares = torch.cat([inputs.square(), torch.eye(INPUTS)])
    exact = squares @ precision.reciprocal().T
    error = ((squares @ right @ left.T - exact) / exact).abs()
    assert error.max() <= 10 * tolerance
    assert error[:NUM_DATA].mean() <= tolerance


def test_tables_without_structure_stay_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(OUTPUTS, INPUTS, generator=generator).mul(2).exp()
    assert factorised(noise, 0.03) is None
    assert factorised(torch.ones(OUTPUTS, INPUTS), 0.0) is None


def test_one_number_for_all_entries_is_exact() -> None:
    factors = factorised(torch.full((OUTPUTS, INPUTS), 0.25), 0.03)
    assert factors is not None
    torch.testing.assert_close(factors[0] @ factors[1].T, torch.full((OUTPUTS, INPUTS), 0.25))


def test_only_gains_are_factorised() -> None:
    """Solves, samples and what is shown of a block stay exact."""
    precision, inputs = curvature(30.0)
    exact, short = (DiagonalBlock.of("w", precision, t) for t in (0.0, 0.03))
    assert exact.gain_factors is None
    assert short.gain_factors is not None
    vector = {"w": torch.ones(OUTPUTS, INPUTS)}
    torch.testing.assert_close(short.solve(vector), exact.solve(vector), rtol=0, atol=0)
    gains = [block.rank_one_gain(inputs) for block in (short, exact)]
    torch.testing.assert_close(*gains, rtol=0.3, atol=0)
    assert not torch.equal(*gains)


@pytest.mark.parametrize("source", ["laplace", "optimizer"])
def test_a_pass_stays_within_the_tolerance(source: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, 4))
    inputs = curvature(1.0)[1]
    targets = inputs[:, :4].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def posterior(tolerance: float | str) -> engram.Posterior:
        if source == "optimizer":
            return engram.posterior_of(optimizer, model, num_data=NUM_DATA, tolerance=tolerance)
        return engram.laplace(
            model,
            (inputs, targets),
            structure="diagonal",
            tolerance=tolerance,
            progress=False,
            prior_precision=1.0,
        )

    short, exact = posterior("auto"), posterior(0.0)
    assert short.settings["tolerance"] == 0.03
    data = (inputs, targets)
    found = [
        engram.sensitivities(model, data, p, estimator="linear", progress=False)
        for p in (short, exact)
    ]
    residual = (model(inputs).softmax(1) - nn.functional.one_hot(targets, 4)).detach()
    reference = torch_func.deviation(model, (inputs,), residual, exact)
    torch.testing.assert_close(found[1].deviation, reference, rtol=1e-4, atol=1e-6)
    error = (found[0].deviation - reference).norm() / reference.norm()
    assert 0 < error < 0.03


def test_double_precision_is_exact() -> None:
    model = nn.Linear(INPUTS, OUTPUTS).double()
    inputs = curvature(1.0)[1].double()
    posterior = engram.laplace(
        model,
        (inputs, torch.zeros(NUM_DATA).long()),
        structure="diagonal",
        progress=False,
        prior_precision=1.0,
    )
    assert all(getattr(block, "tolerance", None) == 0 for block in posterior.blocks)

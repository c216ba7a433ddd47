"""Without a prior precision the weights' own is taken, and said; where they have none it asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import engram
from engram.errors import ArgumentError, PosteriorError
from refusal import Refusal

Data = tuple[Tensor, Tensor]
Problem = tuple[nn.Module, Data]
DELTA = 3.0


def ridge(delta: float) -> Problem:
    """Ridge regression with its bias regularised too, solved in closed form."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + 0.7
    y = y + 0.3 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    design = torch.cat([x, torch.ones(40, 1).double()], 1)
    solved = torch.linalg.solve(design.T @ design + delta * torch.eye(4).double(), design.T @ y)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(solved[:3].T)
        model.bias.copy_(solved[3])
    return model, (x, y)


def stopped(steps: int, seed: int = 0) -> Problem:
    """A small net after some steps of SGD."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(50, 4).double()
    y = (x @ torch.randn(4, 3).double()).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, (x, y)


def by_hand(model: nn.Module, data: Data, first: int = 0) -> float:
    """-<theta, sum of gradients> / |theta|^2, by autograd, of all layers from one on."""
    theta = [p for layer in list(model.children())[first:] for p in layer.parameters()]
    loss = functional.cross_entropy(model(data[0]), data[1], reduction="sum")
    inner = sum((p * g).sum() for p, g in zip(theta, torch.autograd.grad(loss, theta), strict=True))
    return float(-inner / sum(p.square().sum() for p in theta))


@pytest.mark.parametrize("delta", [0.01, 1.0, 30.0])
def test_at_a_minimum_it_is_that_of_the_training(delta: float) -> None:
    model, data = ridge(delta)
    likelihood = engram.likelihoods.Gaussian()
    found = engram.laplace(model, data, likelihood=likelihood, progress=False)
    assert found.prior_precision == pytest.approx(delta, rel=1e-9)
    given = engram.laplace(
        model, data, likelihood=likelihood, prior_precision=delta, progress=False
    )
    vectors = {name: torch.ones(1, *p.shape).double() for name, p in model.named_parameters()}
    for name, value in given.multiply(vectors).items():
        torch.testing.assert_close(found.multiply(vectors)[name], value)


@pytest.mark.parametrize("structure", ["full", "kronecker", "diagonal", "last_layer"])
@pytest.mark.parametrize("batch_size", [50, 7])
def test_elsewhere_it_leaves_the_smallest_gradient(structure: str, batch_size: int) -> None:
    model, data = stopped(100)
    found = engram.laplace(model, data, structure=structure, batch_size=batch_size, progress=False)
    first = 2 if structure == "last_layer" else 0  # the others are fixed
    assert found.prior_precision == pytest.approx(by_hand(model, data, first), rel=1e-9)


def test_the_result_knows_it_as_the_fitting_prior() -> None:
    model, data = stopped(100)
    result = engram.sensitivities(
        model, data, engram.laplace(model, data, progress=False), progress=False
    )
    assert result.diagnostics.fitting_prior == pytest.approx(by_hand(model, data), rel=1e-6)
    assert result.diagnostics.relative_gradient == pytest.approx(
        result.diagnostics.fitting_gradient, rel=1e-6
    )


def test_it_is_said_wherever_it_matters(tmp_path: Path) -> None:
    model, data = stopped(100)
    posterior = engram.laplace(model, data, progress=False)
    delta = f"{posterior.prior_precision:g}"
    assert posterior.prior_fitted
    assert f"prior_precision={delta} (fits the weights)" in repr(posterior)
    assert "fits the weights best" in str(posterior.settings["prior_precision"])
    posterior.save(tmp_path)
    result = engram.sensitivities(model, data, engram.load(tmp_path), progress=False)
    assert "is the one that the weights fit best: none was given" in repr(result)
    reasons = {reason.signal: str(reason) for reason in result.verdict.reasons}
    assert "nothing was said of its training" in reasons["convergence"]
    assert "N times the weight decay" in reasons["convergence"]
    result.save(tmp_path)
    assert engram.load(tmp_path / "result.json").basis.prior_fitted


def test_a_number_that_was_given_is_not_called_fitted() -> None:
    model, data = stopped(100)
    posterior = engram.laplace(model, data, prior_precision=DELTA, progress=False)
    result = engram.sensitivities(model, data, posterior, progress=False)
    assert not posterior.prior_fitted
    assert not result.basis.prior_fitted
    assert "none was given" not in repr(result)
    assert "fits" not in repr(posterior)
    assert "nothing was said" not in str(result.verdict)


def test_it_asks_where_the_weights_fit_no_regulariser() -> None:
    model, data = stopped(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    assert by_hand(model, data) < 0
    with Refusal(
        PosteriorError, "do not pull away from 0", "n times the weight decay of the mean loss"
    ):
        engram.laplace(model, data, progress=False)


def test_it_asks_where_all_weights_are_0() -> None:
    model, data = nn.Linear(4, 3), (torch.randn(9, 4), torch.arange(9) % 3)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with Refusal(PosteriorError, "do not pull away from 0"):
        engram.laplace(model, data, progress=False)


@pytest.mark.parametrize("wrong", [None, 0.0, -1.0, "fit", float("nan")])
def test_auto_is_a_value_and_others_are_not(wrong: object) -> None:
    model, data = stopped(100)
    auto = engram.laplace(model, data, prior_precision="auto", progress=False)
    assert auto.digest == engram.laplace(model, data, progress=False).digest
    with pytest.raises(ArgumentError, match="a positive prior_precision"):
        engram.laplace(model, data, prior_precision=wrong, progress=False)  # type: ignore[arg-type]

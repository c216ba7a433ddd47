"""Leverages of held-out examples against dense filters, and the factor of the curvature."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import engram
from engram.engine.session import session
from engram.sensitivity.trajectory import samples
from engram.sensitivity.trajectory.gradient_products import Products, gradient_products
from engram.sensitivity.trajectory.held_out import curvature_scale, followed, held_out_leverage
from engram.sensitivity.trajectory.samples import Sample
from engram.sensitivity.trajectory.stages import stages
from engram.training.training import Training


def filtered(curvature: Tensor) -> Tensor:
    """(1 - e^-A) / A of a dense matrix."""
    values, vectors = torch.linalg.eigh(curvature)
    safe = values.clamp(min=1e-12)
    return vectors @ (-torch.expm1(-safe) / safe).diag() @ vectors.mT


@pytest.mark.parametrize("roots", [1, 3])
def test_leverages_are_those_of_the_dense_filter(roots: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, roots, 6, dtype=torch.float64, generator=generator)
    flat = rows.flatten(0, 1)
    gram = (flat @ flat.mT).reshape(40, roots, 40, roots)
    seen, held = rows[:30], rows[30:]
    energy = float(held.square().sum()) / 10
    products = Products(gram[:30, :, :30], gram[30:, :, :30], energy)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    found = []
    for count in (4, 2, 1):
        size, leverages = 30 // count, []
        for chosen in order.split(size)[:count]:
            part = seen[chosen].flatten(0, 1)
            dense = filtered(part.mT @ part / size)
            leverages.append(float(sum(g @ dense @ g for g in held.flatten(0, 1))) / 10)
        found.append(sum(leverages) / count)
    wanted = followed(found, torch.log2(torch.tensor(100 / 30)).item())
    assert held_out_leverage(products, 100, seed=0) == pytest.approx(wanted, rel=1e-6)


def test_a_learning_curve_that_has_ended_goes_on_so() -> None:
    assert followed([3.0, 2.0, 2.0], 5.0) == pytest.approx(2.0)
    assert followed([5.0, 5.0, 5.0], 5.0) == pytest.approx(5.0)
    assert followed([8.0, 4.0, 2.0 * 2**0.5], 60.0) == pytest.approx(2.0, rel=1e-3)


def test_the_scale_gives_the_leverage_that_is_wanted() -> None:
    rates, energies = torch.linspace(0.1, 5, 20).double(), torch.linspace(1, 0.1, 20).double()
    scale = curvature_scale(rates, energies, 3.0)
    reached = (energies * -torch.expm1(-scale * rates) / (scale * rates)).sum()
    assert float(reached) == pytest.approx(3.0, rel=1e-6)


def test_factors_are_never_made_softer() -> None:
    """Where the examples are too few to know the curvature, their leverage is no measure of it."""
    assert curvature_scale(torch.ones(3).double(), torch.ones(3).double(), 50.0) == pytest.approx(1)


class Repeated(nn.Module):
    """A linear model whose weight is the sum of several, in as many layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def trained(layers: int, steps: int) -> tuple[nn.Module, tuple[Tensor, Tensor], Training]:
    torch.manual_seed(0)
    model = Repeated(layers).double()
    inputs = torch.randn(300, 4).double()
    targets = inputs @ torch.randn(4, 2).double() + torch.randn(300, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    training = engram.record(optimizer, model)
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (model(inputs) - targets).square().sum(1)).mean().backward()
        optimizer.step()
    return model, (inputs, targets), training


@pytest.mark.parametrize("wanted", [7.0, 10.0, 19.9])
def test_the_scale_is_found_over_many_sizes_of_curvature(wanted: float) -> None:
    """Some directions hardly move and some have settled long ago."""
    rates = torch.logspace(-9, 6, 200, dtype=torch.float64)
    energies = torch.full_like(rates, 0.1)
    scale = curvature_scale(rates, energies, wanted)
    reached = (energies * -torch.expm1(-scale * rates) / (scale * rates)).sum()
    most = float((energies * -torch.expm1(-rates) / rates).sum())
    assert float(reached) == pytest.approx(min(wanted, most))


@pytest.mark.parametrize("layers", [1, 6])
def test_layers_that_move_the_same_outputs_share_their_curvature(layers: int) -> None:
    """L equal layers are one whose weight has L times the training time: kA is L times as large."""
    model, data, training = trained(layers, steps=400)
    with session(model, data, "gaussian", progress=False) as opened:
        walk = stages(opened, training.of(model), 2, seed=0)
    for stage in walk:
        assert stage.scale == pytest.approx(layers, rel=0.15)


def leverage(roots: int) -> float:
    """Of held-out images by a small convolutional net, from so many roots of each of 120 others."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:160]).view(-1, 1, 8, 8) / 16, torch.tensor(labels[:160])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    ).double()
    times = {name: torch.tensor(300.0).double() for name, _ in model.named_parameters()}
    groups = (torch.arange(40), torch.arange(40, 160), torch.arange(0))
    with session(model, (x, y), "categorical", progress=False) as opened:
        sample = Sample(opened, groups, num_outputs=10, seed=0, roots=roots, room=0)
        return held_out_leverage(gradient_products(sample.batches(), 40, 160, times), 160)


def test_three_roots_tell_the_leverage_of_all_and_one_does_not(monkeypatch):
    """A single sampled label leaves directions free that the others' curvature holds."""
    monkeypatch.setattr(samples, "EXACT_GRADIENTS", 10_000)
    every = leverage(10)
    monkeypatch.setattr(samples, "EXACT_GRADIENTS", 0)
    assert leverage(3) == pytest.approx(every, rel=0.15)
    assert leverage(1) > 1.2 * every


def test_the_roots_of_an_example_fit_to_those_of_the_others():
    """More examples than all outputs are taken of: some have three roots, the rest one."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(600, 4, generator=generator), torch.arange(600) % 5
    model = torch.nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model)
    for batch in torch.arange(600).split(50):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    posterior = engram.laplace(model, (x, y), training=training, structure="kronecker")
    result = engram.sensitivities(model, (x, y), posterior, estimator="trajectory")
    assert result.loo_loss.isfinite().all()

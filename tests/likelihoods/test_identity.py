"""A posterior knows its likelihood: the same one is found again, another is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import LikelihoodError, ModelMismatchError
from engram.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, from_loss
from engram.likelihoods.remembered import Remembered, described, restored

FACTOR = 1.0
DATA = (torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20.0))
MODEL = nn.Linear(3, 1).double()


def squared(f: Tensor, y: Tensor) -> Tensor:
    return FACTOR * (f[:, 0] - y).square()


def scaled(scale: float):
    def squared(f: Tensor, y: Tensor) -> Tensor:
        return scale * (f[:, 0] - y).square()

    return squared


class Squared(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        return self.scale * (f[:, 0] - y).square()


def powered(f: Tensor, y: Tensor, power: int) -> Tensor:
    return (f[:, 0] - y).abs() ** power


PAIRS = {
    "closure": (scaled(1.0), scaled(1.0), scaled(2.0)),
    "module": (Squared(1.0), Squared(1.0), Squared(2.0)),
    "partial": (partial(powered, power=2), partial(powered, power=2), partial(powered, power=4)),
    "method": (Squared(1.0).forward, Squared(1.0).forward, Squared(3.0).forward),
    "weights": tuple(
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, w]), reduction="none") for w in (1, 1, 2)
    ),
    "lambda": (
        lambda f, y: (f[:, 0] - y).square(),
        lambda f, y: (f[:, 0] - y).square(),
        lambda f, y: 3 * (f[:, 0] - y).square(),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_function_is_known_by_what_it_does(kind: str) -> None:
    first, same, other = (from_loss(function) for function in PAIRS[kind])
    assert first.identity == same.identity
    assert first.identity != other.identity
    assert from_loss(squared).identity != from_loss(squared, mean=torch.tanh).identity


def test_a_changed_global_is_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    before = from_loss(squared).identity
    assert from_loss(squared).identity == before
    monkeypatch.setitem(squared.__globals__, "FACTOR", 2.0)
    assert from_loss(squared).identity != before


@pytest.mark.parametrize(
    "likelihood", [Categorical(), Bernoulli(), Gaussian(), Gaussian(0.3), Poisson()], ids=repr
)
def test_our_own_are_made_again(likelihood: engram.likelihoods.Likelihood) -> None:
    again = restored(described(likelihood))
    assert type(again) is type(likelihood)
    assert again.identity == likelihood.identity
    assert Gaussian(0.3).identity != Gaussian().identity


def fitted(function: object) -> engram.Posterior:
    return engram.laplace(
        MODEL, DATA, likelihood=from_loss(function), progress=False, prior_precision=1.0
    )


def test_another_function_of_the_same_name_is_refused() -> None:
    posterior = fitted(scaled(1.0))
    posterior.check_likelihood(from_loss(scaled(1.0)))
    with pytest.raises(ModelMismatchError, match="another of that name"):
        posterior.check_likelihood(from_loss(scaled(2.0)))
    with pytest.raises(ModelMismatchError, match="Categorical"):
        posterior.check_likelihood(Categorical())


def test_it_is_taken_from_the_posterior() -> None:
    posterior = fitted(scaled(1.0))
    result = engram.sensitivities(MODEL, DATA, posterior, progress=False)
    torch.testing.assert_close(result.loss, scaled(1.0)(MODEL(DATA[0]), DATA[1]).detach())
    engram.remove(MODEL, DATA, posterior, [1], progress=False)
    engram.influence(MODEL, DATA, DATA, posterior, progress=False)
    engram.prediction_variance(MODEL, DATA, posterior, progress=False)
    engram.assess(MODEL, DATA, result, posterior, progress=False)
    engram.refine(MODEL, DATA, result, posterior, progress=False)
    engram.calibrate(MODEL, DATA, posterior, progress=False)


def test_a_saved_function_is_asked_for_and_compared(tmp_path: Path) -> None:
    read = engram.load(fitted(scaled(1.0)).save(tmp_path))
    assert isinstance(read.likelihood, Remembered)
    with pytest.raises(LikelihoodError, match=r"from_loss\(squared\).*a function cannot be saved"):
        engram.sensitivities(MODEL, DATA, read)
    with pytest.raises(ModelMismatchError, match="another of that name"):
        engram.load(tmp_path, likelihood=from_loss(scaled(2.0)))
    again = engram.load(tmp_path, likelihood=from_loss(scaled(1.0)))
    result = engram.sensitivities(MODEL, DATA, again, progress=False)
    expected = engram.sensitivities(MODEL, DATA, fitted(scaled(1.0)), progress=False)
    torch.testing.assert_close(result.loo_loss, expected.loo_loss)


def test_our_own_are_saved(tmp_path: Path) -> None:
    likelihood = Gaussian(0.3)
    posterior = engram.laplace(
        MODEL, DATA, likelihood=likelihood, progress=False, prior_precision=1.0
    )
    read = engram.load(posterior.save(tmp_path))
    assert read.digest == posterior.digest
    one, other = (engram.sensitivities(MODEL, DATA, p, progress=False) for p in (posterior, read))
    torch.testing.assert_close(one.loo_loss, other.loo_loss)


def test_without_one_it_is_categorical() -> None:
    model, data = nn.Linear(3, 2), (torch.randn(9, 3), torch.randint(2, (9,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, weight_decay=0.1)
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
    posterior = engram.posterior_of(optimizer, model, num_data=9)
    assert isinstance(posterior.likelihood, Categorical)
    result = engram.sensitivities(model, data, posterior, progress=False)
    torch.testing.assert_close(
        result.loss, nn.functional.cross_entropy(model(data[0]), data[1], reduction="none").detach()
    )

"""A fitted laplace-torch object gives what its own precision says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.core.parameters import Layout, trainable
from engram.errors import PosteriorError
from engram.posteriors.laplace_torch import as_posterior

laplace = pytest.importorskip("laplace")
pytestmark = pytest.mark.filterwarnings("ignore")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (12,), generator=generator)


def fitted(model: nn.Module, weights: str, structure: str) -> object:
    from laplace.curvature import AsdlGGN

    result = laplace.Laplace(
        model, "classification", weights, structure, prior_precision=2.5, backend=AsdlGGN
    )
    result.fit(DataLoader(TensorDataset(*data()), batch_size=5))
    return result


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_precision_is_taken_as_it_is(weights: str, structure: str) -> None:
    model = network()
    theirs = fitted(network(), weights, structure)
    posterior = as_posterior(theirs, model)
    layout = Layout.of({n: p for n, p in trainable(model).items() if n in posterior.names})
    precision = theirs.posterior_precision
    dense = {
        "diag": lambda: torch.diag(precision),
        "kron": lambda: precision.to_matrix(),
        "full": lambda: precision,
    }[structure]()
    identity = torch.eye(layout.num_params, dtype=torch.float64)
    ours = layout.flatten(posterior.multiply(layout.unflatten(identity)))
    torch.testing.assert_close(ours, dense.detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_same_sensitivities_as_our_own_fit(structure: str) -> None:
    model = network()
    own = engram.laplace(
        model,
        data(),
        structure={"diag": "diagonal", "full": "full"}[structure],
        prior_precision=2.5,
    )
    expected = engram.sensitivities(model, data(), own, estimator="corrected")
    got = engram.sensitivities(
        model, data(), fitted(network(), "all", structure), estimator="corrected"
    )
    torch.testing.assert_close(got.deviation, expected.deviation, rtol=1e-6, atol=1e-9)


def test_unfitted_object_is_refused() -> None:
    unfitted = laplace.Laplace(network(), "classification", "all", "diag")
    with pytest.raises(PosteriorError, match=r"expected a fitted.*fit\(loader\)"):
        as_posterior(unfitted, network())


def test_object_of_other_weights_is_refused() -> None:
    other = network()
    with torch.no_grad():
        other[0].weight.add_(1.0)
    with pytest.raises(PosteriorError, match="other weights"):
        as_posterior(fitted(network(), "all", "diag"), other)

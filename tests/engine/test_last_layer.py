"""structure="last_layer": what comes before the head is run once, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import architectures as nets
import engram
from engram.core.data.batches import Batches
from engram.engine.last_layer import last_layer

NUMBER, DELTA = 12, 0.7


class Body(nn.Module):
    """Everything that training does otherwise than evaluation, and a count of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.rest = nn.Sequential(nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 6), nn.Tanh())
        self.seen, self.with_gradients = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rest(self.norm(self.first(x)))
        self.seen += len(x)
        self.with_gradients += len(x) * found.requires_grad
        return found


def problem() -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Body(), nn.Linear(6, 3)).double()
    x = torch.randn(NUMBER, 5).double()
    model(x)  # in train mode: statistics
    return model.train(), (x, torch.arange(NUMBER) % 3)


@contextmanager
def saved_numbers() -> Iterator[list[int]]:
    """How many numbers autograd keeps for a backward pass, one entry for each tensor."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield sizes


@pytest.mark.parametrize("prior", [DELTA, "auto"])
@pytest.mark.parametrize("curvature", ["ggn", "hessian", "fisher"])
def test_it_is_the_head_alone_on_its_features(prior: float | str, curvature: str) -> None:
    model, data = problem()
    with torch.no_grad():
        features = (model[0].eval()(data[0]), data[1])
    model.train()
    settings = {"curvature": curvature, "prior_precision": prior, "progress": False}
    if prior == "auto":  # no weights would fit those labels
        with torch.no_grad():
            model[1].weight.copy_(torch.linalg.lstsq(*_one_hot(*features)).solution.T)
    posterior = engram.laplace(model, data, structure="last_layer", **settings)
    alone = engram.laplace(model[1], features, structure="full", **settings)
    assert posterior.prior_precision == pytest.approx(alone.prior_precision)
    found = engram.sensitivities(model, data, posterior, progress=False)
    expected = engram.sensitivities(model[1], features, alone, progress=False)
    torch.testing.assert_close(found.loo_loss, expected.loo_loss)
    torch.testing.assert_close(found.deviation, expected.deviation)
    torch.testing.assert_close(found.leverage, expected.leverage)
    assert found.diagnostics.relative_gradient == pytest.approx(
        expected.diagnostics.relative_gradient
    )
    assert found.diagnostics.parameters_covered < 0.5
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def _one_hot(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return features, nn.functional.one_hot(targets, 3).double()


@pytest.mark.parametrize("call", ["fit", "pass", "score"])
def test_the_body_runs_once_without_gradients(call: str, tmp_path: object) -> None:
    model, (x, y) = problem()
    data = (x.repeat(20, 1), y.repeat(20))
    fit = {"structure": "last_layer", "prior_precision": DELTA, "progress": False}
    posterior = engram.laplace(model, data, **fit)
    body = model[0]
    body.seen = body.with_gradients = 0
    with saved_numbers() as sizes:
        if call == "fit":
            engram.laplace(model, data, **fit)
        elif call == "pass":
            engram.sensitivities(model, data, posterior, progress=False, diagnostics=False)
        else:
            engram.score(model, data, posterior, tmp_path, progress=False)
    # besides the data some examples of which the model is planned, and which are compared
    assert len(data[0]) <= body.seen <= len(data[0]) + 80
    assert body.with_gradients <= 16  # to see which layer is the last
    assert max(sizes) <= len(data[0]) * 6  # the head's input


def test_a_tracker_and_a_recorded_training_do_so_too() -> None:
    model, data = problem()
    loader = DataLoader(TensorDataset(*data), batch_size=NUMBER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    training = engram.record(optimizer, model, loader=loader)
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    posterior = engram.laplace(
        model, data, structure="last_layer", training=training, progress=False
    )
    assert posterior.names == ("1.weight", "1.bias")
    assert set(posterior.mean) == {name for name, _ in model.named_parameters()}
    body = model[0]
    body.seen = body.with_gradients = 0
    engram.sensitivities(model, data, posterior, estimator="corrected", progress=False)
    assert body.with_gradients == 0
    with engram.Tracker(model, optimizer, data, posterior="last_layer") as tracker:
        tracker.update(step=0)
        assert len(tracker.history) == 1


def test_a_head_that_is_tied_to_the_embedding_is_the_whole_of_it() -> None:
    model = nets.TiedEmbedding(5).double()
    found = last_layer(model, Batches((torch.randint(0, 5, (4, 4)), torch.zeros(4)), 1))
    assert len(found) >= 1
    assert found[0].rpartition(".")[0] in dict(model.named_modules())

"""Layers that reach no output, models that branch, and other edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.errors import EngineError, EngramError

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(9) % 3


class Auxiliary(nn.Module):
    """Runs a second head that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        outputs = self.head(hidden)
        self.spare(hidden)
        return outputs


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "ekfac", "full", "last_layer"])
def test_a_layer_that_reaches_no_output_keeps_the_prior(structure: str) -> None:
    torch.manual_seed(0)
    model = Auxiliary()
    posterior = engram.laplace(model, (X, Y), structure=structure, prior_precision=2.0)
    result = engram.sensitivities(model, (X, Y), posterior)
    assert result.score.min() > 0
    if structure == "last_layer":  # runs nothing else with gradients
        assert result.coverage["spare.weight"] == result.coverage["body.weight"] == "frozen"
        assert posterior.names == ("head.weight", "head.bias")
        return
    assert result.coverage["spare.weight"] == "unused"
    ones = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    assert posterior.multiply(ones)["spare.weight"].allclose(torch.tensor(2.0))
    assert engram.remove(model, (X, Y), posterior, [0, 1]).group.change != 0


class Branching(nn.Module):
    """Takes another layer, of the same kind, for other data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.sum() < 1e3 else self.second(x)


def test_a_branch_that_depends_on_the_data_is_noticed() -> None:
    model = Branching()
    inputs = X.clone()
    inputs[5:] += 1e4
    posterior = engram.laplace(model, (X, Y), structure="diagonal", prior_precision=1.0)
    with pytest.raises(EngineError, match="same operations for every batch"):
        engram.sensitivities(model, (inputs, Y), posterior, batch_size=5)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn_like(x))


def test_a_random_forward_is_named_as_such() -> None:
    with pytest.raises(EngineError, match="random forward"):
        engram.laplace(Noisy(), (X, Y), prior_precision=1.0)


def test_half_precision_gives_a_result_in_single() -> None:
    model = nn.Linear(4, 3).to(torch.bfloat16)
    data = (X.to(torch.bfloat16), Y)
    posterior = engram.laplace(model, data, structure="diagonal", prior_precision=1.0)
    result = engram.sensitivities(model, data, posterior, estimator="corrected")
    assert result.loo_loss.dtype == torch.float32
    assert len(result.top(3)) == 3


def test_inputs_that_do_not_fit_the_model_get_a_typed_error() -> None:
    with pytest.raises(EngramError, match=r"got RuntimeError: .*shapes cannot be multiplied"):
        engram.laplace(nn.Linear(7, 3), (X, Y), prior_precision=1.0)


TOKENS = torch.arange(27).reshape(9, 3) % 5


def test_a_layer_that_rescales_its_weights_is_named() -> None:
    embedding = nn.Embedding(5, 4, max_norm=0.1)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(12, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(EngineError, match="max_norm"):
        engram.laplace(model, (TOKENS, Y), prior_precision=1.0)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(EngineError, match="real parameters"):
        engram.laplace(nn.Linear(4, 3, dtype=torch.complex64), (X, Y), prior_precision=1.0)

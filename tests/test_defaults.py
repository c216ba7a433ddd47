"""What a user gets without options: the most faithful way that costs seconds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engram
from engram.errors import ArgumentError
from engram.posteriors import laplace as affordable


def problem(count: int = 30) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(4, 3), (torch.randn(count, 4), torch.randint(0, 3, (count,)))


def test_a_small_model_gets_the_full_matrix_and_the_rule_that_goes_with_it() -> None:
    model, data = problem()
    posterior = engram.laplace(model, data, prior_precision=1.0)
    result = engram.sensitivities(model, data, posterior)
    assert posterior.structure == "full"
    assert posterior.curvature == "hessian"
    assert result.provenance["settings"]["estimator"] == "newton"


def test_a_hessian_that_is_not_definite_is_replaced_unless_it_was_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = (4 * torch.randn(60, 4), torch.randint(0, 3, (60,)))
    posterior = engram.laplace(model, data, prior_precision=1e-3)
    result = engram.sensitivities(model, data, posterior)
    assert posterior.structure == "full"
    assert posterior.curvature == "ggn"
    assert result.provenance["settings"]["estimator"] == "corrected"
    with pytest.raises(engram.errors.PosteriorError, match="positive-definite"):
        engram.laplace(model, data, curvature="hessian", prior_precision=1e-3)


def test_a_named_structure_means_the_gauss_newton_matrix() -> None:
    model, data = problem()
    posterior = engram.laplace(model, data, structure="full", prior_precision=1.0)
    result = engram.sensitivities(model, data, posterior)
    assert posterior.curvature == "ggn"
    assert result.provenance["settings"]["estimator"] == "corrected"


def test_weights_used_at_many_positions_make_the_hessian_too_dear(monkeypatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    data = (torch.randn(30, 1, 6, 6), torch.randint(0, 3, (30,)))
    small = engram.laplace(model, data, prior_precision=100.0)
    monkeypatch.setattr(affordable, "SHARED_WORK", 1.0)
    large = engram.laplace(model, data, prior_precision=100.0)
    assert small.curvature == "hessian"
    assert large.curvature == "ggn"


def test_an_operation_without_a_second_derivative_leaves_the_gauss_newton_matrix() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return 2 * gradient

    class Doubled(nn.Module):
        def forward(self, x):
            return Once.apply(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), Doubled())
    data = (torch.randn(30, 4), torch.randint(0, 3, (30,)))
    posterior = engram.laplace(model, data, prior_precision=1.0)
    assert posterior.curvature == "ggn"


def test_a_much_larger_one_gets_kronecker_factors_and_their_rule(monkeypatch) -> None:
    monkeypatch.setattr(affordable, "FULL_WORK", 30 * 15**2 - 1)  # 15 parameters, 30 examples
    monkeypatch.setattr(affordable, "LOW_RANK_WORK", 0.0)
    model, data = problem()
    posterior = engram.laplace(model, data, prior_precision=1.0)
    result = engram.sensitivities(model, data, posterior)
    assert posterior.structure == "kronecker"
    assert result.provenance["settings"]["estimator"] == "downdated"


def test_many_parameters_get_kronecker_factors_however_few_the_examples(monkeypatch) -> None:
    monkeypatch.setattr(affordable, "FULL_PARAMETERS", 14)
    monkeypatch.setattr(affordable, "LOW_RANK_WORK", 0.0)
    assert engram.laplace(*problem(), prior_precision=1.0).structure == "kronecker"


def test_the_hessian_means_the_full_matrix(monkeypatch) -> None:
    monkeypatch.setattr(affordable, "FULL_WORK", 0)
    model, data = problem()
    assert engram.laplace(model, data, curvature="hessian", prior_precision=1.0).structure == "full"


@pytest.mark.parametrize("name", ["structure", "curvature", "tolerance", "batch_size"])
def test_auto_is_a_value_and_none_is_not(name: str) -> None:
    data = (torch.randn(12, 3), torch.randint(2, (12,)))
    model = nn.Linear(3, 2)
    said = engram.laplace(model, data, **{name: "auto"}, prior_precision=1.0, progress=False)
    assert said.digest == engram.laplace(model, data, progress=False, prior_precision=1.0).digest
    with pytest.raises(ArgumentError, match="auto"):
        engram.laplace(model, data, **{name: None}, progress=False)


def test_the_automatic_structure_is_the_one_of_that_name() -> None:
    torch.manual_seed(0)
    data = (torch.randn(12, 3), torch.randint(2, (12,)))
    model = nn.Linear(3, 2)
    chosen = engram.laplace(model, data, progress=False, prior_precision=1.0)
    named = engram.laplace(
        model,
        data,
        structure=chosen.structure,
        curvature=str(chosen.curvature),
        progress=False,
        prior_precision=1.0,
    )
    assert chosen.digest == named.digest
    text = repr(chosen)
    assert chosen.structure in text
    assert str(chosen.curvature) in text
    result = engram.sensitivities(model, data, chosen, estimator="auto", progress=False)
    assert f"({result.basis.estimator}, " in repr(result)

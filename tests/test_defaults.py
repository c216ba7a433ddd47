"""What a user gets without options: the most faithful way that costs seconds."""

from __future__ import annotations

import torch
from torch import nn

import engram
from engram.posteriors import laplace as fitting


def problem(count: int = 30) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(4, 3), (torch.randn(count, 4), torch.randint(0, 3, (count,)))


def test_a_small_model_gets_the_full_matrix_and_the_rule_that_goes_with_it() -> None:
    model, data = problem()
    posterior = engram.laplace(model, data)
    result = engram.sensitivities(model, data, posterior)
    assert posterior.structure == "full"
    assert result.provenance["settings"]["estimator"] == "corrected"


def test_a_larger_one_gets_kronecker_factors_and_the_linear_rule(monkeypatch) -> None:
    monkeypatch.setattr(fitting, "FULL_WORK", 30 * 15**2 - 1)  # 15 parameters, 30 examples
    model, data = problem()
    posterior = engram.laplace(model, data)
    result = engram.sensitivities(model, data, posterior)
    assert posterior.structure == "kronecker"
    assert result.provenance["settings"]["estimator"] == "linear"


def test_the_hessian_means_the_full_matrix(monkeypatch) -> None:
    monkeypatch.setattr(fitting, "FULL_WORK", 0)
    model, data = problem()
    assert engram.laplace(model, data, curvature="hessian").structure == "full"

"""The walk of a last layer: the rest of the net is as at each checkpoint, without gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engram
from engram.core.processes.group import Processes
from engram.evidence.correlation import rank_correlation
from engram.posteriors import laplace as fitting
from engram.problem import Opener, Problem
from engram.sensitivity.leave_one_out import Asked, left_out

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 4


def trained(width: int) -> tuple[nn.Module, engram.Training]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    record = engram.record(optimizer, model)
    for _ in range(12):
        for rows in torch.randperm(40).split(10):
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
    return model, record


def fitted(model: nn.Module, record: engram.Training) -> engram.Posterior:
    return engram.laplace(
        model, (X, Y), structure="last_layer", training=record, prior_precision=1.0, progress=False
    )


def walked(model: nn.Module, posterior: engram.Posterior) -> Tensor:
    found = engram.sensitivities(model, (X, Y), posterior, estimator="trajectory", progress=False)
    return found.loo_loss


def test_it_is_that_of_a_session_with_all_gradients() -> None:
    model, record = trained(6)
    posterior = fitted(model, record)
    opener = Opener((X, Y), posterior.known_likelihood)
    with opener.session(model, "auto", False, Processes(), None) as opened:
        whole = left_out(Problem(opened, posterior), Asked("trajectory"))
    torch.testing.assert_close(walked(model, posterior), whole.loo_loss)


def test_with_factors_it_ranks_as_with_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model, record = trained(60)
    posterior = fitted(model, record)
    exact = walked(model, posterior)
    monkeypatch.setattr(fitting, "WALK_WORK", 0.0)
    assert rank_correlation(exact, walked(model, posterior)) > 0.9

"""The rule of the paper with many outputs."""

import pytest
import torch
from torch import nn

import engram


def test_the_rule_of_the_paper_builds_no_matrix_of_many_outputs():
    torch.manual_seed(0)
    model = nn.Linear(3, 70).double()
    data = torch.randn(5, 3).double(), torch.arange(5)
    posterior = engram.laplace(
        model, data, structure="diagonal", progress=False, prior_precision=1.0
    )
    variance = engram.prediction_variance(model, data, posterior, progress=False)
    outputs = model(data[0]).detach()
    residual = outputs.softmax(1) - nn.functional.one_hot(data[1], 70)
    expected = torch.diagonal(variance, dim1=1, dim2=2) * residual
    found = engram.sensitivities(model, data, posterior, estimator="paper", progress=False)
    torch.testing.assert_close(found.deviation, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_the_rule_of_the_paper_for_a_group_with_many_outputs(weight):
    """Without eigenvalues nobody can tell whether a weight beyond 1 outweighs all data."""
    torch.manual_seed(0)
    model = nn.Linear(3, 40).double()
    data = torch.randn(5, 3).double(), torch.arange(5)
    posterior = engram.laplace(
        model, data, structure="diagonal", progress=False, prior_precision=1.0
    )
    alone = engram.sensitivities(model, data, posterior, estimator="paper", progress=False)
    settings = {"weights": [weight, weight], "estimator": "paper", "progress": False}
    removal = engram.remove(model, data, posterior, [1, 3], **settings)
    expected = alone.outputs[[1, 3]] + weight * alone.deviation[[1, 3]]
    torch.testing.assert_close(removal.group.outputs_without, expected)
    assert removal.flagged == (weight > 1)


def test_the_rule_of_the_paper_runs_with_many_classes():
    torch.manual_seed(0)
    model, outputs = nn.Linear(2, 6_000), 6_000  # [K, K] of an example: 288 MB, and an eigensystem
    data = torch.randn(4, 2), torch.arange(4)
    posterior = engram.laplace(
        model, data, structure="diagonal", curvature="fisher", progress=False, prior_precision=1.0
    )
    found = engram.sensitivities(model, data, posterior, estimator="paper", progress=False)
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    spread = posterior.solve(ones)  # the inverse of a diagonal precision
    variance = data[0] ** 2 @ spread["weight"].T + spread["bias"]
    residual = model(data[0]).detach().softmax(1) - nn.functional.one_hot(data[1], outputs)
    torch.testing.assert_close(found.deviation, variance * residual, rtol=1e-4, atol=1e-7)

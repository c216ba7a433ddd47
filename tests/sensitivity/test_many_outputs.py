"""Leverages with more outputs than have an exact trace, against that trace."""

import pytest
import torch
from torch import nn

import engram
from engram.sensitivity import diagnostics

OUTPUTS = 20


def grouped_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(64, OUTPUTS)
    ).double()


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_probes_average_to_the_trace(structure, monkeypatch):
    monkeypatch.setattr(diagnostics, "PROBES", 4000)
    model = grouped_net()
    data = torch.randn(6, 2, 4, 4).double(), torch.arange(6)
    posterior = engram.laplace(model, data, structure=structure, progress=False)
    variance = engram.prediction_variance(model, data, posterior, progress=False)
    probability = model(data[0]).detach().softmax(1)
    curvature = torch.diag_embed(probability) - probability[:, :, None] * probability[:, None, :]
    expected = (variance * curvature).sum((1, 2))
    found = engram.sensitivities(model, data, posterior, estimator="linear", progress=False)
    torch.testing.assert_close(found.leverage, expected, rtol=0.05, atol=0.0)
    assert "inconsistent not known" in str(found)

"""Ctrl-C at many moments of the calls that look at a model: everything is as before."""

import pytest
import torch
from torch import nn

import engram
from interrupting import condition, moments, surroundings, watched
from unusual_modules import SparseExperts

Y = torch.arange(6) % 3


class Everything(nn.Module):
    """A rule, a recurrent layer, normalisation with buffers, and experts that are a unit."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.experts = SparseExperts()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.experts(self.norm(self.recurrent(x)[0][:, -1])))


class Merging(nn.Sequential):
    """Adds one to its weights in eval mode."""

    merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self[0].weight.data += -1 if mode else 1
            self.merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x.sum(1, keepdim=True)


def everything():
    torch.manual_seed(0)
    return Everything().double().eval(), torch.randn(6, 2, 4, dtype=torch.float64)


def merging():
    torch.manual_seed(0)
    return Merging(nn.Linear(4, 3)).double(), torch.randn(6, 4, dtype=torch.float64)


QUIET = {"progress": False, "batch_size": 3}
CALLS = {
    "laplace": lambda m, d, p: engram.laplace(
        m, d, structure="kronecker", prior_precision=1.0, **QUIET
    ),
    "sensitivities": lambda m, d, p: engram.sensitivities(m, d, p, **QUIET),
    "remove": lambda m, d, p: engram.remove(m, d, p, [0, 1], **QUIET),
    "influence": lambda m, d, p: engram.influence(m, d, d, p, **QUIET),
    "prediction_variance": lambda m, d, p: engram.prediction_variance(m, d, p, **QUIET),
    "calibrate": lambda m, d, p: engram.calibrate(m, d, p, curvature="ggn", progress=False),
}


PAIRS = [(name, merging) for name in CALLS]
PAIRS += [(name, everything) for name in ("laplace", "influence", "prediction_variance")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "make"), PAIRS)
def test_a_single_interrupt_anywhere(name, make):
    model, x = make()
    data = (x, Y)
    fitted = engram.laplace(model, data, structure="diagonal", prior_precision=1.0, **QUIET)

    def call():
        CALLS[name](model, data, fitted)

    chosen = moments(call, spread=5, guards=7)
    before, weights = surroundings(), condition(model)
    for moment in chosen:
        watched(call, moment)
        assert surroundings() == before, moment
        assert condition(model) == weights, moment

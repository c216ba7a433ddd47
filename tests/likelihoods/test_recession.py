"""Targets that a mean reaches only in the limit, and directions in which losses fall for ever."""

import pytest
import torch

from engram.likelihoods import Bernoulli, Categorical, Gamma, Gaussian, NegativeBinomial, Poisson
from engram.likelihoods.tweedie import Tweedie

FAR = torch.tensor([0.0, 1.0, 10.0, 40.0], dtype=torch.float64)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("link", ["logit", "probit", "cloglog", "loglog", "cauchit"])
def test_binary_targets_go_both_ways(link):
    likelihood, targets = Bernoulli(link), column(0.0, 1.0, 0.3)
    assert likelihood.at_limit(targets).tolist() == [True, True, False]
    ways = likelihood.recession(targets)
    assert ways.directions[:, 0, 0].tolist() == [-1.0, 1.0, 0.0]
    assert ways.held[:, 0].tolist() == [False, False, True]


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(), Tweedie(1.5)], ids=repr)
def test_counts_of_zero_go_down(likelihood):
    ways = likelihood.recession(column(0.0, 2.0))
    assert ways.directions[:, 0, 0].tolist() == [-1.0, 0.0]
    assert likelihood.recession(column(1.0, 2.0)) is None


@pytest.mark.parametrize("likelihood", [Gaussian(), Gamma(), Poisson("identity")], ids=repr)
def test_others_have_a_minimum(likelihood):
    assert likelihood.recession(column(1.0, 2.0)) is None
    assert not likelihood.at_limit(column(1.0, 2.0)).any()


@pytest.mark.parametrize(
    ("likelihood", "target"),
    [(Bernoulli(), 0.0), (Bernoulli("probit"), 1.0), (Poisson(), 0.0), (NegativeBinomial(), 0.0)],
)
def test_the_loss_falls_along_the_direction(likelihood, target):
    """That is what a direction of recession is."""
    targets = column(target)
    way = float(likelihood.recession(targets).directions)
    losses = likelihood.loss(way * FAR[:, None], targets.expand(len(FAR), 1))
    assert (losses.diff() <= 0).all()
    assert losses[-1] < losses[0]


def test_a_class_goes_past_every_other():
    targets = Categorical().form(torch.zeros(2, 3).double(), torch.tensor([0, 2]))
    ways = Categorical().recession(targets)
    assert ways.directions[0].tolist() == [[0, 0, 0], [1, -1, 0], [1, 0, -1]]
    assert not ways.held.any()
    assert Categorical().at_limit(targets).all()
    assert not Categorical().at_limit(torch.full((1, 2), 0.5)).any()

"""The probability of an example's own label is exp(-loss) where the label is certain."""

from __future__ import annotations

import torch

from engram.likelihoods import Bernoulli, Categorical, Gaussian


def test_of_class_numbers_and_of_shares() -> None:
    outputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    numbers = torch.tensor([0, 2, 1, 1, 0])
    prepared = Categorical().prepare(outputs, numbers)
    found = Categorical().target_probability(outputs, prepared)
    torch.testing.assert_close(found, (-Categorical().loss(outputs, prepared)).exp())
    shares = torch.full((5, 3), 1 / 3).double()
    torch.testing.assert_close(
        Categorical().target_probability(outputs, shares), torch.full((5,), 1 / 3).double()
    )


def test_of_several_yes_or_no_targets() -> None:
    outputs = torch.tensor([[0.5, -1.0], [2.0, 0.0]]).double()
    targets = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    for link in ("logit", "probit"):
        likelihood = Bernoulli(link=link)
        found = likelihood.target_probability(outputs, targets)
        torch.testing.assert_close(found, (-likelihood.loss(outputs, targets)).exp())


def test_numbers_are_no_labels() -> None:
    assert Gaussian().target_probability(torch.zeros(2, 1), torch.zeros(2, 1)) is None

"""Removals and verifications on a page: the numbers are theirs."""

from __future__ import annotations

import math

import pytest
import torch

import engram
from engram.errors import DataError
from engram.report.effects import comparisons_of, effect_of


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    data = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 2
    model = torch.nn.Linear(3, 2).double()

    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum")
        loss = loss + 0.5 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, data, engram.laplace(model, data, prior_precision=1.0)


def test_the_interval_of_an_effect_is_that_of_a_mean(problem):
    model, data, posterior = problem
    removal = engram.remove(model, data, posterior, range(5), evaluate_on=data)
    found = effect_of(removal, "five", "group")
    change = removal.evaluation.loss_without - removal.evaluation.loss
    reach = 1.96 * float(change.std()) / math.sqrt(30)
    assert (found.name, found.kind, found.count) == ("five", "group", 5)
    assert found.change == pytest.approx(float(change.mean()))
    assert (found.low, found.high) == pytest.approx((found.change - reach, found.change + reach))
    assert found.level == removal.verdict.level


def test_a_removal_seen_nowhere_has_no_effect_to_show(problem):
    model, data, posterior = problem
    with pytest.raises(DataError, match=r"pass evaluate_on= to engram\.remove"):
        effect_of(engram.remove(model, data, posterior, range(5)), "five")


def test_a_verification_is_two_comparisons(problem):
    model, data, posterior = problem
    result = engram.sensitivities(model, data, posterior)
    check = engram.verify(model, data, result, sample=6, progress=False)
    score, increase = comparisons_of(check)
    assert score.retrained.tolist() == check.truth.score.tolist()
    assert increase.estimated.tolist() == check.estimated_increase.tolist()
    assert score.positions.tolist() == check.truth.indices.tolist()
    assert score.sentence == check.sentence

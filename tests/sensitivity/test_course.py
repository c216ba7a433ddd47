"""What a recorded training says about an estimate that was made from it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional

import engram
from engram.sensitivity.course import Losses, course_of

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(30) % 3
EPOCHS = 8


def recorded():
    """A net trained with its visits named, and the losses before each of them, [epochs, N]."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    training, before = engram.record(optimizer, model), torch.zeros(EPOCHS, 30).double()
    for epoch in range(EPOCHS):
        for chosen in torch.randperm(30).split(10):
            outputs = model(X[chosen])
            training.visit(chosen, outputs)
            losses = functional.cross_entropy(outputs, Y[chosen], reduction="none")
            before[epoch, chosen] = losses.detach()
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
    return model.eval(), training, before


def test_losses_before_the_visits():
    model, training, before = recorded()
    posterior = engram.laplace(
        model, (X, Y), structure="kronecker", training=training, progress=False
    )
    result = engram.sensitivities(model, (X, Y), posterior, progress=False)
    course = result.diagnostics.course
    assert course.visit_loss == pytest.approx(float(before[1:].mean()), rel=1e-6)
    assert course.last_visit_loss == pytest.approx(float(before[-1].mean()), rel=1e-6)
    assert -1 <= course.readout_agreement <= 1
    assert course.readout_growth > 0
    assert result.diagnostics.to_dict()["visit_loss"] == course.visit_loss
    mean = before.mean(0)
    for found, losses in (
        (course.end_agreement, result.loss),
        (course.visit_agreement, result.loo_loss),
    ):
        assert found == pytest.approx(spearmanr(losses, mean).statistic)


def test_without_visits_nothing_is_known_of_their_ranking():
    column = torch.rand(20)
    course = course_of(None, torch.zeros(20), None, Losses(column, column, torch.zeros(0)))
    assert math.isnan(course.end_agreement)
    same = course_of(None, torch.zeros(20), None, Losses(column, 1 - column, column))
    assert (same.end_agreement, same.visit_agreement) == pytest.approx((1.0, -1.0))


def test_readouts_are_ranked_against_the_last():
    readouts = torch.rand(50, 4, generator=torch.Generator().manual_seed(1)).double()
    readouts[7, 2] = math.nan
    course = course_of(None, torch.zeros(50), readouts)
    known = readouts[torch.arange(50) != 7]
    ranks = [spearmanr(known[:, k], known[:, 3]).statistic for k in range(3)]
    assert course.readout_agreement == pytest.approx(sum(ranks) / 3)
    assert course.readout_growth == pytest.approx(float(known[:, 3].mean() / known[:, 0].mean()))


@pytest.mark.parametrize("readouts", [None, torch.ones(5, 1), torch.full((5, 2), math.nan)])
def test_what_was_not_recorded_is_not_known(readouts):
    course = course_of(None, torch.zeros(5), readouts)
    assert all(math.isnan(value) for value in vars(course).values())


def test_visits_of_other_data_say_nothing():
    model, training, _ = recorded()
    course = course_of(training.of(model), Y[:20], None)
    assert math.isnan(course.visit_loss)


def test_it_is_kept_with_the_result(tmp_path):
    model, training, _ = recorded()
    posterior = engram.laplace(
        model, (X, Y), structure="kronecker", training=training, progress=False
    )
    result = engram.sensitivities(model, (X, Y), posterior, progress=False)
    again = engram.load(result.save(tmp_path / "run"))
    assert again.diagnostics.course == result.diagnostics.course


def test_data_of_which_only_a_part_has_few_outputs():
    """A quarter of 160 x 10 outputs is few, all of them are not: both take the same roots."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(160, 4, generator=generator), torch.arange(160) % 10
    model = nn.Linear(4, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = engram.record(optimizer, model)
    for _ in range(8):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    posterior = engram.laplace(
        model, (x, y), structure="kronecker", training=training, progress=False
    )
    result = engram.sensitivities(model, (x, y), posterior, progress=False)
    assert result.loo_nll > result.train_nll

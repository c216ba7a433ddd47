"""The difference estimator against its closed form, and over many draws."""

from __future__ import annotations

import pytest
import torch

from engram.evidence.difference import FLOOR, corrected_mean, drawn

NUMBER = 60
GENERATOR = torch.Generator().manual_seed(0)
TRUE = torch.randn(NUMBER, generator=GENERATOR, dtype=torch.float64).exp()
GUESS = TRUE * torch.exp(0.5 * torch.randn(NUMBER, generator=GENERATOR, dtype=torch.float64))
ONES = torch.ones(NUMBER, dtype=torch.float64)


def estimates(repetitions, counts=ONES, strata=4):
    found = []
    guess = float((counts * GUESS).sum() / counts.sum())
    for seed in range(repetitions):
        draws = drawn(GUESS, counts, 16, strata, seed)
        found.append(corrected_mean(guess, (TRUE - GUESS)[draws.positions], draws))
    return found


@pytest.mark.parametrize("strata", [1, 4, 8])
@pytest.mark.parametrize("counts", [ONES, torch.arange(NUMBER).double() % 4])
def test_right_on_average_and_covered(counts, strata):
    found = estimates(600, counts, strata)
    true = float((counts * TRUE).sum() / counts.sum())
    values = torch.tensor([estimate.value for estimate in found])
    assert abs(float(values.mean()) - true) < 4 * float(values.std()) / 600**0.5
    errors = torch.tensor([estimate.error for estimate in found])
    assert 1 < float(errors.square().mean().sqrt() / values.std()) < 1.35  # one more draw
    inside = [i.low <= true <= i.high for i in (estimate.interval() for estimate in found)]
    assert sum(inside) / len(inside) > 0.93


def test_probabilities_are_those_of_the_sizes():
    often = torch.zeros(NUMBER)
    for seed in range(400):
        draws = drawn(GUESS, ONES, 16, 4, seed)
        often.index_add_(0, draws.positions, torch.ones(16))
        expected = (GUESS.mean() * (1 + FLOOR)) / (GUESS + FLOOR * GUESS.mean())
        assert torch.allclose(draws.weights, expected[draws.positions])
    share = (GUESS + FLOOR * GUESS.mean()) / (GUESS + FLOOR * GUESS.mean()).sum()
    assert float((often / often.sum() - share).abs().max()) < 0.01


def test_a_row_for_two_examples_is_two_rows():
    counts = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)
    size, wide = torch.tensor([1.0, 2.0, 5.0]).double(), torch.tensor([0, 0, 1, 2, 2, 2])
    rows = drawn(size, counts, 12, 3, seed=4)
    written_out = drawn(size[wide], torch.ones(6).double(), 12, 3, seed=4)
    assert torch.equal(rows.positions, wide[written_out.positions])
    assert torch.allclose(rows.weights, written_out.weights)


def test_sizes_of_nothing_draw_evenly():
    draws = drawn(torch.zeros(NUMBER), ONES, 32, 4, seed=0)
    assert torch.allclose(draws.weights, torch.ones(32).double())
    assert len(draws.positions.unique()) > 16


def test_the_standard_error_has_one_more_draw():
    draws = drawn(GUESS, ONES, 12, 3, seed=5)
    scaled = draws.weights * (TRUE - GUESS)[draws.positions]
    found = corrected_mean(float(GUESS.mean()), (TRUE - GUESS)[draws.positions], draws)
    spread = sum(scaled[4 * h : 4 * h + 4].var() / 4 for h in range(3)) / 9
    farthest = (scaled - scaled.mean()).abs().max() / 12
    assert found.error == pytest.approx(float((spread + farthest**2) ** 0.5))
    assert corrected_mean(0.9, torch.zeros(12), draws, least=1.0).error == pytest.approx(1 / 12)


def test_errors_in_proportion_to_size_leave_nothing_open():
    draws = drawn(GUESS, ONES, 8, 2, seed=1)
    errors = 0.3 * (GUESS + FLOOR * GUESS.mean())
    found = corrected_mean(1.0, errors[draws.positions], draws)
    assert found.value == pytest.approx(1.0 + float(errors.mean()))
    assert found.error == pytest.approx(0.0, abs=1e-12)
    assert found.freedom == 6

"""Correlations and slope: their values by SciPy, and intervals that hold what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from engram.evidence.correlation import agreement, rank_correlation
from engram.evidence.verify import stratified

POPULATION = 6000


def test_values_are_those_of_scipy():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(25, generator=generator)
    y = x + 0.5 * torch.randn(25, generator=generator)
    y[3] = y[4]
    found = agreement(x, y)
    assert found.spearman.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert rank_correlation(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert found.pearson.value == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-6)
    slope = np.linalg.lstsq(x.numpy()[:, None], y.numpy(), rcond=None)[0][0]
    assert found.slope.value == pytest.approx(slope, rel=1e-5)


def test_intervals_are_their_formulas_written_out():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, generator=generator).double()
    y = x + torch.randn(9, generator=generator).double()
    found = agreement(x, y)
    z = [
        math.atanh(stats.pearsonr(np.delete(x.numpy(), i), np.delete(y.numpy(), i)).statistic)
        for i in range(9)
    ]
    spread = math.sqrt(max(8 / 9 * np.sum((z - np.mean(z)) ** 2), 1 / 6))
    low = math.tanh(math.atanh(found.pearson.value) - stats.t.ppf(0.975, 8) * spread)
    assert found.pearson.low == pytest.approx(low)
    leverage = x**2 / (x**2).sum()
    left = (y - found.slope.value * x) / (1 - leverage)
    error = math.sqrt(float(((x * left) ** 2).sum())) / float((x**2).sum())
    freedom = 1 / float((leverage**2).sum())
    high = found.slope.value + stats.t.ppf(0.975, freedom) * error
    assert found.slope.high == pytest.approx(high)


@pytest.mark.parametrize("sample", [6, 30])
@pytest.mark.parametrize("noise", ["slight", "some", "nothing else"])
def test_intervals_hold_the_truth_for_six_points_too(sample, noise):
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(3, POPULATION, generator=generator, dtype=torch.float64)
    x = (1.2 * normal[0]).exp()
    y = {
        "slight": 1.3 * x * (0.1 * normal[1]).exp(),
        "some": x * (0.5 * normal[1]).exp(),
        "nothing else": (1.2 * normal[2]).exp(),
    }[noise]
    many, _ = stratified(x, 1800, seed=0)
    true, rows = agreement_values(x[many], y[many]), []
    for seed in range(60):
        chosen, _ = stratified(x, sample, seed)
        found = agreement(x[chosen], y[chosen])
        parts = (found.spearman, found.pearson, found.slope)
        rows.append([part.low <= t <= part.high for part, t in zip(parts, true, strict=True)])
    assert bool((torch.tensor(rows).double().mean(0) > 0.82).all())  # 0.9 less two errors


def agreement_values(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, float]:
    pearson = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    return rank_correlation(x, y), pearson, float((x * y).sum() / (x * x).sum())


def test_constants_are_undefined_and_not_an_error():
    found = agreement(torch.ones(5), torch.arange(5.0))
    assert np.isnan(found.spearman.value)
    nothing = agreement(torch.zeros(5), torch.arange(5.0))
    assert np.isnan(nothing.slope.low)


def test_three_points_say_nothing():
    found = agreement(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.0]))
    assert (found.spearman.low, found.spearman.high) == (-1.0, 1.0)

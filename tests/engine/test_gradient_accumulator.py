"""The sum of gradients: exact where it is cheap, sketched where it is not."""

from __future__ import annotations

import pytest
import torch

from engram.engine.gradient_accumulator import GradientAccumulator

SHAPE = torch.Size((300, 400))


def vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(50, 300, generator=generator), torch.randn(50, 400, generator=generator)


def test_small_sums_are_exact() -> None:
    rows, columns = torch.randn(5, 3), torch.randn(5, 4)
    total = GradientAccumulator()
    total.add_outer("w", torch.Size((3, 4)), rows, columns)
    torch.testing.assert_close(total.exact["w"], rows.mT @ columns)


def test_a_sketch_estimates_the_norm_without_bias() -> None:
    rows, columns = vectors(0)
    exact = float((rows.mT @ columns).square().sum())
    estimates = []
    for seed in range(40):
        total = GradientAccumulator(seed)
        total.add_outer("w", SHAPE, rows, columns)
        assert "w" in total.sketched
        estimates.append(total.square_norms({"w": torch.zeros(SHAPE)}, lambda name: 1.0)[0])
    mean = sum(estimates) / len(estimates)
    assert mean == pytest.approx(exact, rel=0.2)
    assert max(estimates) < 3 * exact


def test_a_sum_that_cancels_has_norm_zero() -> None:
    rows, columns = vectors(1)
    weight = rows.mT @ columns
    total = GradientAccumulator()
    total.add_outer("w", SHAPE, rows, columns)
    losses, objective = total.square_norms({"w": -weight}, lambda name: 1.0)
    assert objective < 1e-8 * losses

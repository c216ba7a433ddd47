"""The sum of gradients: exact where it is cheap, sketched where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engram.engine.gradient_accumulator import GradientAccumulator
from engram.engine.session import session
from engram.linalg.diagonal import DiagonalBlock
from engram.sensitivity.trajectory.fitting import Bases

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


class Tied(nn.Module):
    """A table of words that is the head too, and a layer at every word whose bias stays put."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.mixed = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.mixed(self.table(tokens)))).sum(1))


def test_the_sum_of_all_gradients_is_that_of_one_backward_pass() -> None:
    """Whole batches at once where layers can, with tied weights and without what is in no block."""
    torch.manual_seed(0)
    model = Tied().double()
    data = (torch.randint(9, (12, 5)), torch.randint(9, (12,)))
    nn.functional.cross_entropy(model(data[0]), data[1], reduction="sum").backward()
    parameters = {n: p for n, p in model.named_parameters() if n != "mixed.bias"}
    precision = Bases(tuple(DiagonalBlock.of(n, torch.ones_like(p)) for n, p in parameters.items()))
    total = GradientAccumulator()
    with session(model, data, "categorical", batch_size=5, progress=False) as opened:
        for seen in opened.passes("sum"):
            seen.trace.add_gradient(seen.residual, precision, total)
    assert total.exact.keys() == parameters.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(total.exact[name], parameter.grad)

"""Clustered eigenvalues: the error they bring, and the short ways against the plain solve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks import torch_func
from torch import Tensor, nn

import engram
from engram.core.parameters import Layout
from engram.linalg.clustered import ClusteredSpectrum
from engram.linalg.kronecker import KroneckerBlock

OUTPUTS, INPUTS = 70, 90


def random_block(generator: torch.Generator, bias: bool = False) -> KroneckerBlock:
    """Kronecker factors with quickly falling spectra, as wide layers have them."""
    bases, values = [], []
    for size in (OUTPUTS, INPUTS + bias):
        factor = torch.randn(size, size, generator=generator, dtype=torch.float64)
        bases.append(torch.linalg.qr(factor).Q[None])
        values.append(torch.arange(1, size + 1, dtype=torch.float64).pow(-2.0))
    names, shapes = ("w",), (torch.Size((OUTPUTS, INPUTS)),)
    if bias:
        names, shapes = ("w", "b"), (*shapes, torch.Size((OUTPUTS,)))
    precision = 1 + 100 * values[0][:, None] * values[1]
    return KroneckerBlock(Layout(names, shapes), precision[None], *bases)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def solved(block: KroneckerBlock, rows: Tensor, columns: Tensor) -> Tensor:
    """The move by the definition: every gradient, every rotation, every product."""
    if len(block.names) == 2:
        columns = torch.cat([columns, torch.ones_like(columns[..., :1])], dim=-1)
    matrix = rows.mT @ columns
    step = block.from_basis(block.to_basis(matrix[:, None]) * block.covariance)[:, 0]
    short = block.matrix(block.solve(block.named(matrix[:, None])))[:, 0]
    torch.testing.assert_close(short, step, rtol=1e-10, atol=1e-12)
    return columns @ step.mT


def one_sided(block: KroneckerBlock, side: str) -> KroneckerBlock:
    """A block with a tail on one side only."""
    table = block.precision.clone()
    if side in ("rows", "both"):
        table[:, 20:] = table[:, -1:]
    if side in ("columns", "both"):
        table[:, :, 30:] = table[:, :, -1:]
    return replace(block, precision=table)


@pytest.mark.parametrize("side", ["rows", "columns", "both"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_way_equals_the_solve(side: str, bias: bool, generator: torch.Generator) -> None:
    block = one_sided(random_block(generator, bias), side)
    parts = block.clusters
    assert parts is not None
    assert (parts.merged_rows, parts.merged_columns) == (side != "columns", side != "rows")
    rows, columns = (
        torch.randn(3, 5, size, generator=generator, dtype=torch.float64)
        for size in (OUTPUTS, INPUTS)
    )
    expected = solved(block, rows, columns)
    by_positions = parts.position_perturbations(rows, columns)
    torch.testing.assert_close(by_positions, expected, rtol=1e-10, atol=1e-12)
    whole = torch.cat([columns, torch.ones(3, 5, 1)], dim=2) if bias else columns
    step = parts.step(rows.mT @ whole)
    torch.testing.assert_close(whole @ step.mT, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("side", ["rows", "columns", "both"])
def test_one_position_equals_the_solve(side: str, generator: torch.Generator) -> None:
    block = one_sided(random_block(generator), side)
    rows = torch.randn(4, 3, OUTPUTS, generator=generator, dtype=torch.float64)
    columns = torch.randn(4, INPUTS, generator=generator, dtype=torch.float64)
    moved = block.rank_one_perturbation(rows[:, 0], columns)
    expected = solved(block, rows[:, :1], columns[:, None])[:, 0]
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-12)
    gradients = {"w": rows[..., None] * columns[:, None, None, :]}
    products = block.rank_one_products(rows, columns)
    torch.testing.assert_close(products, block.inner_products(gradients), rtol=1e-10, atol=1e-12)


def test_merging_keeps_the_sum_of_leverages(generator: torch.Generator) -> None:
    block = random_block(generator)
    short = block.within(prior=1.0, tolerance=0.05)
    energy = (block.precision - 1).flatten()
    before = float((energy / block.precision.flatten()).sum())
    turned = (block.rows.mT @ short.rows).abs().argmax(1)[0]  # type: ignore[union-attr]
    columns = (block.columns.mT @ short.columns).abs().argmax(1)[0]  # type: ignore[union-attr]
    shuffled = (block.precision - 1)[:, turned][:, :, columns]
    assert short.clusters is not None
    assert short.clusters.both.shape < (OUTPUTS // 2, INPUTS // 2)
    assert float((shuffled / short.precision).sum()) == pytest.approx(before, rel=1e-3)


def test_a_smaller_tolerance_keeps_more(generator: torch.Generator) -> None:
    block = random_block(generator)
    kept = [block.within(1.0, tolerance).clusters for tolerance in (0.1, 0.01)]
    sizes = [part.both.shape if part else block.precision.shape[1:] for part in kept]
    assert sizes[0][0] < sizes[1][0]
    assert sizes[0][1] < sizes[1][1]
    assert block.within(1.0, 1e-12).clusters is None
    assert block.clusters is None


def test_small_layers_are_left_alone() -> None:
    table = torch.ones(10, 20, dtype=torch.float64)
    assert ClusteredSpectrum.of(table, torch.eye(10), torch.eye(20)) is None


def wide_net(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A net whose layers are wide enough to be merged, trained a little on uneven inputs."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.arange(1, 121, dtype=torch.float64).pow(-1.0)
    x = torch.randn(300, 3, 120, generator=generator, dtype=torch.float64) * scales
    y = (x[:, 0, 0] > 0).long() + (x[:, 1, 0] > 0).long()
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(120, 100), nn.Tanh(), nn.Flatten(), nn.Linear(300, 80), nn.Tanh()
    ).append(nn.Linear(80, 3))
    model, data = model.to(dtype), (x.to(dtype), y)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), y).backward()
        optimizer.step()
    return model, data


@pytest.mark.parametrize("structure", ["kronecker", "ekfac"])
def test_a_pass_with_merged_eigenvalues_is_close_to_the_exact_one(structure: str) -> None:
    model, data = wide_net(torch.float32)
    fit = {"structure": structure, "prior_precision": 2.0, "progress": False}
    exact = engram.laplace(model, data, tolerance=0.0, **fit)
    short = engram.laplace(model, data, **fit)
    assert short.settings["tolerance"] == 0.03
    parts = [getattr(block, "clusters", None) for block in short.blocks]
    assert sum(part is not None for part in parts) == 3
    plain, quick = (
        engram.sensitivities(model, data, p, estimator="linear", progress=False)
        for p in (exact, short)
    )
    error = (quick.score - plain.score).norm() / plain.score.norm()
    assert 0 < float(error) < 0.03
    ranks = torch.stack([plain.score.argsort().argsort(), quick.score.argsort().argsort()])
    assert float(torch.corrcoef(ranks.double())[0, 1]) > 0.999
    assert quick.diagnostics.gradient_norm == pytest.approx(
        plain.diagnostics.gradient_norm, rel=1e-3
    )


def test_double_precision_merges_nothing() -> None:
    model, data = wide_net(torch.float64)
    posterior = engram.laplace(
        model, data, structure="kronecker", progress=False, prior_precision=1.0
    )
    assert posterior.settings["tolerance"] == 0.0
    assert all(block.clusters is None for block in posterior.blocks)  # type: ignore[union-attr]


def test_merged_perturbations_equal_the_engine_reference() -> None:
    """A merged posterior in double: the short ways of a whole pass against its own solves."""
    model, data = wide_net(torch.float64)
    posterior = engram.laplace(
        model, data, structure="kronecker", prior_precision=2.0, tolerance=0.05, progress=False
    )
    result = engram.sensitivities(model, data, posterior, estimator="linear", progress=False)
    with torch.no_grad():
        outputs = model(data[0])
    residual = outputs.softmax(1) - nn.functional.one_hot(data[1], 3)
    expected = torch_func.deviation(model, (data[0],), residual, posterior)
    torch.testing.assert_close(result.deviation, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_tolerance_out_of_range(tolerance: float) -> None:
    model, data = nn.Linear(3, 2), (torch.randn(9, 3), torch.randint(0, 2, (9,)))
    with pytest.raises(engram.errors.ArgumentError, match="tolerance from 0 to below 1"):
        engram.laplace(model, data, tolerance=tolerance, prior_precision=1.0)

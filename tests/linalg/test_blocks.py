"""Every block and everything it can do, against its dense matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engram.core.parameters import Layout, Named
from engram.errors import PosteriorError, StorageError
from engram.linalg.block import Block, MatrixBlock
from engram.linalg.cg import Limits
from engram.linalg.dense import DenseBlock
from engram.linalg.diagonal import DiagonalBlock
from engram.linalg.kronecker import KroneckerBlock
from engram.linalg.low_rank import LowRankBlock

PRIOR = 0.5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def basis(groups: int, size: int) -> Tensor:
    return torch.linalg.qr(drawn(groups, size, size)).Q


def layout_of(**shapes: tuple[int, ...]) -> Layout:
    return Layout(tuple(shapes), tuple(torch.Size(shape) for shape in shapes.values()))


def kronecker(
    groups: int, rows: int, columns: int, turned: str = "rows columns", bias: bool = False
) -> KroneckerBlock:
    """Eigenvalues of two factors and the prior's."""
    share, other = drawn(groups, rows).square() / 7, drawn(groups, columns + bias).square() * 5
    own = {"b": (groups * rows,)} if bias else {}
    return KroneckerBlock(
        layout_of(w=(groups * rows, columns), **own),
        share[:, :, None] * other[:, None, :] + PRIOR,
        basis(groups, rows) if "rows" in turned else None,
        basis(groups, columns + bias) if "columns" in turned else None,
        share[0] if groups == 1 and turned == "rows columns" else None,
    )


def with_tail(block: KroneckerBlock, rows: int, columns: int) -> KroneckerBlock:
    """All eigenvalues after the first rows or columns merged."""
    table = block.precision.clone()
    table[:, rows:] = table[:, -1:]
    table[:, :, columns:] = table[:, :, -1:]
    found = replace(block, precision=table)
    assert found.clusters is not None
    return found


def low_rank() -> LowRankBlock:
    layout = layout_of(w=(3, 2), b=(3,))
    columns = torch.linalg.qr(drawn(9, 4)).Q
    outside = drawn(9, 4) / 3
    outside -= columns @ (columns.mT @ outside)
    return LowRankBlock(layout, columns, drawn(4).square() + 1, outside, rest=0.7)


def dense() -> DenseBlock:
    root = drawn(9, 9)
    matrix = root @ root.mT + torch.eye(9)
    return DenseBlock.factorise(layout_of(w=(3, 2), b=(3,)), matrix)


BLOCKS: dict[str, Block] = {
    "diagonal": DiagonalBlock.of("w", drawn(4, 3).square() + PRIOR),
    "diagonal of a vector": DiagonalBlock.of("b", drawn(5).square() + PRIOR),
    "diagonal of a kernel": DiagonalBlock.of("w", drawn(2, 3, 2, 2).square() + PRIOR),
    "kronecker": kronecker(1, 4, 3),
    "kronecker with bias": kronecker(1, 3, 4, bias=True),
    "kronecker of groups": kronecker(2, 3, 2, bias=True),
    "rotated rows": kronecker(1, 4, 1, turned="rows"),
    "rotated columns": kronecker(1, 5, 3, turned="columns"),
    "rotated columns with bias": kronecker(1, 5, 3, turned="columns", bias=True),
    "merged rows": with_tail(kronecker(1, 64, 3), 5, 3),
    "merged columns with bias": with_tail(kronecker(1, 3, 64, bias=True), 3, 6),
    "dense": dense(),
    "low rank": low_rank(),
}


def matrix_of(block: Block) -> Tensor:
    """The precision by its definition, in the order of the layout."""
    if isinstance(block, DiagonalBlock):
        return torch.diag(block.precision.flatten())
    if isinstance(block, DenseBlock):
        return block.cholesky @ block.cholesky.mT
    if isinstance(block, LowRankBlock):
        basis, whole = block.basis, block.basis * block.inside + block.outside
        beyond = torch.eye(len(basis), dtype=basis.dtype) - basis @ basis.mT
        return whole @ torch.diag(1 / block.inside) @ whole.mT + block.rest * beyond
    assert isinstance(block, KroneckerBlock)
    groups, rows, columns = block.precision.shape
    parts = []
    for group in range(groups):
        turns = [
            torch.eye(size, dtype=torch.float64) if side is None else side[group].contiguous()
            for side, size in ((block.rows, rows), (block.columns, columns))
        ]
        turn = torch.kron(*turns)
        parts.append(turn @ torch.diag(block.precision[group].flatten()) @ turn.mT)
    places = torch.arange(groups * rows * columns).reshape(-1, columns)
    order = places.flatten()
    if block.with_bias:  # the bias is the last column of the matrix, and comes last in the layout
        order = torch.cat([places[:, :-1].flatten(), places[:, -1]])
    return torch.block_diag(*parts)[order][:, order]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def vectors_of(block: Block, *lead: int) -> tuple[Tensor, Named]:
    flat = drawn(*lead, block.layout.num_params, seed=3)
    return flat, block.layout.unflatten(flat)


def solve(block: Block, matrix: Tensor) -> None:
    flat, named = vectors_of(block, 2, 3)
    close(block.layout.flatten(block.solve(named)), flat @ torch.linalg.inv(matrix))


def multiply(block: Block, matrix: Tensor) -> None:
    flat, named = vectors_of(block, 4)
    close(block.layout.flatten(block.multiply(named)), flat @ matrix)


def root_solve(block: Block, matrix: Tensor) -> None:
    identity = torch.eye(len(matrix), dtype=torch.float64)
    root = block.layout.flatten(block.root_solve(block.layout.unflatten(identity)))
    close(root.mT @ root, torch.linalg.inv(matrix))


def inner_products(block: Block, matrix: Tensor) -> None:
    flat, named = vectors_of(block, 2, 3)
    close(block.inner_products(named), flat @ torch.linalg.inv(matrix) @ flat.mT)


def log_det(block: Block, matrix: Tensor) -> None:
    assert block.log_det() == pytest.approx(float(torch.logdet(matrix)), rel=1e-9)


def scaled(block: Block, matrix: Tensor) -> None:
    solve(block.scaled(3.0), 3 * matrix)


def solve_without(block: Block, matrix: Tensor) -> None:
    """With a part of the block's own span taken out."""
    roots = drawn(2, len(matrix)) / 10
    if isinstance(block, LowRankBlock):  # outside of its directions nothing is known
        roots = (roots @ block.basis) @ block.basis.mT
    taken = 0.1 * matrix.diagonal().min() * roots[:, :, None] * roots[:, None, :]
    right = drawn(2, len(matrix), seed=5)

    def own(vectors: Tensor, rows: Tensor) -> Tensor:
        return (taken[rows] @ vectors[:, :, None])[:, :, 0]

    found = block.solve_without(own, right, Limits(1e-12, 500))
    tolerance = 1e-2 if block.is_partial else 1e-8
    expected = torch.linalg.solve(matrix - taken, right)
    assert float((found.vectors - expected).norm() / expected.norm()) < tolerance


def dense_inverse(block: Block, matrix: Tensor) -> None:
    found = block.dense_inverse()
    assert (found is not None) == isinstance(block, DenseBlock)
    if found is not None:
        close(found, torch.linalg.inv(matrix))


def entrywise_covariance(block: Block, matrix: Tensor) -> None:
    found = block.entrywise_covariance()
    assert (found is not None) == isinstance(block, DiagonalBlock)
    if found is not None:
        close(block.layout.flatten(found), torch.linalg.inv(matrix).diagonal())


def check(block: Block, matrix: Tensor) -> None:
    block.check("block 0")
    broken = {"inside": 2 * torch.ones(9)} if isinstance(block, LowRankBlock) else {}
    for name in () if broken else ("precision", "cholesky"):
        if hasattr(block, name):
            broken[name] = torch.eye(11)
    with pytest.raises((StorageError, PosteriorError)):
        replace(block, **broken).check("block 0")  # type: ignore[type-var]


METHODS: list[Callable[[Block, Tensor], None]] = [
    solve,
    multiply,
    root_solve,
    inner_products,
    log_det,
    scaled,
    solve_without,
    dense_inverse,
    entrywise_covariance,
    check,
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
@pytest.mark.parametrize("name", BLOCKS)
def test_what_every_block_can_do(name: str, method: Callable[[Block, Tensor], None]) -> None:
    method(BLOCKS[name], matrix_of(BLOCKS[name]))


MATRICES = {
    name: block.as_matrix
    for name, block in BLOCKS.items()
    if block.as_matrix is not None and name not in {"kronecker of groups", "diagonal of a kernel"}
}


def sides(block: MatrixBlock) -> tuple[int, int]:
    """O, and I without the bias's column."""
    shape = block.layout.shapes[0]
    return (shape[0], 1) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))


def gradients(rows: Tensor, columns: Tensor, block: MatrixBlock) -> Tensor:
    """sum_t r_t c_t' and the bias's, flat, for rows [..., T, O] and columns [..., T, I]."""
    weight = (rows.mT @ columns).flatten(-2)
    if len(block.names) == 1:
        return weight
    return torch.cat([weight, rows.sum(-2)], dim=-1)


def moved(step: Tensor, columns: Tensor, block: MatrixBlock) -> Tensor:
    """What a flat step of the parameters makes of the columns, [B, T, O]."""
    outputs, inputs = sides(block)
    weight = step[..., : outputs * inputs].unflatten(-1, (outputs, inputs))
    out = columns @ weight.mT
    return out if len(block.names) == 1 else out + step[..., None, outputs * inputs :]


@pytest.mark.parametrize("name", MATRICES)
def test_one_position(name: str) -> None:
    block, inverse = MATRICES[name], torch.linalg.inv(matrix_of(BLOCKS[name]))
    outputs, inputs = sides(block)
    rows, columns = drawn(5, 2, outputs, seed=1), drawn(5, inputs, seed=2)
    flat = gradients(rows[:, :, None], columns[:, None, None], block)
    close(block.rank_one_products(rows, columns), flat @ inverse @ flat.mT)
    expected = moved(flat[:, 0] @ inverse, columns[:, None], block)[:, 0]
    close(block.rank_one_perturbation(rows[:, 0], columns), expected)
    if block.keeps_rows:
        close(rows[:, 0] * block.rank_one_gain(columns), expected)


@pytest.mark.parametrize("name", [name for name, block in MATRICES.items() if block.keeps_rows])
def test_rows_by_themselves(name: str) -> None:
    block, inverse = MATRICES[name], torch.linalg.inv(matrix_of(BLOCKS[name]))
    outputs, inputs = sides(block)
    if len(block.names) == 2:
        return  # a table with a bias is none
    numbers, vectors = torch.tensor([0, outputs - 1]), drawn(2, inputs, seed=4)
    whole = torch.zeros(2, outputs, inputs, dtype=torch.float64)
    whole[[0, 1], numbers] = vectors
    expected = (whole.flatten(1) @ inverse).unflatten(1, (outputs, inputs))[[0, 1], numbers]
    close(block.solve_rows(numbers, vectors), expected)


class Sums:
    """Gradients by name, as they come by."""

    def __init__(self) -> None:
        self.by_name: Named = {}

    def add(self, name: str, value: Tensor) -> None:
        self.by_name[name] = self.by_name.get(name, torch.zeros(())) + value

    def add_outer(self, name: str, shape: torch.Size, rows: Tensor, columns: Tensor) -> None:
        self.add(name, (rows.mT @ columns).reshape(shape))


@pytest.mark.parametrize("positions", [1, 3, 40, 200])  # rotations of vectors, and of matrices
@pytest.mark.parametrize("name", [n for n, block in MATRICES.items() if block.turns_positions])
def test_several_positions(name: str, positions: int) -> None:
    block, inverse = MATRICES[name], torch.linalg.inv(matrix_of(BLOCKS[name]))
    outputs, inputs = sides(block)
    rows, columns = drawn(3, 2, positions, outputs, seed=1), drawn(3, positions, inputs, seed=2)
    flat = gradients(rows, columns[:, None], block)
    close(block.position_products(rows, columns), flat @ inverse @ flat.mT)
    total = Sums()
    found = block.position_perturbations(rows[:, 0], columns, total)
    close(found, moved(flat[:, 0] @ inverse, columns, block))
    close(block.layout.flatten(total.by_name), flat[:, 0].sum(0))


@pytest.mark.parametrize("positions", [1, 3, 40, 200])
@pytest.mark.parametrize("name", ["kronecker", "merged rows"])
def test_several_positions_of_a_weight_that_acts_on_its_rows(name: str, positions: int) -> None:
    block, inverse = MATRICES[name], torch.linalg.inv(matrix_of(BLOCKS[name]))
    outputs, inputs = sides(block)
    rows, columns = drawn(3, positions, outputs, seed=1), drawn(3, positions, inputs, seed=2)
    flat, total = torch.bmm(rows.mT, columns).flatten(1), Sums()
    step = (flat @ inverse).reshape(3, outputs, inputs)
    close(block.transposed_perturbations(rows, columns, total), torch.bmm(rows, step))
    close(block.layout.flatten(total.by_name), flat.sum(0))


@pytest.mark.parametrize("name", ["kronecker", "kronecker with bias"])
def test_inputs_are_taken_out_of_kronecker_factors(name: str) -> None:
    block = MATRICES[name]
    assert isinstance(block, KroneckerBlock)
    assert block.knows_inputs
    assert block.row_share is not None
    assert block.rows is not None
    assert block.columns is not None
    outputs, inputs = sides(block)
    row_factor = block.rows[0] @ torch.diag(block.row_share) @ block.rows[0].mT
    values = (block.precision[0, 0] - PRIOR) / block.row_share[0]
    column_factor = block.columns[0] @ torch.diag(values) @ block.columns[0].mT
    columns, rows = 0.2 * drawn(4, inputs, seed=2), drawn(4, outputs, seed=1)
    whole = torch.cat([columns, torch.ones(4, 1)], 1) if block.with_bias else columns
    own, compared = block.without_own_input(PRIOR), 0
    for row, column, full in zip(rows, columns, whole, strict=True):
        taken = torch.outer(full, full)
        remaining = column_factor - taken
        if torch.linalg.eigvalsh(remaining)[0] < 0:
            continue
        precision = torch.kron(row_factor, remaining)
        precision += PRIOR * torch.eye(len(precision), dtype=torch.float64)
        step = torch.linalg.solve(precision, torch.kron(row, full)).reshape(outputs, -1)
        close(own.rank_one_perturbation(row[None], column[None])[0], step @ full)
        group, lowest = block.without_inputs(taken, PRIOR)
        assert lowest >= 0
        compared += 1
        close(group.rank_one_perturbation(row[None], column[None])[0], step @ full)
    assert compared


@pytest.mark.parametrize("name", ["diagonal", "dense", "low rank", "rotated rows"])
def test_other_blocks_have_no_inputs_to_take_out(name: str) -> None:
    block = BLOCKS[name]
    assert not block.knows_inputs
    assert block.without_own_input(PRIOR) is block
    assert block.without_inputs(torch.eye(3), PRIOR) == (block, 0.0)

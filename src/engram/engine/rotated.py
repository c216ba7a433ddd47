r"""Moves of a weight matrix in the eigenbasis of its Kronecker factors.

The step is :math:`Q_r \big(D \circ (Q_r' G Q_c)\big) Q_c'` with :math:`G = \sum_t r_t c_t'`.
Each rotation can be made on the vectors or on the matrix G: on the vectors it costs a product per
position, on the matrix one per row or column there and one back. Whichever is smaller is taken,
so the cost never depends on how many positions a layer has alone. Where eigenvalues are merged
there are two more ways, of :mod:`engram.engine.merged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from engram.engine import merged
from engram.engine.gradient_accumulator import NoSum, Totals
from engram.engine.recorder import Site
from engram.engine.rules.base import Call
from engram.engine.rules.linear import Linear
from engram.linalg.blocks import Block, EigenBlock


def applies(site: Site, blocks: tuple[Block, ...]) -> bool:
    """One block with a rotation, over the weight, or weight and bias, of one matrix layer."""
    if len(blocks) != 1 or not isinstance(blocks[0], EigenBlock):
        return False
    block = blocks[0]
    rotated = block.rows is not None and block.columns is not None
    return rotated and block.precision.shape[0] == 1 and set(block.names) == set(site.names)


def move(
    site: Site, gradient: Tensor, block: EigenBlock, parts: Iterable[slice], total: Totals
) -> Tensor:
    """How the site's output moves when every example takes its step; sums go to ``total``."""
    moved = []
    m = site.call.multiplicity
    for part in parts:
        step = _Step(site, site.call.narrow(part.start, part.stop), block, total)
        moved.append(step.move(gradient[part.start * m : part.stop * m]))
    return moved[0] if len(moved) == 1 else torch.cat(moved)


def inner_products(
    site: Site, gradients: Sequence[Tensor], block: EigenBlock, parts: Iterable[slice]
) -> Tensor:
    """<J' u_r, S^-1 J' u_s>, [B, R, R]: the columns are rotated once for all R vectors."""
    found = []
    m = site.call.multiplicity
    for part in parts:
        call = site.call.narrow(part.start, part.stop)
        step = _Step(site, call, block, NoSum())
        turned = step.turned([g[part.start * m : part.stop * m] for g in gradients])
        found.append(turned @ (turned * block.covariance.flatten()).mT)
    return torch.cat(found)


class _Step:
    """The move of a few examples."""

    def __init__(self, site: Site, call: Call, block: EigenBlock, total: Totals) -> None:
        assert block.rows is not None
        assert block.columns is not None
        self.site, self.rule, self.call, self.block = site, site.rule, call, block
        self.row_basis, self.column_basis = block.rows[0], block.columns[0]
        self.with_bias = len(block.names) == 2
        self.total = total

    def move(self, gradient: Tensor) -> Tensor:
        rule, call = self.rule, self.call
        rows = rule.rows(call, gradient)[:, 0]  # type: ignore[attr-defined]
        columns = rule.columns(call, gradient)[:, 0]  # type: ignore[attr-defined]
        return self._placed(self._way(columns.shape[1])(rows, columns), gradient)

    def _way(self, positions: int) -> Callable[[Tensor, Tensor], Tensor]:
        """The way with the fewest multiplications."""
        parts = self.block.parts
        if parts is None:
            return self._move_in_basis
        outputs, inputs = self.block.precision.shape[1:]
        there_and_back = 2 * positions * outputs * inputs
        in_basis = (
            there_and_back
            + inputs**2 * min(positions, 2 * outputs)
            + 2 * outputs**2 * min(positions, inputs)
        )
        ways = {
            self._move_in_basis: in_basis,
            self._move_by_positions: merged.products_by_positions(parts, positions),
            self._move_by_matrix: there_and_back + merged.products_by_matrix(parts),
        }
        return min(ways, key=ways.__getitem__)

    def _move_by_positions(self, rows: Tensor, columns: Tensor) -> Tensor:
        roles, shapes = self.site.roles, self.call.shapes
        flat = rows.flatten(0, 1)
        self.total.add_outer(roles["weight"], shapes["weight"], flat, columns.flatten(0, 1))
        if self.with_bias:
            self.total.add(roles["bias"], flat.sum(0))
        assert self.block.parts is not None
        return merged.move_by_positions(self.block.parts, rows, columns, self.with_bias)

    def _move_by_matrix(self, rows: Tensor, columns: Tensor) -> Tensor:
        matrix = self._with_bias(torch.bmm(rows.mT, columns), rows)
        self._add_to_total(matrix.sum(0))
        assert self.block.parts is not None
        return self._plain_product(columns, self.block.parts.step(matrix))

    def _move_in_basis(self, rows: Tensor, columns: Tensor) -> Tensor:
        positions, inputs = columns.shape[1:]
        outputs = rows.shape[2]
        turn_columns = positions < 2 * outputs
        turn_rows = positions < inputs
        if turn_rows:
            rows = rows @ self.row_basis
        if turn_columns:
            columns = self._turned(columns)
        matrix = self._to_basis(rows, columns, turn_rows, turn_columns)
        self._add_to_total(self.block.from_basis(matrix.sum(0)[None])[0])
        matrix *= self.block.covariance[0]
        if not turn_rows:
            matrix = self.row_basis @ matrix
        if turn_columns:
            moved = torch.bmm(columns, matrix.mT)
        else:
            matrix = matrix @ self.column_basis.mT
            moved = self._plain_product(columns, matrix)
        return moved @ self.row_basis.mT if turn_rows else moved

    def _add_to_total(self, summed: Tensor) -> None:
        for name, value in self.block.named(summed[None]).items():
            self.total.add(name, value)

    def turned(self, gradients: Sequence[Tensor]) -> Tensor:
        """Q_r' G Q_c of several gradients per example, [b, R, O * I]."""
        rule, call = self.rule, self.call
        rows = torch.stack(
            [rule.rows(call, g)[:, 0] for g in gradients],  # type: ignore[attr-defined]
            dim=1,
        )
        columns = rule.columns(call, gradients[0])[:, 0]  # type: ignore[attr-defined]
        positions, inputs = columns.shape[1:]
        turn_columns = positions < rows.shape[1] * rows.shape[3]
        turn_rows = positions < inputs
        if turn_rows:
            rows = rows @ self.row_basis
        if turn_columns:
            columns = self._turned(columns)
        wide = rows.transpose(1, 2).flatten(2)  # [b, T, R * O]: one product for all vectors
        matrix = self._columns_done(torch.bmm(wide.mT, columns), wide, turn_columns)
        matrix = matrix.unflatten(1, (rows.shape[1], -1))
        if not turn_rows:
            matrix = self.row_basis.mT @ matrix
        return matrix.flatten(2)

    def _turned(self, columns: Tensor) -> Tensor:
        if not self.with_bias:
            return columns @ self.column_basis
        flat = columns.reshape(-1, columns.shape[-1])
        turned = torch.addmm(self.column_basis[-1], flat, self.column_basis[:-1])
        return turned.unflatten(0, columns.shape[:2])

    def _to_basis(
        self, rows: Tensor, columns: Tensor, turn_rows: bool, turn_columns: bool
    ) -> Tensor:
        """Q_r' G Q_c, [b, O, I], from whatever has not been rotated yet."""
        matrix = self._columns_done(torch.bmm(rows.mT, columns), rows, turn_columns)
        return matrix if turn_rows else self.row_basis.mT @ matrix

    def _columns_done(self, matrix: Tensor, rows: Tensor, turned: bool) -> Tensor:
        """G Q_c: nothing to do where the columns were rotated before the product."""
        if turned:
            return matrix
        return self._with_bias(matrix, rows) @ self.column_basis

    def _with_bias(self, matrix: Tensor, rows: Tensor) -> Tensor:
        """[b, O, I] with the bias's column, where it belongs to the block."""
        if not self.with_bias:
            return matrix
        return torch.cat([matrix, rows.sum(1)[:, :, None]], dim=2)

    def _plain_product(self, columns: Tensor, matrix: Tensor) -> Tensor:
        if not self.with_bias:
            return torch.bmm(matrix, columns.mT).mT
        product = torch.bmm(matrix[:, :, :-1], columns.mT)
        return (product + matrix[:, :, -1:]).mT

    def _placed(self, moved: Tensor, gradient: Tensor) -> Tensor:
        """[b, T, O] in the layout of the output, examples first."""
        if isinstance(self.rule, Linear):
            return moved.reshape(gradient.shape)
        m = self.call.multiplicity
        split = moved.unflatten(1, (m, -1)).mT
        return split.reshape(gradient.shape)

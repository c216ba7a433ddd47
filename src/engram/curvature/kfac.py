r"""Kronecker factors of each layer's curvature: K-FAC.

For a layer with columns c (inputs, with a 1 for the bias) and rows r (output gradients) at M
positions in all, the block of the Gauss-Newton matrix is approximated by

.. math:: \frac{1}{M} \Big(\sum r r'\Big) \otimes \Big(\sum c c'\Big).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.core.dtypes import eigh, wide
from engram.core.parameters import Layout
from engram.curvature import conv_gram as patch_squares
from engram.engine.passes import Trace
from engram.engine.rules.convolution import Convolution
from engram.engine.rules.embedding import Embedding
from engram.engine.rules.linear import Linear, MatrixRule
from engram.engine.sites import Site
from engram.engine.steps import CHUNK_BYTES
from engram.linalg.gram import GramSum
from engram.linalg.kronecker import KroneckerBlock

WIDE = 6000  # rows of a factor from which on its eigenvectors take a minute and more on two cores


@dataclass
class Factors:
    """Sums for one layer: rows [G, O, O], columns [G, I, I] (or token counts), positions M.

    With a bias the columns have a constant 1 appended, whose products are ``column_sum`` and M.
    """

    layout: Layout
    rows: GramSum = field(default_factory=GramSum)
    columns: GramSum = field(default_factory=GramSum)
    column_sum: Tensor | None = None
    counts: Tensor | None = None
    positions: int = 0

    @property
    def complete(self) -> bool:
        """Whether both sides have been seen."""
        other = self.counts is not None or self.rows.matrix is not None
        return other and self.columns.matrix is not None

    def block(self, prior_precision: float, dtype: torch.dtype) -> KroneckerBlock:
        """The precision in its eigenbasis: products of eigenvalues over M, plus delta."""
        columns = self.columns.matrix
        if columns is not None and self.column_sum is not None:
            columns = _bordered(columns, self.column_sum, self.positions)
        row_values, row_vectors = self._eigen(self.rows.matrix)
        column_values, column_vectors = self._eigen(columns)
        if self.counts is not None:
            row_values, row_vectors = self.counts[None], None
        shares = row_values / max(self.positions, 1)
        products = shares[:, :, None] * column_values[:, None, :]
        return KroneckerBlock(
            self.layout,
            (products + prior_precision).to(dtype),
            None if row_vectors is None else row_vectors.to(dtype),
            None if column_vectors is None else column_vectors.to(dtype),
            None if row_vectors is None or len(shares) > 1 else shares[0].to(dtype),
        )

    @staticmethod
    def _eigen(matrix: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if matrix is None:
            return torch.ones(1, 1, dtype=torch.float64), None
        if matrix.shape[-1] >= WIDE:
            warnings.warn(
                f"the eigenvectors of a Kronecker factor with {matrix.shape[-1]:,} rows take "
                'minutes, in which nothing is shown; structure="diagonal" needs none',
                stacklevel=2,
            )
        values, vectors = eigh(matrix)
        return values.clamp(min=0), vectors


def _sum(total: Tensor | None, value: Tensor) -> Tensor:
    return wide(value) if total is None else total + wide(value)


class KroneckerFactors:
    """Collects the factors of every layer that has them."""

    def __init__(self) -> None:
        self.layers: dict[str, Factors] = {}

    def covered(self) -> set[str]:
        """Parameters that have Kronecker factors."""
        return {name for factors in self.layers.values() for name in factors.layout.names}

    def drop_unused(self) -> None:
        """Forget layers whose output reaches no output of the model: they have no gradients."""
        self.layers = {name: f for name, f in self.layers.items() if f.complete}

    def update_columns(self, trace: Trace) -> None:
        """Add a batch's inputs; once per batch."""
        uses = Counter(name for site in trace.sites for name in site.names)
        for site in trace.sites:
            layout = self._layout(site, uses)
            if layout is None:
                continue
            factors = self.layers.setdefault(site.roles["weight"], Factors(layout))
            if isinstance(site.rule, Embedding):
                self._count_tokens(site, site.rule, factors)
            elif isinstance(site.rule, (Linear, Convolution)):
                self._add_columns(site, site.rule, factors)

    def update_rows(self, trace: Trace, gradients: Sequence[Tensor | None], number: int) -> None:
        """Add the gradients of the batch's output vector of this number."""
        for site, gradient in zip(trace.sites, gradients, strict=True):
            factors = self.layers.get(site.roles.get("weight", ""))
            if factors is None or gradient is None:
                continue
            if isinstance(site.rule, Embedding):
                picked = site.rule.picked_gradient(site.call, gradient).flatten(0, 1)
                factors.columns.add(picked[:, None, None])
            elif isinstance(site.rule, (Linear, Convolution)):
                factors.rows.add(site.rule.rows(site.call, gradient))
            elif isinstance(site.rule, MatrixRule):
                self._add_transposed(site, site.rule, gradient, factors, number)

    def _layout(self, site: Site, uses: Counter[str]) -> Layout | None:
        if "weight" not in site.roles or any(uses[name] > 1 for name in site.names):
            return None
        if not isinstance(site.rule, (MatrixRule, Embedding)):
            return None
        roles = ["weight"]
        if isinstance(site.rule, (Linear, Convolution)) and "bias" in site.roles:
            roles.append("bias")
        return Layout(
            tuple(site.roles[r] for r in roles), tuple(site.call.shapes[r] for r in roles)
        )

    def _count_tokens(self, site: Site, rule: Embedding, factors: Factors) -> None:
        tokens = rule.tokens(site.call).flatten()
        padding = rule.padding(site.call)
        factors.positions += tokens.numel()
        if padding is not None:
            tokens = tokens[tokens != padding]
        counts = torch.bincount(tokens, minlength=site.call.shapes["weight"][0])
        factors.counts = _sum(factors.counts, counts)

    def _add_columns(self, site: Site, rule: Linear | Convolution, factors: Factors) -> None:
        call = site.call
        with_bias = len(factors.layout.names) == 2
        if patch_squares.applies(rule, call):
            square, total, num_patches = patch_squares.patch_squares(call)
            factors.columns.add_square(square, num_patches)
            factors.positions += num_patches
            if with_bias:
                factors.column_sum = _sum(factors.column_sum, total[None])
            return
        size = max(1, CHUNK_BYTES // max(rule.bytes_per_example(call), 1))
        if isinstance(rule, Linear):
            size = call.num_examples
        for start in range(0, call.num_examples, size):
            part = call.narrow(start, min(start + size, call.num_examples))
            columns = rule.columns(part, part.input)
            factors.positions += columns.shape[0] * columns.shape[2]
            factors.columns.add(columns)
            if with_bias:
                factors.column_sum = _sum(factors.column_sum, columns.sum((0, 2)))

    def _add_transposed(
        self, site: Site, rule: MatrixRule, gradient: Tensor, factors: Factors, number: int
    ) -> None:
        """Rows are inputs here, and columns change with the gradient."""
        rows, columns = rule.rows(site.call, gradient), rule.columns(site.call, gradient)
        factors.columns.add(columns)
        if number == 0:  # the inputs are the same for every output vector
            factors.positions += rows.shape[0] * rows.shape[2]
            factors.rows.add(rows)


def _bordered(square: Tensor, total: Tensor, positions: int) -> Tensor:
    """The square of columns with a constant 1 appended."""
    size = square.shape[-1]
    result = square.new_empty(square.shape[0], size + 1, size + 1)
    result[:, :size, :size] = square
    result[:, :size, size] = total
    result[:, size, :size] = total
    result[:, size, size] = positions
    return result

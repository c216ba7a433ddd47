r"""Moves of a weight matrix at several positions where the posterior's eigenvalues are merged.

With the covariance :math:`D_{jc} = \beta + u_j + w_c + M_{jc}` of
:mod:`engram.linalg.clustered`, rows :math:`R` [T, O], columns :math:`C` [T, I], and
:math:`\tilde R = R Q_r`, :math:`\tilde C = C Q_c` in the few kept directions, the outputs move by

.. math::

    \big(\beta C C' + \tilde C w \tilde C'\big) R
    + \big(C C' \tilde R u + \tilde C (M \circ \tilde R' \tilde C)'\big) Q_r' ,

which needs no matrix as large as the weight. That is short where there are few positions; where
there are many, the same step is made on the matrix :math:`G = R' C`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.linalg.clustered import ClusteredSpectrum


def move_by_positions(
    parts: ClusteredSpectrum, rows: Tensor, columns: Tensor, with_bias: bool
) -> Tensor:
    """From rows [b, T, O] and columns [b, T, I] without the bias's, the move [b, T, O]."""
    seen, turned = _seen(parts, columns, with_bias), rows @ parts.rows
    inner = turned.mT @ seen
    kept = seen @ (parts.both * inner).mT
    near = None
    if parts.merged_columns:
        gram = columns @ columns.mT
        gram = gram + 1 if with_bias else gram
        kept = torch.baddbmm(kept, gram, turned * parts.by_row)
        near = parts.base * gram
    moved = kept @ parts.rows.mT
    if not parts.merged_rows:
        return moved
    by_columns = (seen * parts.by_column) @ seen.mT
    return torch.baddbmm(moved, by_columns if near is None else near + by_columns, rows)


def products_by_positions(parts: ClusteredSpectrum, positions: int) -> int:
    """Multiplications per example of :func:`move_by_positions`."""
    outputs, p = parts.rows.shape
    inputs, q = parts.columns.shape
    gram = positions**2 * (inputs + p) if parts.merged_columns else 0
    near = positions**2 * (outputs + q) if parts.merged_rows else 0
    return positions * (2 * outputs * p + inputs * q + 2 * p * q) + gram + near


def products_by_matrix(parts: ClusteredSpectrum) -> int:
    """Multiplications per example of :meth:`engram.linalg.clustered.ClusteredSpectrum.step`."""
    outputs, p = parts.rows.shape
    inputs, q = parts.columns.shape
    by_columns = 2 * outputs * inputs * q if parts.merged_rows else 0
    return 2 * p * inputs * (outputs + q) + by_columns


def _seen(parts: ClusteredSpectrum, columns: Tensor, with_bias: bool) -> Tensor:
    if not with_bias:
        return columns @ parts.columns
    flat = columns.reshape(-1, columns.shape[-1])
    seen = torch.addmm(parts.columns[-1], flat, parts.columns[:-1])
    return seen.unflatten(0, columns.shape[:2])

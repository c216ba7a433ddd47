"""Which columns of a design are determined by the others."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import qr, solve_triangular

from engram.core.errors import DesignError
from engram.models.predictor.design import Design

MENTIONED = 4  # columns named in a message


def check_rank(design: Design, remedy: str = "drop them, or use penalty > 0") -> None:
    """DesignError, naming columns, unless the weighted design with its penalty has full rank.

    Example:
        >>> from engram.models.predictor.design import read_design
        >>> x = torch.arange(12.0).reshape(6, 2)
        >>> try:
        ...     check_rank(read_design(torch.cat([x, 3 * x[:, 1:]], 1), 6, intercept=False))
        ... except DesignError as error:
        ...     print(error.got)
        3 columns of rank 2: x2 = 3 x1
    """
    rows = torch.cat([design.weights.sqrt()[:, None] * design.matrix, design.penalty.sqrt().diag()])
    scale = rows.norm(dim=0)
    scaled = (rows / scale.clamp(min=torch.finfo(torch.float64).tiny)).numpy()
    triangle, order = qr(scaled, mode="r", pivoting=True, overwrite_a=True)[:2]
    diagonal = np.abs(np.diagonal(triangle))
    count = len(order)
    tolerance = 10 * max(scaled.shape) * np.finfo(float).eps
    rank = int((diagonal > tolerance * max(float(diagonal[0]), tolerance)).sum())
    if rank == count:
        return
    # each dependent column as a combination of the independent ones, in the data's own units
    shares = solve_triangular(triangle[:rank, :rank], triangle[:rank, rank:count])
    lines = []
    for position, column in enumerate(order[rank:][:MENTIONED]):
        terms = _terms(design, shares[:, position], order[:rank], scale.numpy(), int(column))
        lines.append(f"{design.names[column]} = {terms}")
    more = count - rank - MENTIONED
    raise DesignError(
        "columns that are linearly independent",
        f"{count} columns of rank {rank}: {'; '.join(lines)}"
        + (f"; and {more} more" if more > 0 else ""),
        remedy,
    )


def _terms(
    design: Design, shares: np.ndarray, basis: np.ndarray, scale: np.ndarray, column: int
) -> str:
    involved = [k for k in np.argsort(-np.abs(shares)) if abs(shares[k]) > 1e-7]
    if not involved or scale[column] == 0:
        return "0 everywhere"
    text = ""
    for k in involved[:MENTIONED]:
        share = shares[k] * scale[column] / scale[basis[k]]
        size = f"{abs(share):.4g}"
        sign = ("-" if share < 0 else "") if not text else (" - " if share < 0 else " + ")
        text += sign + ("" if size == "1" else f"{size} ") + design.names[basis[k]]
    return text + (" + ..." if len(involved) > MENTIONED else "")

r"""The precision :math:`S = \sum_i w_i \Lambda_i \otimes x_i x_i' + D` and its triangular root.

With :math:`S = R'R` the variance of an example is the squared norm of its whitened row,
:math:`v_i = x_i' S^{-1} x_i = |R^{-T} x_i|^2`: for N rows one triangular product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.linalg.blas import dtrmm
from torch import Tensor

from engram.models.glm.design import RANK_ROUNDING, Design

ROWS = 2048  # of the design in one product: more leave the cache, fewer cost calls
# smallest pivot of the Cholesky factor with columns of length 1, whose square X'X has lost
WELL_CONDITIONED = 1e-2  # as good as QR from here on (four digits lost), which takes longer
STILL_DEFINITE = 1e-7  # below, where QR has no rows to work on, S counts as singular
# share of an example's information that is rounding
SMALLEST_SHARE = 1e-10  # with independent columns; more would call leverages near 1 undetermined
SOLVE_ROUNDING = 1e3  # machine epsilons that a solve loses, divided by the smallest pivot
ABOVE_ONE = 10.0  # such shares by which the leverage of an example may come out above 1


@dataclass(frozen=True, eq=False)
class Factor:
    """R, upper triangular with S = R'R, [D, D]; D = K P, outputs first."""

    upper: Tensor

    @cached_property
    def inverse(self) -> Tensor:
        """R^-1."""
        identity = torch.eye(len(self.upper), dtype=self.upper.dtype)
        return torch.linalg.solve_triangular(self.upper, identity, upper=True)

    @cached_property
    def nothing_left(self) -> float:
        """Share of an example's information that is lost in rounding when the example goes.

        A small share, or more where columns are nearly dependent: the smallest pivot of the root
        with columns of length 1 says how many digits that costs.
        """
        pivots = self.upper.diagonal().abs() / self.upper.norm(dim=0)
        rounding = SOLVE_ROUNDING * torch.finfo(torch.float64).eps
        return max(SMALLEST_SHARE, rounding / max(float(pivots.min()), rounding))

    def determined_alone(self, leverage: Tensor) -> Tensor:
        """Where a leverage is 1 but for rounding: the example alone determines some combination.

        Above that, which only a fit that is at no minimum has, the posterior is inconsistent.
        """
        nothing = self.nothing_left
        return (leverage > 1 - nothing) & (leverage < 1 + ABOVE_ONE * nothing)

    @property
    def precision(self) -> Tensor:
        """S."""
        return self.upper.mT @ self.upper

    @property
    def covariance(self) -> Tensor:
        """S^-1."""
        return self.inverse @ self.inverse.mT

    def solve(self, vectors: Tensor) -> Tensor:
        """S^-1 v for rows v, [..., D]."""
        return torch.cholesky_solve(vectors.mT, self.upper, upper=True).mT

    def whiten(self, rows: Tensor) -> Tensor:
        """R^-T x for rows x of a single output, [M, P]."""
        return rows @ self.inverse

    def log_det(self) -> float:
        """log |S|."""
        return 2 * float(self.upper.diagonal().abs().log().sum())

    def variances(self, design: Design, num_outputs: int) -> Tensor:
        """V_i = (I (x) x_i)' S^-1 (I (x) x_i), [N, K, K]."""
        if num_outputs == 1:
            return _square_norms(design, self.inverse)[:, None, None]
        matrix, width = design.matrix, design.width
        blocks = self.covariance.reshape(num_outputs, width, num_outputs, width)
        result = matrix.new_empty(len(matrix), num_outputs, num_outputs)
        for start in range(0, len(matrix), ROWS):
            part = matrix[start : start + ROWS]
            for k in range(num_outputs):
                for j in range(k + 1):
                    value = ((part @ blocks[k, :, j]) * part).sum(1)
                    result[start : start + ROWS, k, j] = value
                    result[start : start + ROWS, j, k] = value
        return result


def _square_norms(design: Design, inverse: Tensor) -> Tensor:
    """|x_i R^-1|^2; a triangular product takes half the time of a full one."""
    values, triangle = design.body.numpy(), inverse.numpy()
    constant, shift = 0.0, None
    if design.ones:  # the first row of R^-1 belongs to the column of ones
        constant, shift, triangle = triangle[0, 0] ** 2, triangle[0, 1:, None], triangle[1:, 1:]
    lower = np.asfortranarray(triangle).T
    result = np.full(len(values), constant)
    for start in range(0, len(values) if len(triangle) else 0, ROWS):
        whitened = dtrmm(1.0, lower, values[start : start + ROWS].T, lower=1)
        if shift is not None:
            whitened += shift
        result[start : start + ROWS] += np.einsum("pn,pn->n", whitened, whitened)
    return torch.from_numpy(result)


def gram(design: Design, weights: Tensor) -> Tensor:
    """X' diag(w) X for weights of either sign."""
    total = _body_gram(design.body, weights)
    if not design.ones:
        return total
    result = total.new_empty(design.width, design.width)
    result[0, 0], result[1:, 1:] = weights.sum(), total
    result[0, 1:] = result[1:, 0] = weights @ design.body
    return result


def _body_gram(matrix: Tensor, weights: Tensor) -> Tensor:
    values, shares = matrix.numpy(), weights.numpy()
    if bool((shares == shares[:1]).all()) and shares[0] >= 0:
        return torch.from_numpy(shares[0] * (values.T @ values))
    total = np.zeros((matrix.shape[1], matrix.shape[1]))
    for sign in (1.0, -1.0):
        roots = np.sqrt(np.maximum(sign * shares, 0.0))[:, None]
        if not roots.any():
            continue
        for start in range(0, len(values), ROWS):
            part = values[start : start + ROWS] * roots[start : start + ROWS]
            total += sign * (part.T @ part)  # numpy takes half the time for a matrix and itself
    return torch.from_numpy(total)


def curvature(design: Design, hessian: Tensor) -> Tensor:
    """S without its penalty from output Hessians [N, K, K], weights not yet included."""
    num_outputs, width = hessian.shape[1], design.width
    if num_outputs == 1:
        return gram(design, design.weights * hessian[:, 0, 0])
    blocks = design.matrix.new_empty(num_outputs, width, num_outputs, width)
    for k in range(num_outputs):
        for j in range(k + 1):
            shares = (design.weights * hessian[:, k, j])[:, None]
            block = (design.matrix * shares).mT @ design.matrix
            blocks[k, :, j], blocks[j, :, k] = block, block.mT
    return blocks.reshape(num_outputs * width, num_outputs * width)


def factorise(design: Design, hessian: Tensor, gauge: bool) -> Factor | None:
    """R of the design at these output Hessians; None where S is not positive definite.

    Args:
        gauge: whether a constant added to all outputs changes nothing, so that S is singular there
            for columns without penalty. Some precision is then added in that direction, in which
            no residual ever points.
    """
    num_outputs = hessian.shape[1]
    matrix = curvature(design, hessian)
    penalty = design.penalty.repeat(num_outputs)
    precision = matrix + penalty.diag()
    if gauge:
        free = torch.where(
            design.penalty > 0, 0.0, matrix.diagonal().reshape(num_outputs, -1).sum(0)
        )
        precision = precision + free.diag().repeat(num_outputs, num_outputs)
    scale = precision.diagonal().clamp(min=0).sqrt()
    if not (scale > 0).all() or not torch.isfinite(scale).all():
        return None
    lower, failed = torch.linalg.cholesky_ex(precision / torch.outer(scale, scale))
    smallest = 0.0 if int(failed) else float(lower.diagonal().min())
    if smallest > WELL_CONDITIONED:
        return Factor(lower.mT.contiguous() * scale)
    if num_outputs == 1 and bool((hessian >= 0).all()):
        return _by_rows(design, hessian[:, 0, 0], scale)
    return Factor(lower.mT.contiguous() * scale) if smallest > STILL_DEFINITE else None


def _by_rows(design: Design, hessian: Tensor, scale: Tensor) -> Factor | None:
    """R from the rows themselves, which keeps the digits that X'X loses."""
    rows = (design.weights * hessian).sqrt()[:, None] * design.matrix
    stacked = torch.cat([rows, design.penalty.sqrt().diag()]) / scale
    upper = torch.linalg.qr(stacked, mode="r").R
    signs = torch.where(upper.diagonal() < 0, -1.0, 1.0)
    upper = signs[:, None] * upper
    tolerance = RANK_ROUNDING * max(stacked.shape) * torch.finfo(torch.float64).eps
    return Factor(upper * scale) if float(upper.diagonal().min()) > tolerance else None

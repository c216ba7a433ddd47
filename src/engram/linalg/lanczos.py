r"""The ends of a spectrum, by products alone: Lanczos' method.

For symmetric A and positive-definite M the eigenvalues of :math:`M^{-1} A` are those of a
tridiagonal matrix in a basis that is orthonormal in the inner product of M and grows by a product
with A a step; the ends of the spectrum are found first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# Length of a new vector over the largest curvature; below, it is rounding, and the space is whole
BREAKDOWN = 1e-10
Apply = Callable[[Tensor], Tensor]


def ritz_values(
    times: Apply, multiply: Apply, solve: Apply, start: Tensor, steps: Iterable[int]
) -> Tensor:
    """Estimates of the eigenvalues of M^-1 A, ascending; the true ends lie at these or further out.

    Args:
        times: A v for a vector [P].
        multiply, solve: M v and M^-1 v.
        start: the first vector, [P].
        steps: one product with A each, at most; behind a progress bar, say.

    Example:
        >>> values = torch.tensor([-1.0, 2.0, 5.0], dtype=torch.float64)
        >>> start = torch.ones(3, dtype=torch.float64)
        >>> ritz_values(lambda v: values * v, torch.clone, torch.clone, start, range(9))
        tensor([-1.,  2.,  5.], dtype=torch.float64)
    """
    vector = start
    basis: list[Tensor] = []
    images: list[Tensor] = []  # M times the basis
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in steps:
        image = multiply(vector)
        length = math.sqrt(max(float(vector @ image), 0.0))
        if basis:
            if length <= BREAKDOWN * max(map(abs, diagonal)):
                break
            beside.append(length)
        basis.append(vector / length)
        images.append(image / length)
        product = times(basis[-1])
        diagonal.append(float(basis[-1] @ product))
        vector = solve(product)
        for _ in range(2):  # rounding takes orthogonality away
            known, weighted = torch.stack(basis), torch.stack(images)
            vector = vector - (weighted @ vector) @ known
        if len(basis) == len(start):
            break
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    outer = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
    return torch.linalg.eigvalsh(matrix + outer + outer.T)

r"""The scale matrix of a normal-inverse-Wishart as a small matrix and a large one.

With n examples of mean :math:`\bar x`

.. math:: \Psi_n = \Psi_0 + \sum_i (x_i - \bar x)(x_i - \bar x)'
    + \frac{\kappa_0 n}{\kappa_0 + n} (\bar x - m_0)(\bar x - m_0)' = B + c\,vv'

Data far from the prior mean make the second part so large that the first would be lost in its
rounding, and with it how the data vary; so they are never added before a determinant or a solve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SOME = 1e-6  # share of all examples, the prior's included: below, data have no mean of their own


@dataclass(frozen=True, eq=False)
class ScaleParts:
    """The scale as base + factor away away', and the mean as centre + pulled, from the origin."""

    base: Tensor
    factor: Tensor
    away: Tensor
    centre: Tensor
    pulled: Tensor

    @property
    def scale(self) -> Tensor:
        """Psi, [..., D, D]."""
        outer = self.away[..., :, None] * self.away[..., None, :]
        return self.base + self.factor[..., None, None] * outer

    def log_determinant(self) -> Tensor:
        """log |Psi|, [...]."""
        solved = torch.linalg.solve(self.base, self.away[..., None])[..., 0]
        grown = torch.log1p(self.factor * (self.away * solved).sum(-1))
        return torch.logdet(self.base) + grown

    def whitened(self, points: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`(x - m)'\Psi^{-1}(x - m)` of points from the origin, [..., N], and log |Psi|.

        In the metric of B what is along v is divided by :math:`1 + c |v|^2`, the rest is not.
        """
        factor = torch.linalg.cholesky(self.base)
        difference = (points - self.centre[..., None, :]).mT  # [..., D, N]
        inside = torch.linalg.solve_triangular(factor, difference, upper=False)
        away = torch.linalg.solve_triangular(factor, self.away[..., None], upper=False)
        pulled = torch.linalg.solve_triangular(factor, self.pulled[..., None], upper=False)
        length = away.norm(dim=-2, keepdim=True)
        axis = away / torch.where(length > 0, length, 1.0)
        along = (axis * inside).sum(-2)
        beside = inside - axis * along[..., None, :]
        reach = along - (axis * pulled).sum(-2)
        grown = 1 + self.factor[..., None] * length[..., 0] ** 2
        determinant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return (beside**2).sum(-2) + reach**2 / grown, determinant + grown[..., 0].log()


def scale_parts(natural: Mapping[str, Tensor], kappa: float, ahead: Tensor) -> ScaleParts:
    """The parts of a natural parameter from which the prior's mean is left out.

    Args:
        natural: with any leading dimensions.
        kappa: the prior's number of examples.
        ahead: the prior mean minus the origin, [D].
    """
    total, count = natural["sum"], natural["count"]
    number = count - kappa
    some = number > SOME * count
    safe = torch.where(some, number, 1.0)[..., None]
    own = total[..., :, None] * (total / safe)[..., None, :]
    # without examples, or with more taken out than put in, there is no mean of theirs
    crossed = ahead[:, None] * total[..., None, :]
    prior = number[..., None, None] * ahead[:, None] * ahead - crossed - crossed.mT
    generic = total[..., :, None] * (total / count[..., None])[..., None, :]
    generic = generic - (kappa / count)[..., None, None] * prior
    base = natural["outer"] - torch.where(some[..., None, None], own, generic)
    mean = (kappa * ahead + total) / count[..., None]
    away = torch.where(some[..., None], total / safe - ahead, 0.0)
    return ScaleParts(
        base=0.5 * (base + base.mT),
        factor=torch.where(some, kappa * number / count, 0.0),
        away=away,
        centre=torch.where(some[..., None], total / safe, mean),
        pulled=-(kappa / count)[..., None] * away,
    )

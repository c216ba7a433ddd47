r"""What a training that was stopped makes of a precision: a spectral filter.

Steps :math:`\theta \leftarrow \theta - \eta_t P_t^{-1} \nabla` on the mean of N losses with
curvature S of their sum have come, after a training time :math:`C = \sum_t \eta_t P_t^{-1}`, as
far as :math:`(1 - e^{-C S / N}) S^{-1}` of a gradient of the sum, where a minimum has
:math:`S^{-1}`. In the metric of C an eigenvalue s of the precision becomes

.. math:: \frac{s}{1 - e^{-c s / N}} \;\approx\; s + \frac{N}{c},

of which the right side is the Laplace posterior with a prior of precision N / c around the first
weights. Both are N / c where there is no curvature, and s where training has settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram.core.parameters import Layout, Named

SMALL = 1e-4  # x below which x / (1 - e^-x) is 1 + x / 2, to the last digit but one in double


@dataclass(frozen=True)
class SpectralFilter:
    """The prior precision and the training time of every parameter.

    Args:
        prior: delta, by name: the parameter's shape, or one number for all of its entries.
        pull: N / C, likewise, above 0: the precision of what stopping early stands for.
        base: a number that blocks contain in every direction, in place of ``prior``, until they
            are filtered: so that they are positive definite before.
    """

    prior: Mapping[str, Tensor] = field(repr=False)
    pull: Mapping[str, Tensor] = field(repr=False)
    base: float

    def priors(self, layout: Layout) -> Named:
        """delta of every entry, by name."""
        return _expanded(self.prior, layout)

    def pulls(self, layout: Layout) -> Named:
        """N / C of every entry, by name."""
        return _expanded(self.pull, layout)


def filtered(curvature: Tensor, pull: Tensor) -> Tensor:
    """s / (1 - exp(-s / p)) for eigenvalues s, of any sign, and pulls p above 0.

    Example:
        >>> filtered(torch.tensor([0.0, 1.0, 50.0]), torch.tensor(2.0))
        tensor([ 2.0000,  2.5415, 50.0000])
    """
    ratio = curvature / pull
    large = ratio.abs() > SMALL
    safe = torch.where(large, ratio, 1.0)
    return pull * torch.where(large, safe / -torch.expm1(-safe), 1 + ratio / 2)


def _expanded(values: Mapping[str, Tensor], layout: Layout) -> Named:
    return {
        name: values[name].expand(shape)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }

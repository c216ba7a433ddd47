r"""Tweedie's distributions, with variance mu^power; between 1 and 2 sums of gamma variables.

.. math:: \log p(y) = \frac1\phi \Big(\frac{y\,\mu^{1-p}}{1-p} - \frac{\mu^{2-p}}{2-p}\Big)
    + \log \frac{W(y, \phi)}{y}, \qquad
    W = \sum_{j \ge 1} \frac{z^j}{j!\, \Gamma(a j)}, \quad a = \frac{2-p}{p-1}

The series is summed around its largest term. Where that is so far out that the sum would be long,
the saddle point is as good: its relative error is about a twelfth of one over the number of terms.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from engram.errors import ArgumentError
from engram.likelihoods.elementwise import ElementwiseLikelihood
from engram.likelihoods.gaussian import Gaussian
from engram.likelihoods.links import Link
from engram.likelihoods.positive import (
    NOT_NEGATIVE,
    POSITIVE,
    ZERO_IN_THE_LIMIT,
    Gamma,
    InverseGaussian,
    PowerVariance,
)

FARTHEST = 1e7  # largest term that the series is summed around; beyond, the saddle point
REACH = 12.0  # standard deviations of the terms on either side: what is left is below rounding
ENTRIES = 2_000_000  # terms at a time: 16 MB, whatever the number of targets


class Tweedie(PowerVariance):
    """Tweedie: numbers with variance phi mu^power; between 1 and 2 some are exactly 0.

    Between 1 and 2 the density is a series. With another power (for 2 and 3 see :class:`Gamma` and
    :class:`InverseGaussian`) there is none to hand: the loss is half the unit deviance over the
    dispersion, which gives the same estimates, and is called so.

    Args:
        power: 1 or more.
        link: as for :class:`Gamma`.
        dispersion: phi.
    """

    name, limits = "tweedie", ZERO_IN_THE_LIMIT

    def __init__(
        self, power: float = 1.5, link: str | Link | None = None, dispersion: float = 1.0
    ) -> None:
        super().__init__(link, dispersion)
        if not (isinstance(power, Real) and math.isfinite(power) and power >= 1):
            raise ArgumentError(
                "a power of 1 or more", repr(power), "use the gaussian likelihood for power 0"
            )
        self.power = float(power)
        self.support = POSITIVE if self.power >= 2 else NOT_NEGATIVE

    def settings(self) -> dict[str, Any]:
        return {"power": self.power} | super().settings()

    def constant(self, targets: Tensor, dispersion: Tensor) -> Tensor:
        if 1 < self.power < 2:
            return -log_normaliser(targets, dispersion, self.power)
        return -self.saturated(targets) / dispersion

    def fitted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (self.kernel(outputs, targets) - self.saturated(targets)).sum(1)

    @property
    def unit(self) -> str:
        return "nats" if 1 < self.power < 2 else "half unit deviances over the dispersion"


def power_likelihood(power: float, link: str | Link | None = None) -> ElementwiseLikelihood:
    """The likelihood with variance mu^power, with a density in closed form where there is one."""
    if power == 0:
        return Gaussian(link=link)
    special: dict[float, type[PowerVariance]] = {2.0: Gamma, 3.0: InverseGaussian}
    return special[power](link) if power in special else Tweedie(power, link)


def log_normaliser(targets: Tensor, dispersion: Tensor, power: float) -> Tensor:
    """log W / y of positive targets, 0 for a target of 0; of any one shape.

    Example:
        >>> y = torch.tensor([0.0, 1.0], dtype=torch.float64)
        >>> log_normaliser(y, torch.ones(2).double(), 1.5)  # W = 2 I_1(4)
        tensor([0.0000, 2.9714], dtype=torch.float64)
    """
    some = targets > 0
    result = torch.zeros_like(targets)
    y, phi = targets[some], dispersion.expand_as(targets)[some]
    largest = y ** (2 - power) / ((2 - power) * phi)
    near = largest <= FARTHEST
    kernel = y ** (2 - power) * (1 / (2 - power) - 1 / (1 - power)) / phi
    values = kernel - 0.5 * (2 * math.pi * phi * y**power).log()
    values[near] = _series(y[near], phi[near], power) - y[near].log()
    result[some] = values
    return result


def _series(y: Tensor, phi: Tensor, power: float) -> Tensor:
    """log W, for targets in any order."""
    slope = (2 - power) / (power - 1)
    log_z = slope * y.log() - slope * math.log(power - 1) - (1 + slope) * phi.log()
    log_z = log_z - math.log(2 - power)
    centre = y ** (2 - power) / ((2 - power) * phi)
    reach = REACH * (centre / (1 + slope)).sqrt() + 2 * REACH
    first = (centre - reach).floor().clamp(min=1)
    if len(y) == 0:
        return y
    order = reach.argsort()
    parts = []
    width = int(2 * float(reach.max()) + 2)
    for chosen in order.split(max(1, ENTRIES // width)):
        steps = torch.arange(int(2 * float(reach[chosen].max()) + 2), dtype=torch.float64)
        j = first[chosen, None] + steps
        terms = j * log_z[chosen, None] - torch.lgamma(j + 1) - torch.lgamma(slope * j)
        parts.append(torch.logsumexp(terms, 1))
    result = torch.empty_like(y)
    result[order] = torch.cat(parts)
    return result

r"""The Gamma posterior of a rate, which counts and durations share.

.. math:: q(\theta) = \mathrm{Gamma}(a, \text{rate } b), \quad T(\theta) = (\log\theta, -\theta),
    \quad \lambda = (a - 1, b)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engram.core.parameters import Named
from engram.families.base import check_cavities, improper


def gamma_natural(a: float, b: float) -> Named:
    """From the textbook parameters."""
    return {
        "events": torch.tensor(a - 1.0, dtype=torch.float64),
        "exposure": torch.tensor(b, dtype=torch.float64),
    }


def check_gamma(natural: Mapping[str, Tensor]) -> None:
    """PosteriorError unless both parameters are positive."""
    a, b = gamma_standard(natural).values()
    if not (a > 0 and b > 0):
        raise improper("a Gamma with positive a and b", f"a={float(a):.4g}, b={float(b):.4g}")


def gamma_standard(natural: Mapping[str, Tensor]) -> Named:
    """Shape a and rate b."""
    return {"a": natural["events"] + 1, "b": natural["exposure"]}


def gamma_log_partition(natural: Mapping[str, Tensor]) -> Tensor:
    """A, the logarithm of the normaliser."""
    a, b = gamma_standard(natural).values()
    return torch.lgamma(a) - a * b.log()


def gamma_moments(natural: Mapping[str, Tensor]) -> Named:
    """Mean and variance of the rate."""
    a, b = gamma_standard(natural).values()
    return {"mean": a / b, "variance": a / b**2}


def gamma_cavity(natural: Mapping[str, Tensor], events: Tensor, exposures: Tensor) -> Named:
    """The natural parameter without each example by itself, [N] per component; proper for all."""
    cavity = {
        "events": natural["events"] - events,
        "exposure": natural["exposure"] - exposures,
    }
    check_cavities((cavity["events"] > -1) & (cavity["exposure"] > 0))
    return cavity

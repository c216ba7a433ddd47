r"""The numbers to expect of an estimate for a net that was stopped, from a study of such nets.

In docs/results/trust-practical.md nets are trained as people train them and held against trainings
on random subsets. What the estimates came out at follows from a few figures that need no truth:

.. math::
    \operatorname{artanh} \rho = a' x, \qquad
    \log \frac{\text{estimated increase}}{\text{true increase}} = b' x

with the rank correlation :math:`\rho` of leave-one-out losses with the true ones, and figures x of
the result: how alike examples are ranked at the readouts along the training, at its end and before
its visits, and where visits were not recorded, its losses and how far it is from a minimum. The
mean leave-one-out loss is then too large by
:math:`\ell_{loo} / (\ell + (\ell_{loo} - \ell) / \text{size})`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engram.trust.aspects import Expected

ONE, TRAIN, RATIO, GRADIENT, AGREEMENT, VISITS, KEPT = FEATURES = (
    "one",
    "train",  # log of the mean loss
    "ratio",  # log of the mean leave-one-out loss over it
    "gradient",  # of the objective, relative to its parts, with the prior that fits best
    "agreement",  # of the readouts along the training, in rank
    "visits",  # rank correlation of the estimate with the mean losses before the visits
    "kept",  # rank correlation of the losses at the end with them
)


@dataclass(frozen=True)
class Predictor:
    """Coefficients of the figures, by name.

    Args:
        ranking: for the artanh of the rank correlation.
        size: for the logarithm of estimated over true increase.
    """

    ranking: Mapping[str, float]
    size: Mapping[str, float]

    def expected(self, figures: Mapping[str, float]) -> Expected:
        """The numbers for a result; NaN where a figure is not known."""
        size = math.exp(_product(self.size, figures))
        grown = math.exp(figures[RATIO])
        return Expected(
            math.tanh(_product(self.ranking, figures)), size, grown / (1 + (grown - 1) / size)
        )


def _product(coefficients: Mapping[str, float], figures: Mapping[str, float]) -> float:
    """Bounded to what a study can have seen."""
    total = sum(value * figures[name] for name, value in coefficients.items())
    return math.nan if math.isnan(total) else max(-LARGEST, min(LARGEST, total))


LARGEST = 5.0  # of a logarithm: e^5 is a factor 150

# Fitted by `python -m benchmarks.trust.practical`, which prints them
ALONG = Predictor(
    ranking={ONE: -0.611, KEPT: 1.69, AGREEMENT: 1.15},
    size={ONE: 1.04, KEPT: -1.24},
)
ALONG_UNNAMED = Predictor(  # steps have not named their examples
    ranking={ONE: 0.0669, RATIO: -0.153, AGREEMENT: 2.24},
    size={ONE: 0.721, TRAIN: -0.0259, AGREEMENT: -0.876},
)
AT_THE_END = Predictor(
    ranking={ONE: -0.101, VISITS: 2.51, GRADIENT: -0.637},
    size={ONE: 5.95, TRAIN: 0.634, VISITS: -5.49},
)
AT_THE_END_UNNAMED = Predictor(
    ranking={ONE: 2.74, RATIO: -0.29, GRADIENT: -1.13},
    size={ONE: 0.687},
)
NOT_RECORDED = Predictor(
    ranking={ONE: 3.26, RATIO: -0.189, GRADIENT: -1.81},
    size={ONE: -1.51, RATIO: 0.148, GRADIENT: 3.23},
)
PREDICTORS = {
    "along": ALONG,
    "along, no visits": ALONG_UNNAMED,
    "at the end": AT_THE_END,
    "at the end, no visits": AT_THE_END_UNNAMED,
    "not recorded": NOT_RECORDED,
}

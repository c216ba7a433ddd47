r"""The numbers to expect of an estimate for a net that was stopped, from a study of such nets.

In docs/results/trust-practical.md nets are trained as people train them and held against trainings
on random subsets. What the estimates came out at follows from a few figures that need no truth:

.. math::
    \operatorname{artanh} \rho = a' x, \qquad
    \log \frac{\text{estimated increase}}{\text{true increase}} = b' x

with the rank correlation :math:`\rho` of leave-one-out losses with the true ones, and figures x of
the result: its losses, how far it is from a minimum, and, where it went along a recorded training,
how alike examples were ranked at the readouts. The mean leave-one-out loss is then too large by
:math:`\ell_{loo} / (\ell + (\ell_{loo} - \ell) / \text{size})`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engram.trust.aspects import Expected

ONE, TRAIN, RATIO, GRADIENT, AGREEMENT = FEATURES = (
    "one",
    "train",  # log of the mean loss
    "ratio",  # log of the mean leave-one-out loss over it
    "gradient",  # of the objective, relative to its parts, with the prior that fits best
    "agreement",  # of the readouts along the training, in rank
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
    ranking={ONE: 0.781, TRAIN: 0.221, GRADIENT: -0.719, AGREEMENT: 2.31},
    size={ONE: 1.66, RATIO: 0.307, AGREEMENT: -2.04},
)
AT_THE_END = Predictor(
    ranking={ONE: 2.94, RATIO: -0.348, GRADIENT: -1.27},
    size={ONE: 0.61},
)
NOT_RECORDED = Predictor(
    ranking={ONE: 3.26, RATIO: -0.274, GRADIENT: -1.59},
    size={ONE: -1.48, RATIO: 0.399, GRADIENT: 2.83},
)
PREDICTORS = {"along": ALONG, "at the end": AT_THE_END, "not recorded": NOT_RECORDED}

r"""How many labels are likely to be wrong, and how sure that is: a cut-off, not only a ranking.

Where a model contradicts a label, one of the two is wrong. Which of them shows in how often it
happens among examples that the model is as sure of. Of those that it is surest of, the model is
hardly ever wrong: labels are contradicted there as often as labels are wrong,

.. math:: \epsilon = P(\hat y \neq y \mid \text{the surest}), \qquad
    r(c) = P(\hat y \neq y \mid c) = \epsilon + (1 - \epsilon)\, m(c)

and r at a lower confidence c, a rising function of its rank, gives how often the model is wrong
there, m(c). A label y that the model contradicts with :math:`\hat y` is then wrong with chance

.. math:: \frac{\epsilon\, (1 - m)\, T(\hat y, y)}
    {\epsilon\, (1 - m)\, T(\hat y, y) + (1 - \epsilon)\, m\, g(y)}

where g(y) is what the model itself would give to y if it were wrong, its probabilities without
:math:`\hat y`, and T which label stands in place of which, counted among the surest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MORE_LIKELY = 0.5  # chance of being wrong from which a label counts as an issue
SMALLEST = 1e-6  # probability below which none is told from none
SUREST = (0.2, 0.3, 0.4)  # shares of the examples; the one with the fewest contradictions counts
FEWEST = 20  # examples that a share must have
LARGEST_RATE = 0.45  # of wrong labels: beyond, it is the model that is wrong
LEAST_ODDS = 1e-3  # of any class, where the model is wrong


@dataclass(frozen=True, eq=False)
class LabelNoise:
    """Which labels are likely wrong.

    Args:
        chance: that each label is wrong, [N].
        is_issue: where it is more likely than not, [N].
        rate: estimated share of all labels that are wrong.
    """

    chance: Tensor
    is_issue: Tensor
    rate: float

    @property
    def count(self) -> int:
        """Labels that are likely wrong."""
        return int(self.is_issue.sum())

    @property
    def precision(self) -> float:
        """The expected share of truly wrong ones among them; NaN where there are none."""
        return float(self.chance[self.is_issue].double().mean())


def blended(left_out: Tensor, heard: Tensor | None) -> Tensor:
    r"""Probabilities without the example, from both of what is known of them, [N, C].

    .. math:: q \propto \sqrt{p_{\setminus i} \cdot \bar p_i}

    Leave-one-out probabilities overshoot where an example was learned by heart, and those at the
    example's visits lag behind, as it was learned from meanwhile: the geometric mean does neither.

    Args:
        left_out: by leave-one-out.
        heard: mean over the visits of the example in training; None where none were recorded.
    """
    p = left_out.double().clamp(min=SMALLEST)
    if heard is not None:
        q = heard.double().clamp(min=SMALLEST)
        p = torch.where(q.isfinite(), (p * q).sqrt(), p)
    return p / p.sum(1, keepdim=True)


def label_noise(probabilities: Tensor, labels: Tensor) -> LabelNoise:
    """Wrong labels of a classifier, from probabilities without each example.

    Args:
        probabilities: of the classes, [N, C], as :func:`blended` gives them.
        labels: as they were given, [N].

    Example:
        >>> p = torch.tensor([[0.9, 0.1]] * 50 + [[0.1, 0.9]] * 50)
        >>> y = torch.tensor([0] * 50 + [1] * 49 + [0])
        >>> label_noise(p, y).is_issue.nonzero()
        tensor([[99]])
    """
    confidence, predicted = probabilities.double().max(1)
    contradicted = predicted != labels
    order = confidence.argsort(descending=True, stable=True)
    rate, surest = _rate(contradicted[order])
    often = _rising(-confidence[order], contradicted[order].double())
    mistaken = (often - rate) / (1 - rate)
    wrong_model = torch.empty_like(confidence)
    wrong_model[order] = mistaken.clamp(SMALLEST, 1.0)
    swaps = _swaps(predicted[order[:surest]], labels[order[:surest]], probabilities.shape[1])
    others = (1 - confidence).clamp(min=SMALLEST)
    given = probabilities.double().gather(1, labels[:, None])[:, 0] / others
    label_is = rate * (1 - wrong_model) * swaps[predicted, labels]
    model_is = (1 - rate) * wrong_model * given.clamp(LEAST_ODDS, 1.0)
    chance = torch.where(contradicted, label_is / (label_is + model_is), 0.0)
    return LabelNoise(chance, chance > MORE_LIKELY, rate)


def _rate(contradicted: Tensor) -> tuple[float, int]:
    """How often labels are wrong, and how many of the surest that was seen in.

    Args:
        contradicted: labels, the surest prediction first, [N].
    """
    number = len(contradicted)
    sizes = [min(number, max(FEWEST, int(share * number))) for share in SUREST]
    rates = [float(contradicted[:size].double().mean()) for size in sizes]
    floor = 0.5 / sizes[-1]  # less than one is not seen
    return min(max(min(rates), floor), LARGEST_RATE), sizes[-1]


def _rising(places: Tensor, values: Tensor) -> Tensor:
    """The rising function of places [N] that is nearest to values [N]."""
    from sklearn.isotonic import IsotonicRegression

    return torch.from_numpy(IsotonicRegression().fit_transform(places.numpy(), values.numpy()))


def _swaps(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Which label stands in place of which, each row a distribution; one in C - 1 before counts."""
    counts = torch.full((classes, classes), 1.0 / max(1, classes - 1), dtype=torch.float64)
    counts.index_put_((predicted, labels), torch.ones(len(labels)).double(), accumulate=True)
    counts.fill_diagonal_(0.0)
    return counts / counts.sum(1, keepdim=True).clamp(min=SMALLEST)

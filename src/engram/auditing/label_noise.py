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

with the rate of class :math:`\hat y`. Here g(y) is what the model itself would give to y if it
were wrong, its probabilities without :math:`\hat y`, and T which label stands in place of which,
counted among the surest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MORE_LIKELY = 0.5  # chance of being wrong from which a label counts as an issue
SMALLEST = 1e-6  # probability below which none is told from none
SUREST = (0.2, 0.3, 0.4)  # shares of the examples that count as the surest; their mean is taken
FEWEST = 20  # examples that such a share must have
FEWEST_OF_CLASS = 50  # examples of a class, from which its labels have a rate of their own
SHARED = 10.0  # examples' worth of the rate of all classes in that of one
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
    contradicted = (predicted != labels).double()
    order = confidence.argsort(descending=True, stable=True)
    rates = _rates(contradicted[order], predicted[order], probabilities.shape[1])
    rate = rates[predicted]
    mistaken = rising(-confidence, (contradicted - rate) / (1 - rate), -confidence)
    mistaken = mistaken.clamp(SMALLEST, 1.0)
    surest = order[: _size(SUREST[-1], len(order))]
    swaps = _swaps(predicted[surest], labels[surest], probabilities.shape[1])
    others = (1 - confidence).clamp(min=SMALLEST)
    given = probabilities.double().gather(1, labels[:, None])[:, 0] / others
    label_is = rate * (1 - mistaken) * swaps[predicted, labels]
    model_is = (1 - rate) * mistaken * given.clamp(LEAST_ODDS, 1.0)
    chance = torch.where(contradicted > 0, label_is / (label_is + model_is), 0.0)
    return LabelNoise(chance, chance > MORE_LIKELY, float(rate.mean()))


def _rates(contradicted: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """How often the labels of examples of each class are wrong, [C].

    Args:
        contradicted: 1 where a label is, the surest prediction first, [N].
        predicted: classes, in that order, [N].
        classes: C.
    """
    overall = _among_surest(contradicted)
    found = torch.full((classes,), overall, dtype=torch.float64)
    for number in range(classes):
        own = contradicted[predicted == number]
        if len(own) >= FEWEST_OF_CLASS:
            weight = SUREST[-1] * len(own)
            found[number] = (_among_surest(own) * weight + overall * SHARED) / (weight + SHARED)
    floor = 0.5 / _size(SUREST[-1], len(contradicted))  # less than one is not seen
    return found.clamp(floor, LARGEST_RATE)


def _among_surest(contradicted: Tensor) -> float:
    """The share of labels that are contradicted, mean over some shares of the surest."""
    sizes = [_size(share, len(contradicted)) for share in SUREST]
    return sum(float(contradicted[:size].mean()) for size in sizes) / len(sizes)


def _size(share: float, count: int) -> int:
    return min(count, max(FEWEST, int(share * count)))


def rising(places: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """The rising function of places [M] that is nearest to values [M], at others [N]."""
    from sklearn.isotonic import IsotonicRegression

    fitted = IsotonicRegression(out_of_bounds="clip").fit(places.numpy(), values.numpy())
    return torch.from_numpy(fitted.predict(at.numpy())).double()


def _swaps(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Which label stands in place of which, each row a distribution; one in C - 1 before counts."""
    counts = torch.full((classes, classes), 1.0 / max(1, classes - 1), dtype=torch.float64)
    counts.index_put_((predicted, labels), torch.ones(len(labels)).double(), accumulate=True)
    counts.fill_diagonal_(0.0)
    return counts / counts.sum(1, keepdim=True).clamp(min=SMALLEST)

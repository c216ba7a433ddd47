r"""How many labels are likely to be wrong, and how sure that is: a cut-off, not only a ranking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MORE_LIKELY = 0.5  # chance of being wrong from which a label counts as an issue
SMALLEST = 1e-9  # probability below which none is told from none


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


def label_noise(probabilities: Tensor, labels: Tensor) -> LabelNoise:
    r"""Wrong labels of a classifier, from out-of-sample probabilities.

    Args:
        probabilities: of the classes without the example, [N, C].
        labels: as they were given, [N].

    Example:
        >>> p = torch.tensor([[0.9, 0.1]] * 20 + [[0.1, 0.9]] * 20)
        >>> y = torch.tensor([0] * 20 + [1] * 19 + [0])
        >>> label_noise(p, y).is_issue.nonzero()
        tensor([[39]])
    """
    p = probabilities.double().clamp(min=SMALLEST)
    count, classes = p.shape
    own = p.gather(1, labels[:, None])[:, 0]
    sizes = torch.bincount(labels, minlength=classes).clamp(min=1)
    usual = torch.zeros(classes, dtype=p.dtype).index_add(0, labels, own) / sizes
    surely = torch.where(p >= usual, p, 0.0)
    surely[torch.arange(count), labels] = torch.where(own >= usual[labels], own, 0.0)
    likeliest = surely.argmax(1)
    contradicted = (surely.amax(1) > 0) & (likeliest != labels)
    chance = torch.where(contradicted, 1 - own / (own + surely.amax(1)), 0.0)
    rate = float(contradicted.double().mean())
    return LabelNoise(chance, contradicted & (chance > MORE_LIKELY), rate)

r"""Wrong numbers: targets of a regression, or sets of labels, far beyond what noise explains.

For a regression with leave-one-out residuals :math:`u_i` of robust scale s (their median absolute
value over that of the distribution F), the chance that a target is wrong is

.. math:: 1 - \frac{\text{expected number as large}}{\text{number as large}}
    = 1 - \frac{2 N F(-|u_i| / s)}{\#\{j : |u_j| \ge |u_i|\}}

which is one minus the false discovery rate there. F is Student's distribution with four degrees of
freedom, since residuals of real data have heavier tails than a normal one. For several labels at
once each one is judged as a class of two by itself, and the example by its worst.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engram.auditing.label_noise import MORE_LIKELY, LabelNoise, label_noise
from engram.sensitivity.result import Result

FREEDOM = 4.0  # degrees of: fewer expect larger residuals, and find fewer wrong numbers
SMALLEST = 1e-12  # scale below which all residuals are nothing


def wrong_numbers(result: Result, predicted: Tensor) -> LabelNoise:
    """Targets that are likely wrong, where they are no classes.

    Args:
        result: leave-one-out.
        predicted: without the example, [N, K].
    """
    if predicted.shape[1] > 1:
        return wrong_sets(predicted, result.targets)
    return wrong_residuals(predicted[:, 0] - result.targets[:, 0])


def wrong_residuals(residuals: Tensor) -> LabelNoise:
    """Residuals beyond what the distribution of their bulk explains, [N].

    Example:
        >>> u = torch.cat([torch.linspace(-2, 2, 99), torch.tensor([40.0])])
        >>> wrong_residuals(u).is_issue.nonzero()
        tensor([[99]])
    """
    from scipy.stats import t as student

    size = residuals.double().abs()
    scale = (size.median() / float(student.ppf(0.75, FREEDOM))).clamp(min=SMALLEST)
    expected = 2 * len(size) * torch.from_numpy(student.sf((size / scale).numpy(), FREEDOM))
    order = size.argsort(descending=True, stable=True)
    found = torch.empty_like(size)
    found[order] = torch.arange(1, len(size) + 1, dtype=size.dtype)
    rates = (expected / found).clamp(max=1.0)
    # no smaller residual has a smaller rate: the usual step-up of false discovery rates
    rates[order] = rates[order].flip(0).cummin(0).values.flip(0)
    chance = 1 - rates
    return LabelNoise.of(chance, float(chance.mean()))


def wrong_sets(predicted: Tensor, targets: Tensor) -> LabelNoise:
    """Sets of labels of which one is likely wrong, each label judged by itself.

    Args:
        predicted: probability of every label without the example, [N, K].
        targets: 0 and 1, [N, K].
    """
    own = [
        label_noise(torch.stack([1 - p, p], 1).clamp(0, 1), (y > MORE_LIKELY).long())
        for p, y in zip(predicted.double().unbind(1), targets.unbind(1), strict=True)
    ]
    chance = torch.stack([one.chance for one in own]).amax(0)
    return LabelNoise.of(chance, sum(one.rate for one in own) / len(own))

"""How well an estimate and the truth agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

REPRODUCED, PARTLY, NOT = "reproduced", "partly", "not reproduced"


def agreement(
    true: Tensor | Sequence[float], estimated: Tensor | Sequence[float]
) -> dict[str, float]:
    """Spearman's and Pearson's correlation, and the mean estimate over the mean truth."""
    a, b = (torch.as_tensor(values, dtype=torch.float64) for values in (true, estimated))
    return {
        "spearman": float(spearmanr(a, b).statistic),
        "pearson": float(pearsonr(a, b).statistic),
        "ratio": float(b.mean() / a.mean()),
    }


def graded(value: float, good: float, fair: float, words: str) -> tuple[str, str]:
    """A verdict on a number that should be large."""
    level = REPRODUCED if value >= good else PARTLY if value >= fair else NOT
    return level, f"{words} {value:.2f}"


def mean_distance(estimates: Sequence[float], truths: Sequence[float]) -> float:
    """Mean of |estimate - truth| / truth."""
    a, b = torch.tensor(estimates), torch.tensor(truths)
    return float(((a - b).abs() / b).mean())

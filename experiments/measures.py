"""How well an estimate and the truth agree, and when a finding counts as reproduced."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

REPRODUCED, PARTLY, NOT = "reproduced", "partly", "not reproduced"
TWICE = 2.0  # sizes agree where their ratio is between its inverse and this


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


def of_rank_and_size(row: dict[str, float], good: float, fair: float) -> tuple[str, str]:
    """Reproduced where ranks and sizes agree, partly where ranks alone do, or nearly."""
    rank, ratio = row["spearman"], row["ratio"]
    sized = ratio > 0 and abs(math.log(ratio)) <= math.log(TWICE)
    words = f"rank correlation {rank:.2f}, estimated over true sizes {ratio:.2f}"
    if rank >= good and sized:
        return REPRODUCED, words
    return (PARTLY if rank >= fair else NOT), words


def mean_distance(estimates: Sequence[float], truths: Sequence[float]) -> float:
    """Mean of |estimate - truth| / truth."""
    a, b = torch.tensor(estimates), torch.tensor(truths)
    return float(((a - b).abs() / b).mean())


def top_share(values: Tensor, part: float = 0.1) -> float:
    """Share of a sum that the largest tenth has."""
    count = max(1, round(part * len(values)))
    return float(values.topk(count).values.sum() / values.sum())

"""Compare a result with true retraining, on a sample of its examples."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, seed_number, whole
from engram.core.data.batches import Batches, Data
from engram.core.parameters import check_module, uncompiled
from engram.errors import ArgumentError
from engram.evidence.correlation import SMALLEST_SAMPLE, agreement
from engram.evidence.matching import check_outputs
from engram.evidence.verification import Verification
from engram.evidence.ways import Request, chosen_way, truth_of, way_of
from engram.retraining.retrain import Train
from engram.sensitivity.result import Result, check_result

OUTER = 0.1  # share of the ranking that counts as its top, and as its bottom


def verify(
    model: nn.Module,
    data: Data,
    result: Result,
    *,
    train: Train = AUTO,
    sample: int = 30,
    refits: int = 3,
    folder: str | Path | None = None,
    trust_folder: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Verification:
    """Train again without a sample of the examples and compare with what was estimated.

    A third of the sample comes from the top tenth of the estimated score, a third from the bottom
    tenth and the rest from between, drawn by seed.

    Args:
        model: the one that the result is about; it is not changed.
        data: its training data.
        result: from :func:`engram.sensitivities`.
        train: how to train again. ``"auto"`` is the recipe ``newton`` for a model at a minimum. For
            others pass the record of their training, of ``engram.record(..., replay=True)``, or
            ``engram.recipes.FromStart(fit, Net)``; see :func:`engram.retrain` for all. A recipe
            takes the result's prior precision, or precisions.
        sample: how many examples; at most as many as there are.
        refits, folder, trust_folder, seed, progress: as in :func:`engram.retrain`.

    Returns:
        Spearman, Pearson and slope with 95 % intervals, of score and of loss increase; the noise
        floor; ``way``, how the truth was found; ``figure()``; and one sentence, ``str(check)``.

    Example:
        >>> from engram import laplace, sensitivities
        >>> from engram.likelihoods import Gaussian
        >>> _ = torch.manual_seed(0)
        >>> x, model = torch.randn(50, 3).double(), nn.Linear(3, 1, bias=False).double()
        >>> data = (x, x.sum(1, keepdim=True) + torch.randn(50, 1).double())
        >>> solution = torch.linalg.solve(x.T @ x + torch.eye(3).double(), x.T @ data[1])
        >>> _ = model.weight.data.copy_(solution.T)
        >>> posterior = laplace(model, data, likelihood=Gaussian(), prior_precision=1.0)
        >>> exact = sensitivities(model, data, posterior, estimator="corrected")
        >>> check = verify(model, data, exact, sample=12)
        >>> check.score.pearson.value, check.score.slope.value
        (1.0, 1.0)
    """
    check_result(result)
    check_module(model)
    batches = Batches(data, 1)
    num_data = batches.num_data
    result.check_data(num_data)
    _check_sample(sample, num_data)
    train, seed = chosen_way(train, result), seed_number(seed)
    way = way_of(train)
    check_outputs(result, uncompiled(model), batches)
    chosen, strata = stratified(result.score, sample, seed)
    request = Request(train, refits, folder, trust_folder, seed, progress)
    truth = truth_of(model, data, result, result.indices[chosen], request)
    score, increase = result.score[chosen], (result.loo_loss - result.loss)[chosen]
    return Verification(
        estimated_score=score,
        estimated_increase=increase,
        strata=strata,
        score=agreement(score, truth.score),
        increase=agreement(increase, truth.increase),
        truth=truth,
        way=way,
    )


def stratified(score: Tensor, sample: int, seed: int) -> tuple[Tensor, Tensor]:
    """Positions from top (0), middle (1) and bottom (2) of a score, and which they are from.

    Example:
        >>> positions, strata = stratified(torch.arange(100.0), 6, seed=0)
        >>> strata
        tensor([0, 0, 1, 1, 2, 2])
        >>> bool((positions[:2] >= 90).all()), bool((positions[4:] < 10).all())
        (True, True)
    """
    order = score.argsort(descending=True, stable=True)
    third = sample // 3
    outer = max(third, round(OUTER * len(order)))
    outer = min(outer, (len(order) - (sample - 2 * third)) // 2)
    pools = (order[:outer], order[outer : len(order) - outer], order[len(order) - outer :])
    counts = (third, sample - 2 * third, third)
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        pool[torch.randperm(len(pool), generator=generator)[:count]]
        for pool, count in zip(pools, counts, strict=True)
    ]
    return torch.cat(drawn), torch.arange(3).repeat_interleave(torch.tensor(counts))


def _check_sample(sample: int, num_data: int) -> None:
    if num_data < SMALLEST_SAMPLE:
        raise ArgumentError(
            f"data with at least {SMALLEST_SAMPLE} examples, so that estimates can be compared",
            f"{num_data} examples",
            "use engram.retrain for the left-out models themselves",
        )
    whole("sample", sample, SMALLEST_SAMPLE, num_data, "use sample=30, or fewer for small data")

"""What a method says about the left-out examples, and how far that is from the truth."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

import engram
from benchmarks.faithfulness.limits import SECONDS, limited
from benchmarks.faithfulness.truths import Problem

CORRELATIONS = ("score_spearman", "score_pearson", "deviation_pearson", "increase_pearson")
METRICS = (*CORRELATIONS, "increase_ratio", "loo_error")


@dataclass(frozen=True)
class Estimate:
    """Of n left-out examples; a method with one number per example gives only the score.

    Args:
        score: larger where the example matters more, [n].
        increase: of the example's own loss, in nats, where the method's number is that, [n].
        deviation: of the outputs, where the method has them, [n, K].
    """

    score: Tensor
    increase: Tensor | None = None
    deviation: Tensor | None = None

    @classmethod
    def of_influence(cls, increase: Tensor) -> Estimate:
        """A self-influence in nats: to first order the increase of the loss, and the score."""
        return cls(increase, increase)

    @classmethod
    def of_result(cls, result: engram.Result) -> Estimate:
        """What engram found."""
        return cls(result.score, result.loo_loss - result.loss, result.deviation)


Method = Callable[[Problem], Estimate]


def metrics(estimate: Estimate, truth: engram.Retraining) -> dict[str, float | None]:
    """Correlations with the truth, mean estimated over mean true increase, error of the LOO loss.

    A method with one number per example has that correlated with the increase too.
    """
    score, increase = estimate.score.double(), estimate.increase
    if not torch.isfinite(score).all():
        raise ValueError(f"{int((~torch.isfinite(score)).sum())} scores are not finite")
    one_number = score if increase is None else increase.double()
    found: dict[str, float | None] = {
        "score_spearman": float(spearmanr(score, truth.score).statistic),
        "score_pearson": float(pearsonr(score, truth.score).statistic),
        "deviation_pearson": None,
        "increase_pearson": float(pearsonr(one_number, truth.increase).statistic),
        "increase_ratio": None,
        "loo_error": None,
    }
    if estimate.deviation is not None:
        entries = estimate.deviation.flatten(), truth.deviation.flatten()
        found["deviation_pearson"] = float(pearsonr(*entries).statistic)
    if increase is not None:
        mean, true = float(increase.mean()), float(truth.increase.mean())
        found["increase_ratio"], found["loo_error"] = mean / true, mean - true
    return found


def measure(method: Method, problem: Problem, allowed: float = SECONDS) -> dict[str, Any]:
    """Metrics and seconds, of which so many are allowed, or the first line of what went wrong."""
    began = time.perf_counter()
    try:
        with limited(allowed):
            estimate = method(problem)
        found = metrics(estimate, problem.truth)
    except Exception as error:  # whatever a library raises is its row in the table
        first = (str(error).strip() or "no message").splitlines()[0]
        return {"error": f"{type(error).__name__}: {first}"}
    seconds = time.perf_counter() - began
    return {**found, "seconds": seconds, "values": estimate.score.double().tolist()}


def methods_of(module: str, package: str) -> tuple[str, dict[str, Method]]:
    """A library's version and methods; where it does not load, methods that say so."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "not installed"
    try:
        return found, importlib.import_module(module).METHODS
    except Exception as error:  # an import may fail in any way
        return found, {package: _failing(error)}


def _failing(error: Exception) -> Method:
    def method(problem: Problem) -> Estimate:
        raise error

    return method

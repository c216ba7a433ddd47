"""What engram says about each training of the study, in several ways, beside the truth."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import engram
from benchmarks.practical.estimates import Watched
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.practical.truths import FOLDER, truth
from benchmarks.trust.runs import rounded
from engram.trust import judge
from engram.trust.expectation import PREDICTORS

SEEDS = (0, 1)  # trainings of each setting that are estimated
FULL_UP_TO = 2700  # weights of nets whose matrices are taken whole
LEAST_RELIABLE = 0.3  # of a truth that correlations are taken with
SPLITS = 10  # of the trainings in two halves, for the noise of the truth


@dataclass(frozen=True)
class Way:
    """How an estimate is made.

    Args:
        name: in words.
        structure: of the posterior.
        recorded: whether the training was recorded.
        estimator: of the sensitivities.
    """

    name: str
    structure: str
    recorded: bool
    estimator: str = "auto"


WAYS = (
    Way("recorded, kronecker", "kronecker", True),
    Way("recorded, full", "full", True),
    Way("recorded, end alone", "kronecker", True, "linear"),
    Way("nothing recorded, kronecker", "kronecker", False),
    Way("nothing recorded, full", "full", False),
)


@dataclass(frozen=True, eq=False)
class Truth:
    """Of every example, by the trainings that saw it and those that did not.

    Args:
        out: loss without the example, [N].
        increase: that minus the loss with it, mean over examples.
        score: L1 distance of the mean predictions, [N].
        reliability: rank correlation of ``out`` and ``score`` with what so many other trainings
            would give, by halves (Spearman-Brown).
    """

    out: Tensor
    increase: float
    score: Tensor
    reliability: tuple[float, float]

    @classmethod
    def of(cls, found: engram.SubsetTruth) -> Truth:
        everything = torch.arange(found.num_trainings)
        out, score = _out(found, everything), _score(found, everything)
        halves = [_reliability(found, measure) for measure in (_out, _score)]
        increase = float(out.nanmean() - found.loss_in.nanmean())
        return cls(out, increase, score, (halves[0], halves[1]))


def _out(found: engram.SubsetTruth, some: Tensor) -> Tensor:
    left = ~found.kept[some]
    return (found.losses[some] * left).sum(0) / left.sum(0)


def _score(found: engram.SubsetTruth, some: Tensor) -> Tensor:
    kept = found.kept[some][:, :, None].double()
    means = torch.softmax(found.outputs[some].double(), 2)
    inside, outside = ((means * k).sum(0) / k.sum(0) for k in (kept, 1 - kept))
    return (outside - inside).abs().sum(1)


def _reliability(found: engram.SubsetTruth, measure: Any) -> float:
    generator, halves = torch.Generator().manual_seed(0), []
    for _ in range(SPLITS):
        order = torch.randperm(found.num_trainings, generator=generator)
        middle = len(order) // 2
        halves.append(_ranks(measure(found, order[:middle]), measure(found, order[middle:])))
    half = sum(halves) / SPLITS
    return 2 * half / (1 + half)


def _ranks(left: Tensor, right: Tensor) -> float:
    fine = left.isfinite() & right.isfinite()
    return float(spearmanr(left[fine], right[fine]).statistic)


def rows_of(
    name: str, seed: int, ways: Sequence[Way] = WAYS, folder: Path = FOLDER
) -> list[dict[str, Any]]:
    """Some ways on one training of a setting."""
    setting, known = SETTINGS[name], Truth.of(truth(name, folder))
    split, watched = setting.split(), Watched()
    model = setting.train(seed, watched)
    size = sum(p.numel() for p in model.parameters())
    about = {"setting": name, "kind": name.split("-")[0], "seed": seed, "weights": size}
    found = []
    for way in ways:
        if way.structure == "full" and size > FULL_UP_TO:
            continue
        training = watched.training if way.recorded else None
        result = _estimated(model, split.data, way, training)
        found.append(about | {"way": way.name} | _against(result, known))
    return found


def _estimated(
    model: nn.Module, data: tuple[Tensor, Tensor], way: Way, training: engram.Training | None
) -> engram.Result:
    recorded = {} if training is None else {"training": training}
    posterior = engram.laplace(model, data, structure=way.structure, progress=False, **recorded)
    return engram.sensitivities(model, data, posterior, estimator=way.estimator, progress=False)


def _without_noise(correlation: float, reliability: float) -> float:
    """The correlation with a truth of no noise; NaN where that is hardly more than noise."""
    return correlation / math.sqrt(reliability) if reliability > LEAST_RELIABLE else math.nan


def _against(result: engram.Result, known: Truth) -> dict[str, Any]:
    fine = known.out.isfinite() & result.loo_loss.isfinite()
    loo, out = result.loo_loss[fine].double(), known.out[fine].double()
    ranking, score = _ranks(loo, out), _ranks(result.score[fine], known.score[fine])
    increase = float(loo.mean() - result.loss[fine].double().mean())
    numbers = {
        "ranking": _without_noise(ranking, known.reliability[0]),
        "ranking_seen": ranking,
        "score_ranking": _without_noise(score, known.reliability[1]),
        "size": increase / known.increase,
        "mean": float(loo.mean() / out.mean()),
        "true_loo": float(out.mean()),
        "true_increase": known.increase,
    }
    return rounded(numbers) | {
        "path": path_of(result),
        "losses": rounded({"train": result.train_nll, "leave_one_out": result.loo_nll}),
        "figures": rounded(judge.figures_of(result)),
        "signals": rounded(judge.signals(result)),
        "diagnostics": rounded(result.diagnostics.to_dict()),
    }


def path_of(result: engram.Result) -> str:
    """The name of the predictor that speaks of such a result; empty where none does."""
    predictor = judge.predictor_of(result)
    return next((name for name, one in PREDICTORS.items() if one is predictor), "")


def all_rows(
    seeds: Sequence[int] = SEEDS, ways: Sequence[Way] = WAYS, folder: Path = FOLDER
) -> list[dict[str, Any]]:
    """Every setting whose truth is there."""
    found = []
    for name in SETTINGS:
        if not (folder / name / "subset_truth.json").is_file():
            continue
        for seed in seeds:
            found += rows_of(name, seed, ways, folder)
        print(f"  {name}", file=sys.stderr, flush=True)
    return found

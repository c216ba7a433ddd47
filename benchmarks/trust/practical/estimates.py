"""What engram says about each training of the study, in several ways, beside the truth."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import engram
from benchmarks.practical.estimates import Watched
from benchmarks.trust.practical.settings import SETTINGS
from benchmarks.trust.practical.truths import Truth, ranks
from benchmarks.trust.runs import rounded
from engram.trust import judge
from engram.trust.expectation import PREDICTORS

SEEDS = (0,)  # trainings of each setting that are estimated
FULL_UP_TO = 2700  # weights of nets whose matrices are taken whole
LEAST_RELIABLE = 0.3  # of a truth that correlations are taken with


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


def rows_of(name: str, known: Truth, seed: int, ways: Sequence[Way] = WAYS) -> list[dict[str, Any]]:
    """Some ways on one training of a setting."""
    setting = SETTINGS[name]
    watched = Watched(augment=setting.augment)
    split, began = setting.split(), time.process_time()
    model = setting.train(seed, watched)
    trained = time.process_time() - began
    size = sum(p.numel() for p in model.parameters())
    about = {"setting": name, "kind": name.split("-")[0], "seed": seed, "weights": size}
    found = []
    for way in ways:
        if way.structure == "full" and size > FULL_UP_TO:
            continue
        training = watched.training if way.recorded else None
        began = time.process_time()
        try:
            result, _ = estimated(model, split.data, way, training)
        except engram.errors.PosteriorError:  # told in words that it takes a record: no estimate
            continue
        cost = {"cost": (time.process_time() - began) / trained}  # in trainings
        found.append(about | {"way": way.name} | held_against(result, known) | rounded(cost))
    return found


def estimated(
    model: nn.Module, data: tuple[Tensor, Tensor], way: Way, training: engram.Training | None
) -> tuple[engram.Result, Any]:
    """A result, and the posterior that it was computed with."""
    recorded = {} if training is None else {"training": training}
    posterior = engram.laplace(model, data, structure=way.structure, progress=False, **recorded)
    result = engram.sensitivities(model, data, posterior, estimator=way.estimator, progress=False)
    return result, posterior


def _without_noise(correlation: float, reliability: float) -> float:
    """The correlation with a truth of no noise; NaN where that is hardly more than noise."""
    return correlation / math.sqrt(reliability) if reliability > LEAST_RELIABLE else math.nan


def held_against(result: engram.Result, known: Truth) -> dict[str, Any]:
    """How a result compares with the truth, and what it says of itself."""
    fine = known.out.isfinite() & result.loo_loss.isfinite()
    loo, out = result.loo_loss[fine].double(), known.out[fine].double()
    ranking, score = ranks(loo, out), ranks(result.score[fine], known.score[fine])
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

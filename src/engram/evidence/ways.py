"""How the truth about a result is found: the minimum again, a replay, or the user's training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from engram.core.arguments import is_auto
from engram.core.data.batches import Data
from engram.core.parameters import trainable
from engram.errors import ArgumentError
from engram.retraining.own_trainings import FromStart, Replay
from engram.retraining.prior import Prior
from engram.retraining.recipes import Recipe
from engram.retraining.result import Retraining
from engram.retraining.retrain import Train, resolved, retrain
from engram.sensitivity.result import Result
from engram.trust import judge
from engram.trust.thresholds import CONVERGENCE
from engram.trust.verdict import UNRELIABLE

REPEATABLE = 0.01  # of the median true score: trainings that differ by less are the same
MINIMUM, REPLAY, PART = "minimum", "replay", "replay of a part"
ANEW, GOING_ON = "from the start", "going on"
WAYS = {
    MINIMUM: "the minimum again, by a recipe",
    REPLAY: "the recorded training walked again without the example",
    PART: "the recorded training walked again from a checkpoint on",
    ANEW: "your training function, from new first weights, with one seed for all",
    GOING_ON: "your training function, going on from the trained model, with one seed for all",
}


def chosen_way(train: Train, result: Result) -> Train:
    """What was asked for; ``"auto"`` is the minimum again, for a model that is at one.

    A net that was stopped has no minimum nearby: looking for one takes for ever, and finds another
    model.
    """
    if not is_auto(train):
        return train
    convergence = judge.signals(result)["convergence"]
    if not result.basis.stopped and CONVERGENCE.level(convergence) != UNRELIABLE:
        return "newton"
    raise ArgumentError(
        "train=, the way to train this model again, since it is not at a minimum",
        "none",
        "pass train=training, of engram.record(optimizer, model, replay=True); or "
        "train=engram.recipes.FromStart(fit, Net), your training loop from new first weights; or "
        'train="newton" for the minimum that is nearest',
    )


def way_of(train: Train) -> str:
    """One of ``WAYS``."""
    found = resolved(train)
    if isinstance(found, Recipe):
        return MINIMUM
    if isinstance(found, Replay):
        return REPLAY if found.is_whole else PART
    return ANEW if isinstance(found, FromStart) else GOING_ON


@dataclass(frozen=True)
class Request:
    """How to train again; as for :func:`engram.retrain`."""

    train: Train
    refits: int
    folder: str | Path | None
    trust_folder: bool
    seed: int
    progress: bool


def truth_of(
    model: nn.Module, data: Data, result: Result, indices: Tensor, request: Request
) -> Retraining:
    """The true effects of some examples, under the result's likelihood and prior."""
    return retrain(
        model,
        data,
        indices,
        train=request.train,
        likelihood=result.basis.known_likelihood,
        prior_precision=_prior(result, model, request.train),
        refits=request.refits,
        seed=request.seed,
        folder=request.folder,
        trust_folder=request.trust_folder,
        progress=request.progress,
    )


def _prior(result: Result, model: nn.Module, train: Train) -> Prior:
    """The prior precision of the result, by name where parameters have different ones.

    Only recipes train with it: other trainings bring their own weight decay, or none.
    """
    mean, by_name = result.basis.prior_precision, result.basis.prior_by_name
    if mean is None:
        return 1.0
    prior = {n: by_name.get(n, mean) for n in trainable(model)} if by_name else mean
    regularised = any(prior.values()) if isinstance(prior, dict) else prior > 0
    return prior if regularised or way_of(train) == MINIMUM else 1.0

"""What to do about a doubtful audit, by whoever ran it, who may not have written any code.

The remedies of a verdict are calls on a model, its data and its training. A stock model is in
nobody's hands, so that an audit of one says what another audit would bring.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engram.training.training import Training
from engram.trust.verdict import Verdict

if TYPE_CHECKING:
    from engram.auditing.own_model import Own

TEST = (
    "Trust the order of the examples before the sizes; with further data in test= (--test) the "
    "loss that the leave-one-out loss estimates stands beside it."
)
HALF = (
    "A model of half of the data has a loss of {:.4g} on the other half: one of all of it should "
    "have less on unseen data. Trust the order of the examples before the sizes."
)
AGAIN = (
    " Where the size counts, engram certify RUN trains again without some examples and gives the "
    "loss with an interval; engram verify RUN holds single estimates against such trainings."
)
WHOLE = (
    "Audit without minimal (--minimal): what it leaves out makes the estimate and the cut-off "
    "surer."
)
RETURNED = (
    "Let your training (train=, --train) return the record of engram.record(optimizer, model): the "
    "estimate then goes along it."
)
TRAINED = (
    "Weights do not say how they came about: name your training with train= (--train), and let it "
    "return the record of engram.record(optimizer, model)."
)


def advice_for(own: Own, training: Training | None, minimal: bool, half: float | None) -> str:
    """What whoever ran an audit can do; empty where the verdict's own remedies are open to them.

    Args:
        own: what the user brought.
        training: the record of the training; None where there is none.
        minimal: whether the audit left out what takes longest.
        half: the loss of a model of half of the data on the others; None where there is none.
    """
    if own.train is not None:
        return RETURNED if training is None else ""
    if own.weights is not None:
        return TRAINED
    if minimal:
        return WHOLE
    return (TEST if half is None else HALF.format(half)) + AGAIN


def advised(verdict: Verdict, advice: str) -> Verdict:
    """The verdict with this advice behind its worst reason, in place of all remedies."""
    if not advice:
        return verdict
    told = (advice, *[""] * len(verdict.reasons))
    reasons = (replace(r, remedy=a) for r, a in zip(verdict.reasons, told, strict=False))
    return replace(verdict, reasons=tuple(reasons))

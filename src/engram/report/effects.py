"""Removals and verifications as a page shows them."""

from __future__ import annotations

import torch

from engram.errors import DataError
from engram.evidence.verification import Verification
from engram.report.page import Comparison, Effect
from engram.report.result_page import loss_interval
from engram.sensitivity.groups import Removal


def effect_of(removal: Removal, name: str, kind: str = "class") -> Effect:
    """The effect of leaving a class or a group out, on the data that it was evaluated on.

    The interval is 1.96 standard errors of the mean change over those examples; what the estimate
    itself is off by, the removal's verdict says.

    Args:
        removal: of :func:`engram.remove` or :func:`engram.remove_classes` with ``evaluate_on=``.
        name: of the class or group.
        kind: what it is one of: effects of one kind share a chart.
    """
    found = removal.evaluation
    if found is None:
        raise DataError(
            "a removal that was evaluated on other data",
            "one without",
            "pass evaluate_on= to engram.remove",
        )
    change = found.loss_without - found.loss
    low, high = loss_interval(change, torch.ones(len(change)))
    return Effect(name, kind, len(removal.indices), found.change, low, high, removal.verdict.level)


def comparisons_of(verification: Verification) -> list[Comparison]:
    """Scores and loss increases beside those of :func:`engram.verify`, which trained again."""
    truth = verification.truth
    places = truth.indices.numpy()
    return [
        Comparison(
            "score",
            verification.estimated_score.numpy(),
            truth.score.numpy(),
            positions=places,
            noise=truth.noise_floor.level,
            sentence=verification.sentence,
        ),
        Comparison(
            "increase of the loss",
            verification.estimated_increase.numpy(),
            truth.increase.numpy(),
            positions=places,
        ),
    ]

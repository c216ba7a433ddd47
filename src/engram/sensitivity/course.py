r"""What a recorded training says about an estimate that was made from it, at no further pass.

The loss of an example just before a visit is that of a net which has not seen it for an epoch: a
leave-one-out loss is hardly below it, and where the loss at the end is far below its mean over all
visits the net knows its examples by heart. And an estimate that is read out along the training
ranks examples alike at all times, if what it ranks by is in the examples and not in the last steps.
So does the training: losses at the end that are ordered otherwise than those before the visits are
what is left of them, and an estimate from there has little to go by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from engram.core.dtypes import wide
from engram.core.storage.values import ADDED_LATER
from engram.errors import DataError, LikelihoodError
from engram.linalg.ranks import FEWEST, rank_correlation
from engram.training.segments import NamedTraining


@dataclass(frozen=True)
class Course:
    """Means over the examples; NaN where the record does not know one.

    Args:
        visit_loss: mean loss just before the visits after the first.
        last_visit_loss: mean loss just before the last visit.
        readout_agreement: mean rank correlation of the losses without an example that were read
            out along the training with those at its end.
        readout_growth: mean of those at the end over that at the first readout.
        end_agreement: rank correlation of the losses at the end with the mean losses before all
            visits.
        visit_agreement: that of the losses without an example with them.
    """

    visit_loss: float = math.nan
    last_visit_loss: float = math.nan
    readout_agreement: float = math.nan
    readout_growth: float = math.nan
    end_agreement: float = field(default=math.nan, metadata=ADDED_LATER)
    visit_agreement: float = field(default=math.nan, metadata=ADDED_LATER)


@dataclass(frozen=True, eq=False)
class Losses:
    """Of every example.

    Args:
        end: with it, at the end of training, [N].
        without: without it, as estimated, [N].
        before: mean over its visits of that before them, [N]; empty where none were recorded.
    """

    end: Tensor
    without: Tensor
    before: Tensor


def course_of(
    training: NamedTraining | None,
    targets: Tensor,
    readouts: Tensor | None,
    losses: Losses | None = None,
) -> Course:
    """What the record says of its examples.

    Args:
        training: that the posterior comes from; None where it was not recorded.
        targets: of all examples, [N].
        readouts: losses without the example along the training, [N, R]; the last is its end.
        losses: at the end, and before the visits.
    """
    before, last = _losses_at_visits(training, targets)
    agreement, growth = _readout_figures(readouts)
    return Course(before, last, agreement, growth, *_ranked_as_at_visits(losses))


def _ranked_as_at_visits(losses: Losses | None) -> tuple[float, float]:
    if losses is None or not len(losses.before):
        return math.nan, math.nan
    before = wide(losses.before.cpu())
    found = (rank_correlation(wide(kind.cpu()), before) for kind in (losses.end, losses.without))
    end, without = found
    return end, without


def _losses_at_visits(training: NamedTraining | None, targets: Tensor) -> tuple[float, float]:
    visits = None if training is None else training.visits
    if visits is None or visits.with_targets is None:
        return math.nan, math.nan
    try:
        found = visits.prequential(targets, skip=1), visits.last_loss(targets)
    except (DataError, LikelihoodError):  # of other data, or a loss that its sums do not give
        return math.nan, math.nan
    before, last = (float(wide(losses).nanmean()) for losses in found)
    return before, last


def _readout_figures(readouts: Tensor | None) -> tuple[float, float]:
    if readouts is None or readouts.shape[1] < 2:
        return math.nan, math.nan
    known = wide(readouts[readouts.isfinite().all(1)])
    if len(known) < FEWEST:
        return math.nan, math.nan
    ranks = [rank_correlation(column, known[:, -1]) for column in known[:, :-1].mT]
    means = known.mean(0)
    return sum(ranks) / len(ranks), float(means[-1] / means[0])

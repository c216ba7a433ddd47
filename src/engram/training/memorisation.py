r"""What a net has memorised: examples that it knows at the end, and did not before each look.

A net that is trained long enough knows its examples by heart, and no estimate from its last weights
alone sees what it would have said without one of them. Its own training does: the prequential loss
of an example is high as long as the net cannot tell its target from all the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from engram.core.data.inputs import Data
from engram.core.dtypes import wide
from engram.errors import DataError, TrainingError
from engram.training.segments import NamedTraining
from engram.training.training import Training

# Chosen and measured on small CNNs with 10 % wrong labels, three seeds each: shares of 0 to 0.006
# after 12 epochs with and without dropout (training loss 0.4 to 0.8), 0.05 after 24 epochs without
# (0.09 to 0.16; two fifths of the wrong labels), 0.13 after 40 (0.01; nine tenths of them). With
# no wrong label, one seed: 0.03, 0.08 and 0.15 after 12, 24 and 40 epochs without dropout: hard
# examples are memorised too, and the share does not tell whether labels are wrong
FAR_BELOW = 0.1  # of the prequential loss: that of an example which is known at the end
# Mean loss at the end over that before the visits: below, a net knows its data by heart. Measured
# on CNNs: 0.6 where they generalise, 0.05 after 40 epochs without dropout
BY_HEART = 0.1
HARD = 2.0  # times the mean of all: the prequential loss of one that was unknown for long
UNKNOWN = 4 * math.log(2)  # nats in all visits but the first: more than four with even odds


@dataclass(frozen=True)
class Memorisation:
    """How much of its examples a net knows only from having seen them.

    Args:
        share: of the examples that are memorised.
        loss_ratio: mean loss at the end over mean prequential loss; 1 for a net that has learned
            nothing since, near 0 for one that knows its data by heart.
        memorised: which examples, [N].
    """

    share: float
    loss_ratio: float
    memorised: Tensor

    @property
    def note(self) -> str | None:
        """What to say of estimates at such weights; None where the net has not memorised."""
        if not self.loss_ratio < BY_HEART:
            return None
        return (
            f"the net knows its data by heart: its loss is {self.loss_ratio:.2g} of that before "
            "the visits. The leave-one-out loss is too small then; it ranks examples better than "
            "the loss does, label_issues better still, and engram.replayed_level finds its size"
        )


def prequential(training: Training | NamedTraining, data: Data | None = None) -> Tensor | None:
    """The mean loss of every example before its visits, [N]; None where steps named none.

    Args:
        training: a record.
        data: that was trained on, or its targets; see :meth:`Visits.prequential`.
    """
    visits = training.visits
    if visits is None or visits.with_targets is None:
        return None
    return visits.prequential(data)


def memorisation(
    training: Training | NamedTraining, data: Data | None = None, loss: Tensor | None = None
) -> Memorisation:
    r"""Which examples a net has memorised, from its own training.

    Example i is memorised where the net knows it at the end, and had found it hard for long: with
    its prequential loss :math:`\bar\ell_i` over the :math:`T_i - 1` visits after the first, at
    which nothing was known yet,

    .. math:: \ell_i < \tfrac{1}{10}\, \bar\ell_i, \qquad
        \bar\ell_i > \tfrac{2}{N} \sum_j \bar\ell_j, \qquad (T_i - 1)\, \bar\ell_i > 4 \log 2

    The second compares examples, and so does not depend on how long the training was; the third
    leaves out what was never hard. Meant for classifiers, whose losses are not negative.

    Args:
        training: a record whose steps named their examples.
        data: that was trained on, or its targets; not needed where visits were named with targets.
        loss: of every example at the end, [N]; if not given, that just before its last visit.

    Example:
        >>> import torch, engram
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> training = engram.record(optimizer, model)
        >>> for logit in (-2.0, -2.0, -1.0, 8.0):  # of the first example's class, at its visits
        ...     outputs = torch.tensor([[logit, 0.0], [4.0, 0.0], [5.0, 0.0]])
        ...     training.visit([0, 1, 2], outputs, torch.tensor([0, 0, 0]))
        >>> memorisation(training).memorised
        tensor([ True, False, False])
    """
    visits = training.visits
    if visits is None or visits.with_targets is None:
        raise TrainingError(
            "a record whose steps have named their examples",
            "one without visits",
            "use engram.record(optimizer, model, loader=loader), or training.visit",
        )
    before = visits.prequential(data, skip=1)
    end = visits.last_loss(data) if loss is None else loss.detach().cpu().to(before.dtype)
    if end.shape != before.shape:
        raise DataError(
            f"a loss for each of the {len(before):,} examples that were named",
            f"shape {list(end.shape)}",
            "pass result.loss of all training examples",
        )
    known = before.isfinite() & end.isfinite()
    mean = wide(before[known]).mean()
    hard = (before > HARD * mean) & ((visits.count - 1).clamp(min=1) * before > UNKNOWN)
    found = known & (end < FAR_BELOW * before) & hard
    ratio = float(wide(end[known]).mean() / mean)
    return Memorisation(float(found.sum() / known.sum().clamp(min=1)), ratio, found)

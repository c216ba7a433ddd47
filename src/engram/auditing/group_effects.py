r"""What each group does to the others: leave-group-out for every value of a column.

Weights that have been fitted to the other examples say little about what these lose or gain when a
group goes: they always gain on average, as the weights then fit to them alone. So each of them is
looked at as if it had been left out itself:

.. math:: \text{harm} = \frac{1}{|R|} \sum_{i \in R}
    \ell(f_i + d_i, y_i) - \ell(f_i + d_i + \Delta f_i, y_i)

with :math:`\Delta f_i` the change of its outputs by leaving the group out. With test data the
losses there are compared. A group of half the data or more is never said to hurt: where the others
are the wrong ones, they are better off without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engram.core.progress import progress_over
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.effects import Effect
from engram.sensitivity.groups import remove
from engram.sensitivity.result import Result
from engram.training.training import Training
from engram.trust.verdict import LEVELS, UNRELIABLE

if TYPE_CHECKING:
    import pandas as pd

MOST_GROUPS = 50  # that are left out, the largest first; each takes a good part of a training
COVERED = 1.96  # standard errors either side of a mean: 95 % of a normal distribution
REPLAYED_STEPS = 40_000  # of all groups together, up to which trainings are walked again
COLUMNS = ("examples", "harm", "harm_low", "harm_high", "own_loss_change", "hurts", "verdict", "by")


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model with what is known of it.

    Args:
        model, data, posterior: of the audit.
        training: its record; None where there is none.
        result: leave-one-out.
        test: other data to see the effects on; None for the other examples.
    """

    model: nn.Module
    data: tuple[Tensor, Tensor]
    posterior: Posterior
    training: Training | None
    result: Result
    test: tuple[Tensor, Tensor] | None = None


def group_effects(trained: Trained, groups: Sequence[str], progress: bool) -> pd.DataFrame:
    """A row for each group: what it adds to the others' loss, with an interval and a verdict.

    Args:
        trained: the model.
        groups: that each example is of, [N].
        progress: show a bar.
    """
    import pandas as pd

    names = pd.Series(list(groups))
    counts = names.value_counts()
    chosen = [name for name, count in counts.items() if count < len(names)][:MOST_GROUPS]
    training = _replayable(trained, len(chosen))
    rows: dict[str, dict[str, Any]] = {}
    for name in progress_over(chosen, "leaving groups out", progress):
        indices = torch.from_numpy((names == name).to_numpy().nonzero()[0].copy())
        rows[str(name)] = _row(trained, indices, training)
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS))
    return frame.rename_axis("group")


def no_groups() -> pd.DataFrame:
    """The table of data without groups."""
    import pandas as pd

    return pd.DataFrame(columns=list(COLUMNS)).rename_axis("group")


def _replayable(trained: Trained, count: int) -> Training | None:
    """The record, where walking it again for every group is affordable."""
    training = trained.training
    if training is None or training.order is None:
        return None
    return training if training.num_steps * count <= REPLAYED_STEPS else None


def _row(trained: Trained, indices: Tensor, training: Training | None) -> dict[str, Any]:
    removal = remove(
        trained.model,
        trained.data,
        trained.posterior,
        indices,
        evaluate_on=trained.data if trained.test is None else trained.test,
        training=training,
        progress=False,
    )
    assert removal.evaluation is not None
    if trained.test is None:
        gains = _gains_left_out(trained.result, removal.evaluation, indices)
    else:
        gains = (removal.evaluation.loss - removal.evaluation.loss_without).double()
    harm = float(gains.mean())
    reach = COVERED * float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    believed = removal.verdict.level != LEVELS[UNRELIABLE]
    return {
        "examples": len(indices),
        "harm": harm,
        "harm_low": harm - reach,
        "harm_high": harm + reach,
        "own_loss_change": removal.group.change,
        "hurts": bool(harm - reach > 0) and believed and 2 * len(indices) < trained.result.num_data,
        "verdict": removal.verdict.level,
        "by": removal.estimator,
    }


def _gains_left_out(result: Result, effect: Effect, indices: Tensor) -> Tensor:
    """What each other example gains, as if it had been left out itself, [M]."""
    rest = torch.ones(len(result.outputs), dtype=torch.bool)
    rest[indices] = False
    likelihood, targets = result.basis.known_likelihood, result.targets[rest]
    left_out = (result.outputs + result.deviation)[rest]
    moved = left_out + (effect.outputs_without - effect.outputs)[rest]
    prepared = likelihood.prepare(left_out, targets)
    return (likelihood.loss(left_out, prepared) - likelihood.loss(moved, prepared)).double()

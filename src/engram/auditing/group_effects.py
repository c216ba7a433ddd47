r"""What each group and each class does to the others, by leaving it out as a whole.

Weights that have been fitted to the other examples say little about what these lose or gain when a
group goes: they always gain on average, as the weights then fit to them alone. So each of them is
looked at as if it had been left out itself:

.. math:: \text{gain} = \frac{1}{|R|} \sum_{i \in R}
    \ell(f_i + d_i, y_i) - \ell(f_i + d_i + \Delta f_i, y_i)

with :math:`\Delta f_i` the change of its outputs by leaving the group out. With test data the
losses there are compared. Left-out predictions that overshoot gain by any change, so that random
groups seem to hurt too: the harm of a group is what its removal gains beyond that of random groups
of the same size and classes (:mod:`engram.auditing.random_groups`). A group of half the data or
more is never said to hurt: where the others are the wrong ones, they are better off without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engram.auditing.random_groups import Gains, Null, random_groups
from engram.core.progress import progress_over
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.effects import Effect
from engram.sensitivity.groups import Removal, remove
from engram.sensitivity.result import Result
from engram.training.training import Training
from engram.trust.verdict import LEVELS, UNRELIABLE

if TYPE_CHECKING:
    import pandas as pd

MOST_GROUPS = 50  # that are left out, the largest first; each takes a good part of a training
MOST_CLASSES = 20  # that are left out in turn, the largest first
FEWEST_CLASSES = 3  # without one of two nothing is left to tell apart
REPLAYED_STEPS = 40_000  # of all groups together, up to which trainings are walked again
COLUMNS = (
    "examples", "harm", "harm_low", "harm_high", "random", "own_loss_change", "hurts", "verdict",
    "by",
)  # fmt: skip
OF_CLASSES = ("examples", "gain", "gain_low", "gain_high", "own_loss_change", "verdict", "by")


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

    @property
    def strata(self) -> Tensor:
        """Classes [N] of which a random group has as many examples as the group has."""
        targets = self.data[1]
        whole = targets.dim() == 1
        return targets if whole else torch.zeros(len(targets), dtype=torch.long)


def group_effects(
    trained: Trained, groups: Sequence[str], seed: int, progress: bool
) -> pd.DataFrame:
    """A row for each group: what it adds to the others' loss, with an interval and a verdict.

    Args:
        trained: the model.
        groups: that each example is of, [N].
        seed: of the random groups that they are compared with.
        progress: show a bar.
    """
    import pandas as pd

    names = pd.Series(list(groups))
    counts = names.value_counts()
    chosen = [name for name, count in counts.items() if count < len(names)][:MOST_GROUPS]
    if not chosen:
        return no_groups()
    members = [_positions(names == name) for name in chosen]
    drawn = random_groups(members, trained.strata, seed)
    training = _replayable(trained, len(members) + len(drawn))
    removed = [
        _removed(trained, indices, training)
        for indices in progress_over([*drawn, *members], "leaving groups out", progress)
    ]
    null = Null.of([gains for _, gains in removed[: len(drawn)]], len(members))
    rows = {
        str(name): _row(trained, removal, gains, null)
        for name, (removal, gains) in zip(chosen, removed[len(drawn) :], strict=True)
    }
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS))
    return frame.rename_axis("group")


def class_effects(trained: Trained, names: Sequence[str], progress: bool) -> pd.DataFrame:
    """A row for each class: what examples of the others gain where there are none of it.

    By one step with the curvature of the rest: which classes are in each other's way shows in that.
    Empty of fewer than three classes.

    Args:
        trained: a classifier.
        names: of its classes.
        progress: show a bar.
    """
    import pandas as pd

    if len(names) < FEWEST_CLASSES:
        return no_classes()
    labels = trained.data[1]
    counts = torch.bincount(labels, minlength=len(names))
    order = counts.argsort(descending=True, stable=True)[:MOST_CLASSES].tolist()
    some = [number for number in order if 0 < counts[number] < len(labels)]
    rows = {}
    for number in progress_over(some, "leaving classes out", progress):
        removal, gains = _removed(trained, _positions(labels == number), None)
        low, high = gains.interval
        rows[names[number]] = {
            "examples": gains.size, "gain": gains.mean, "gain_low": low, "gain_high": high,
            "own_loss_change": removal.group.change, "verdict": removal.verdict.level,
            "by": removal.estimator,
        }  # fmt: skip
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(OF_CLASSES))
    return frame.rename_axis("class")


def no_classes() -> pd.DataFrame:
    """The table of data without classes."""
    import pandas as pd

    return pd.DataFrame(columns=list(OF_CLASSES)).rename_axis("class")


def _positions(chosen: Any) -> Tensor:
    return torch.as_tensor(chosen).nonzero()[:, 0]


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


def _removed(trained: Trained, indices: Tensor, training: Training | None) -> tuple[Removal, Gains]:
    """A removal, and what every other example gains by it."""
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
    size, count = len(indices), trained.result.num_data
    if trained.test is not None:
        gains = (removal.evaluation.loss - removal.evaluation.loss_without).double()
        return removal, Gains(gains, size, count)
    gains = _gains_left_out(trained.result, removal.evaluation)
    gains[indices] = torch.nan
    return removal, Gains(gains, size, count)


def _row(trained: Trained, removal: Removal, gains: Gains, null: Null) -> dict[str, Any]:
    harm, reach, expected = null.compared(gains)
    believed = removal.verdict.level != LEVELS[UNRELIABLE]
    gained = harm - reach > 0 and harm + expected > 0
    return {
        "examples": gains.size,
        "harm": harm,
        "harm_low": harm - reach,
        "harm_high": harm + reach,
        "random": expected,
        "own_loss_change": removal.group.change,
        "hurts": gained and believed and 2 * gains.size < trained.result.num_data,
        "verdict": removal.verdict.level,
        "by": removal.estimator,
    }


def _gains_left_out(result: Result, effect: Effect) -> Tensor:
    """What each example gains, as if it had been left out itself, [N]."""
    likelihood = result.basis.known_likelihood
    left_out = result.outputs + result.deviation
    moved = left_out + (effect.outputs_without - effect.outputs)
    prepared = likelihood.prepare(left_out, result.targets)
    return (likelihood.loss(left_out, prepared) - likelihood.loss(moved, prepared)).double()

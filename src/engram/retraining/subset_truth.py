"""What many trainings on random subsets say about every example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engram.core.arguments import one_of, whole
from engram.core.parameters import Named, check_module, uncompiled
from engram.core.printable import printable
from engram.core.storage.kinds import (
    Column,
    Kind,
    anything,
    check_that,
    checked,
    flags,
    numbers,
    stored,
)
from engram.errors import ArgumentError
from engram.retraining.user_function import with_state

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("loss", "probability")


@dataclass(frozen=True)
class Estimate:
    """A number, and its standard error."""

    value: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:.4f} +- {self.standard_error:.4f}"


@dataclass(frozen=True, eq=False)
class Influence:
    """The effect of every training example on every evaluated one, [N, T].

    Attributes:
        change: without the training example minus with it.
        standard_error: of each.
    """

    change: Tensor
    standard_error: Tensor


@dataclass(frozen=True, eq=False)
class SubsetTruth:
    r"""Memorisation and influence from S trainings on random subsets; N examples, K outputs.

    .. math:: \text{loss\_out}_i = \operatorname{mean}_{s:\, i \notin s} \ell_i(\theta_s),
        \qquad \text{memorisation}_i = \text{loss\_out}_i - \text{loss\_in}_i

    All of it is measured in eval mode, and averaged over seeds: it is true of the way to train,
    not of one trained net. Nets that see 85 % of the data do a little worse than nets that leave
    out one example, so the mean of ``loss_out`` is somewhat above the leave-one-out loss.

    Attributes:
        kept: which examples each training saw, [S, N].
        targets: of the examples, as in the data.
        outputs: of each trained net on all examples, [S, N, K].
        losses: likewise, nats, [S, N].
        probabilities: of each example's own label, likewise; None where targets are no labels.
        prediction_in: mean prediction of the nets that saw the example, [N, K].
        prediction_out: of those that did not, [N, K]: out-of-sample, as cross-validation gives.
        seeds: of each training.
        seconds: that each training took, [S].
        evaluation_outputs: of each net on ``evaluate_on``, [S, T, K].
        evaluation_losses: likewise, [S, T].
        evaluation_probabilities: likewise, [S, T].
        parameters: of every net by name, [S, *shape], where they were kept.
        trained_by: the training function, in words.
        provenance: versions, settings and seed, for the record; nothing is decided by it.

    Reference:
        Feldman and Zhang, "What neural networks memorize and why", NeurIPS 2020.
    """

    kept: Tensor
    targets: Tensor
    outputs: Tensor
    losses: Tensor
    prediction_in: Tensor
    prediction_out: Tensor
    seeds: tuple[int, ...]
    seconds: Tensor
    provenance: Mapping[str, Any] = field(repr=False)
    probabilities: Tensor | None = None
    evaluation_outputs: Tensor | None = None
    evaluation_losses: Tensor | None = None
    evaluation_probabilities: Tensor | None = None
    parameters: Named = field(default_factory=dict, repr=False)
    trained_by: str = ""

    @property
    def num_trainings(self) -> int:
        """S."""
        return len(self.kept)

    @property
    def num_data(self) -> int:
        """N."""
        return self.kept.shape[1]

    @property
    def times_in(self) -> Tensor:
        """How many trainings saw the example, [N]."""
        return self.kept.sum(0)

    @property
    def times_out(self) -> Tensor:
        """How many did not, [N]."""
        return (~self.kept).sum(0)

    @property
    def loss_in(self) -> Tensor:
        """Mean loss over the nets that saw the example, nats; NaN where none did, [N]."""
        return mean_over(self.kept, self.losses)

    @property
    def loss_out(self) -> Tensor:
        """Mean loss over the nets that did not see it, which is the true loss without it, [N]."""
        return mean_over(~self.kept, self.losses)

    @property
    def loss_in_error(self) -> Tensor:
        """Standard error of ``loss_in``; NaN for fewer than two nets, [N]."""
        return variance_of_mean(self.kept, self.losses).sqrt()

    @property
    def loss_out_error(self) -> Tensor:
        """Standard error of ``loss_out``; NaN for fewer than two nets, [N]."""
        return variance_of_mean(~self.kept, self.losses).sqrt()

    @property
    def memorisation(self) -> Tensor:
        """loss_out - loss_in, what having seen the example is worth to it, nats, [N]."""
        return self.loss_out - self.loss_in

    @property
    def memorisation_error(self) -> Tensor:
        """Standard error of ``memorisation``, [N]."""
        return _difference_error(self.kept, self.losses)

    @property
    def label_memorisation(self) -> Tensor:
        """Mean probability of the own label over the nets that saw it, minus the others', [N]."""
        values = self._probabilities()
        return mean_over(self.kept, values) - mean_over(~self.kept, values)

    @property
    def label_memorisation_error(self) -> Tensor:
        """Standard error of ``label_memorisation``, [N]."""
        return _difference_error(self.kept, self._probabilities())

    @property
    def loss(self) -> Estimate:
        """Mean of ``loss_in``, the training loss; the error is that of finitely many trainings."""
        return _overall(self.kept, self.losses)

    @property
    def loo_loss(self) -> Estimate:
        """Mean of ``loss_out``, the loss without the example; the error is as for ``loss``."""
        return _overall(~self.kept, self.losses)

    @property
    def test_loss(self) -> Tensor:
        """Mean loss of each net on ``evaluate_on``, [S]."""
        return self._evaluated("loss").mean(1)

    @property
    def unknown(self) -> Tensor:
        """Positions of the examples that no training left out, or none saw; they have NaN."""
        return ((self.times_in == 0) | (self.times_out == 0)).nonzero()[:, 0]

    def influence(self, measure: str = "loss") -> Influence:
        r"""The effect of every training example on every example of ``evaluate_on``.

        .. math:: \operatorname{mean}_{s:\, i \notin s} \ell_j(\theta_s)
            - \operatorname{mean}_{s:\, i \in s} \ell_j(\theta_s)

        Positive where the evaluated example's loss is larger without the training example. Most
        effects are below their standard errors unless there are thousands of trainings.

        Args:
            measure: ``loss``, or ``probability`` of the evaluated example's own label.
        """
        values = self._evaluated(one_of("measure", measure, MEASURES, 'use "loss"'))
        seen, unseen = self.kept.double(), (~self.kept).double()
        variance = _columns_variance(seen, values) + _columns_variance(unseen, values)
        return Influence(
            _columns_mean(unseen, values) - _columns_mean(seen, values), variance.sqrt()
        )

    def model(self, number: int, template: nn.Module) -> nn.Module:
        """A copy of the template with the weights, and the buffers, of one training."""
        if not self.parameters:
            raise ArgumentError("kept parameters", "none", "retrain with keep_models=True")
        check_module(template)
        chosen = whole("number of a training", number, 0, self.num_trainings - 1)
        state = {name: values[chosen] for name, values in self.parameters.items()}
        return with_state(uncompiled(template), state)

    def to_frame(self) -> pd.DataFrame:
        """One row per example."""
        import pandas as pd

        columns: dict[str, Any] = {}
        if self.targets.dim() == 1:
            columns["target"] = self.targets.numpy()
        for name in ("loss_in", "loss_in_error", "loss_out", "loss_out_error"):
            columns[name] = getattr(self, name).numpy()
        for name in ("memorisation", "memorisation_error"):
            columns[name] = getattr(self, name).numpy()
        if self.probabilities is not None:
            columns["label_memorisation"] = self.label_memorisation.numpy()
        columns |= {"times_in": self.times_in.numpy(), "times_out": self.times_out.numpy()}
        return pd.DataFrame(columns, index=pd.RangeIndex(self.num_data, name="example"))

    def save(self, folder: str | Path) -> Path:
        """Write ``subset_truth.json`` and its tensors into a folder, whole; no pickle."""
        return KIND.write(self, folder)

    def _probabilities(self) -> Tensor:
        if self.probabilities is None:
            raise ArgumentError("targets that are labels", "others", "use memorisation")
        return self.probabilities

    def _evaluated(self, measure: str) -> Tensor:
        if self.evaluation_losses is None:
            raise ArgumentError("a run with evaluate_on=", "one without", "pass a data set")
        found = {"loss": self.evaluation_losses, "probability": self.evaluation_probabilities}
        values = found[measure]
        if values is None:
            raise ArgumentError("targets that are labels", "others", 'use measure="loss"')
        return values.double()

    def __repr__(self) -> str:
        share = float(self.kept.double().mean())
        low, high = int(self.times_out.min()), int(self.times_out.max())
        lines = [
            f"Trained {self.num_trainings:,} times on {share:.0%} of {self.num_data:,} examples"
            f" ({printable(self.trained_by)})",
            f"loss                  {self.loss} where the example was seen, nats per example",
            f"loo loss              {self.loo_loss} where it was left out",
            f"left out              {low} to {high} times",
        ]
        if self.evaluation_losses is not None:
            spread = self.test_loss.std() / math.sqrt(self.num_trainings)
            mean = Estimate(float(self.test_loss.mean()), float(spread))
            lines.append(f"loss on evaluate_on   {mean}")
        if len(self.unknown):
            lines.append(
                f"not known             {len(self.unknown):,} examples that all trainings saw, or"
                " none: NaN, and in no mean"
            )
        total = float(self.seconds.sum())
        lines.append(
            f"time                  {total:.3g} s, {total / self.num_trainings:.2g} s each"
        )
        return "\n".join(lines)


def mean_over(chosen: Tensor, values: Tensor) -> Tensor:
    """Mean over the chosen nets, example by example; NaN where none is chosen, [S, N] -> [N]."""
    return torch.where(chosen, values.double(), 0.0).sum(0) / chosen.sum(0)


def variance_of_mean(chosen: Tensor, values: Tensor) -> Tensor:
    """Squared standard error of that mean; NaN for fewer than two nets, [N]."""
    count = chosen.sum(0)
    squares = torch.where(chosen, (values.double() - mean_over(chosen, values)) ** 2, 0.0).sum(0)
    return squares / (count - 1).clamp(min=0) / count


def _difference_error(kept: Tensor, values: Tensor) -> Tensor:
    return (variance_of_mean(kept, values) + variance_of_mean(~kept, values)).sqrt()


def _overall(chosen: Tensor, values: Tensor) -> Estimate:
    """The mean over examples of their means over nets, with the standard error of the nets.

    Losses of one net move together, so its whole contribution is one draw: the jackknife over
    nets. The examples are the ones that there are; no error is made by their choice.
    """
    count, means = chosen.sum(0), mean_over(chosen, values)
    known = count > 0
    shift = (values.double() - means) / (count - 1)  # of the mean, where the net is taken away
    single = torch.where(chosen & (count > 1), shift, 0.0)[:, known].mean(1)
    nets = len(values)
    error = math.sqrt((nets - 1) / nets * float(((single - single.mean()) ** 2).sum()))
    return Estimate(float(means[known].mean()), error if bool((count > 1).any()) else math.nan)


def _columns_mean(chosen: Tensor, values: Tensor) -> Tensor:
    """Means of values [S, T] over each example's chosen nets [S, N], [N, T]."""
    return chosen.T @ values / chosen.sum(0)[:, None]


def _columns_variance(chosen: Tensor, values: Tensor) -> Tensor:
    """Squared standard errors of those means, [N, T]."""
    count = chosen.sum(0)[:, None]
    centred = values - values.mean(0)  # against cancellation
    spread = (_columns_mean(chosen, centred**2) - _columns_mean(chosen, centred) ** 2).clamp(min=0)
    return torch.where(count > 1, spread / (count - 1), torch.nan)


COLUMNS = {
    "kept": flags("S N"),
    "targets": anything("N ..."),
    "outputs": numbers("S N K"),
    "losses": numbers("S N"),
    "probabilities": numbers("S N", low=0.0),
    "prediction_in": Column("N K", float, finite=False),  # NaN where no net saw the example
    "prediction_out": Column("N K", float, finite=False),
    "seeds": anything("S"),
    "seconds": numbers("S"),
    "evaluation_outputs": numbers("S T K"),
    "evaluation_losses": numbers("S T"),
    "evaluation_probabilities": numbers("S T", low=0.0),
    "parameters": anything("S ..."),
}


def _check(found: SubsetTruth) -> None:
    given = [part is not None for part in (found.evaluation_outputs, found.evaluation_losses)]
    check_that(given[0] == given[1], "both or none of outputs and losses on evaluate_on", "one")


KIND = stored(Kind("subset_truth", 1, checked(SubsetTruth, COLUMNS, _check)))

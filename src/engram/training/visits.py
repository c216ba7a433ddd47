r"""What the training itself says about its examples: outputs just before each step that used them.

Whenever a step visits an example, the forward pass of that step gives its prediction at weights
that have not taken the step yet. Kept are sums over the visits, for every interval between two
checkpoints: of the predictions, whose mean minus the target is the *visit residual* of a segment,
and of the losses. The mean over the visits t of example i is its *prequential* loss,

.. math:: \bar\ell_i = \frac{1}{T_i} \sum_t \ell(f_i(\theta_t), y_i)

Nothing is computed for it but a softmax: no further pass over the data, no gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from engram.core.arguments import whole
from engram.core.data.batches import Batches, Data, as_outputs, check_output_rows
from engram.core.selection import check_indices
from engram.core.storage.kinds import check_that
from engram.errors import (
    ArgumentError,
    DataError,
    LikelihoodError,
    ModelMismatchError,
    TrainingError,
)
from engram.likelihoods import Likelihood
from engram.likelihoods.remembered import Remembered
from engram.training.intervals import IntervalSums

WAITING = 16  # visits that are added at once: a device that computes ahead is waited for less often
READ = 1024  # examples whose targets are read at once
Indices = Tensor | Sequence[int]


@dataclass
class Visits:
    """The examples of a training as its own steps have seen them.

    A row of :attr:`sums` has the number of visits, the predictions [K], and the losses [1] or the
    statistics that losses are made of [M].

    Args:
        likelihood: that makes predictions of outputs; only remembered where the record was loaded
            and it is a user's own.
        sums: over the visits, by interval.
        num_outputs: K, from the first visit on.
        with_targets: whether targets came with the outputs, and losses were summed; else the
            numbers that a loss is made of once targets are known. None before the first visit.
        keeps_predictions: False where sums of [N, K] would take too much memory.
        num_unmatched: forward passes for which no batch of as many examples had been named.
        num_bad: visits whose outputs were not finite; nothing of them is in the sums.
    """

    likelihood: Likelihood | Remembered
    sums: IntervalSums = field(default_factory=IntervalSums)
    num_outputs: int = 0
    with_targets: bool | None = None
    keeps_predictions: bool = True
    num_unmatched: int = 0
    num_bad: int = 0
    _waiting: list[tuple[Tensor, Tensor, Tensor | None]] = field(
        default_factory=list, init=False, repr=False
    )

    def __repr__(self) -> str:
        count = self.count
        return (
            f"Visits({int((count > 0).sum()):,} of {self.num_data:,} examples, "
            f"{int(count.sum()):,} visits, {self.num_unmatched:,} passes unmatched)"
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was named, and no pass came without a name."""
        return self.with_targets is None and not self.num_unmatched

    @property
    def num_data(self) -> int:
        """Examples that there are, as far as they were named."""
        self.settle()
        return self.sums.num_data

    @property
    def count(self) -> Tensor:
        """How often each example was visited, [N]."""
        self.settle()
        if self.sums.first is None:
            return torch.zeros(self.sums.num_data, dtype=torch.int64)
        return self.sums.total()[:, 0].long()

    def add(self, indices: Tensor, outputs: Tensor, targets: Tensor | None = None) -> None:
        """Add the examples of a forward pass: positions in the data, outputs, and targets."""
        outputs = as_outputs(outputs)
        check_output_rows(outputs, len(indices))
        if self.with_targets is None:
            _check_outputs(self._usable(), outputs.shape[1])
            self.num_outputs, self.with_targets = outputs.shape[1], targets is not None
        if outputs.shape[1] != self.num_outputs:
            raise DataError(
                f"{self.num_outputs} outputs for every example, as at the first visit",
                f"{outputs.shape[1]}",
                "name the visits of one model's outputs only",
            )
        if (targets is not None) != self.with_targets:
            raise ArgumentError(
                f"visits {'with' if self.with_targets else 'without'} targets, as the first one",
                f"one {'without' if targets is None else 'with'} targets",
                "give targets at all visits, or at none",
            )
        kept = None if targets is None else targets.detach().clone()
        self._waiting.append((indices, outputs.detach().clone(), kept))
        if len(self._waiting) >= WAITING:
            self.settle()

    def settle(self) -> None:
        """Add what waits to the sums."""
        waiting, self._waiting = self._waiting, []
        with torch.inference_mode(False), torch.no_grad():
            for indices, outputs, targets in waiting:
                self._sum(indices, outputs, targets)

    def _sum(self, indices: Tensor, outputs: Tensor, targets: Tensor | None) -> None:
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        losses = self._losses(outputs, targets)
        parts = [torch.ones_like(outputs[:, :1]), losses]
        if self.keeps_predictions:
            parts.insert(1, self._usable().mean(outputs))
        rows = torch.cat([part.to(losses.dtype) for part in parts], dim=1).cpu()
        good = rows.isfinite().all(1)
        if not bool(good.all()):
            self.num_bad += int((~good).sum())
            rows, indices = rows[good], indices[good]
        if len(indices):
            self.sums.add(indices, self._affordable(int(indices.max()) + 1, rows))

    def _affordable(self, count: int, rows: Tensor) -> Tensor:
        """Rows, without predictions where those of so many examples take too much memory."""
        first = self.sums.first
        if first is not None and len(first) >= count:
            return rows
        if self.keeps_predictions and not self.sums.fits(count, rows):
            self.keeps_predictions = False
            self.sums.drop(self._predictions)
            rows = torch.cat([rows[:, :1], rows[:, self._predictions.stop :]], dim=1)
        self.sums.check(count, rows)
        return rows

    @property
    def _predictions(self) -> slice:
        """Columns of the predictions."""
        return slice(1, 1 + self.num_outputs)

    @property
    def _loss_columns(self) -> slice:
        return slice(self._predictions.stop if self.keeps_predictions else 1, None)

    def _losses(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """The losses [B, 1], or what they can be made of [B, M]; of neither [B, 0]."""
        likelihood = self._usable()
        if targets is not None:
            prepared = likelihood.prepare(outputs, targets.to(outputs.device))
            return likelihood.loss(outputs, prepared)[:, None]
        found = likelihood.loss_statistics(outputs)
        return outputs[:, :0] if found is None else found

    def _usable(self) -> Likelihood:
        if isinstance(self.likelihood, Remembered):
            raise LikelihoodError(
                f"the likelihood {self.likelihood!r} itself",
                "a loaded record, which only remembers it",
                "say it again: engram.record(..., likelihood=...), and load its state",
            )
        return self.likelihood

    def advance(self, step: int) -> None:
        """So many steps were taken; visits from now on are those of the next one."""
        self.sums.advance(step)

    def cut(self, kept: Collection[int]) -> None:
        """A checkpoint was taken: a new interval begins; those between kept ones are merged."""
        self.settle()
        self.sums.cut(kept)

    def mean_predictions(
        self, indices: Tensor, start: int = 0, end: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mean prediction of examples at their visits within some steps, and their number.

        Args:
            indices: of the examples, [B].
            start, end: steps; rounded to the intervals that were kept.

        Returns:
            Means [B, K], NaN where an example was not visited in that time, and counts [B].
        """
        self.settle()
        if not self.keeps_predictions or self.sums.first is None:
            raise TrainingError(
                "a record with the predictions at visits",
                "one without visits" if self.keeps_predictions else "one that had no memory left",
                "name the examples of the steps: engram.record(optimizer, model, loader=loader)",
            )
        found = self.sums.total(start, end, check_indices(indices, self.sums.num_data))
        count = found[:, :1]
        mean = found[:, self._predictions] / torch.where(count > 0, count, torch.nan)
        return mean, count[:, 0].long()

    def prequential(
        self, data: Data | None = None, *, skip: int = 0, first: int = 0, last: int | None = None
    ) -> Tensor:
        r"""The mean loss of every example just before the steps that used it, [N].

        .. math:: \bar\ell_i = \frac{1}{T_i} \sum_t \ell(f_i(\theta_t), y_i)

        It is what the training said of the example before each look at it, so that what was only
        memorised counts as much as it did when it was not known yet. Losses are those of the
        training: with its dropout, its augmentation and the statistics of its batches.

        Args:
            data: that was trained on, in the order that the indices count, or its targets; not
                needed where targets were named with the visits.
            skip: 1 leaves out the first visit of every example that has others.
            first, last: steps that count are those after ``first`` up to ``last``, rounded to the
                intervals that were kept.

        Returns:
            Means in nats; NaN for an example that was not visited in that time.

        Example:
            >>> from engram.likelihoods import Categorical
            >>> visits = Visits(Categorical())
            >>> visits.add(torch.tensor([0, 1]), torch.zeros(2, 4))
            >>> visits.prequential(torch.tensor([3, 1]))
            tensor([1.3863, 1.3863])
        """
        skip = whole("skip", skip, 0, 1, "use 0, or 1 to leave out first visits")
        self._check_any()
        sums = self.sums.total(first, last)
        if skip and (first or last is not None):
            raise ArgumentError(
                "either skip=1, or first and last steps",
                "both",
                "leave skip out: the first visits are those of the first epoch's steps",
            )
        if skip:
            assert self.sums.first is not None
            again = sums[:, :1] > 1
            sums = torch.where(again, sums - self.sums.first[: len(sums)], sums)
        return self._mean_loss(sums, data)

    def last_loss(self, data: Data | None = None) -> Tensor:
        """The loss of every example just before its last visit, [N]; see :meth:`prequential`."""
        self._check_any()
        assert self.sums.last is not None
        return self._mean_loss(self.sums.last[: self.sums.num_data], data)

    def _check_any(self) -> None:
        self.settle()
        if self.sums.first is None:
            raise TrainingError(
                "a record whose steps have named their examples",
                f"none named, {self.num_unmatched:,} forward passes unmatched",
                "use engram.record(optimizer, model, loader=loader), or training.visit",
            )

    def _mean_loss(self, sums: Tensor, data: Data | None) -> Tensor:
        """Sums of losses, or what they are made of, over the number of visits."""
        count = sums[:, :1]
        means = sums[:, self._loss_columns] / torch.where(count > 0, count, torch.nan)
        if self.with_targets:
            return means[:, 0]
        likelihood = self._usable()
        if not means.shape[1]:
            raise LikelihoodError(
                "a likelihood whose mean loss follows from sums over outputs",
                repr(likelihood),
                "name the targets with the visits: training.visit(indices, outputs, targets)",
            )
        targets = self._targets(data)
        prepared = likelihood.prepare(means.new_zeros(len(means), self.num_outputs), targets)
        found = likelihood.loss_from_statistics(means, prepared)
        return found if found.dtype == sums.dtype else found.to(sums.dtype)

    def _targets(self, data: Data | None) -> Tensor:
        if data is None:
            raise ArgumentError(
                "the training data, or its targets",
                "none, and the visits were named without targets",
                "pass prequential(data)",
            )
        targets = data if isinstance(data, Tensor) else _read_targets(data)
        if len(targets) != self.sums.num_data:
            raise DataError(
                f"targets of the {self.sums.num_data:,} examples that were named",
                f"{len(targets):,}",
                "pass the data that the indices of the steps count, all of it",
            )
        return targets.detach().cpu()

    def load(self, found: Visits) -> None:
        """Go on with the visits of an earlier process; ModelMismatchError where losses differ."""
        if found.is_empty:
            return
        if found.likelihood.identity != self.likelihood.identity:
            raise ModelMismatchError(
                f"visits with {self.likelihood!r}",
                f"those with {found.likelihood!r}",
                "record with the likelihood= that the first training had",
            )
        for one in fields(self):
            if one.init and one.name != "likelihood":
                setattr(self, one.name, getattr(found, one.name))
        self._waiting.clear()

    def check_fit(self) -> None:
        """StorageError where what was read does not fit together."""
        sums = self.sums
        tables = [sums.first, sums.last, *(i.sums for i in sums.intervals)]
        shapes = {tuple(table.shape) for table in tables if table is not None}
        empty = sums.first is None
        rows = {shape[0] for shape in shapes} <= {sums.num_data}
        fits = len(shapes) == 1 and rows and sums.last is not None
        check_that(empty != fits and len(shapes) <= 1, "sums of one shape", f"{shapes or 'none'}")
        ends = [step for i in sums.intervals for step in (i.start, i.end)]
        check_that(bool(ends) and ends == sorted(ends), "intervals in order", f"{ends[:8]}")

    def copied(self) -> Visits:
        """The same in memory of its own."""
        self.settle()
        return replace(self, sums=self.sums.copied())


def positions(indices: Indices) -> Tensor:
    """Positions of a batch's examples in the data, which a batch may have several times."""
    try:
        found = torch.as_tensor(indices).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(indices).__name__
        raise ArgumentError("the indices of a batch", got, "pass a list or a tensor") from error
    whole_numbers = not (found.is_floating_point() or found.is_complex())
    if found.dim() != 1 or not whole_numbers or found.dtype == torch.bool or (found < 0).any():
        raise ArgumentError(
            "the indices of a batch: whole numbers from 0 in one list",
            f"{found.dtype} of shape {list(found.shape)}",
            "count examples from 0 in the order of the data",
        )
    return found.long()


def _read_targets(data: Data) -> Tensor:
    return torch.cat([batch.targets.cpu() for batch in Batches(data, READ)])


def _check_outputs(likelihood: Likelihood, count: int) -> None:
    if count == 1 and likelihood.shift_invariant:
        raise LikelihoodError(
            f"at least 2 outputs for {likelihood!r}",
            "1",
            'say engram.record(..., likelihood="bernoulli"), or "gaussian" for a regression',
        )

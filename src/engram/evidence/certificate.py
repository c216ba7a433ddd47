"""The leave-one-out loss with a confidence interval: what certifying gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.core.dtypes import SMALLEST_DIVISOR
from engram.core.printable import printable
from engram.core.progress import time_in_words
from engram.core.storage.kinds import Kind, check_that, checked, numbers, positions, stored
from engram.evidence.correlation import COVERED, Interval, rank_correlation
from engram.evidence.ways import GOING_ON, PART, REPEATABLE, WAYS
from engram.retraining.result import Retraining

if TYPE_CHECKING:
    import pandas as pd

TELLING = 0.5  # rank correlation of estimated and true losses below which intervals are too narrow
OTHER_NET = 0.5  # of the interval's half width that a refit's mean loss may be from the model's


@dataclass(frozen=True, eq=False)
class Certificate:
    """The mean leave-one-out loss and accuracy, each with a 95 % confidence interval.

    Attributes:
        loss: mean leave-one-out loss, nats per example, with its interval.
        accuracy: the same of a classifier's accuracy; None for a regression.
        estimated_loss: as the result has it.
        estimated_accuracy: likewise.
        train_loss: of the given model, and of the training with nothing left out.
        refit_train_loss: of the training with nothing left out.
        positions: row of ``truth`` for every draw; an example that is drawn twice is trained
            once, [m].
        guesses: estimated losses of the rows of ``truth``, [R].
        weights: of the draws, whose mean is about 1, [m].
        strata: that they are from, [m].
        truth: the retraining; ``truth.indices`` says which examples.
        way: how they were trained, one of ``minimum``, ``replay``, ``replay of a part``,
            ``from the start``, ``going on``.
        num_data: N.
    """

    loss: Interval
    accuracy: Interval | None
    estimated_loss: float
    estimated_accuracy: float | None
    train_loss: float
    refit_train_loss: float
    positions: Tensor = field(repr=False)
    guesses: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    strata: Tensor = field(repr=False)
    truth: Retraining = field(repr=False)
    way: str
    num_data: int

    @property
    def loo_nll(self) -> float:
        """Mean leave-one-out loss, nats per example."""
        return self.loss.value

    @property
    def interval(self) -> tuple[float, float]:
        """Where that is with 95 % confidence."""
        return self.loss.low, self.loss.high

    @property
    def refits(self) -> int:
        """Draws."""
        return len(self.positions)

    @property
    def trainings(self) -> int:
        """Copies that were trained without an example; one that is drawn twice is trained once."""
        return self.truth.num_copies

    @property
    def seconds(self) -> float:
        """That these copies took."""
        return float(self.truth.seconds.sum())

    @property
    def worth(self) -> float:
        """Refits drawn at random, and nothing estimated, that would give as narrow an interval."""
        losses = self.truth.loo_loss.double()[self.positions]
        share = self.weights / self.weights.sum()
        mean = (share * losses).sum()
        variance = float((share * (losses - mean).square()).sum())
        half = max((self.loss.high - self.loss.low) / 4, SMALLEST_DIVISOR)  # two standard errors
        return min(float(self.num_data), variance / half**2)

    def to_frame(self) -> pd.DataFrame:
        """One row per retrained example: the truth, and how often and at what weight it counts."""
        frame = self.truth.to_frame()
        rows = torch.zeros(len(frame), dtype=torch.long).index_add(
            0, self.positions, torch.ones_like(self.positions)
        )
        weights = torch.zeros(len(frame), dtype=torch.float64)
        weights[self.positions] = self.weights
        frame.insert(0, "draws", rows.numpy())
        frame.insert(1, "weight", weights.numpy())
        return frame

    def save(self, folder: str | Path) -> Path:
        """Write ``certificate.json`` and its tensors, the truth among them, into a folder."""
        return KIND.write(self, folder)

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        said = f"leave-one-out loss {self.loss} with {COVERED:.0%} confidence"
        said += f", estimated as {self.estimated_loss:.3f}"
        if self.accuracy is not None:
            said += f"; accuracy {self.accuracy}"
        return said

    def notes(self) -> list[str]:
        """What else has to be known about these trainings, in words."""
        half, floor = (self.loss.high - self.loss.low) / 2, self.truth.noise_floor
        found = []
        ranks = rank_correlation(self.guesses, self.truth.loo_loss)
        if not ranks >= TELLING:
            found.append(
                f"the estimate hardly ranks these examples as retraining does (Spearman "
                f"{ranks:.2f}): large losses that it misses are rarely drawn, and an interval from "
                "so few is too narrow then; use more refits"
            )
        chance = floor.repeated > REPEATABLE * float(self.truth.score.median())
        if chance and bool(self.truth.wanted_norm.isinf().all()):
            found.append(
                f"the same training twice moves predictions by {floor.repeated:.2g}: it is not "
                "decided by its seed, and that chance is in the interval"
            )
        apart = abs(self.refit_train_loss - self.train_loss)
        if apart > OTHER_NET * half:
            found.append(
                f"these trainings end at another loss on the training data, "
                f"{self.refit_train_loss:.3f}, than the given model, {self.train_loss:.3f}: the "
                "interval is about them"
            )
        if self.way == PART:
            found.append(
                "what an example had done before the checkpoint is still in the weights: use "
                "start=0 for the truth"
            )
        if self.way == GOING_ON:
            found.append(
                "every training began with a model that had seen the example: for a net that was "
                "trained to no minimum pass train=engram.recipes.FromStart(fit, Net)"
            )
        short = int((~self.truth.converged).sum())
        if short:
            found.append(f"{short} of the refits did not reach the gradient norm asked for")
        return found

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        lines = [
            f"leave-one-out loss    {self.loss} with {COVERED:.0%} confidence",
            f"estimated             {self.estimated_loss:.3f}, and {self.train_loss:.3f} on the "
            "training data",
        ]
        if self.accuracy is not None:
            lines.append(
                f"accuracy              {self.accuracy}, estimated {self.estimated_accuracy:.3f}"
            )
        lines += [
            f"from                  {self.trainings:,} trainings without an example for "
            f"{self.refits:,} draws, {time_in_words(self.seconds)}",
            f"                      as narrow as {self.worth:,.0f} drawn at random, of "
            f"{self.num_data:,}",
            f"way                   {WAYS[self.way]} ({printable(self.truth.trained_by)})",
        ]
        for note in self.notes():
            begin = "note                  "
            lines += wrap(note, 90, initial_indent=begin, subsequent_indent=" " * len(begin))
        return "\n".join(lines)


COLUMNS = {
    "positions": positions("m"),
    "guesses": numbers("R"),
    "weights": numbers("m", low=0),
    "strata": positions("m"),
}


def _check(found: Certificate) -> None:
    rows, last = len(found.truth.indices), int(found.positions.max())
    check_that(last < rows, f"draws among {rows} true rows", f"row {last}")
    guesses = len(found.guesses)
    check_that(guesses == rows, f"an estimate of each of {rows} true rows", f"{guesses}")
    check_that(found.way in WAYS, f"one of {', '.join(WAYS)}", repr(found.way)[:80])
    both = [found.accuracy is None, found.estimated_accuracy is None]
    check_that(both[0] == both[1], "both or none of the accuracies", "one")


KIND = stored(Kind("certificate", 1, checked(Certificate, COLUMNS, _check)))

"""The result of verifying estimates by retraining: correlations, a figure and a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.core.dtypes import SMALLEST_DIVISOR
from engram.core.printable import printable
from engram.core.storage.kinds import Kind, check_that, checked, numbers, positions, stored
from engram.core.storage.values import ADDED_LATER
from engram.evidence.correlation import Agreement, Interval
from engram.evidence.ways import MINIMUM, REPEATABLE, WAYS
from engram.retraining.result import Retraining

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STRATA = ("top", "middle", "bottom")  # of the estimated scores, from which a sample is drawn
# Where the sentence turns from one judgement to the next. Shares are of the median true score.
NOISY = 0.1  # share of the noise floor; above it the truth ranks nothing
DRIFTED = 0.5  # share that the refit moves predictions by; above it, a caveat is added
RANKED, ROUGHLY = 0.95, 0.7  # Spearman correlation: from here they rank, or roughly rank
SIZED = 1.25  # factor between true and estimated loss increases that still counts as right


@dataclass(frozen=True, eq=False)
class Verification:
    """Estimated and true scores and loss increases of some examples.

    Attributes:
        estimated_score: as the result has it, [n].
        estimated_increase: of the loss, likewise, [n].
        strata: 0 top, 1 middle, 2 bottom of the estimated score, [n].
        score: agreement of estimated and true scores.
        increase: the same of increases of the loss.
        truth: the retraining; ``truth.indices`` says which examples.
        way: how they were trained: ``minimum``, ``replay``, ``replay of a part``,
            ``from the start`` or ``going on``.
    """

    estimated_score: Tensor = field(repr=False)
    estimated_increase: Tensor = field(repr=False)
    strata: Tensor = field(repr=False)
    score: Agreement
    increase: Agreement
    truth: Retraining = field(repr=False)
    way: str = field(default=MINIMUM, metadata=ADDED_LATER)

    @property
    def _typical_score(self) -> float:
        """The median true score; never 0."""
        return max(float(self.truth.score.median()), SMALLEST_DIVISOR)

    @property
    def noise_share(self) -> float:
        """Noise floor over the median true score."""
        return self.truth.noise_floor.level / self._typical_score

    @property
    def deterministic(self) -> bool:
        """Whether the same training twice gave nearly the same predictions."""
        return self.truth.noise_floor.repeated <= REPEATABLE * self._typical_score

    @property
    def sentence(self) -> str:
        """The outcome of the verification in one sentence."""
        count, ranks = len(self.strata), self.score.spearman
        start = f"Trained again without each of {count} examples: "
        lost = int((~self._comparable()).sum())
        if lost:
            return start + (
                f"{lost} of the scores or loss increases are NaN or infinite, so nothing can be "
                "said; result.verdict names what to do about them."
            )
        if not self.deterministic:
            start += self._apart()
        if self.noise_share > NOISY:
            return start + (
                f"the noise floor is {self.noise_share:.0%} of the median true score, so this "
                "truth is too noisy to judge the estimates by; train to convergence, or fix what "
                "is random."
            )
        return start + self._ranking(ranks) + "; " + self._size() + self._caveats() + "."

    def _comparable(self) -> Tensor:
        """Where estimate and truth are both finite, [n]."""
        pairs = (self.estimated_score, self.estimated_increase, self.truth.score)
        return torch.stack([torch.isfinite(v.double()) for v in pairs]).all(0)

    def _apart(self) -> str:
        moved = f"predictions by {self.truth.noise_floor.repeated:.2g}), "
        if bool(torch.isfinite(self.truth.wanted_norm).all()):  # they start a little elsewhere
            return "refits with nothing left out end a little apart (they move " + moved
        return (
            "the training is not deterministic (the same training with nothing left out moves "
            + moved
        )

    def _ranking(self, ranks: Interval) -> str:
        if math.isnan(ranks.value):
            return "their order cannot be compared, since scores do not differ"
        word = "do not rank" if ranks.value < ROUGHLY else "roughly rank"
        word = "rank" if ranks.value >= RANKED else word
        return (
            f"the estimated scores {word} the examples as retraining does (Spearman {ranks}, "
            f"Pearson {self.score.pearson.value:.3f})"
        )

    def _size(self) -> str:
        found = self.increase.slope
        if not found.value > 0:
            return "the estimated loss increases have the wrong sign"
        beside = f" (true over estimated {found.value:.2f}, {found.low:.2f} to {found.high:.2f})"
        if 1 / SIZED <= found.value <= SIZED:
            return "the loss increases have the right size" + beside
        side = "small" if found.value > 1 else "large"
        open_yet = ", which so few do not settle" if found.low <= 1 <= found.high else ""
        times = max(found.value, 1 / found.value)
        return f"the loss increases are {times:.1f} times too {side}{open_yet}{beside}"

    def _caveats(self) -> str:
        text = ""
        drift = self.truth.noise_floor.drift / self._typical_score
        if drift > DRIFTED:
            text += (
                f"; the model had not converged (training it further moves predictions by "
                f"{drift:.1f} times the median score), and truth is measured from the refit"
            )
        short = int((~self.truth.converged).sum())
        if short:
            text += f"; {short} of the refits did not reach the gradient norm asked for"
        return text

    def to_frame(self) -> pd.DataFrame:
        """One row per example: estimates beside the truth."""
        frame = self.truth.to_frame()[["score", "increase", "noise"]]
        frame = frame.rename(columns={"score": "true_score", "increase": "true_increase"})
        frame.insert(0, "stratum", [STRATA[int(s)] for s in self.strata])
        frame.insert(1, "estimated_score", self.estimated_score.numpy())
        frame.insert(3, "estimated_increase", self.estimated_increase.numpy())
        return frame

    def figure(self) -> Figure:
        """Estimated against true: score on the left, loss increase on the right."""
        from engram.report.figures import verification_figure

        return verification_figure(self)

    def save(self, folder: str | Path) -> Path:
        """Write ``verification.json`` and its tensors, the truth among them, into a folder."""
        return KIND.write(self, folder)

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        lines = [
            self.sentence,
            "                      Spearman                 Pearson                  slope",
        ]
        for name, found in (("score", self.score), ("loss increase", self.increase)):
            cells = [f"{part!s:<24}" for part in (found.spearman, found.pearson, found.slope)]
            lines.append(f"{name:<22}" + " ".join(cells).rstrip())
        lines.append(f"noise floor           {self.truth.noise_floor}")
        lines.append("slope                 true over estimated, through the origin")
        lines.append(f"way                   {WAYS[self.way]} ({printable(self.truth.trained_by)})")
        return "\n".join(lines)


COLUMNS = {
    "estimated_score": numbers("n"),
    "estimated_increase": numbers("n"),
    "strata": positions("n", below=len(STRATA)),
}


def _check(found: Verification) -> None:
    rows, estimates = len(found.truth.indices), len(found.strata)
    check_that(found.way in WAYS, f"one of {', '.join(WAYS)}", repr(found.way)[:80])
    check_that(rows == estimates, f"an estimate of each of {rows} true rows", f"{estimates}")


KIND = stored(Kind("verification", 4, checked(Verification, COLUMNS, _check)))

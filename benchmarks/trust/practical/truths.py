"""The truth about each training of the study: kept as numbers, since it takes the most time.

``docs/results/trust-practical-truths.json`` has the loss without each example, the distance of the
mean predictions, and how well they are known. It does not depend on any estimate, so that all
estimates can be made again in minutes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.records import RESULTS
from benchmarks.trust.practical.settings import SETTINGS, SUBSETS
from benchmarks.trust.practical.together import KEEP, Trainings, together

NAME = "trust-practical-truths"
SPLITS = 10  # of the trainings in two halves, for the noise of the truth
DIGITS = 4  # that are kept of every number


@dataclass(frozen=True, eq=False)
class Truth:
    """Of every example, by the trainings that saw it and those that did not.

    Args:
        out: loss without the example, [N].
        increase: that minus the loss with it, mean over examples.
        score: L1 distance of the mean predictions, [N].
        reliability: rank correlation of ``out`` and ``score`` with what so many other trainings
            would give, by halves (Spearman-Brown).
    """

    out: Tensor
    increase: float
    score: Tensor
    reliability: tuple[float, float]

    @classmethod
    def of(cls, found: Trainings) -> Truth:
        """The truth of some trainings."""
        everything = torch.arange(len(found))
        out, score = _out(found, everything), _score(found, everything)
        inside = (found.losses * found.kept).sum(0) / found.kept.sum(0)
        halves = [_reliability(found, measure) for measure in (_out, _score)]
        increase = float(out.nanmean() - inside.nanmean())
        return cls(out, increase, score, (halves[0], halves[1]))

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Truth:
        """From plain numbers; an example that every training saw has none."""
        columns = [
            torch.tensor([math.nan if value is None else value for value in kept[name]])
            for name in ("out", "score")
        ]
        first, second = kept["reliability"]
        return cls(columns[0], kept["increase"], columns[1], (first, second))

    @property
    def of_one_training(self) -> float:
        """The ranking of the losses that *one* training without the examples would have.

        The reliability of a mean over k trainings, every example's share of them, is that of one by
        Spearman and Brown; its root is the correlation of one with what all have in common.
        """
        k, found = (1 - KEEP) * SUBSETS, self.reliability[0]
        return math.sqrt(found / (k - (k - 1) * found))

    def plain(self) -> dict[str, Any]:
        """Plain numbers of some digits."""
        return {
            "increase": _short(self.increase),
            "reliability": [_short(value) for value in self.reliability],
            "out": [_short(value) for value in self.out.tolist()],
            "score": [_short(value) for value in self.score.tolist()],
        }


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _out(found: Trainings, some: Tensor) -> Tensor:
    left = ~found.kept[some]
    return (found.losses[some] * left).sum(0) / left.sum(0)


def _score(found: Trainings, some: Tensor) -> Tensor:
    kept = found.kept[some][:, :, None].double()
    means = torch.softmax(found.outputs[some].double(), 2)
    inside, outside = ((means * k).sum(0) / k.sum(0) for k in (kept, 1 - kept))
    return (outside - inside).abs().sum(1)


def _reliability(found: Trainings, measure: Any) -> float:
    generator, halves = torch.Generator().manual_seed(0), []
    for _ in range(SPLITS):
        order = torch.randperm(len(found), generator=generator)
        middle = len(order) // 2
        halves.append(ranks(measure(found, order[:middle]), measure(found, order[middle:])))
    half = sum(halves) / SPLITS
    return 2 * half / (1 + half)


def ranks(left: Tensor, right: Tensor) -> float:
    """Spearman's correlation over the examples that both know."""
    fine = left.isfinite() & right.isfinite()
    return float(spearmanr(left[fine], right[fine]).statistic)


def kept_truths(folder: Path = RESULTS) -> dict[str, Any]:
    """All that are kept, as plain numbers by setting."""
    file = folder / f"{NAME}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def truth(name: str, folder: Path = RESULTS) -> Truth:
    """Of a setting: read where it is kept, else trained and kept."""
    known = kept_truths(folder)
    if name not in known:
        how = {"trained": "together"}  # the first ones, one after the other by engram.retrain
        known[name] = Truth.of(together(SETTINGS[name])).plain() | how
        folder.mkdir(parents=True, exist_ok=True)
        ordered = {setting: known[setting] for setting in SETTINGS if setting in known}
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in ordered.items())
        (folder / f"{NAME}.json").write_text(f"{{\n{lines}\n}}\n")
    return Truth.read(known[name])

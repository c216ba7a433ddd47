"""What an assessment must be to be saved and read."""

from __future__ import annotations

import torch

from engram.core.errors import StorageError
from engram.evidence.signals import Signals
from engram.trust.verdict import GOOD, LEVELS, Verdict

FORMAT = 2
COLUMNS = ("score", "second_score", "linearisation_error", "residuals")
FINITE = ("score", "second_score")


def check_saved(verdict: Verdict, signals: Signals) -> None:
    """StorageError unless the verdict is the worst of its reasons and the columns fit together."""
    _check(all(reason.level in LEVELS[1:] for reason in verdict.reasons), "levels of the reasons")
    worst = max((LEVELS.index(reason.level) for reason in verdict.reasons), default=GOOD)
    _check(verdict.level == LEVELS[worst], f"the level {LEVELS[worst]!r}, as its reasons have it")
    levels = verdict.levels
    _check(levels.dim() == 1 and levels.dtype == torch.int8, "levels of the examples, [N]")
    _check(bool(((levels >= 0) & (levels < len(LEVELS))).all()), f"levels among {LEVELS}")
    positions, indices = signals.positions, signals.indices
    for found in (positions, indices):
        _check(found.dim() == 1 and found.dtype == torch.int64, "whole positions [n]")
        _check(len(found) == len(positions) > 0 and int(found.min()) >= 0, "positions from 0")
    _check(int(positions.max()) < len(levels), f"positions among {len(levels)} examples")
    for name in COLUMNS:
        column = getattr(signals, name)
        fits = column.shape == positions.shape and column.is_floating_point()
        _check(fits, f"{name} of {len(positions)} examples")
    for name in FINITE:
        _check(bool(torch.isfinite(getattr(signals, name)).all()), f"finite {name}")


def _check(good: bool, expected: str) -> None:
    if not good:
        raise StorageError(
            f"an assessment with {expected}", "another one", "assess the result again, and save it"
        )

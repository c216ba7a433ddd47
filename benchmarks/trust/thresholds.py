"""Thresholds from the runs: for each signal the value that tells the two kinds of runs apart best.

A run is flagged when any signal is above its threshold. Thresholds are found one signal after the
other, in rounds, each at the middle of the values with the largest (share of bad runs flagged)
minus twice (share of good runs flagged); a signal that adds nothing gets none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

GOOD, UNRELIABLE = 0.95, 0.7  # of the truth correlation
FALSE_ALARM_WEIGHT = 2.0  # a good run that is flagged costs as much as two bad ones that are not
ROUNDS = 4

Run = Mapping[str, Any]
Thresholds = dict[str, float]


def truth(run: Run) -> float:
    """The smaller of both correlations of the score with the true one."""
    return min(run["spearman"], run["pearson"])


def known(runs: Sequence[Run]) -> list[Run]:
    """Those whose truth is one: more than half of the refits have converged."""
    return [run for run in runs if run["refits_converged"] > 0.5]


def fit(
    runs: Sequence[Run], signals: Sequence[str], bad_below: float, fixed: Thresholds
) -> Thresholds:
    """Thresholds beside ``fixed`` ones that tell truths below ``bad_below`` from good ones."""
    truths = np.array([truth(run) for run in runs])
    good, bad = truths > GOOD, truths < bad_below
    values = {name: np.array([run["signals"][name] for run in runs]) for name in signals}
    known_already = np.array([says(run, fixed) for run in runs])
    found = dict.fromkeys(signals, np.inf)
    for _ in range(ROUNDS):
        for name in signals:
            others = known_already.copy()
            for other in signals:
                if other != name:
                    others |= values[other] > found[other]
            candidates = between(values[name])
            flagged = others[:, None] | (values[name][:, None] > candidates)
            merits = flagged[bad].mean(0) - FALSE_ALARM_WEIGHT * flagged[good].mean(0)
            ties = candidates[merits >= merits.max() - 1e-12]
            # a signal that adds nothing gets no threshold; else the middle of what is as good
            found[name] = np.inf if np.isinf(ties[-1]) else float(ties[len(ties) // 2])
    return fixed | found


def between(values: np.ndarray) -> np.ndarray:
    """Values half-way between neighbours, and infinity."""
    ordered = np.unique(values[np.isfinite(values)])
    return np.append((ordered[1:] + ordered[:-1]) / 2, np.inf)


def says(run: Run, thresholds: Thresholds) -> bool:
    """Whether these thresholds flag a run."""
    return any(run["signals"][name] > value for name, value in thresholds.items())


def held_out(runs: Sequence[Run], stages: Sequence[Sequence[str]], bad_below: float) -> list[bool]:
    """Of every run, what thresholds say that were fitted without its data set."""
    fitted = {
        name: in_stages([run for run in runs if run["data"] != name], stages, bad_below)
        for name in {run["data"] for run in runs}
    }
    return [says(run, fitted[run["data"]]) for run in runs]


def in_stages(runs: Sequence[Run], stages: Sequence[Sequence[str]], bad_below: float) -> Thresholds:
    """The signals of each stage after, and beside, those of the stages before."""
    found: Thresholds = {}
    for signals in stages:
        found = fit(runs, signals, bad_below, found)
    return found


def rates(runs: Sequence[Run], verdicts: Sequence[bool], by: str) -> dict[str, int]:
    """Unreliable and good runs, and how many of each were flagged, by one measure of truth."""
    found = [min(r["spearman"], r["pearson"]) if by == "smaller" else r[by] for r in runs]
    low = [v for t, v in zip(found, verdicts, strict=True) if t < UNRELIABLE]
    high = [v for t, v in zip(found, verdicts, strict=True) if t > GOOD]
    return {
        "unreliable": len(low),
        "flagged": sum(low),
        "good": len(high),
        "false_alarms": sum(high),
    }

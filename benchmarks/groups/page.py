"""The page of all groups: estimates beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.groups.estimates import WAYS
from benchmarks.groups.truths import SEEDS
from benchmarks.records import conditions, table

CLEAR = 2.0  # standard errors that a true change must exceed to count as clear
FACTOR = 2.0  # within which a size counts as right
COSTS = ("trainings", "seconds_over_training", "fit_over_training")
KINDS = ("own", "test")


def true_changes(found: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Mean and standard error over the seeds, by ``group/own`` and ``group/test``."""
    changes = {}
    for name, losses in found.items():
        if name.endswith(KINDS):
            change = (losses[:, 1] - losses[:, 0]).double()
            changes[name] = float(change.mean()), float(change.std() / len(change) ** 0.5)
    return changes


def judged(row: dict[str, Any], kind: str, true: tuple[float, float]) -> dict[str, bool]:
    """Whether the change is clear, the sign right, the size right, or the row flagged."""
    mean, error = true
    ratio = row[kind] / mean
    return {
        "clear": abs(mean) > CLEAR * error,
        "sign": ratio > 0,
        "size": 1 / FACTOR <= ratio <= FACTOR,
        "flagged": row["flagged"],
    }


def summary(record: dict[str, Any], way: str, kind: str) -> list[str]:
    """How many are right, of those where the true change is clear."""
    rows = [row for row in record["rows"] if row["way"] == way]
    truth = record["truth"]
    found = [judged(row, kind, truth[row["case"]][f"{row['group']}/{kind}"]) for row in rows]
    clear = [one for one in found if one["clear"]]
    believed = [one for one in clear if not one["flagged"]]
    return [
        way,
        "its own" if kind == "own" else "test",
        f"{sum(one['sign'] for one in clear)} of {len(clear)}",
        f"{sum(one['size'] for one in clear)} of {len(clear)}",
        f"{sum(one['flagged'] for one in clear)}",
        f"{sum(one['sign'] for one in believed)} of {len(believed)}",
        f"{sum(one['size'] for one in believed)} of {len(believed)}",
    ]


def page(record: dict[str, Any]) -> str:
    """Counts for every way, then all groups."""
    header = ["way", "loss", "sign", "size", "flagged", "sign, not flagged", "size, not flagged"]
    counts = table(header, [summary(record, way, kind) for way in WAYS for kind in KINDS])
    columns = ["way", "passes over those of a training", "time over it", "time of the fit over it"]
    costs = table(columns, [_cost(record, way) for way in WAYS])
    header = ["net, group", "true, its own", "true, test"]
    header += [f"{way}, seed {seed}" for way in WAYS for seed in record["seeds"]]
    return f"""# Leaving out groups, sources and classes from nets as people train them

CNNs with BatchNorm on Fashion-MNIST (`benchmarks/groups/settings.py`; {", ".join(record["truth"])})
in which one source has wrong labels: AdamW 300 of 3000, SGD half of 600, SGD without dropout 300 of
1000, AdamW on 10,000 images 1000. The truth is the mean over {SEEDS} seeds of training
with and without the group, a true change is clear where it exceeds {CLEAR:g} standard errors, and a
size is right within a factor {FACTOR:g}. Estimates are of single recorded trainings (seeds
{record["seeds"]}), flagged by `removal.flagged` alone.
{conditions(record["environment"])}
Written by `python -m benchmarks.groups`.

`factors` is a step with Kronecker factors and the training time; `gauss_newton` five conjugate
gradients with the exact Gauss-Newton matrix of some remaining examples and the training time;
`replay` the last two thirds of the recorded training without the group.

{counts}

Wrong by more than a factor {FACTOR:g} where the true change is clear, and not flagged:
{_missed(record)}.
A replay says too little rather than too much: the first third of the training has seen the group.

Cost, means. The passes are forward and backward over examples; times are wall-clock and were taken
while other programs ran, so that they say little; a replay needs no fit:

{costs}

Change of the mean loss, without the group minus with it: the group's own / the test set's;
\\* flagged.

{table(header, _groups(record))}
"""


def _missed(record: dict[str, Any]) -> str:
    """Rows that a reader would have believed, in words."""
    found = []
    for row in record["rows"]:
        for kind in KINDS:
            true = record["truth"][row["case"]][f"{row['group']}/{kind}"]
            seen = judged(row, kind, true)
            if seen["clear"] and not seen["size"] and not seen["flagged"]:
                where = f"{row['way']}, {row['case']}, {row['group']}, seed {row['seed']}"
                found.append(f"{where} ({kind}, {row[kind] / true[0]:.2f} of it)")
    return "; ".join(found) or "none"


def _cost(record: dict[str, Any], way: str) -> list[str]:
    rows = [row for row in record["rows"] if row["way"] == way]
    found = [[row[key] for row in rows if row[key] is not None] for key in COSTS]
    return [way, *(f"{sum(some) / len(some):.2f}" if some else "-" for some in found)]


def _groups(record: dict[str, Any]) -> Sequence[Sequence[str]]:
    found = []
    for case, truth in record["truth"].items():
        for group in dict.fromkeys(name.rpartition("/")[0] for name in truth):
            cells = [f"{case}, {group}"]
            for kind in KINDS:
                mean, error = truth[f"{group}/{kind}"]
                cells.append(f"{mean:+.3f} \u00b1 {error:.3f}")
            for way in WAYS:
                for seed in record["seeds"]:
                    cells += [
                        f"{row['own']:+.2f} / {row['test']:+.3f}{' *' * row['flagged']}"
                        for row in record["rows"]
                        if (row["case"], row["group"], row["way"], row["seed"])
                        == (case, group, way, seed)
                    ]
            found.append(cells)
    return found

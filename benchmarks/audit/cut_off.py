"""The page of the cut-off alone: how many labels are called wrong, and how many of them are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.audit.page import NEAR, summary
from benchmarks.records import conditions, table, write
from benchmarks.timing import environment

TEXT = """# How many labels an audit calls wrong

Data with a tenth of its labels made wrong, as in [audit](audit.md), or as it is (`none`). What
share of those that are called wrong is stated to be, what share is, in which share it was expected
with a chance of 90 %, and what share of the wrong labels is found. Stock models, trained once and
once on a half; no folds. {conditions}
Run by `python -m benchmarks.audit --no-folds --runs FOLDER` with `--only`, written by
`python -m benchmarks.audit --cut-off --runs FOLDER`.

{rows}

Within ten points in {near}. Where nothing was made wrong, nobody knows which of the labels that are
called wrong are.

The form was chosen on affairs, blobs, digits, gauss2, overlap, tabular, trec and wine, of which all
were looked at; usps was not. `affairs` and the dependent `gauss2` are data where wrong labels can
hardly be told: the one says next to nothing of its label, in the other only labels of one of two
classes that overlap widely are wrong.
"""


def write_cut_offs(runs: Path, folder: Path) -> None:
    """Write audit-cut-off.json and audit-cut-off.md from what the runs have kept."""
    found = [summary(path) for path in sorted(runs.glob("*.npz"))]
    known = [row for row in found if row["noise"] != "none" and row["cut_off"]["count"]]
    near = sum(abs(_distance(row)) <= NEAR for row in known)
    setting = environment(0)
    page = TEXT.format(
        conditions=conditions(setting),
        rows=table(
            ["", "examples", "wrong", "estimated", "called", "stated", "true", "among", "found"],
            [_row(row) for row in found],
        ),
        near=f"{near} of {len(known)} with wrong labels of which some were called",
    )
    write(folder, "audit-cut-off", {"environment": setting, "runs": found, "near": near}, page)


def _distance(row: dict[str, Any]) -> float:
    return float(row["cut_off"]["stated"] - row["cut_off"]["true"])


def _row(row: dict[str, Any]) -> list[str]:
    cut, count = row["cut_off"], row["examples"]
    shares = [f"{cut[name]:.2f}" if cut["count"] else "-" for name in ("stated", "true", "recall")]
    ends = [f"{cut[name] / cut['count']:.2f}" if cut["count"] else "" for name in ("low", "high")]
    shares.insert(2, " to ".join(ends) if cut["count"] else "-")
    if row["noise"] == "none":
        shares[1:] = ["-", shares[2], "-"]
    name = f"{row['data']}, {row['noise']}"
    rates = [f"{row['wrong'] / count:.3f}", f"{row['rate']:.3f}"]
    return [name, f"{count:,}", *rates, f"{cut['count']:,}", *shares]

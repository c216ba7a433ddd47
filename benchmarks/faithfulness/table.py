"""The page: where the default is not ahead, a summary, and a table a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.faithfulness.bars import bars
from benchmarks.faithfulness.estimates import METRICS
from benchmarks.faithfulness.limits import BYTES, RETRAINING_SECONDS, SECONDS
from benchmarks.faithfulness.ours import DEFAULT
from benchmarks.records import conditions, table

SCORES = {"score_spearman": "Spearman", "score_pearson": "Pearson"}
HEADER = [
    *("method", "score, Spearman", "score, Pearson", "output deviation, Pearson"),
    *("increase, Pearson", "mean increase, estimated / true", "error of mean LOO loss", "seconds"),
]
DIGITS = {name: 4 for name in METRICS} | {"increase_ratio": 2}
Row = dict[str, Any]


def distance(metric: str) -> Callable[[float], float]:
    """How far a value is from the best there can be."""
    goal = 0.0 if metric == "loo_error" else 1.0
    return lambda value: abs(value - goal)


def best(rows: dict[str, Row], metric: str) -> str | None:
    """The method that is closest to the truth."""
    known = {title: row[metric] for title, row in rows.items() if row.get(metric) is not None}
    return min(known, key=lambda title: distance(metric)(known[title])) if known else None


def shortfalls(problem: Row) -> list[str]:
    """Which peers the default is not ahead of, in which correlation of the score."""
    default = problem["methods"][DEFAULT]
    if "error" in default:
        return [f"the default failed: {default['error']}"]
    found = []
    for metric, name in SCORES.items():
        ahead = {
            title: row[metric]
            for title, row in problem["peers"].items()
            if row.get(metric) is not None and row[metric] >= default[metric]
        }
        if ahead:
            listed = ", ".join(f"{t} {v:.4f}" for t, v in sorted(ahead.items()))
            found.append(f"{name} {default[metric]:.4f} against {listed}")
    return found


def named(problem: Row) -> str:
    """Title and regime."""
    return f"{problem['title']}, {problem['regime']}"


def page(record: Row) -> str:
    """The Markdown page."""
    done = [p for p in record["problems"] if "error" not in p]
    missing = [p for p in record["problems"] if "error" in p]
    behind = {named(p): shortfalls(p) for p in done}
    lines = [f"- **{title}**: " + "; ".join(why) for title, why in behind.items() if why]
    ahead = [title for title, why in behind.items() if not why]
    absent = [f"- {p['setting']}, {p['regime']}: not run, {p['error']}" for p in missing]
    return "\n\n".join(
        part
        for part in (
            "# How close estimates come to training again",
            f"What a user gets without options is **not ahead of every peer** in both correlations "
            f"of the score in {len(lines)} of {len(done)} settings:",
            "\n".join(lines) or "- none",
            "It is ahead in: " + ("; ".join(ahead) or "none") + ".",
            "\n".join(absent),
            method(record),
            "![estimated against true scores](faithfulness.png)",
            "## Summary",
            summary(done),
            "## Bars",
            bars(done),
            *(section(p) for p in done),
        )
        if part
    )


def method(record: Row) -> str:
    """How it was measured."""
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    count = record["num_left_out"]
    return f"""Each of {count} examples a setting is really left out. A converged net is trained on
without it, from where it is, until the gradient vanishes; an early-stopped one is trained with the
same recipe, order and first weights. Deviations are from the same training with everything. Half of
the examples are spread evenly over the quarter of the data with the largest loss, half over the
rest; no estimate has a part in the choice. Every method is told the regulariser, delta/2 |theta|^2
beside the sum of the losses. Influence libraries get it as their damping, and their self-influence
is taken as score and, over N, as increase; a number in other units is correlated with both. The
error is the estimated minus the true mean LOO loss over the left-out examples, in nats. Bold is
closest to the truth in its column. It is one seed and {count} examples: differences in the third
decimal mean little. Seconds are of one run on a busy machine; rows that share a posterior have its
fit in the first of them. Rows of engram that are refined or calibrated say so; `refine` chooses the
examples itself, the flagged ones and the 5 % with the highest estimated score, and the others stay
as they were. Peers' rows are kept with the nets and truths, and not measured again by a later run
with the same version; a run with `--settings` measures these and keeps the page's other rows.

A method has {SECONDS:g} s of processor time and {BYTES / 2**30:g} GiB of memory on a problem,
`refine`, which trains again and is no estimate, {RETRAINING_SECONDS:g} s; one that needs more says
so in its row, and "ahead of every peer" is then said without it: on the larger nets most exact
solvers are missing. Nets with more than some thousand parameters are too large for full matrices,
ours and others'; TRAK's gradients are projected there, as its authors do.

The regulariser was not fixed in advance: the estimates on the digits with a prior precision of 2
were seen before 3 was taken for all settings. That setting is in the table as "weaker regulariser".
What engram does without options on converged nets was chosen in view of these truths and of those
of the calibration study: [decisions](../decisions.md) has what was tried.

{conditions(record["environment"])} Peers: {versions}. Written by `make bench-faithfulness`."""


def summary(done: list[Row]) -> str:
    """The default against the best peer in each correlation of the score."""
    rows = []
    for problem in done:
        cells = [named(problem)]
        for metric in SCORES:
            leader = best(problem["peers"], metric)
            own = problem["methods"][DEFAULT].get(metric)
            other = problem["peers"][leader][metric] if leader else None
            cells += [number(own, 4), f"{number(other, 4)} ({leader})"]
        rows.append([*cells, "no" if shortfalls(problem) else "yes"])
    header = ["setting", "default, Spearman", "best peer", "default, Pearson", "best peer", "ahead"]
    return table(header, rows)


def section(problem: Row) -> str:
    """One problem: what it is, and every method."""
    rows = problem["methods"] | problem["peers"]
    leaders = {metric: best(rows, metric) for metric in METRICS}
    cells = []
    for title, row in rows.items():
        if "error" in row:
            cells.append([title, row["error"].replace("|", "/"), *[""] * (len(HEADER) - 2)])
            continue
        shown = [number(row[m], DIGITS[m], leaders[m] == title) for m in METRICS]
        cells.append([title, *shown, f"{row['seconds']:.1f}"])
    short = problem["refits_short_of_convergence"]
    state = f", {short} refits short of convergence" if short else ""
    return f"""## {named(problem)}

{problem["num_data"]} examples, {problem["num_params"]} parameters, training accuracy
{problem["train_accuracy"]:.3f}, relative gradient {problem["relative_gradient"]:.1e}, loss of the
left-out examples {problem["true_loss"]:.4f} with and {problem["true_loo_loss"]:.4f} without
them{state}.

{table(HEADER, cells)}"""


def number(value: float | None, digits: int, bold: bool = False) -> str:
    """For a cell; what a method does not give is a dash."""
    if value is None:
        return "-"
    text = f"{value:.{digits}f}"
    return f"**{text}**" if bold else text

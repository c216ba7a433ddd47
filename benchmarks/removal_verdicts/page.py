"""The page: how often verdicts on removals were right."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.groups.page import CLEAR
from benchmarks.records import RESULTS, conditions, table
from benchmarks.removal_verdicts.rows import OFF, Row, row
from engram.sensitivity.group_steps import Matrix
from engram.sensitivity.removal_verdict import Grounds, removal_verdict
from engram.sensitivity.step_signals import StepSignals

# of docs/results/groups.json: the matrix of the step, and what the way is called here
GROUP_WAYS = {
    "factors": (Matrix.ALL, "factors"),
    "gauss_newton": (Matrix.STOPPED, "one step"),
    "replay": (None, "replay"),
}


def of_groups() -> Iterator[Row]:
    """The removals of the study of groups, by today's verdict."""
    stored = json.loads((RESULTS / "groups.json").read_text())
    for one in stored["rows"]:
        matrix, way = GROUP_WAYS[one["way"]]
        signals = StepSignals(one["rise"], one["leverage"], one["agreement"])
        verdict = removal_verdict(
            Grounds(matrix, signals, stopped=True, exact=False, held=False, finite=True)
        )
        for loss in ("own", "test"):
            true, error = stored["truth"][one["case"]][f"{one['group']}/{loss}"]
            if abs(true) > CLEAR * error:
                net = f"{one['case']}, seed {one['seed']}"
                about = ("recorded, groups.md", net, way, one["group"])
                yield row(about, loss, one[loss], true, verdict)


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """All removals of the record, and those of the study of groups."""
    return [Row(**one) for part in record["parts"].values() for one in part] + list(of_groups())


def cells(rows: Sequence[Row]) -> list[str]:
    """How many are off, how many of them were flagged, and the same of those that are right."""
    off, right = ([one for one in rows if one.wrong is wrong] for wrong in (True, False))
    return [*_flagged(off), *_flagged(right)]


def _flagged(rows: Sequence[Row]) -> list[str]:
    doubted = sum(one.level != "good" for one in rows)
    bad = sum(one.level == "unreliable" for one in rows)
    share = f" ({doubted / len(rows):.0%})" if rows else ""
    return [f"{len(rows)}", f"{doubted}{share}, {bad}"]


def page(record: Mapping[str, Any]) -> str:
    """Two tables, and what is off and was called good."""
    rows = rows_of(record)
    kinds = dict.fromkeys((one.kind, one.way if "record" in one.kind else "") for one in rows)
    lines = [["all", "", *cells(rows)]]
    for kind, way in kinds:
        own = [one for one in rows if one.kind == kind and way in ("", one.way)]
        lines.append([kind, way, *cells(own)])
    lines += [[f"the wrong labels of a {k}", "", *cells(_wrong_labels(rows, k))] for k in NET_KINDS]
    header = ["removals", "way", "off", "of them not good, unreliable"]
    return f"""# Verdicts on leaving groups out, beside training again

Groups, classes and wrong labels left out of nets and generalised linear models, in
{len({(r.kind, r.net) for r in rows})} fits. A removal is *off* where its sign is wrong or its size
by more than a factor {OFF:g}, of the group's own loss or, where it was looked at, of the test loss.
The truth is fitting again (at a minimum, and generalised linear models), the same training without
the group (stopped, no record: MLPs), or the mean over four seeds, where it is beyond {CLEAR:g}
standard errors (nets of the [study](trust-practical.md), and those of [groups](groups.md)).
{conditions(record["environment"])}
Written by `python -m benchmarks.removal_verdicts`; removals of [groups](groups.md) are judged anew
from the signals that are kept there.

{table([*header, "right", "of them not good, unreliable"], lines)}

What verdicts say of the sign, and how often it was right:

{table(["said", "of its own loss", "of the test loss"], _signs(rows))}

Off and called good:
{_missed(rows)}.
"""


NET_KINDS = ("net with a record", "net without")


def _wrong_labels(rows: Sequence[Row], kind: str) -> list[Row]:
    recorded = kind == NET_KINDS[0]
    found = [one for one in rows if "wrong labels" in one.group]
    return [one for one in found if one.kind.startswith("recorded") is recorded]


def _signs(rows: Sequence[Row]) -> list[list[str]]:
    """Of the group's own loss, which hardly ever falls, and of the test loss, which may."""
    lines = []
    for words in sorted({one.sign for one in rows}):
        said = [one for one in rows if one.sign == words]
        right = [[one.same_sign for one in said if one.loss == loss] for loss in ("own", "test")]
        lines.append([words, *(f"{sum(some)} of {len(some)}" for some in right)])
    return lines


def _missed(rows: Sequence[Row]) -> str:
    missed = [one for one in rows if one.wrong and one.level == "good"]
    found = [
        f"{one.kind}, {one.net}, {one.way}, {one.group} ({one.loss}, "
        f"{one.estimated:.2g} for {one.true:.2g})"
        for one in missed
    ]
    return "; ".join(found) or "none"

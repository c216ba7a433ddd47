"""The page of an audit: what :class:`engram.report.page.PageData` asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engram.auditing.outcome import Audit
from engram.report.page import Alert, Curves, Effect, Making, PageData
from engram.report.result_page import result_data

WRONG, MEMORISED, COPIED = "likely wrong label", "memorised", "near duplicate"
CLASS = "class"


def audit_page(audit: Audit) -> PageData:
    """Everything that an audit knows, for a page."""
    shown, issues = audit.shown, audit.issues
    classes = getattr(shown.task, "classes", None) if audit.result.num_outputs > 1 else None
    plain = result_data(
        audit.result,
        ids=list(shown.ids),
        classes=classes,
        images=_Thumbnails(audit) if shown.kind == "image" else None,
        texts=list(shown.texts) if any(shown.texts) else None,
    )
    flags = {
        WRONG: issues["is_label_issue"].to_numpy(),
        MEMORISED: issues["memorised"].to_numpy(),
        COPIED: issues["duplicate_of"].notna().to_numpy(),
    }
    kept = {k: v for k, v in plain.examples.flags.items() if k not in flags}
    groups = {} if shown.groups is None else {_grouping(audit): shown.groups}
    examples = replace(
        plain.examples,
        flags=flags | kept,
        groups=groups,
        label_score=issues["label_score"].to_numpy(),
        neighbours=audit.neighbours,
    )
    headline = replace(plain.headline, title=_title(audit), sentence=_sentence(audit))
    return replace(
        plain,
        headline=headline,
        examples=examples,
        alerts=_alerts(audit, plain),
        effects=_effects(audit),
        effect_notes=_effect_notes(audit),
        effects_on=str(audit.facts.get("groups_on", "the other examples")),
        curves=_curves(audit),
        making=_making(audit, plain),
    )


class _Thumbnails:
    """Pictures by position; a grey square for those that were not kept."""

    def __init__(self, audit: Audit) -> None:
        self.pixels, self.count = audit.shown.thumbnails, len(audit.shown.ids)
        self.place = {int(i): n for n, i in enumerate(audit.shown.pictured)}
        self.nothing = np.full((2, 2), 200, np.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> Any:
        place = self.place.get(int(position))
        if place is None:
            return self.nothing
        picture = self.pixels[place]
        return picture[..., 0] if picture.shape[-1] == 1 else picture


def _grouping(audit: Audit) -> str:
    return str(audit.settings.get("group_by") or "group")


def _title(audit: Audit) -> str:
    return f"Audit of {audit.facts.get('source') or 'the data'}"


def _sentence(audit: Audit) -> str:
    found = audit.findings
    if not found.num_label_issues:
        return f"None of {found.num_data:,} labels is more likely wrong than right."
    return (
        f"{found.num_label_issues:,} of {found.num_data:,} labels are likely wrong; "
        f"of those, {found.precision:.0%} are expected to be."
    )


def _alerts(audit: Audit, plain: PageData) -> list[Alert]:
    found, alerts = audit.findings, []
    if found.num_label_issues:
        alerts.append(
            Alert(
                f"{found.num_label_issues:,} likely wrong labels",
                f"About {found.precision:.0%} of them are expected to be wrong.",
                flag=WRONG,
            )
        )
    if found.num_memorised:
        title = f"{found.num_memorised:,} memorised examples"
        alerts.append(Alert(title, "Known at the end, unknown before each look.", flag=MEMORISED))
    if found.num_duplicates:
        title = f"{found.num_duplicates:,} examples with a near copy"
        alerts.append(Alert(title, "They were left out together.", flag=COPIED))
    for name, row in audit.groups.to_dict("index").items():
        if row["hurts"]:
            title = f"{_grouping(audit)} {name} hurts"
            text = (
                f"Without its {row['examples']:,} examples others' loss falls by {row['harm']:.2g} "
                "more than without as many random ones."
            )
            alerts.append(Alert(title, text, group=(_grouping(audit), str(name))))
    return alerts + [alert for alert in plain.alerts if alert.flag not in (WRONG, MEMORISED)]


def _effects(audit: Audit) -> list[Effect]:
    """Of groups, then of classes."""
    found = [
        Effect(str(name), kind, row["examples"], -row[of], -row[high], -row[low], row["verdict"])
        for frame, kind, (of, low, high) in (
            (audit.groups, _grouping(audit), ("harm", "harm_low", "harm_high")),
            (audit.classes, CLASS, ("gain", "gain_low", "gain_high")),
        )
        for name, row in frame.to_dict("index").items()
    ]
    return found


def _effect_notes(audit: Audit) -> dict[str, str]:
    """What the changes of each kind are compared with."""
    return {
        _grouping(audit): "Beside leaving out as many random examples of the same classes. The "
        "intervals hold for all at once.",
        CLASS: "What examples of the other classes would lose. Where that is less than nothing, "
        "this class is in their way: it is taken for them, or they for it.",
    }


def _curves(audit: Audit) -> Curves | None:
    if not audit.curve:
        return None
    loo = [point.get("loo", np.nan) for point in audit.curve]
    stopped = audit.facts.get("stopped")
    return Curves(
        [int(point["epoch"]) for point in audit.curve],
        [point["train"] for point in audit.curve],
        loo,
        stop=None if stopped is None else int(stopped),
        stop_reason="" if stopped is None else "The leave-one-out estimate got no better.",
    )


def _making(audit: Audit, plain: PageData) -> Making:
    facts = {**audit.facts, **{k: v for k, v in audit.settings.items() if v is not None}}
    notes = (*audit.notes, *plain.making.notes)
    return replace(plain.making, facts={**plain.making.facts, **facts}, notes=notes)

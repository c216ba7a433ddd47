"""The page of an audit: what :class:`engram.report.page.PageData` asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engram.auditing.command import command_of
from engram.auditing.outcome import Audit, Shown
from engram.auditing.tasks import Classes, Regression
from engram.report.page import Alert, Curves, Effect, Examples, Making, PageData
from engram.report.result_page import CONTRADICTED, result_data

WRONG, MEMORISED, COPIED = "likely wrong label", "memorised", "near duplicate"
# Alerts of a plain result that an audit has better ones for: of the contradicted labels the cut-off
# says which are wrong, and they stay a filter
TOLD = (CONTRADICTED, MEMORISED)
CLASS = "class"
HANGING = 0.2  # share of a class that is right with each example and wrong without it
MOST_HANGING = 3  # classes that an alert has figures of
OVERFITTED = 3.0  # times its training loss, from which the leave-one-out loss is an alert


def audit_page(audit: Audit) -> PageData:
    """Everything that an audit knows, for a page."""
    shown, issues = audit.shown, audit.issues
    classes = getattr(shown.task, "classes", None) if audit.result.num_outputs > 1 else None
    plain = result_data(
        audit.result,
        ids=list(shown.ids),
        classes=classes,
        images=_Thumbnails(audit) if shown.kind == "image" else None,
        texts=list(shown.texts) if _says_more(shown) else None,
        rows=shown.rows,
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
        **_as_given(audit, plain),
    )
    headline = replace(
        plain.headline,
        title=_title(audit),
        sentence=_sentence(audit),
        reasons=[str(reason) for reason in audit.verdict.reasons],
        test_loss=audit.test.get("loss"),
    )
    return replace(
        plain,
        headline=headline,
        examples=examples,
        alerts=_alerts(audit, plain),
        metrics=_metrics(audit, plain),
        effects=_effects(audit),
        effect_notes=_effect_notes(audit),
        effects_on=str(audit.facts.get("groups_on", "the other examples")),
        curves=_curves(audit),
        making=_making(audit, plain),
    )


def _says_more(shown: Shown) -> bool:
    """Whether texts say what neither ids nor rows do."""
    return shown.rows is None and any(shown.texts) and shown.texts != shown.ids


def _as_given(audit: Audit, plain: PageData) -> dict[str, Any]:
    """Labels that are no classes as people know them, and distances in their unit."""
    task, issues = audit.shown.task, audit.issues
    if isinstance(task, Classes):
        return {}
    found: dict[str, Any] = {
        "given": issues["given_label"].to_numpy(),
        "predicted": issues["predicted_label"].to_numpy(),
        "score": issues["score"].to_numpy(),
    }
    if plain.examples.prediction_error is not None:
        found["prediction_error"] = task.unit * plain.examples.prediction_error
    return found


def _metrics(audit: Audit, plain: PageData) -> dict[str, tuple[float, float]]:
    """Measures, distances in the unit of the data."""
    unit = audit.shown.task.unit
    return {
        name: (unit * values[0], unit * values[1]) if name == "rmse" else values
        for name, values in plain.metrics.items()
    }


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
        f"{found.num_label_issues:,} of {found.num_data:,} labels look wrong; "
        f"{found.wrong} of those probably are."
    )


def _alerts(audit: Audit, plain: PageData) -> list[Alert]:
    found, alerts = audit.findings, []
    if found.num_label_issues:
        alerts.append(
            Alert(
                f"{found.num_label_issues:,} likely wrong labels",
                f"With a chance of 90 %, {found.wrong} of them are wrong.",
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
    alerts += [*_hanging(plain.examples), *_overfitted(audit)]
    return alerts + [alert for alert in plain.alerts if alert.flag not in TOLD]


def _hanging(examples: Examples) -> list[Alert]:
    """Classes that hang on single examples: right with them, and wrong without."""
    if examples.probabilities is None or examples.given is None:
        return []
    known = examples.probabilities.argmax(1) == examples.given
    left_out = examples.predicted == examples.given
    found = []
    for number, name in enumerate(examples.classes):
        own = examples.given == number
        with_it, without = (
            float(right[own].mean()) if own.any() else 0 for right in (known, left_out)
        )
        if with_it - without > HANGING:
            words = f"{name} {100 * with_it:.0f} → {100 * without:.0f} %"
            found.append((with_it - without, number, words))
    if not found:
        return []
    found.sort(reverse=True)
    named = ", ".join(words for _, _, words in found[:MOST_HANGING])
    more = f" and {len(found) - MOST_HANGING} more" if len(found) > MOST_HANGING else ""
    what = "1 class hangs" if len(found) == 1 else f"{len(found)} classes hang"
    text = f"Right with each example in the data, and without it: {named}{more}."
    return [Alert(f"{what} on single examples", text, section="effects")]


def _overfitted(audit: Audit) -> list[Alert]:
    """A training whose loss says little about unseen data."""
    train, loo = audit.result.train_nll, audit.result.loo_nll
    if not audit.curve or not loo > OVERFITTED * train > 0:
        return []
    text = f"Left out, examples cost {loo:.2g}; in the training data {train:.2g}."
    return [Alert("The training overfits", text, section="training")]


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
        CLASS: "What examples of the other classes would lose. One class less is easier, so that "
        "most are below 0: those furthest down are most in the others' way, taken for them or they "
        "for it.",
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
    notes = (*audit.notes, *_units(audit), *plain.making.notes)
    return replace(
        plain.making,
        facts={**plain.making.facts, **facts},
        notes=notes,
        command=command_of(audit.settings),
    )


def _units(audit: Audit) -> tuple[str, ...]:
    """Which numbers are in which unit, where there is more than one."""
    if not isinstance(audit.shown.task, Regression):
        return ()
    size = f"{audit.shown.task.unit:.4g}"
    return (
        f"Labels, errors and scores are in the unit of the labels; losses are half the square of "
        f"an error in their standard deviation, {size}.",
    )

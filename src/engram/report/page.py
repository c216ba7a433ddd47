"""What stands on a page: examples, and whatever else is known about them.

:class:`PageData` is filled by whoever has the numbers and written by
:func:`engram.report.html.write_page`. Only the examples are needed, and of them only ids and
losses; what is None, or empty, is not on the page. :func:`engram.report.result_page.result_data`
fills one from a :class:`engram.Result`, :func:`engram.report.training_page.training_data` from a
:class:`engram.Tracker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from engram.errors import DataError
from engram.report.examples import Examples, Neighbours, check_length
from engram.trust.verdict import LEVELS

__all__ = [
    "Alert",
    "Comparison",
    "Curves",
    "Effect",
    "Examples",
    "Headline",
    "Making",
    "Neighbours",
    "PageData",
]


@dataclass(frozen=True)
class Headline:
    """The first lines: one sentence and four numbers.

    Attributes:
        title: of the page.
        sentence: what was found, in one sentence.
        train_loss: mean over the examples.
        loo_loss: the same under leave-one-out.
        loo_interval: low and high of the leave-one-out loss.
        accuracy: under leave-one-out; of a regression R squared.
        accuracy_name: which of the two it is, or another measure.
        train_accuracy: the same on the training data.
        verdict: ``good``, ``caution`` or ``unreliable``.
        verdict_line: what may be believed, in a line: ``result.verdict.line``.
        reasons: why, the worst first; each with its remedy.
        unit: of the losses.
        test_loss: on further data, which the leave-one-out loss estimates, where there are some.
    """

    title: str
    sentence: str
    train_loss: float
    loo_loss: float
    loo_interval: tuple[float, float] | None = None
    accuracy: float | None = None
    accuracy_name: str = "accuracy"
    train_accuracy: float | None = None
    verdict: str = ""
    verdict_line: str = ""
    reasons: Sequence[str] = ()
    unit: str = "nats"
    test_loss: float | None = None


@dataclass(frozen=True)
class Alert:
    """Something to look at, with a link to it.

    Attributes:
        title: in a few words, with the number: ``"212 likely wrong labels"``.
        text: a sentence more.
        flag: of the examples it is about, a name in ``Examples.flags``: the link filters by it.
        section: without a flag, the section to go to: ``"effects"``, ``"training"``,
            ``"calibration"`` or ``"verification"``.
        group: without a flag, the grouping and its value to filter by.
        level: ``"caution"``, or ``"unreliable"`` for what makes other numbers doubtful.
    """

    title: str
    text: str = ""
    flag: str = ""
    section: str = ""
    group: tuple[str, str] | None = None
    level: str = LEVELS[1]


@dataclass(frozen=True)
class Effect:
    """What leaving a class or a group out changes; without it minus with it.

    Attributes:
        name: of the class or group.
        kind: ``"class"``, or the grouping it is of.
        count: its examples.
        change: of the mean loss on ``PageData.effects_on``; positive where the group helps.
        low: end of the change's interval.
        high: the other end.
        level: how far to trust it.
    """

    name: str
    kind: str
    count: int
    change: float
    low: float | None = None
    high: float | None = None
    level: str = ""


@dataclass(frozen=True, eq=False)
class Curves:
    """The training over time, against the step; NaN where something is not known.

    Attributes:
        steps: of the U updates, rising.
        train: losses, [U].
        loo: the estimate of the test loss, [U].
        loo_low: lower end of the estimate's band, [U].
        loo_high: upper end, [U].
        validation: loss, [U], with its band in ``validation_low`` and ``validation_high``.
        stop: the step to stop at: the lowest estimate.
        stop_reason: why, in a sentence.
        step_name: ``"epoch"`` or ``"step"``.
        scores: of all examples over time, [U, N]; the page sorts and groups them.
        leverage: quantiles 5, 25, 50, 75 and 95 % over time, [U, 5].
        sentence: where the estimate comes from.
    """

    steps: Any
    train: Any
    loo: Any
    loo_low: Any = None
    loo_high: Any = None
    validation: Any = None
    validation_low: Any = None
    validation_high: Any = None
    stop: int | None = None
    stop_reason: str = ""
    step_name: str = "epoch"
    scores: Any = None
    leverage: Any = None
    sentence: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "Any" and value is not None:
                column = np.asarray(value)
                if len(column) != len(self.steps):
                    check_length(item.name, len(column), len(self.steps))
                object.__setattr__(self, item.name, column)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Estimates beside what training again gave.

    Attributes:
        name: of what is compared, with its unit.
        estimated: [n].
        retrained: [n].
        positions: of the examples they are of, [n]; None for groups.
        names: in place of positions, n words.
        noise: what training twice without leaving anything out differs by.
        sentence: what comes of it.
    """

    name: str
    estimated: Any
    retrained: Any
    positions: Any = None
    names: Sequence[str] = ()
    noise: float | None = None
    sentence: str = ""


@dataclass(frozen=True)
class Making:
    """How the numbers were made.

    Attributes:
        explanations: in plain words, one sentence or two for each name of a number.
        facts: versions, settings and whatever else was recorded.
        command: to make it again.
        notes: what the numbers do not hold, one sentence each.
    """

    explanations: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class PageData:
    """Everything on a page.

    Attributes:
        headline: title, sentence and numbers.
        examples: the rows.
        alerts: the most urgent first.
        effects: of classes and groups; sorted by the page.
        effects_on: what their changes are measured on.
        effect_notes: a sentence for each kind of effect, where there is something to say of it.
        curves: the training over time.
        metrics: measures of the predictions by name, each on the training data and left out.
        comparisons: estimated against retrained.
        making: how it was made.

    Example:
        >>> examples = Examples(["a", "b"], loss=[0.1, 0.2], loo_loss=[0.1, 2.0])
        >>> data = PageData(Headline("Two examples", "One is hard.", 0.15, 1.05), examples)
        >>> len(data.examples), data.alerts
        (2, ())
    """

    headline: Headline
    examples: Examples
    alerts: Sequence[Alert] = ()
    effects: Sequence[Effect] = ()
    effects_on: str = "the other examples"
    effect_notes: Mapping[str, str] = field(default_factory=dict)
    curves: Curves | None = None
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    comparisons: Sequence[Comparison] = ()
    making: Making = field(default_factory=Making)

    def __post_init__(self) -> None:
        for alert in self.alerts:
            if alert.flag and alert.flag not in self.examples.flags:
                raise DataError(
                    f"the flag of an alert among {sorted(self.examples.flags)}",
                    repr(alert.flag),
                    "give Examples.flags the issue that the alert is about",
                )

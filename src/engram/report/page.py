"""What stands on a page: examples, and whatever else is known about them.

:class:`PageData` is filled by whoever has the numbers and written by
:func:`engram.report.html.write_page`. Only the examples are needed, and of them only ids and
losses; what is None, or empty, is not on the page. :func:`engram.report.result_page.result_data`
fills one from a :class:`engram.Result`, :func:`engram.report.training_page.training_data` from a
:class:`engram.Tracker`.

Positions are those of the rows in :class:`Examples`, 0 to N - 1; ids are what a person knows an
example by. Nothing has to be escaped, shortened or made safe before: the page does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from engram.errors import DataError
from engram.trust.verdict import LEVELS

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]
NUMBERS = ("loss", "loo_loss", "score", "prediction_error", "prediction_variance")  # columns [N]


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Training examples that speak for or against others; for some examples, or all.

    Attributes:
        of: positions of the n examples that have neighbours, [n].
        helpful: positions of those that lower an example's loss most, first the strongest, [n, k];
            -1 where there are fewer.
        harmful: of those that raise it most, likewise.
        helpful_effect: what they change, in the unit of the losses: the example's loss without the
            neighbour minus with it, [n, k]; None where only the order is known.
        harmful_effect: likewise, negative.
    """

    of: Array
    helpful: Array
    harmful: Array
    helpful_effect: Array | None = None
    harmful_effect: Array | None = None


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples, one row each; whatever numpy makes an array of will do for a column.

    Attributes:
        ids: of the examples, unique, N of them.
        loss: under the model as it is, [N].
        loo_loss: under the model without the example, [N].
        score: how far the example moves its own prediction, [N].
        prediction_error: how far the prediction is from the label when the example is left out,
            [N]; of a classifier 1 minus the probability of the given class.
        prediction_variance: the share of that error that the example takes away itself, [N];
            see :mod:`engram.report.result_page`.
        classes: names of the C classes; empty for a regression, or where labels are words.
        given: label, as a position in ``classes``; without classes a number, or words, N of them.
        predicted: under leave-one-out, likewise.
        probabilities: of the classes under the model as it is, [N, C].
        loo_probabilities: under leave-one-out, [N, C].
        trust: level of each example as a position in :data:`engram.trust.verdict.LEVELS`, [N].
        flags: examples that an issue was found with, [N] truth values under the issue's name, as
            it shall be read (``"likely wrong label"``); filters and alerts name them.
        groups: for each grouping (``"source"``, ``"annotator"``) what each example belongs to, N
            words.
        label_score: how likely the label is right, 0 to 1, [N].
        images: N pictures, by position: arrays [H, W], [H, W, 3] or [3, H, W], of bytes or
            numbers between 0 and 1, or pictures of pillow. Only those shown are read, so that they
            may come from a disk.
        texts: N texts, likewise.
        rows: N rows of a table.
        neighbours: which examples help and harm them.
    """

    ids: Sequence[Any]
    loss: Any
    loo_loss: Any
    score: Any = None
    prediction_error: Any = None
    prediction_variance: Any = None
    classes: Sequence[str] = ()
    given: Any = None
    predicted: Any = None
    probabilities: Any = None
    loo_probabilities: Any = None
    trust: Any = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    label_score: Any = None
    images: Any = None
    texts: Any = None
    rows: pd.DataFrame | None = None
    neighbours: Neighbours | None = None

    def __post_init__(self) -> None:
        _check_unique(self.ids)
        for name in (*NUMBERS, "label_score"):
            self._keep(name, np.float64)
        for name in ("given", "predicted"):
            self._keep(name, np.int64 if self.classes else None)
            _check_positions(name, getattr(self, name), len(self.classes))
        self._keep("trust", np.int8)
        _check_positions("trust", self.trust, len(LEVELS))
        for name in ("probabilities", "loo_probabilities"):
            self._keep(name, np.float32, (len(self.classes),))
        object.__setattr__(self, "flags", {k: self._flag(k, v) for k, v in self.flags.items()})
        own = {"images": self.images, "texts": self.texts, "rows": self.rows, **self.groups}
        for name, values in own.items():
            if values is not None:
                _check_length(name, len(values), len(self))

    def __len__(self) -> int:
        return len(self.ids)

    def _keep(self, name: str, dtype: Any, inner: tuple[int, ...] = ()) -> None:
        """The column as an array of its type."""
        value = getattr(self, name)
        if value is not None:
            column = np.asarray(value) if dtype is None else np.asarray(value).astype(dtype)
            _check_shape(name, column, (len(self), *inner))
            object.__setattr__(self, name, column)

    def _flag(self, name: str, value: Any) -> Array:
        column: Array = np.asarray(value).astype(bool)
        _check_shape(name, column, (len(self),))
        return column


@dataclass(frozen=True)
class Headline:
    """The first lines: one sentence and four numbers.

    Attributes:
        title: of the page.
        sentence: what was found, in one sentence.
        train_loss, loo_loss: means over the examples.
        loo_interval: low and high of the leave-one-out loss.
        accuracy: under leave-one-out; of a regression R squared.
        accuracy_name: which of the two it is, or another measure.
        train_accuracy: the same on the training data.
        verdict: ``good``, ``caution`` or ``unreliable``.
        verdict_line: what may be believed, in a line: ``result.verdict.line``.
        reasons: why, the worst first; each with its remedy.
        unit: of the losses.
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
        low, high: of the change.
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
        train, loo: losses, [U]; ``loo`` is the estimate of the test loss.
        loo_low, loo_high: the band of the estimate, [U].
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
                    _check_length(item.name, len(column), len(self.steps))
                object.__setattr__(self, item.name, column)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Estimates beside what training again gave.

    Attributes:
        name: of what is compared, with its unit.
        estimated, retrained: [n].
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


def _check_unique(ids: Sequence[Any]) -> None:
    if len(ids) == 0:
        raise DataError("at least one example", "none", "give the page its examples")
    repeated = len(ids) - len({str(name) for name in ids})
    if repeated:
        raise DataError("an id of its own for each example", f"{repeated} ids twice", "number them")


def _check_length(name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise DataError(f"{name} of {wanted:,} rows", f"{found:,}", "give one for each")


def _check_shape(name: str, column: Array, shape: tuple[int, ...]) -> None:
    if column.shape != shape:
        raise DataError(f"{name} of shape {list(shape)}", f"{list(column.shape)}", "reshape it")


def _check_positions(name: str, column: Array | None, count: int) -> None:
    if column is not None and count and not ((column >= 0) & (column < count)).all():
        raise DataError(
            f"{name} as positions from 0 to {count - 1}",
            f"from {column.min()} to {column.max()}",
            "give positions, and the names they stand for",
        )

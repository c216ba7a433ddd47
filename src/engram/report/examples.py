"""The examples of a page: one row each, with whatever is known of them.

Positions are those of the rows, 0 to N - 1; ids are what a person knows an example by. Nothing has
to be escaped, shortened or made safe before: the page does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    @classmethod
    def of_influence(cls, influence: Any, of: Any, count: int = 4) -> Neighbours:
        """The strongest of what :func:`engram.influence` gives; nobody is a neighbour of itself.

        Args:
            influence: of the N training examples on the losses of n of them, [N, n].
            of: which ones those are, [n].
            count: of neighbours on each side.

        Example:
            >>> influence = np.array([[9.0, 0.5], [0.2, 9.0], [-0.1, 0.3]])
            >>> near = Neighbours.of_influence(influence, [0, 1], count=1)
            >>> near.helpful.tolist(), near.harmful.tolist()
            ([[1], [0]], [[2], [-1]])
        """
        values, places = np.asarray(influence).astype(np.float64).T, np.asarray(of)
        values[np.arange(len(places)), places] = 0.0
        order = np.argsort(-values, axis=1, kind="stable")
        sides = order[:, :count], order[:, ::-1][:, :count]
        effects = [np.take_along_axis(values, side, 1) for side in sides]
        helpful, harmful = (
            np.where(sign * effect > 0, side, -1)
            for sign, side, effect in zip((1, -1), sides, effects, strict=True)
        )
        return cls(places, helpful, harmful, *effects)


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
                check_length(name, len(values), len(self))

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


def _check_unique(ids: Sequence[Any]) -> None:
    if len(ids) == 0:
        raise DataError("at least one example", "none", "give the page its examples")
    repeated = len(ids) - len({str(name) for name in ids})
    if repeated:
        raise DataError("an id of its own for each example", f"{repeated} ids twice", "number them")


def check_length(name: str, found: int, wanted: int) -> None:
    """DataError unless there are as many as wanted."""
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

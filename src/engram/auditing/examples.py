"""Examples as a reader found them: inputs, targets, ids, groups, and what can be shown of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from engram.auditing.tasks import Task

if TYPE_CHECKING:
    import pandas as pd

SHOWN_CELLS = 12  # columns of a row that its text has; more would not be read
SHOWN_LENGTH = 2000  # characters of a text that are kept for showing


class Inputs(ABC):
    """Abstract: what a model is to predict from."""

    #: tabular, image or text
    kind: str

    @abstractmethod
    def __len__(self) -> int:
        """N."""

    @abstractmethod
    def subset(self, chosen: np.ndarray) -> Inputs:
        """Those at some positions."""

    @abstractmethod
    def texts(self) -> list[str]:
        """Each in words, for showing."""

    def rows(self) -> pd.DataFrame | None:
        """Each as a row of cells, for showing; None of what is no table."""
        return None


@dataclass(frozen=True, eq=False)
class Rows(Inputs):
    """Rows of a table.

    Args:
        frame: features only, as they were read; missing values are in it.
    """

    frame: pd.DataFrame
    kind = "tabular"

    def __len__(self) -> int:
        return len(self.frame)

    def subset(self, chosen: np.ndarray) -> Rows:
        return Rows(self.frame.iloc[chosen])

    def texts(self) -> list[str]:
        names = list(self.frame.columns[:SHOWN_CELLS])
        rows = self.frame[names].itertuples(index=False, name=None)
        return [
            ", ".join(f"{n}={_cell(v)}" for n, v in zip(names, row, strict=True))[:SHOWN_LENGTH]
            for row in rows
        ]

    def rows(self) -> pd.DataFrame:
        """Their first columns; what is no column of numbers as words."""
        from pandas.api.types import is_bool_dtype, is_numeric_dtype

        first = self.frame.iloc[:, :SHOWN_CELLS].reset_index(drop=True)
        words = {
            name: column.astype(object).where(column.notna(), "").astype(str)
            for name, column in first.items()
            if is_bool_dtype(column) or not is_numeric_dtype(column)
        }
        return first.assign(**words)


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, eq=False)
class Pictures(Inputs):
    """Images of one size.

    Args:
        pixels: [N, H, W, C] of bytes, with 1 or 3 channels.
        names: of their files, where they have some; else what to call them.
    """

    pixels: np.ndarray
    names: tuple[str, ...] = ()
    kind = "image"

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, chosen: np.ndarray) -> Pictures:
        return Pictures(self.pixels[chosen], _taken(self.names, chosen))

    def texts(self) -> list[str]:
        return list(self.names) or [""] * len(self)


@dataclass(frozen=True, eq=False)
class Texts(Inputs):
    """Pieces of writing."""

    lines: tuple[str, ...]
    kind = "text"

    def __len__(self) -> int:
        return len(self.lines)

    def subset(self, chosen: np.ndarray) -> Texts:
        return Texts(_taken(self.lines, chosen))

    def texts(self) -> list[str]:
        return [line[:SHOWN_LENGTH] for line in self.lines]


@dataclass(frozen=True, eq=False)
class Examples:
    """N examples, in the order that every result counts them.

    Args:
        inputs: what a model predicts from.
        task: what the targets mean.
        targets: class numbers [N], 0 and 1 [N, K], or standardised numbers [N, 1].
        ids: by which people know the examples.
        groups: the value of the column that examples are grouped by; None without one.
        skipped: names of what could not be read, with the reason.
        notes: what was done to the data on the way, for people to read.
        source: where they come from.
    """

    inputs: Inputs
    task: Task
    targets: Tensor
    ids: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Examples({len(self):,} of kind {self.inputs.kind}, {self.task.name})"

    def subset(self, chosen: np.ndarray) -> Examples:
        """Those at some positions, in that order."""
        return replace(
            self,
            inputs=self.inputs.subset(chosen),
            targets=self.targets[chosen],
            ids=_taken(self.ids, chosen),
            groups=None if self.groups is None else _taken(self.groups, chosen),
        )


def _taken(values: Sequence[str], chosen: np.ndarray) -> tuple[str, ...]:
    return tuple(values[i] for i in chosen.tolist()) if values else ()

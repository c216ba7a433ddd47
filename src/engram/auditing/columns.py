"""From a table to examples: which column is the label, what it means, what a model may look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engram.auditing.examples import Examples, Inputs, Rows, Texts
from engram.auditing.tasks import Classes, MultiLabel, Regression, Task
from engram.core.arguments import AUTO, one_of
from engram.core.printable import printable
from engram.errors import ArgumentError, DataError

if TYPE_CHECKING:
    import pandas as pd

LABEL_NAMES = ("label", "labels", "target", "class", "y")  # that a label column is known by
TASKS = (AUTO, "classes", "regression")
# Whole numbers are classes where there are few of them: a rating or a digit, not a price
MOST_NUMBERED = 50  # classes that numbers may stand for
FEWEST_EACH = 5  # examples of an average class, where numbers are classes
MOST_DIFFERENT = 10  # labels that are all different: more are names of rows
LISTED = 12  # names in a message; more would not be read


@dataclass(frozen=True)
class Wanted:
    """What the columns of a table are for.

    Args:
        label: name of the label column, or several 0/1 columns of a multi-label task; where it is
            not given, a column of a usual name is.
        text: the column to predict from, where it is text.
        image: the column with the paths of images.
        group_by: column by whose values examples are left out together.
        id: by which people know the examples.
        task: ``classes`` or ``regression``, where the column does not say.
        sample: most examples to read, drawn at random.
        seed: of that draw.
    """

    label: str | Sequence[str] | None = None
    text: str | None = None
    image: str | None = None
    group_by: str | None = None
    id: str | None = None
    task: str = AUTO
    sample: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("task", self.task, TASKS, 'leave it out, or use task="regression"')


def from_frame(frame: pd.DataFrame, wanted: Wanted, source: str, root: Path | None) -> Examples:
    """The examples of a table.

    Args:
        frame: as it was read.
        wanted: what its columns are for.
        source: what to call the table.
        root: folder that paths in it start from.
    """
    frame = _checked(frame, source)
    labels = _label_columns(frame, wanted)
    for name in (wanted.text, wanted.image, wanted.group_by, wanted.id):
        if name is not None:
            column_named(frame, name)
    frame, notes = _labelled(frame, labels, source)
    task, targets, more = task_of(frame[labels], wanted.task)
    inputs: Inputs
    kept: np.ndarray = np.arange(len(frame))
    skipped: tuple[str, ...] = ()
    if wanted.image is not None:
        from engram.auditing.readers.pictures import read_pictures

        inputs, kept, skipped = read_pictures(frame[wanted.image].tolist(), root)
    elif wanted.text is not None:
        inputs = Texts(tuple(_as_text(frame[wanted.text])))
    else:
        inputs = Rows(_features(frame, {*labels, wanted.group_by, wanted.id}, source))
    rows = frame.iloc[kept]
    found = Examples(
        inputs,
        task,
        targets[kept],
        _ids(rows, wanted.id),
        None if wanted.group_by is None else tuple(_as_text(rows[wanted.group_by], "missing")),
        skipped,
        (*notes, *more),
        source,
    )
    return checked(found)


def checked(examples: Examples) -> Examples:
    """The examples, where something can be learned from them; notes on what will be weak."""
    if len(examples) < 2:
        raise DataError(
            "at least two examples with a label",
            f"{len(examples)} in {examples.source}",
            "check the label column and the file",
        )
    examples = _told_apart(examples)
    if not isinstance(examples.task, Classes):
        return examples
    names, counts = examples.task.classes, torch.bincount(examples.targets.long())
    present = int((counts > 0).sum())
    if present < 2:
        raise DataError(
            "labels of at least two classes",
            f"only {printable(names[int(counts.argmax())])!r} in {examples.source}",
            "check the label column; of one class there is nothing to tell apart",
        )
    lone = [names[k] for k in (counts == 1).nonzero()[:, 0].tolist()]
    if len(lone) == present > MOST_DIFFERENT:
        raise DataError(
            "labels of which some appear more than once",
            f"{present:,} examples with as many labels in {examples.source}: {_listed(lone)}",
            'name the label column; where it has numbers to predict, use task="regression"',
        )
    if not lone:
        return examples
    note = (
        f"only one example{' each' * (len(lone) > 1)} of {_listed(lone)}: without it nothing is "
        "known of the class, so that its label is not judged"
    )
    return replace(examples, notes=(*examples.notes, note))


def _told_apart(examples: Examples) -> Examples:
    """The examples with an id of its own for each: rows that were pasted in twice share one."""
    seen: Counter[str] = Counter()
    taken, ids = set(examples.ids), []
    for name in examples.ids:
        seen[name] += 1
        number = seen[name]
        while number > 1 and f"{name} ({number})" in taken:
            number += 1
        ids.append(name if number == 1 else f"{name} ({number})")
        taken.add(ids[-1])
    several = [name for name, count in seen.items() if count > 1]
    if not several:
        return examples
    note = f"ids of several examples have a number behind them: {_listed(several)}"
    return replace(examples, ids=tuple(ids), notes=(*examples.notes, note))


def column_named(frame: pd.DataFrame, name: str) -> None:
    """DataError, with near names, where a table has no such column."""
    names = [str(column) for column in frame.columns]
    if name in names:
        return
    lowered = {one.lower(): one for one in names}
    near = [lowered[n] for n in get_close_matches(str(name).lower(), lowered, n=3, cutoff=0.5)]
    raise DataError(
        f"a column {name!r}",
        f"the columns {_listed(names)}",
        f"did you mean {' or '.join(map(repr, near))}?" if near else "name one of them",
    )


def class_targets(values: Sequence[str]) -> tuple[Classes, Tensor]:
    """The task of labels that name classes, and their class numbers; numbers in their order."""
    names = sorted(set(values), key=_in_order)
    number = {name: k for k, name in enumerate(names)}
    return Classes(tuple(names)), torch.tensor([number[value] for value in values])


def _in_order(name: str) -> tuple[int, float, str]:
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def _checked(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    if len(frame) == 0:
        raise DataError("a table with rows", f"none in {source}", "check the file")
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise DataError(
            "column names that differ",
            f"{printable(twice[0])!r} more than once in {source}",
            "rename one of them",
        )
    return frame if frame.index.is_unique else frame.reset_index(drop=True)


def _label_columns(frame: pd.DataFrame, wanted: Wanted) -> list[str]:
    if wanted.label is None:
        usual = [n for n in frame.columns if n.lower() in LABEL_NAMES]
        if len(usual) != 1:
            raise ArgumentError(
                "the name of the label column",
                f"none given, and {'several' if usual else 'none'} of a usual name among "
                f"{_listed(list(frame.columns))}",
                f"name it: label={usual[0] if usual else frame.columns[-1]!r}",
            )
        return usual
    names = [wanted.label] if isinstance(wanted.label, str) else list(wanted.label)
    for name in names:
        column_named(frame, name)
    return names


def _labelled(
    frame: pd.DataFrame, labels: list[str], source: str
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows that have a label, and a note about the others."""
    missing = frame[labels].isna().any(axis=1).to_numpy()
    if not missing.any():
        return frame, ()
    if missing.all():
        raise DataError(
            f"values in the label column {labels[0]!r}",
            f"none in {source}",
            "name another label column",
        )
    first = _listed([str(row) for row in np.flatnonzero(missing)])
    count, s = int(missing.sum()), "" if missing.sum() == 1 else "s"
    note = f"{count:,} row{s} without a label left out (row{s} {first})"
    return frame[~missing], (note,)


def task_of(labels: pd.DataFrame, wanted: str) -> tuple[Task, Tensor, tuple[str, ...]]:
    """The task, its targets, and notes."""
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    if labels.shape[1] > 1:
        return (*_several(labels), ())
    column = labels.iloc[:, 0]
    if column.map(lambda value: isinstance(value, list | tuple | set | np.ndarray)).any():
        return (*_lists(column), ())
    numeric = is_numeric_dtype(column) and not is_bool_dtype(column)
    if wanted == "regression" or (wanted == AUTO and numeric and _is_quantity(column)):
        numbers = _numbers(column)
        return (*Regression.of(numbers), ())
    mixed = column.map(type).nunique() > 1
    note = (f"label column {column.name!r} has mixed types: taken as names of classes",)
    return (*class_targets(_as_text(column)), note if mixed else ())


def _is_quantity(column: pd.Series[Any]) -> bool:
    values = column.to_numpy(dtype=np.float64)
    if not np.isfinite(values).all() or (values != np.round(values)).any():
        return True
    distinct = len(np.unique(values))
    return distinct > min(MOST_NUMBERED, max(2, len(values) // FEWEST_EACH))


def _numbers(column: pd.Series[Any]) -> np.ndarray:
    try:
        numbers = column.astype(float).to_numpy()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"numbers in the label column {column.name!r} of a regression",
            str(error),
            'use task="classes", or mend the column',
        ) from error
    if not np.isfinite(numbers).all():
        raise DataError(
            f"finite numbers in the label column {column.name!r}",
            f"infinity in {int((~np.isfinite(numbers)).sum()):,} rows",
            "mend or drop these rows",
        )
    return numbers


def _several(labels: pd.DataFrame) -> tuple[MultiLabel, Tensor]:
    """Columns of 0 and 1, one a label."""
    values = labels.to_numpy()
    try:
        numbers = values.astype(np.float32)
    except (TypeError, ValueError):
        numbers = np.full(values.shape, np.nan)
    if not np.isin(numbers, (0, 1)).all():
        wrong = labels.columns[int(np.flatnonzero(~np.isin(numbers, (0, 1)).all(axis=0))[0])]
        raise DataError(
            "0 or 1 in each of several label columns",
            f"other values in {wrong!r}",
            "name one label column, or columns of 0 and 1",
        )
    return MultiLabel(tuple(labels.columns)), torch.from_numpy(numbers)


def _lists(column: pd.Series[Any]) -> tuple[MultiLabel, Tensor]:
    """Lists of the names of labels."""
    sets = [{str(one) for one in value} for value in column]
    names = sorted(set().union(*sets), key=_in_order)
    rows = [[float(name in found) for name in names] for found in sets]
    return MultiLabel(tuple(names)), torch.tensor(rows)


def _features(frame: pd.DataFrame, taken: set[str | None], source: str) -> pd.DataFrame:
    features = frame.drop(columns=[name for name in taken if name is not None])
    if features.shape[1] == 0:
        raise DataError(
            "columns to predict the label from",
            f"none left in {source}",
            "name a text column with text=, or add features",
        )
    return features


def _ids(rows: pd.DataFrame, name: str | None) -> tuple[str, ...]:
    return tuple(map(str, rows.index)) if name is None else tuple(_as_text(rows[name], "missing"))


def _as_text(column: pd.Series[Any], missing: str = "") -> list[str]:
    """Values as words; whole numbers in a column of floats without their point."""
    values = column.tolist()
    whole = all(isinstance(v, float) and v.is_integer() for v in values if v == v)
    return [missing if v != v or v is None else str(int(v) if whole else v) for v in values]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:LISTED])
    return shown + (f" and {len(names) - LISTED:,} more" if len(names) > LISTED else "")

"""Arrays: an npz file, or inputs and labels in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram.auditing.columns import Wanted, checked, column_named, task_of
from engram.auditing.examples import Examples, Inputs, Pictures, Rows, Texts
from engram.auditing.tasks import Task
from engram.errors import DataError, brief

INPUT_NAMES = ("x_train", "X_train", "x", "X", "images", "data", "inputs", "features", "texts")
TARGET_NAMES = ("y_train", "Y_train", "y", "Y", "labels", "label", "targets", "target")
CHANNELS = (1, 3)  # of an image: grey, or red, green and blue


def read_arrays(path: Path, wanted: Wanted) -> Examples:
    """An npz file with inputs under one of the usual names and labels under another."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"arrays in {path}", brief(error), "save plain arrays with np.savez"
        ) from error
    inputs = _named(arrays, wanted.image or wanted.text, INPUT_NAMES, "inputs")
    labels = wanted.label if isinstance(wanted.label, str) else None
    targets = _named(arrays, labels, TARGET_NAMES, "labels")
    groups = None if wanted.group_by is None else _named(arrays, wanted.group_by, (), "groups")
    ids = None if wanted.id is None else _named(arrays, wanted.id, (), "ids")
    return from_arrays(inputs, targets, wanted, path.name, groups, ids)


def from_arrays(
    inputs: Any,
    labels: Any,
    wanted: Wanted,
    source: str,
    groups: Any = None,
    ids: Any = None,
) -> Examples:
    """Examples of arrays.

    Args:
        inputs: rows [N, F], images [N, H, W] or [N, H, W, C] (also [N, C, H, W]), or N texts.
        labels: [N]; or [N, K] of 0 and 1.
        wanted: for its task and sample.
        source: what to call them.
        groups, ids: of the examples, [N].
    """
    found, task_and_targets = _inputs(np.asarray(inputs), source), _targets(labels, wanted)
    task, targets = task_and_targets
    if len(found) != len(targets):
        raise DataError(
            f"a label for each of the {len(found):,} inputs of {source}",
            f"{len(targets):,}",
            "save inputs and labels of the same examples",
        )
    names = [str(i) for i in range(len(found))] if ids is None else [str(v) for v in ids]
    grouped = None if groups is None else tuple(str(v) for v in groups)
    examples = Examples(found, task, targets, tuple(names), grouped, source=source)
    if wanted.sample is not None and wanted.sample < len(examples):
        generator = np.random.default_rng(wanted.seed)
        chosen = np.sort(generator.choice(len(examples), wanted.sample, replace=False))
        examples = examples.subset(chosen)
    return checked(examples)


def _named(
    arrays: Mapping[str, np.ndarray], name: str | None, usual: tuple[str, ...], what: str
) -> np.ndarray:
    import pandas as pd

    if name is not None:
        column_named(pd.DataFrame(columns=list(arrays)), name)
        return arrays[name]
    for known in usual:
        if known in arrays:
            return arrays[known]
    raise DataError(
        f"{what} under one of the names {', '.join(usual)}",
        f"arrays named {', '.join(arrays) or 'nothing'}",
        "rename the array, or name it with label= or image=",
    )


def _inputs(array: np.ndarray, source: str) -> Inputs:
    import pandas as pd

    if array.dtype.kind in "US" and array.ndim == 1:
        return Texts(tuple(str(v) for v in array))
    if array.dtype.kind not in "biuf":
        raise DataError(
            "inputs of numbers or of texts",
            f"{array.dtype} in {source}",
            "convert them first, or save a table as CSV or Parquet",
        )
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim == 2:
        return Rows(pd.DataFrame(array, columns=[f"x{k}" for k in range(array.shape[1])]))
    return Pictures(_pixels(array, source))


def _pixels(array: np.ndarray, source: str) -> np.ndarray:
    """Images as bytes, channels last."""
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim == 4 and array.shape[3] not in CHANNELS and array.shape[1] in CHANNELS:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[3] not in CHANNELS:
        raise DataError(
            "images [N, H, W], or with 1 or 3 channels",
            f"shape {list(array.shape)} in {source}",
            "save rows [N, F] for a table",
        )
    if array.dtype == np.uint8:
        return array
    numbers = array.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise DataError("finite pixels", f"NaN or infinity in {source}", "mend the images")
    low, high = float(numbers.min()), float(numbers.max())
    scale = 255 / ((high - low) or 1.0)
    return np.round((numbers - low) * scale).astype(np.uint8)


def _targets(labels: Any, wanted: Wanted) -> tuple[Task, torch.Tensor]:
    import pandas as pd

    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim not in (1, 2):
        raise DataError(
            "labels [N], or [N, K] of 0 and 1", f"shape {list(array.shape)}", "save one for each"
        )
    frame = pd.DataFrame(array if array.ndim == 2 else {"label": array})
    missing = int(frame.isna().any(axis=1).sum())
    if missing:
        raise DataError("a label for every example", f"{missing:,} missing", "leave these out")
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    task, targets, _ = task_of(frame, wanted.task)
    return task, targets

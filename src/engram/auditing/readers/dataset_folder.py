"""A data set as Hugging Face's ``datasets`` saves it: Arrow files, and what their columns are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.auditing.columns import Wanted, from_frame
from engram.auditing.examples import Examples
from engram.auditing.readers.tables import check_size
from engram.core.optional import require
from engram.errors import DataError, brief

if TYPE_CHECKING:
    import pandas as pd

SPLITS = ("train", "training")  # of a folder with several, that is read
INFO = "dataset_info.json"
BYTES = "bytes"  # key of the file in an image's cell


def is_dataset_folder(path: Path) -> bool:
    """Whether a folder, or a split in it, has Arrow files."""
    return any(path.glob("*.arrow")) or any(path.glob("*/*.arrow"))


def read_dataset_folder(path: Path, wanted: Wanted) -> Examples:
    """The examples of its training split."""
    folder = _split(path)
    frame, features = _frame(folder), _features(folder)
    for name, feature in features.items():
        names = feature.get("names") if isinstance(feature, Mapping) else None
        if names and name in frame and feature.get("_type") == "ClassLabel":
            frame[name] = [names[int(v)] if v == v and int(v) >= 0 else None for v in frame[name]]
    images = [str(name) for name in frame if _holds_images(frame[name])]
    if wanted.image is None and wanted.text is None:
        wanted = replace(wanted, image=images[0] if images else None)
    if wanted.image is None and wanted.text is None:
        wanted = replace(wanted, text=_text_column(frame, wanted))
    if wanted.image in images:
        frame[wanted.image] = [_source(cell) for cell in frame[wanted.image]]
    if wanted.sample is not None and wanted.sample < len(frame):
        frame = frame.sample(wanted.sample, random_state=wanted.seed).sort_index()
    return from_frame(frame, wanted, path.name, folder)


def _split(path: Path) -> Path:
    if any(path.glob("*.arrow")):
        return path
    for name in SPLITS:
        if any((path / name).glob("*.arrow")):
            return path / name
    raise DataError(
        f"Arrow files in {path}, or in {path.name}/train",
        f"splits {', '.join(sorted(p.parent.name for p in path.glob('*/*.arrow')))}",
        "name the folder of the split",
    )


def _frame(folder: Path) -> pd.DataFrame:
    """All Arrow files of a folder, in the order of their names."""
    import pandas as pd

    pyarrow = require("pyarrow", "audit")
    files = sorted(folder.glob("*.arrow"))
    check_size(folder, sum(file.stat().st_size for file in files))
    parts = []
    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as source:
                try:
                    table = pyarrow.ipc.open_stream(source).read_all()
                except pyarrow.ArrowInvalid:
                    table = pyarrow.ipc.open_file(source).read_all()
                parts.append(table.to_pandas())
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"an Arrow file in {file}", brief(error), "save it again") from error
    return pd.concat(parts, ignore_index=True)


def _features(folder: Path) -> dict[str, Any]:
    """What the folder says about its columns; nothing where it does not."""
    try:
        found = json.loads((folder / INFO).read_text(encoding="utf-8")).get("features")
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def _holds_images(column: pd.Series[Any]) -> bool:
    first = next((cell for cell in column if cell is not None), None)
    return isinstance(first, dict) and set(first) == {BYTES, "path"}


def _source(cell: Any) -> Any:
    """The bytes of an image, or the path of its file."""
    if not isinstance(cell, dict):
        return ""
    return cell[BYTES] if cell[BYTES] is not None else str(cell["path"])


def _text_column(frame: pd.DataFrame, wanted: Wanted) -> str | None:
    """The one column of strings beside those that are named; None where there are none or more."""
    named = {wanted.label, wanted.id, wanted.group_by, "label", "labels"}
    strings = [
        str(name)
        for name in frame
        if name not in named and frame[name].map(lambda v: isinstance(v, str)).all()
    ]
    return strings[0] if len(strings) == 1 else None

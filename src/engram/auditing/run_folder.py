"""The folder of a run: a table, arrays, a description and the page; ordinary tools open them all.

=====================  =======================================================================
``run.json``           settings, versions, git commit, findings, the groups, the training curve
``examples.parquet``   a row an example: the table of issues, its text and its group
``rows.parquet``       their first columns, of a table
``result/``            sensitivities: ``result.json`` and safetensors
``weights.safetensors``  of the trained model
``thumbnails.safetensors``  pictures of the examples that are shown, of images
``neighbours.safetensors``  examples that help and harm those whose labels look most wrong
``report.html``        the page
=====================  =======================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engram.auditing.group_effects import no_classes, no_groups
from engram.auditing.outcome import Audit, Findings, Shown
from engram.auditing.tasks import Task
from engram.core.storage.files import read_tensors, replacing, write_tensors
from engram.core.storage.kinds import Kind, stored
from engram.core.storage.values import ADDED_LATER, init_fields, read_fields
from engram.errors import StorageError, brief
from engram.report.examples import Neighbours
from engram.sensitivity.result import KIND as RESULT

if TYPE_CHECKING:
    import pandas as pd

TABLE, ROWS, RESULTS, WEIGHTS, THUMBNAILS, NEIGHBOURS, PAGE = (
    "examples.parquet",
    "rows.parquet",
    "result",
    "weights.safetensors",
    "thumbnails.safetensors",
    "neighbours.safetensors",
    "report.html",
)
TEXT, GROUP = "text", "group"  # columns of the table beside those of the issues


@dataclass(frozen=True, eq=False)
class Run:
    """What ``run.json`` holds."""

    kind: str
    task: Task
    findings: Findings
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]
    test: Mapping[str, float]
    curve: tuple[Mapping[str, float], ...]
    groups: tuple[Mapping[str, Any], ...]
    classes: tuple[Mapping[str, Any], ...] = ()
    advice: str = field(default="", metadata=ADDED_LATER)

    @classmethod
    def of(cls, audit: Audit) -> Run:
        """The part of an audit that is neither table nor array."""
        return cls(
            audit.shown.kind,
            audit.shown.task,
            audit.findings,
            audit.settings,
            audit.facts,
            audit.notes,
            audit.test,
            tuple(audit.curve),
            _records(audit.groups),
            _records(audit.classes),
            audit.advice,
        )


def _records(frame: pd.DataFrame) -> tuple[dict[str, Any], ...]:
    """The rows of a table, its index a column."""
    rows = frame.reset_index().to_dict("records")
    return tuple({str(k): v for k, v in row.items()} for row in rows)


def _frame(records: tuple[Mapping[str, Any], ...], empty: pd.DataFrame) -> pd.DataFrame:
    """The table of rows, as :func:`_records` gives them."""
    import pandas as pd

    if not records:
        return empty
    return pd.DataFrame([dict(row) for row in records]).set_index(empty.index.name)


def write_run(audit: Audit, folder: Path) -> Path:
    """Write everything; ``run.json`` last, so that a folder with one is whole."""
    _write_table(audit.issues.assign(**{TEXT: list(audit.shown.texts)}), folder / TABLE)
    if audit.shown.rows is not None:
        _write_table(audit.shown.rows, folder / ROWS)
    RESULT.write(audit.result, folder / RESULTS)
    if audit.weights:
        write_tensors(folder / WEIGHTS, audit.weights)
    if len(audit.shown.pictured):
        tensors = {
            "pictured": torch.from_numpy(audit.shown.pictured),
            "thumbnails": torch.from_numpy(np.ascontiguousarray(audit.shown.thumbnails)),
        }
        write_tensors(folder / THUMBNAILS, tensors)
    if audit.neighbours is not None:
        columns = {item.name: getattr(audit.neighbours, item.name) for item in fields(Neighbours)}
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(column))
            for name, column in columns.items()
            if column is not None
        }
        write_tensors(folder / NEIGHBOURS, tensors)
    audit.report(folder / PAGE)
    return KIND.write(audit, folder)


def _write_table(table: pd.DataFrame, path: Path) -> None:
    with replacing(path) as temporary:
        table.to_parquet(temporary)


def _read_table(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except Exception as error:  # whatever the reader of another library makes of a damaged file
        raise StorageError(
            f"the table of a run in {path.name}", brief(error), "make the run again"
        ) from error


def _audit(run: Run, folder: Path) -> Audit:
    """The audit of a folder."""
    table = _read_table(folder / TABLE)
    result = RESULT.read(folder / RESULTS)
    if TEXT not in table or len(table) != result.num_data:
        raise StorageError(
            f"{result.num_data:,} rows in {TABLE}, one for each example of the result",
            f"{len(table):,}",
            "make the run again",
        )
    pictured, thumbnails = np.empty(0, np.int64), np.empty((0, 1, 1, 1), np.uint8)
    if (folder / THUMBNAILS).exists():
        tensors = read_tensors(folder / THUMBNAILS)[0]
        pictured, thumbnails = tensors["pictured"].numpy(), tensors["thumbnails"].numpy()
    grouped = table[GROUP].notna().all()
    shown = Shown(
        run.kind,
        run.task,
        tuple(table["id"]),
        tuple(table[TEXT]),
        _read_table(folder / ROWS) if (folder / ROWS).exists() else None,
        tuple(table[GROUP].astype(str)) if grouped else None,
        pictured,
        thumbnails,
    )
    near = None
    if (folder / NEIGHBOURS).exists():
        tensors = read_tensors(folder / NEIGHBOURS)[0]
        near = Neighbours(**{name: column.numpy() for name, column in tensors.items()})
    return Audit(
        shown,
        result,
        table.drop(columns=TEXT),
        run.findings,
        _frame(run.groups, no_groups()),
        run.curve,
        run.settings,
        run.facts,
        run.notes,
        run.test,
        _frame(run.classes, no_classes()),
        near,
        run.advice,
        read_tensors(folder / WEIGHTS)[0] if (folder / WEIGHTS).exists() else {},
    )


def _made(content: Any, where: str) -> Any:
    return Run(**read_fields(Run, content, where))


def _content(audit: Audit) -> dict[str, Any]:
    return init_fields(Run.of(audit))


KIND: Kind[Any] = stored(Kind("run", 1, _made, content=_content, placed=_audit))

"""Every example's score at every update: rows of numbers, in memory or in a file that grows."""

from __future__ import annotations

import gc
import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram.errors import DataError

MEMORY_BYTES = 16 * 2**20  # beyond this the rows go to a file
FILE = "scores.f32"
_writers: weakref.WeakValueDictionary[Path, ScoreRows] = weakref.WeakValueDictionary()


class ScoreRows:
    """Rows [N] of single precision, appended one by one.

    Args:
        folder: where the file of rows is kept; without one, rows stay in memory while they are
            small and then go to a temporary folder that is removed at the end. What an earlier run
            left there is replaced by the first row, and not before.

    Example:
        >>> rows = ScoreRows()
        >>> rows.append(torch.tensor([1.0, 2.0]))
        >>> rows.append(torch.tensor([3.0, 4.0]))
        >>> rows.matrix()
        tensor([[1., 2.],
                [3., 4.]])
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.kept = folder is not None
        self.num_rows, self.width = 0, 0
        self._rows: list[Tensor] = []
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def path(self) -> Path | None:
        """The file of rows, where there is one."""
        return None if self.folder is None else self.folder / FILE

    def append(self, row: Tensor) -> None:
        """Add a row, as long as those before."""
        values = row.detach().to("cpu", torch.float32).contiguous()
        if self.num_rows and len(values) != self.width:
            raise DataError(
                f"scores of {self.width:,} examples, as before",
                f"{len(values):,}",
                "use one tracker per data set",
            )
        if self.path is not None:
            self._check_writer(self.path)
            self._write(self.path, [values], self.num_rows * self.width * 4)
        else:
            self._rows.append(values.clone())
        self.num_rows, self.width = self.num_rows + 1, len(values)
        if self.path is None and self.num_rows * self.width * 4 > MEMORY_BYTES:
            self._spill()

    def take_over(self) -> None:
        """Be the one that writes the file from now on, in place of who did so before."""
        if self.path is not None:
            _writers[self.path.resolve()] = self

    def _check_writer(self, path: Path) -> None:
        """One writer a file: two would mix their rows."""
        key = path.resolve()
        if _writers.get(key, self) is not self:
            gc.collect()  # a tracker that nobody holds any more may still be there
        if _writers.setdefault(key, self) is not self:
            raise DataError(
                "a folder that no other tracker writes to",
                f"one whose {FILE} belongs to another one",
                "give every tracker a folder= of its own",
            )

    def _spill(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="engram-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.take_over()
        self._write(self.folder / FILE, self._rows, 0)
        self._rows = []

    @staticmethod
    def _write(path: Path, rows: list[Tensor], start: int) -> None:
        path.touch()
        with path.open("r+b") as file:
            file.truncate(start)  # what an earlier run left after our rows
            file.seek(start)
            for row in rows:
                file.write(row.numpy().tobytes())

    def matrix(self) -> Tensor:
        """All rows, [rows, N]; those in a file are read as they are needed."""
        if self.num_rows == 0:
            return torch.empty(0, 0)
        if self.path is None:
            return torch.stack(self._rows)
        shape = (self.num_rows, self.width)
        return torch.from_numpy(np.memmap(self.path, np.float32, "c", shape=shape))

    def __getitem__(self, number: int) -> Tensor:
        if self.path is None:
            return self._rows[number]
        return self.matrix()[number].clone()

    @classmethod
    def reopen(cls, folder: str | Path, num_rows: int, width: int) -> ScoreRows:
        """Go on with the first rows of a file; later ones, if any, go with the next row."""
        path, size = Path(folder) / FILE, num_rows * width * 4
        if not path.is_file() or path.stat().st_size < size:
            raise DataError(
                f"{num_rows:,} rows of scores in {path}",
                "a file that is missing or shorter",
                "resume where the run wrote its scores, with the same folder",
            )
        rows = cls()
        rows.folder, rows.kept = Path(folder), True
        rows.num_rows, rows.width = num_rows, width
        rows.take_over()
        return rows

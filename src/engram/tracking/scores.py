"""Every example's numbers at every update: rows, in memory or in a file that grows."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram.core.arguments import path_of
from engram.core.storage.files import reason_of, replacing
from engram.errors import DataError, StorageError

MEMORY_BYTES = 16 * 2**20  # of rows that are held in memory; beyond, all go to a file
FILE = "scores.f32"  # single-precision numbers, row after row
LOO_FILE = "loo_losses.f32"
PIECE_ROWS = 64  # read at once for a checksum: speed against memory
_writers: weakref.WeakValueDictionary[Path, ScoreRows] = weakref.WeakValueDictionary()


class ScoreRows:
    """Rows [N] of single precision, appended one by one.

    Args:
        folder: where the file of rows is kept; without one, rows stay in memory while they are
            small and then go to a temporary folder that is removed at the end. What an earlier run
            left there is replaced by the first row, and not before.
        file: its name in the folder.

    Example:
        >>> rows = ScoreRows()
        >>> rows.append(torch.tensor([1.0, 2.0]))
        >>> rows.append(torch.tensor([3.0, 4.0]))
        >>> rows.matrix()
        tensor([[1., 2.],
                [3., 4.]])
    """

    def __init__(self, folder: str | Path | None = None, file: str = FILE) -> None:
        self.file = file
        self.folder = None if folder is None else path_of("folder", folder)
        self.kept = folder is not None
        self.num_rows, self.width = 0, 0
        self._rows: list[Tensor] = []
        self._digest = hashlib.sha256()
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unusable(self.folder, error) from error

    def __len__(self) -> int:
        return self.num_rows

    @property
    def path(self) -> Path | None:
        """The file of rows, where there is one."""
        return None if self.folder is None else self.folder / self.file

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
        self._digest.update(values.numpy().data)
        self.num_rows, self.width = self.num_rows + 1, len(values)
        if self.path is None and self.num_rows * self.width * 4 > MEMORY_BYTES:
            self._spill()

    @property
    def digest(self) -> str:
        """SHA-256 of all rows, to recognise a file of them."""
        return self._digest.hexdigest()

    def take_over(self) -> None:
        """Become the one writer of the file, in place of an earlier one."""
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
                f"one whose {self.file} belongs to another one",
                "give every tracker a folder= of its own",
            )

    def _spill(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="engram-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.take_over()
        self._write(self.folder / self.file, self._rows, 0)
        self._rows = []

    @staticmethod
    def _write(path: Path, rows: list[Tensor], start: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # no link is written through
        try:
            with os.fdopen(os.open(path, flags, 0o666), "r+b") as file:
                _check_length(path, os.fstat(file.fileno()).st_size, start)
                file.truncate(start)  # what an earlier run left after our rows
                file.seek(start)
                for row in rows:
                    file.write(row.numpy().tobytes())
        except OSError as error:
            raise _unusable(path, error) from error

    def matrix(self) -> Tensor:
        """All rows, [rows, N]; those in a file are read as they are needed."""
        if self.num_rows == 0:
            return torch.empty(0, 0)
        if self.path is None:
            return torch.stack(self._rows)
        shape = (self.num_rows, self.width)
        try:
            _check_length(self.path, self.path.stat().st_size, math.prod(shape) * 4)
            return torch.from_numpy(np.memmap(self.path, np.float32, "c", shape=shape))
        except OSError as error:
            raise _unusable(self.path, error) from error

    def __getitem__(self, number: int) -> Tensor:
        if self.path is None:
            return self._rows[number]
        return self.matrix()[number].clone()

    @classmethod
    def of_matrix(cls, matrix: Tensor, folder: str | Path | None, file: str = FILE) -> ScoreRows:
        """Go on with rows [rows, N] that were kept elsewhere; into a folder they come whole."""
        rows = cls(folder, file)
        if folder is None or len(matrix) == 0:
            for row in matrix:
                rows.append(row)
            rows.take_over()
            return rows
        numbers = matrix.cpu().contiguous().numpy()
        with replacing(Path(folder) / file) as path:
            numbers.tofile(path)
        digest = hashlib.sha256(numbers.data).hexdigest()
        return cls.reopen(folder, len(matrix), matrix.shape[1], digest, file)

    @classmethod
    def reopen(
        cls, folder: str | Path, num_rows: int, width: int, digest: str, file: str = FILE
    ) -> ScoreRows:
        """Go on with the first rows of a file; later ones, if any, go with the next row.

        StorageError unless those rows are there as they were written.
        """
        rows = cls(file=file)
        rows.folder, rows.kept = Path(folder), True
        rows.num_rows, rows.width = num_rows, width
        for start in range(0, num_rows, PIECE_ROWS):
            rows._digest.update(rows.matrix()[start : start + PIECE_ROWS].numpy().data)
        if rows.digest != digest:
            raise StorageError(
                f"the {num_rows:,} rows of scores that the run has written to {rows.path}",
                "other ones",
                "resume where the run wrote its scores, with the same folder",
            )
        rows.take_over()
        return rows


def _check_length(path: Path, found: int, wanted: int) -> None:
    """A file that lost its end would be filled up with zeros."""
    if found < wanted:
        raise StorageError(
            f"at least {wanted:,} bytes of scores in {path}",
            f"{found:,}: the file was cut, or is that of another run",
            "resume where the run wrote its scores, with the same folder",
        )


def _unusable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"scores in {path}",
        reason_of(error),
        "resume where the run wrote its scores, with the same folder; check its rights and the "
        "free space",
    )

"""The folder that :func:`engram.score` writes: its parts, as far as they are there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engram.core.arguments import path_of
from engram.core.storage.files import check_file, digest_of, read_bytes
from engram.errors import RunFolderError, StorageError
from engram.sensitivity.estimators.trajectory import level
from engram.sensitivity.first_pass import STAGE, mean_without

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "scores.json"
NAME = re.compile(r"part-(?P<number>\d{6})-(?P<digest>[0-9a-f]{16})\.parquet")
READOUT = "readout_"  # losses at the times of a recorded training, which all parts are averaged by


@dataclass(frozen=True)
class Scores:
    """What :func:`engram.score` has written so far.

    Args:
        folder: with its parts.
    """

    folder: Path
    manifest: Mapping[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        path = path_of("folder", self.folder)
        object.__setattr__(self, "folder", path)
        object.__setattr__(self, "manifest", read_manifest(path))

    @property
    def num_data(self) -> int:
        """N, of all parts, written or not."""
        return int(self.manifest["num_data"])

    @property
    def num_parts(self) -> int:
        """All parts, written or not."""
        return -(-self.num_data // int(self.manifest["part"]))

    def rows_of(self, number: int) -> range:
        """The examples of a part."""
        size = int(self.manifest["part"])
        return range(number * size, min((number + 1) * size, self.num_data))

    @cached_property
    def parts(self) -> Mapping[int, Path]:
        """Files of the parts that are there and whole, by number; damaged ones do not count."""
        found = {}
        for file in sorted(self.folder.iterdir()):
            named = NAME.fullmatch(file.name)
            if named and digest_of(file)[:16] == named["digest"]:
                found[int(named["number"])] = file
        return found

    @property
    def missing(self) -> list[int]:
        """Numbers of the parts that are not there."""
        return [number for number in range(self.num_parts) if number not in self.parts]

    def to_frame(self, partial: bool = False) -> pd.DataFrame:
        """``loss``, ``loo_loss``, ``score`` and ``flagged`` of every example, by its position.

        Examples that ``top=`` left without an estimate have NaN in ``loo_loss`` and ``score``.

        Args:
            partial: also where parts are missing: of those that are there.
        """
        import pandas as pd

        if self.missing and not partial:
            some = ", ".join(map(str, self.missing[:5])) + (", ..." if self.missing[5:] else "")
            raise RunFolderError(
                f"all {self.num_parts:,} parts in {self.folder}",
                f"{len(self.missing):,} missing ({some})",
                "run engram.score again, which writes what is missing, or ask for partial=True",
            )
        frames = [pd.read_parquet(file) for _, file in sorted(self.parts.items())]
        if not frames:
            return pd.DataFrame(columns=["loss", "loo_loss", "score", "flagged"])
        frame = pd.concat(frames).set_index("example")
        readouts = [name for name in frame.columns if name.startswith(READOUT)]
        if readouts:
            estimated = frame["loo_loss"].notna()
            known = torch.tensor(frame.loc[estimated, readouts].to_numpy())
            frame.loc[estimated, "loo_loss"] = level(known).numpy()
        return frame.drop(columns=readouts)

    def top(self, count: int = 20, by: str = "loo_loss") -> pd.DataFrame:
        """The examples that come first in a column, highest first."""
        return self.to_frame().sort_values(by, ascending=False, kind="stable").head(count)

    @cached_property
    def _means(self) -> tuple[float, float]:
        frame = self.to_frame()
        if STAGE in frame:
            return float(frame["loss"].mean()), mean_without(frame)
        return float(frame["loss"].mean()), float(frame["loo_loss"].mean())

    @property
    def train_nll(self) -> float:
        """Mean loss on the training data, nats per example."""
        return self._means[0]

    @property
    def loo_nll(self) -> float:
        """Mean leave-one-out loss, which estimates the test loss; nats per example.

        With ``top=`` the examples without an estimate count by the sample of them that has one.
        """
        return self._means[1]

    def __repr__(self) -> str:
        told = f"{self.num_parts - len(self.missing):,} of {self.num_parts:,} parts"
        mean = ""
        if not self.missing:
            mean = f"; train loss {self.train_nll:.4f}, leave-one-out loss {self.loo_nll:.4f}"
        return f"Scores of {self.num_data:,} examples in {self.folder}: {told}{mean}; not judged"


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the folder is about; StorageError where that is damaged."""
    check_file(folder / MANIFEST)
    text = read_bytes(folder / MANIFEST, "a folder written by engram.score")
    try:
        found = json.loads(text)
        fine = isinstance(found, dict) and int(found["num_data"]) > 0 and int(found["part"]) > 0
    except (ValueError, KeyError, TypeError):
        fine = False
    if not fine:
        raise StorageError(
            "an undamaged folder", f"{folder / MANIFEST} that says nothing", "begin a new one"
        )
    return dict(found)

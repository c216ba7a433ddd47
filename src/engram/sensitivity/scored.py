"""Sensitivities of data of any length, written to a folder as they come.

A part is the examples from one number to another: one Parquet file, written beside its place and
renamed, whose name has the SHA-256 of what is in it. So a part is whole or not there, any process
can write any part, and nobody has to wait for anybody: what is missing after a kill is written by
the next call. All that the processes share is the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, is_auto, path_of, whole
from engram.core.data.batches import Data
from engram.core.data.columns import Columns
from engram.core.identity.digests import joined
from engram.core.memory import backing_off
from engram.core.processes.group import Processes
from engram.core.processes.shares import Share
from engram.core.progress import Bar
from engram.core.selection import spread
from engram.core.storage.files import check_file, digest_of, read_bytes, replacing, write_text
from engram.engine.gradient_accumulator import DiscardGradients
from engram.errors import RunFolderError, StorageError
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior
from engram.problem import Problem, opened_problem
from engram.sensitivity.estimators import ESTIMATORS, check_estimator, chosen_estimator
from engram.sensitivity.estimators.base import Estimator, Setting
from engram.sensitivity.estimators.trajectory import level

if TYPE_CHECKING:
    import pandas as pd

PART = 4096  # examples of a part: what a kill can cost, against files
COMPARED = 16  # examples whose targets and losses tell whether a folder is about this data
MANIFEST = "scores.json"
NAME = re.compile(r"part-(?P<number>\d{6})-(?P<digest>[0-9a-f]{16})\.parquet")
READOUT = "readout_"  # losses at the times of a recorded training, which all parts are averaged by


@backing_off
def score(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    folder: str | Path,
    *,
    estimator: str = AUTO,
    rounds: int = 3,
    part: int = PART,
    share: tuple[int, int] | str = AUTO,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Scores:
    """Loss, leave-one-out loss and score of every example, written to a folder part by part.

    What is there already is not computed again, so that a run goes on after a kill, and several
    processes share it. Memory does not grow with the number of examples.

    Args:
        model, data, posterior, estimator, rounds: as for :func:`engram.sensitivities`.
        folder: is made where it is missing; one of another run is refused.
        part: examples of a part, which a kill costs at the most.
        share: which of the parts are this process's, ``(number, of how many)``; ``"auto"`` is the
            rank in ``torch.distributed``, or in the environment of ``torchrun`` or ``srun``.
        batch_size: most examples at a time; ``"auto"`` is what the free memory has room for.
        progress: show a bar when it takes longer than a few seconds.

    Example:
        >>> import tempfile
        >>> import engram
        >>> model, data = nn.Linear(3, 2), (torch.randn(50, 3), torch.arange(50) % 2)
        >>> posterior = engram.laplace(model, data, structure="kronecker", prior_precision=1.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     scores = score(model, data, posterior, folder, part=20)
        ...     print(scores.num_parts, len(scores.to_frame()))
        3 50
    """
    size = whole("part", part, 1, MANY, f"use part={PART}")
    rounds = whole("number of rounds", rounds, 0, MANY, "use rounds=3")
    check_estimator(estimator)
    mine = _share(share)
    path = path_of("folder", folder)
    posterior = as_posterior(posterior, model)
    chosen = chosen_estimator(estimator, posterior)
    only = None if ESTIMATORS[chosen].along_training else posterior.only
    with opened_problem(model, data, posterior, batch_size, progress, only=only) as problem:
        _check_manifest(path, _manifest(problem, chosen, rounds, size))
        scores = Scores(path)
        own = mine.of(scores.missing)
        if own:
            _write_parts(problem, ESTIMATORS[chosen], rounds, scores, own)
    return Scores(path)


def _write_parts(
    problem: Problem, estimator: Estimator, rounds: int, scores: Scores, parts: list[int]
) -> None:
    session = problem.session
    sink = DiscardGradients()
    setting = estimator.prepared(
        Setting(session.likelihood, problem.posterior, rounds, sink, opened=session)
    )
    opened = setting.opened or session
    with Bar(len(parts), "parts", session.progress) as bar:
        for number in parts:
            rows = scores.rows_of(number)
            columns = Columns(len(rows))
            for start in range(0, len(rows), opened.batches.batch_size):
                some = rows[start : start + opened.batches.batch_size]
                for observed in opened.passes("", torch.as_tensor(some)):
                    columns.add(_row(observed, estimator(observed, setting)))
            _write_part(scores.folder, number, columns.complete())
            bar.update()


def _row(observed: Any, estimate: Any) -> dict[str, Tensor]:
    """Numbers of each example of a batch, by the names of their columns."""
    found = {
        "example": observed.batch.indices,
        "loss": observed.loss,
        "loo_loss": estimate.loo_loss,
        "score": estimate.prediction_deviation.abs().sum(1),
        "flagged": estimate.flagged,
    }
    if estimate.readouts is not None:
        for place, values in enumerate(estimate.readouts.unbind(1)):
            found[f"{READOUT}{place}"] = values
    return found


def _write_part(folder: Path, number: int, columns: Mapping[str, Tensor]) -> None:
    import pandas as pd

    frame = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    beside = folder / f".part-{number:06d}-{os.getpid()}.parquet"
    try:
        with replacing(beside) as path:
            frame.to_parquet(path, index=False)
        beside.replace(folder / f"part-{number:06d}-{digest_of(beside)[:16]}.parquet")
    finally:
        beside.unlink(missing_ok=True)


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
        object.__setattr__(self, "manifest", _read_manifest(path))

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
            frame["loo_loss"] = level(torch.tensor(frame[readouts].to_numpy())).numpy()
        return frame.drop(columns=readouts)

    def top(self, count: int = 20, by: str = "loo_loss") -> pd.DataFrame:
        """The examples that come first in a column, highest first."""
        return self.to_frame().sort_values(by, ascending=False, kind="stable").head(count)

    @cached_property
    def _means(self) -> tuple[float, float]:
        frame = self.to_frame()
        return float(frame["loss"].mean()), float(frame["loo_loss"].mean())

    @property
    def train_nll(self) -> float:
        """Mean loss on the training data, nats per example."""
        return self._means[0]

    @property
    def loo_nll(self) -> float:
        """Mean leave-one-out loss, which estimates the test loss; nats per example."""
        return self._means[1]

    def __repr__(self) -> str:
        told = f"{self.num_parts - len(self.missing):,} of {self.num_parts:,} parts"
        mean = ""
        if not self.missing:
            mean = f"; train loss {self.train_nll:.4f}, leave-one-out loss {self.loo_nll:.4f}"
        return f"Scores of {self.num_data:,} examples in {self.folder}: {told}{mean}; not judged"


def _manifest(problem: Problem, estimator: str, rounds: int, part: int) -> dict[str, Any]:
    """What a folder is about: anything else may not be added to it."""
    chosen = spread(problem.num_data, COMPARED)
    seen = list(problem.session.passes("", chosen))
    outputs = torch.cat([o.loss.double().cpu() for o in seen])
    targets = torch.cat([o.batch.targets.flatten().double().cpu() for o in seen])
    data = [f"{value:.3e}" for value in (*outputs.tolist(), *targets.tolist())]
    return {
        "num_data": problem.num_data,
        "part": part,
        "estimator": estimator,
        "rounds": rounds if estimator == "iterated" else None,
        "likelihood": problem.likelihood.identity,
        "posterior": problem.posterior.digest,
        "examples": joined("examples", *data).hex(),
    }


def _check_manifest(folder: Path, wanted: dict[str, Any]) -> None:
    if not (folder / MANIFEST).exists():
        write_text(folder / MANIFEST, json.dumps(wanted, indent=2) + "\n")
        return
    found = _read_manifest(folder)
    other = [name for name in wanted if found.get(name) != wanted[name]]
    if other:
        raise RunFolderError(
            f"a folder of this run in {folder}",
            f"one of another run, with other {', '.join(other)}",
            "give another folder, or the model, data and settings that it was begun with",
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
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


def _share(share: tuple[int, int] | str) -> Share:
    """What is given, the rank in torch.distributed, or what the environment says."""
    peers = Processes.found(together=is_auto(share))
    return Share.chosen(share) if peers.alone else Share(peers.rank, peers.count)

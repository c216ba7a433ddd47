"""Sensitivities of data of any length, written to a folder as they come.

A part is the examples from one number to another: one Parquet file, written beside its place and
renamed, whose name has the SHA-256 of what is in it. So a part is whole or not there, any process
can write any part, and nobody has to wait for anybody: what is missing after a kill is written by
the next call. All that the processes share is the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, MANY, fraction, is_auto, path_of, whole
from engram.core.data.batches import Data
from engram.core.data.columns import Columns
from engram.core.identity.digests import joined
from engram.core.memory import backing_off
from engram.core.processes.group import Processes
from engram.core.processes.shares import Share
from engram.core.progress import Bar
from engram.core.selection import spread
from engram.core.storage.files import digest_of, replacing, write_text
from engram.engine.gradient_accumulator import DiscardGradients
from engram.errors import RunFolderError
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior
from engram.problem import Problem, opened_problem
from engram.sensitivity.estimators import ESTIMATORS, check_estimator, chosen_estimator
from engram.sensitivity.estimators.base import Estimator, Setting
from engram.sensitivity.first_pass import FOLDER as FIRST
from engram.sensitivity.first_pass import Chosen, losses
from engram.sensitivity.scores import MANIFEST, READOUT, Scores, read_manifest

if TYPE_CHECKING:
    import pandas as pd

PART = 4096  # examples of a part: what a kill can cost, against files
COMPARED = 16  # examples whose targets and losses tell whether a folder is about this data


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
    top: float | None = None,
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
        top: two stages for very large data: a forward pass over all examples, and estimates for
            this share of them alone, those with the largest losses, and for a random sample of the
            others. The column ``stage`` says which is which: ``top``, ``sample`` or ``loss``.
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
    top = None if top is None else fraction("top", top)
    rounds = whole("number of rounds", rounds, 0, MANY, "use rounds=3")
    check_estimator(estimator)
    mine = _share(share)
    path = path_of("folder", folder)
    posterior = as_posterior(posterior, model)
    chosen = chosen_estimator(estimator, posterior)
    only = posterior.only
    with opened_problem(model, data, posterior, batch_size, progress, only=only) as problem:
        manifest = _manifest(problem, chosen, rounds, size) | ({} if top is None else {"top": top})
        _check_manifest(path, manifest)
        scores = Scores(path)
        own = mine.of(scores.missing)
        picked = None
        if top is not None and own:
            first = _first_pass(problem, path / FIRST, manifest, mine)
            if first.missing:  # other processes have not come so far
                return scores
            picked = Chosen.of(first.to_frame(), top)
        if own:
            _write_parts(problem, ESTIMATORS[chosen], rounds, scores, own, picked)
    return Scores(path)


def _first_pass(problem: Problem, folder: Path, manifest: dict[str, Any], share: Share) -> Scores:
    """The losses of all examples in parts of their own, as far as they are there."""
    _check_manifest(folder, manifest)
    found = Scores(folder)
    own = share.of(found.missing)
    with Bar(len(own), "losses", problem.session.progress) as bar:
        for number in own:
            rows = torch.as_tensor(found.rows_of(number))
            _write_part(folder, number, _framed(losses(problem.session, rows)))
            bar.update()
    return Scores(folder)


def _write_parts(
    problem: Problem,
    estimator: Estimator,
    rounds: int,
    scores: Scores,
    parts: list[int],
    picked: Chosen | None = None,
) -> None:
    """These parts; of each example, or of those that were picked."""
    session = problem.session
    sink = DiscardGradients()
    setting = estimator.prepared(
        Setting(session.likelihood, problem.posterior, rounds, sink, opened=session)
    )
    opened = setting.opened or session
    with Bar(len(parts), "parts", session.progress) as bar:
        for number in parts:
            rows = scores.rows_of(number)
            own = torch.as_tensor(rows) if picked is None else picked.wanted(rows)
            columns = Columns(len(own))
            for some in own.split(opened.batches.batch_size):
                for observed in opened.passes("", some):
                    columns.add(_row(observed, estimator(observed, setting)))
            frame = _framed(columns.complete() if len(own) else _no_rows())
            if picked is not None:
                frame = picked.completed(frame, rows)
            _write_part(scores.folder, number, frame)
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


def _no_rows() -> dict[str, Tensor]:
    """Of a part in which no example was picked."""
    empty = torch.zeros(0, dtype=torch.float64)
    return {"example": empty.long(), "loo_loss": empty, "score": empty, "flagged": empty.bool()}


def _framed(columns: Mapping[str, Tensor]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({name: values.numpy() for name, values in columns.items()})


def _write_part(folder: Path, number: int, frame: pd.DataFrame) -> None:
    beside = folder / f".part-{number:06d}-{os.getpid()}.parquet"
    try:
        with replacing(beside) as path:
            frame.to_parquet(path, index=False)
        beside.replace(folder / f"part-{number:06d}-{digest_of(beside)[:16]}.parquet")
    finally:
        beside.unlink(missing_ok=True)


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
    found = read_manifest(folder)
    other = [name for name in wanted if found.get(name) != wanted[name]]
    if other:
        raise RunFolderError(
            f"a folder of this run in {folder}",
            f"one of another run, with other {', '.join(other)}",
            "give another folder, or the model, data and settings that it was begun with",
        )


def _share(share: tuple[int, int] | str) -> Share:
    """What is given, the rank in torch.distributed, or what the environment says."""
    peers = Processes.found(together=is_auto(share))
    return Share.chosen(share) if peers.alone else Share(peers.rank, peers.count)

"""``engram score FOLDER``: a posterior and the scores of every example, alone or under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from torch import nn

from engram.cli.output import Json, Quiet, console, frame_table, print_json, say
from engram.cli.plan import Likelihood, Structure
from engram.cli.subjects import Data, Model, Weights, subject
from engram.core.processes.group import Processes
from engram.core.processes.meeting import together
from engram.core.state.model import device_of
from engram.posteriors.gaussian import KIND, Posterior
from engram.posteriors.laplace import laplace
from engram.sensitivity.scored import PART, score
from engram.sensitivity.scores import Scores

Folder = Annotated[Path, typer.Argument(help="Where parts are written, and a run goes on.")]
Prior = Annotated[
    float | None,
    typer.Option(help="N times the weight decay of the mean loss; else fitted."),
]
Size = Annotated[int, typer.Option("--part", min=1, help="Examples of a part.")]
SHOWN = 10  # rows that are printed


def command(
    folder: Folder,
    model: Model,
    data: Data,
    weights: Weights = None,
    structure: Structure = "auto",
    likelihood: Likelihood = "categorical",
    prior_precision: Prior = None,
    part: Size = PART,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Loss and leave-one-out loss of every example, part by part; the same command goes on.

    Under torchrun the processes share both the fit of the posterior and the examples.

    Example: torchrun --nproc-per-node 2 -m engram score scores --model nets:make --data nets:data
    """
    net, examples = subject(model, weights, data)
    fit: dict[str, Any] = {"structure": structure, "likelihood": likelihood}
    if prior_precision is not None:
        fit["prior_precision"] = prior_precision
    with (
        _group(net),
        together(True, net, examples, "engram score", fit | {"part": part}) as peers,
    ):
        shown = not quiet and peers.rank == 0
        posterior = _posterior(folder, net, examples, peers, fit, shown)
        score(net, examples, posterior, folder, part=part, progress=shown)
        peers.told("scored", True)
        if peers.rank == 0:
            _tell(Scores(folder), as_json)


@contextmanager
def _group(model: nn.Module) -> Iterator[None]:
    """The processes of torchrun as a group; nothing where there are none, or there is one."""
    if int(os.environ.get("WORLD_SIZE") or 1) < 2 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device_of(model).type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _posterior(
    folder: Path,
    model: nn.Module,
    data: Any,
    peers: Processes,
    fit: dict[str, Any],
    progress: bool,
) -> Posterior:
    """The one that the run was begun with; the sums of other processes would round otherwise."""
    kept = folder / KIND.name
    if peers.agreed("a posterior", (kept / f"{KIND.name}.json").is_file()):
        return KIND.read(kept)
    found = laplace(model, data, across_ranks=True, progress=progress, **fit)
    if peers.rank == 0:
        found.save(kept)
    return found


def _tell(scores: Scores, as_json: bool) -> None:
    top = scores.top(SHOWN)
    if as_json:
        figures = {"loo_nll": scores.loo_nll, "train_nll": scores.train_nll}
        print_json({"folder": str(scores.folder), **figures, "missing": scores.missing, "top": top})
        return
    say(scores, console())
    console().print(frame_table(top, "the largest leave-one-out losses"))

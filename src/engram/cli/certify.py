"""``engram certify RUN``: the leave-one-out loss with an interval."""

from __future__ import annotations

from typing import Annotated

import typer

from engram.cli.output import Json, Quiet, console, print_json, say
from engram.cli.runs import Run
from engram.cli.subjects import (
    Folder,
    OwnData,
    OwnModel,
    Seed,
    Train,
    Weights,
    by_training_again,
)

Refits = Annotated[int, typer.Option(min=8, help="Trainings without an example.")]


def command(
    run: Run,
    model: OwnModel = None,
    data: OwnData = None,
    weights: Weights = None,
    train: Train = None,
    folder: Folder = None,
    refits: Refits = 32,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The leave-one-out loss with a 95 % interval, from the estimate and some trainings.

    Of an audit's stock model, or of yours. Trainings are kept (in RUN/certified): the same command
    goes on after it was stopped.

    Example: engram certify run --model nets:make --data nets:train_data --train nets:fit
    """
    from engram.evidence.certify import certify

    found = by_training_again(
        certify,
        run,
        (model, weights, data, train),
        folder=folder or run / "certified",
        seed=seed,
        quiet=quiet,
        refits=refits,
    )
    saved = found.save(run / "certificate")
    if as_json:
        low, high = found.interval
        print_json({"loo_loss": found.loo_nll, "low": low, "high": high, "folder": str(saved)})
    else:
        say(found, console())

"""``engram verify RUN``: train again without some examples, and compare."""

from __future__ import annotations

from dataclasses import asdict
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

Sample = Annotated[int, typer.Option(min=3, help="Examples that are left out, one by one.")]


def command(
    run: Run,
    model: OwnModel = None,
    data: OwnData = None,
    weights: Weights = None,
    train: Train = None,
    folder: Folder = None,
    sample: Sample = 30,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train again without some examples, and compare with what was estimated.

    Of an audit's stock model, or of yours. Trainings are kept (in RUN/trainings): the same command
    goes on after it was stopped.

    Example: engram verify run --model nets:make --data nets:train_data --train nets:fit
    """
    from engram.evidence.verify import verify

    found = by_training_again(
        verify,
        run,
        (model, weights, data, train),
        folder=folder or run / "trainings",
        seed=seed,
        quiet=quiet,
        sample=sample,
    )
    saved = found.save(run / "verification")
    if as_json:
        agreement = {"score": asdict(found.score), "increase": asdict(found.increase)}
        print_json({**agreement, "sentence": found.sentence, "folder": str(saved)})
    else:
        say(found, console())

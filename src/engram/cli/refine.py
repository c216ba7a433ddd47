"""``engram refine RUN``: examples that are not to be believed, computed again."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.output import Json, Quiet, console, print_json, say
from engram.cli.runs import Run, result_in
from engram.cli.subjects import Data, Model, Train, Weights, subject, training


class Method(str, Enum):
    """How an example is computed again."""

    solve = "solve"
    retrain = "retrain"


Folder = Annotated[
    Path | None, typer.Option("--posterior", help="Folder of the posterior; RUN if not given.")
]
Output = Annotated[
    Path | None, typer.Option(help="Folder for the refined result; RUN/refined if not given.")
]
Way = Annotated[Method, typer.Option(help="Exact Newton steps, or trainings.")]


def command(
    run: Run,
    model: Model,
    data: Data,
    weights: Weights = None,
    posterior: Folder = None,
    method: Way = Method.solve,
    train: Train = None,
    output: Output = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute the examples again that the verdict does not believe.

    Example: engram refine run --model nets:make --weights net.safetensors --data nets:train_data
    """
    from engram.evidence.refine import refine
    from engram.posteriors.gaussian import KIND

    result = result_in(run)
    net, examples = subject(model, weights, data)
    found = refine(
        net,
        examples,
        result,
        KIND.read(posterior or run),
        method=method.value,
        train=training(train, "newton"),
        progress=not quiet,
    )
    saved = found.save(output or run / "refined")
    if as_json:
        refined = int(found.obtained.bool().sum())
        print_json({"refined": refined, "loo_loss": found.loo_nll, "folder": str(saved)})
    else:
        say(found, console())

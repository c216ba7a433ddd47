"""``engram plan``: memory, time and disk before a run."""

from __future__ import annotations

from typing import Annotated

import typer

from engram.cli.output import Json, console, print_json, say
from engram.cli.subjects import Data, Model, Train, Weights, subject, training

Structure = Annotated[str, typer.Option(help="Of the posterior, as for engram.laplace.")]
Likelihood = Annotated[str, typer.Option(help="Of the data, as for engram.laplace.")]
LeaveOut = Annotated[int, typer.Option("--leave-out", min=1, help="Examples of a retraining.")]


def command(
    model: Model,
    data: Data,
    weights: Weights = None,
    train: Train = None,
    structure: Structure = "auto",
    likelihood: Likelihood = "categorical",
    leave_out: LeaveOut = 30,
    as_json: Json = False,
) -> None:
    """Memory, time and disk of a fit, a pass and a retraining, from some seconds of trial.

    Example: engram plan --model nets:make --data nets:train_data --train nets:fit
    """
    from engram.planning.plan import plan

    net, examples = subject(model, weights, data)
    found = plan(
        net,
        examples,
        likelihood=likelihood,
        structure=structure,
        train=training(train, None),
        leave_out=leave_out,
    )
    if as_json:
        print_json({"fits": found.fits, "free": found.free, "steps": found.to_frame()})
    else:
        say(found, console())

"""The user's model, its data and its training, as options of commands name them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from engram.core.user_code import imported, model_of, with_weights
from engram.retraining.recipes import NAMED

Model = Annotated[
    str,
    typer.Option("--model", metavar="MODULE:FUNCTION", help="Your function that makes the model."),
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", help="Of the model: safetensors, or torch.save of a state_dict."),
]
Data = Annotated[
    str,
    typer.Option(
        "--data", metavar="MODULE:FUNCTION", help="Your function that gives the training data."
    ),
]
Train = Annotated[
    str | None,
    typer.Option(
        "--train",
        metavar="MODULE:FUNCTION",
        help="Your function fit(model, data) that trains, or newton, lbfgs, adam, sgd.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="Where finished trainings are kept, to go on with."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of all random numbers.")]


def subject(model: str, weights: Path | None, data: str) -> tuple[nn.Module, Any]:
    """The model with its weights, and the data."""
    made = model_of(imported(model)(), model)
    return made if weights is None else with_weights(made, weights), imported(data)()


def training(name: str | None, otherwise: Any) -> Any:
    """A recipe's name as it is, a function's as the function."""
    if name is None:
        return otherwise
    return name if name in NAMED else imported(name)

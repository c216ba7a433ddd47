"""The user's model, its data and its training, as options of commands name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from torch import nn

from engram.auditing.own_model import load_weights, named_function
from engram.auditing.run_folder import WEIGHTS
from engram.auditing.trained_again import trained_again
from engram.cli.commands import RUN_FILE
from engram.cli.runs import result_in
from engram.core.arguments import AUTO
from engram.errors import ArgumentError
from engram.retraining.recipes import NAMED

Model = Annotated[
    str,
    typer.Option("--model", metavar="MODULE:FUNCTION", help="Your function that makes the model."),
]
# Of commands that can train what an audit has trained
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        help="Your function that makes the model; an audit with a stock model has its own.",
    ),
]
OwnData = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="MODULE:FUNCTION",
        help="Your function that gives the training data; goes with --model.",
    ),
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
Found = TypeVar("Found")


def by_training_again(
    function: Callable[..., Found],
    run: Path,
    named: tuple[str | None, Path | None, str | None, str | None],
    *,
    folder: Path,
    seed: int,
    quiet: bool,
    **counts: int,
) -> Found:
    """What a function that trains again says of a run's result.

    Args:
        function: ``engram.verify`` or ``engram.certify``.
        run: folder of the result.
        named: model, weights, data and training, as the options have them; without weights those
            that an audit has left in its folder, and without any of them its own training again.
        folder: where finished trainings are kept.
        seed, quiet: as the options have them.
        counts: of trainings, as the function calls them.
    """
    result = result_in(run)
    net, examples, again = _subject_of(run, *named, progress=not quiet)
    return function(
        net,
        examples,
        result,
        train=again,
        folder=folder,
        seed=seed,
        progress=not quiet,
        **counts,
    )


def _subject_of(
    run: Path,
    model: str | None,
    weights: Path | None,
    data: str | None,
    train: str | None,
    progress: bool,
) -> tuple[nn.Module, Any, Any]:
    """The model, its data and how it is trained, as named or as the audit had them."""
    if model is not None and data is not None:
        kept = run / WEIGHTS
        known = kept if weights is None and kept.exists() else weights
        return *subject(model, known, data), training(train, AUTO)
    if (run / RUN_FILE).is_file() and not any((model, data, weights, train)):
        return trained_again(run, progress)
    raise ArgumentError(
        "--model and --data, or the folder of an audit that has trained its own model",
        f"{run} with --{'model' if model is None else 'data'} missing",
        "name your functions: --model nets:make --data nets:train_data --train nets:fit",
    )


def subject(model: str, weights: Path | None, data: str) -> tuple[nn.Module, Any]:
    """The model with its weights, and the data."""
    made = named_function(model)()
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f"a torch.nn.Module from {model}", type(made).__name__, "return the model"
        )
    if weights is not None:
        load_weights(made, weights)
    return made, named_function(data)()


def training(name: str | None, otherwise: Any) -> Any:
    """A recipe's name as it is, a function's as the function."""
    if name is None:
        return otherwise
    return name if name in NAMED else named_function(name)

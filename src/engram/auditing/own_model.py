"""The user's own model, weights and training, named as ``package.module:function``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.auditing.examples import Examples
from engram.auditing.fitting import Fit, Schedule, fit
from engram.auditing.run_lock import RunInProgress
from engram.auditing.second_training import SecondOpinion, second_opinion
from engram.auditing.stock import NAMED
from engram.auditing.stock.base import Recipe, Stock
from engram.auditing.tasks import Classes
from engram.core.arguments import path_of, shown
from engram.core.near_names import near
from engram.core.storage.files import read_tensors
from engram.errors import ArgumentError, DataError, ModelMismatchError, StorageError, brief
from engram.training.training import Training

FORM = "package.module:function"
RECIPE = Recipe(12, 64, 1e-3, 1e-2)  # of the training of a model that brings none
ENDINGS = (".safetensors",)


@dataclass(frozen=True)
class Own:
    """What the user brings.

    Args:
        model: makes the model: called with the examples where it takes an argument. It returns a
            module, or a module and its inputs [N, ...] where it encodes them by itself.
        weights: file of its trained weights: safetensors, or a state dict of torch.
        train: trains it: called with the model and the data (inputs, targets). It may return the
            :class:`engram.Training` that it recorded, or its optimizer.
    """

    model: str | Callable[..., Any] | None = None
    weights: str | Path | None = None
    train: str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.model is None and (self.weights is not None or self.train is not None):
            raise ArgumentError(
                "model= with weights= or train=",
                "no model",
                f'name the function that makes it: model="{FORM}"',
            )

    def stock(self, examples: Examples, stock: Callable[[Examples], Stock]) -> Stock:
        """The user's model in place of the stock one, on its inputs unless it brings others."""
        if self.model is None:
            return stock(examples)
        if isinstance(self.model, str) and self.model in NAMED:
            return NAMED[self.model](examples)
        plain = stock(examples)
        made = _called(named_function(self.model), examples)
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, plain.inputs)
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"a torch.nn.Module from {_name(self.model)}",
                shown(model),
                "return the module, or the module and its inputs",
            )
        if len(inputs) != len(examples):
            raise DataError(
                f"{len(examples):,} inputs from {_name(self.model)}",
                f"{len(inputs):,}",
                "encode every example, in their order",
            )
        if self.weights is not None:
            load_weights(model, path_of("file", self.weights))
        model = _with_outputs(model, inputs, examples)
        return Stock(model, plain.encode, inputs, RECIPE, type(model).__name__, plain.notes)

    def opinion(
        self, stock: Stock, examples: Examples, schedule: Schedule, epochs: int, progress: bool
    ) -> SecondOpinion | None:
        """What a model of half of the examples says of classes; None where we do not train it."""
        foreign = self.train is not None or self.weights is not None
        if foreign or not isinstance(examples.task, Classes):
            return None
        targets, task = examples.targets, examples.task
        return second_opinion(stock, targets, task, schedule, epochs, progress)

    def fit(
        self,
        stock: Stock,
        examples: Examples,
        schedule: Schedule,
        progress: bool,
        kept: RunInProgress | None,
    ) -> Fit:
        """The trained model, by the user's training, by weights, or by ours."""
        if self.train is not None:
            return _trained(stock, examples, named_function(self.train))
        if self.weights is not None:
            return Fit(stock.model.eval(), None)
        state, keep = (None, None) if kept is None else (kept.state(), kept.keep)
        return fit(stock, examples.targets, examples.task, schedule, progress, state, keep)


def load_weights(model: nn.Module, path: Path) -> None:
    """Weights of a file into a model; never code.

    Raises:
        ModelMismatchError: where they are another model's.
        StorageError: where they cannot be read.
    """
    if not path.is_file():
        raise StorageError("a file of weights", f"{path}, which is not there", "check the path")
    if path.suffix in ENDINGS:
        state: Any = read_tensors(path)[0]
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch makes of another format
            raise StorageError(
                "weights alone: safetensors, or a state dict saved by torch.save",
                f"{path.name}, which holds more than weights or is damaged",
                "save model.state_dict(), not the model itself",
            ) from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict):
        raise StorageError("tensors by name", type(state).__name__, "save model.state_dict()")
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        reasons = [line.strip() for line in str(error).splitlines()[1:3]]
        raise ModelMismatchError(
            f"weights of {type(model).__name__}",
            f"{path.name}: {' '.join(reasons)[:300] or brief(error)}",
            "name the function that makes the model that these weights are of",
        ) from error


def named_function(named: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function of a name; modules in the working folder are found."""
    if callable(named):
        return named
    module, divider, name = named.partition(":")
    if not divider or not module or not name:
        raise ArgumentError(f'a function named as "{FORM}"', shown(named), "write it so")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not module.startswith(error.name):
            raise  # an import inside of the user's module: its own traceback says most
        raise ArgumentError(
            f"a module {module!r} that can be imported",
            str(error),
            "run from the folder that it is in, or install it",
        ) from error
    finally:
        sys.path.remove(here)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(
                f"a function {name!r} in {module}",
                "none of that name",
                near(part, dir(found)) or "check its spelling",
            )
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f"a function {named!r}", type(found).__name__, "name a function")
    return found


def _called(function: Callable[..., Any], examples: Examples) -> Any:
    """What it makes; its own errors come through as they are."""
    try:
        takes = bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        takes = False
    return function(examples) if takes else function()


def _name(named: str | Callable[..., Any]) -> str:
    return named if isinstance(named, str) else getattr(named, "__name__", "the function")


class TwoClasses(nn.Module):
    """A model of one logit as one of two classes, of which the first has the logit 0."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logit = self.model(inputs).reshape(len(inputs), 1)
        return torch.cat([torch.zeros_like(logit), logit], dim=1)


def _with_outputs(model: nn.Module, inputs: Tensor, examples: Examples) -> nn.Module:
    """The model, where its outputs fit the task; one logit does for two classes."""
    training = model.training
    model.eval()
    with torch.no_grad():
        outputs = model(inputs[:2])
    model.train(training)
    wanted = examples.task.num_outputs
    found = outputs.shape[1] if isinstance(outputs, Tensor) and outputs.dim() == 2 else 1
    if found == wanted:
        return model
    if found == 1 and wanted == 2:
        return TwoClasses(model)
    raise ModelMismatchError(
        f"{wanted} outputs, as the labels have it",
        f"{found} from {type(model).__name__}",
        "make the model for these classes",
    )


def _trained(stock: Stock, examples: Examples, train: Callable[..., Any]) -> Fit:
    model = stock.model
    returned = train(model, (stock.inputs, examples.targets))
    training: Training | None = None
    if isinstance(returned, nn.Module):
        model = returned
    elif isinstance(returned, Training):
        training = returned
    elif isinstance(returned, Optimizer):
        training = Training.guess(model, returned)
    elif returned is not None:
        raise ArgumentError(
            "nothing, the record of engram.record, the optimizer or the trained model from the "
            "training function",
            shown(returned),
            "train the model that it is given",
        )
    return Fit(model.eval(), training)

"""The training of an audit's run, done again, to be set beside trainings without some examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from engram.auditing.columns import Wanted
from engram.auditing.command import IN_MEMORY
from engram.auditing.fitting import Schedule, fit
from engram.auditing.outcome import Audit
from engram.auditing.own_model import Own
from engram.auditing.readers import read_examples
from engram.auditing.run_folder import KIND
from engram.auditing.stock import stock_of
from engram.core.state.process import kept_surroundings
from engram.errors import ArgumentError, DataError, TrainingError
from engram.training.training import Training

SAME = 0.1  # of the training loss: rounding grows over the steps of a training
Subject = tuple[nn.Module, tuple[Tensor, Tensor], Training | Callable[..., Any]]


def trained_again(folder: Path, progress: bool) -> Subject:
    """The model, its data, and its training, of a run whose training was ours.

    The record of the training is not in the folder, so that it is done once more, with the same
    seed; what comes third is that record, to be walked without some examples, or a function that
    trains from the start, where views of the examples were drawn.

    Args:
        folder: of the run.
        progress: show a bar.
    """
    run: Audit = KIND.read(folder)
    given = run.settings
    if str(given["data"]).endswith(IN_MEMORY):
        raise ArgumentError(
            "an audit of data in a file, which can be read again",
            f"{given['data']}",
            "in Python: engram.verify(model, data, audit.result, train=fit)",
        )
    if given["train"] is not None or given["weights"] is not None:
        raise ArgumentError(
            "--model and --data for an audit of a model that was trained by its user",
            "neither",
            "name your functions: --model nets:make --data nets:train_data --train nets:fit",
        )
    wanted = Wanted(*(given[name] for name in ("label", "text", "image", "group_by", "id", "task")))
    wanted = replace(wanted, sample=given["sample"], seed=given["seed"])
    examples = read_examples(given["data"], wanted)
    if tuple(examples.ids) != tuple(run.shown.ids):
        raise DataError(
            f"the {len(run.shown.ids):,} examples of {folder}",
            f"{len(examples):,} others in {given['data']}",
            "put the data back, or audit it anew",
        )
    stock = Own(given["model"]).stock(examples, stock_of)
    targets, task = examples.targets, examples.task
    schedule = Schedule(len(run.curve), given["optimizer"], given["seed"])
    with kept_surroundings():
        found = fit(stock, targets, task, schedule, progress)

    before, now = (curve[-1]["train"] for curve in (run.curve, found.curve))
    if abs(now - before) > SAME * before:  # on another machine, or with other versions
        raise TrainingError(
            f"a training that ends with the loss of the run, {before:.4g}",
            f"{now:.4g}",
            "audit the data anew on this machine, and verify that",
        )

    def train(model: nn.Module, data: tuple[Tensor, Tensor]) -> nn.Module:
        inputs, own = data
        return fit(replace(stock, model=model, inputs=inputs), own, task, schedule, False).model

    data = stock.inputs, targets
    assert found.training is not None
    return found.model, data, train if stock.recipe.augment is not None else found.training

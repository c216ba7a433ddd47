r"""A second training on half of the data, and what it says of the labels that it has not seen.

How sure a model is of an example that it was trained on depends on the example's label, however
well that is taken out again: too little where the head alone is asked, too much where a net has
learned its data by heart. Which labels come first is hardly changed by it, but how many of them are
wrong is. So half of the examples are judged by a model that has never seen them, by
:mod:`engram.auditing.label_noise`, and what comes of it is carried over to all: how often labels
are wrong, and of which classes; and the chance of each is a rising function of the loss that labels
are ranked by.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.auditing.fitting import Schedule, fit
from engram.auditing.label_noise import LabelNoise, NoiseModel, rising
from engram.auditing.stock.base import Stock
from engram.auditing.tasks import Task

FEWEST = 100  # examples; half of fewer teaches nothing


@dataclass(frozen=True, eq=False)
class SecondOpinion:
    """What a model of half of the examples says of the others.

    Args:
        positions: of those others, [M].
        probabilities: of their classes, [M, C].
        loss: mean over them, nats per example: that of unseen data, for half as many examples.
    """

    positions: Tensor
    probabilities: Tensor
    loss: float


def second_opinion(
    stock: Stock, targets: Tensor, task: Task, schedule: Schedule, epochs: int, progress: bool
) -> SecondOpinion | None:
    """Train the same model on a random half; None where there are too few examples.

    Args:
        stock: the model, trained or not; a copy of it is trained.
        targets: of all examples.
        task: for the loss.
        schedule: of the first training.
        epochs: that it took.
        progress: show a bar.
    """
    if len(targets) < FEWEST:
        return None
    generator = torch.Generator().manual_seed(schedule.seed)
    order = torch.randperm(len(targets), generator=generator)
    inside, outside = order[::2].sort().values, order[1::2].sort().values
    recipe = replace(stock.recipe, epochs=max(1, epochs), stops_early=False)
    name = f"{stock.name} on half"
    half = replace(
        stock,
        model=copy.deepcopy(stock.model),
        inputs=stock.inputs[inside],
        recipe=recipe,
        name=name,
    )
    again = replace(schedule, epochs=None, seed=schedule.seed + 1)
    trained = fit(half, targets[inside], task, again, progress)
    with torch.no_grad():
        outputs = torch.cat([trained.model(part) for part in stock.inputs[outside].split(1024)])
    loss = float(task.loss(outputs, targets[outside]))
    return SecondOpinion(outside, task.likelihood.mean(outputs), loss)


def carried_over(
    opinion: SecondOpinion, losses: Tensor, probabilities: Tensor, labels: Tensor
) -> LabelNoise:
    """Chances of all labels, by what the half that was judged says of how labels come about.

    There are two readings of the same noise. The half's own chances are those of a model that has
    learned from half of the data; those of the whole model's left-out probabilities have its
    knowledge, and something of the labels themselves. Both make too little of wrong labels, so that
    the one that finds more of them is taken.

    Args:
        opinion: on that half.
        losses: that all labels are ranked by, [N].
        probabilities: without each example, by the whole model, [N, C]; no label that is their
            likeliest class is called wrong.
        labels: as they were given, [N].
    """
    some, contradicted = opinion.positions, probabilities.argmax(1) != labels
    fitted = NoiseModel.fitted(opinion.probabilities, labels[some])
    half = fitted.noise(opinion.probabilities, labels[some])
    whole = fitted.refitted(probabilities, labels, ("log_scale", "offset"))
    judged = contradicted[some]
    readings = [_along(losses, losses, whole.noise(probabilities, labels).chance, contradicted)]
    if int(judged.sum()) > 1:
        own = (losses[some][judged], half.chance[judged])
        readings.append(_along(losses, *own, contradicted))
    found = [LabelNoise.of(chance, half.rate) for chance in readings]
    return max(found, key=lambda one: float(one.chance[one.is_issue].sum()))


def _along(losses: Tensor, places: Tensor, values: Tensor, contradicted: Tensor) -> Tensor:
    """Chances that rise with the loss, of labels that are contradicted."""
    return torch.where(contradicted, rising(places, values, losses), 0.0)

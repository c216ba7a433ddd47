r"""A second training on half of the data, and what it says of the labels that it has not seen.

How sure a model is of an example that it was trained on depends on the example's label, however
well that is taken out again: too little where the head alone is asked, too much where a net has
learned its data by heart. Which labels come first is hardly changed by it, but how many of them are
wrong is. So half of the examples are judged by a model that has never seen them, by
:mod:`engram.auditing.label_noise`, and what comes of it is carried over to all: the chance that a
label is wrong is the rising function of the loss that labels are ranked by which is nearest to the
chances of that half.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.auditing.fitting import Schedule, fit
from engram.auditing.label_noise import MORE_LIKELY, LabelNoise, label_noise, rising
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
    opinion: SecondOpinion, losses: Tensor, contradicted: Tensor, labels: Tensor
) -> LabelNoise:
    """Chances of all labels, by those of the half that was judged.

    Args:
        opinion: on that half.
        losses: that all labels are ranked by, [N].
        contradicted: labels that are not the likeliest class without the example, [N]; no other
            one is called wrong.
        labels: as they were given, [N].
    """
    some = opinion.positions
    own = label_noise(opinion.probabilities, labels[some])
    chance = rising(losses[some], own.chance, losses)
    chance = torch.where(contradicted, chance, 0.0)
    return LabelNoise(chance, chance > MORE_LIKELY, own.rate)

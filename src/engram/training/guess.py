r"""A training that nobody recorded, from what is known of it afterwards.

.. math::
    C \approx T \bar\eta\, b\, P_T^{-1}

with the number of steps T, a mean learning rate, the weight b of a momentum that has settled, and
the root P as the optimizer has it at the end. Everything that changed on the way is missing: roots
of early steps, clipping, learning rates other than the first and the last. So the result says that
it is a guess, and has no checkpoint but the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from engram.core.arguments import is_number, positive, whole
from engram.core.dtypes import wide
from engram.core.parameters import check_module, trainable
from engram.errors import ArgumentError, ModelMismatchError
from engram.training.clock import LONG, Clock, ParameterClock
from engram.training.metrics import metric_of, steps_taken, unwrapped
from engram.training.step_rules import Step


@dataclass(frozen=True)
class Known:
    """What is known of a training: see :meth:`engram.Training.guess`."""

    learning_rate: float | None = None
    steps: int | None = None
    weight_decay: float | None = None
    momentum: float = 0.0


def guessed(model: nn.Module, optimizer: Optimizer | None, known: Known) -> Clock:
    """Clocks that show what the training time and weight decay will have been."""
    check_module(model)
    parameters = trainable(model)
    inner = _plain(parameters, known) if optimizer is None else unwrapped(optimizer)
    clock = Clock(inner, metric_of(inner))
    _check_owner(clock, parameters)
    for parameter, group, hand in clock.each():
        count = steps_taken(inner, parameter) if known.steps is None else known.steps
        settings = dict(group) | {"lr": _rate(group, known.learning_rate)}
        if known.weight_decay is not None:
            settings["weight_decay"] = _decay(known.weight_decay)
        _spend(clock, hand, parameter, settings, _count(count, inner))
    return clock


def _plain(parameters: Mapping[str, Tensor], known: Known) -> Optimizer:
    """An SGD that stands for the one that is gone."""
    if known.learning_rate is None:
        raise ArgumentError(
            "an optimizer as it was at the end, or learning_rate= and steps= of SGD",
            "neither",
            "pass the optimizer: its state has the roots that gradients were divided by",
        )
    rate, decay = positive("learning_rate", known.learning_rate), _decay(known.weight_decay or 0.0)
    momentum = known.momentum
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise ArgumentError("a momentum from 0 to below 1", repr(momentum), "use momentum=0.9")
    return SGD(list(parameters.values()), lr=rate, momentum=momentum, weight_decay=decay)


def _rate(group: Mapping[str, Any], given: float | None) -> float:
    """The mean of the first and the last: what a linear and a cosine schedule have on average."""
    if given is not None:
        return positive("learning_rate", given)
    if group["lr"] is None:
        return 1.0  # transformers' Adafactor has a schedule of its own, and does not ask
    last = float(group["lr"])
    rate = (float(group.get("initial_lr", last)) + last) / 2
    return positive("learning rate in the optimizer", rate, "pass learning_rate=, its mean")


def _decay(value: float) -> float:
    if is_number(value) and 0 <= value < math.inf:
        return float(value)
    raise ArgumentError("a weight_decay of at least 0", repr(value), "use weight_decay=0.0")


def _count(steps: int, optimizer: Optimizer) -> int:
    remedy = f"pass steps=: the state of {type(optimizer).__name__} does not say how many"
    return whole("number of steps", steps, remedy=remedy)


def _spend(
    clock: Clock,
    hand: ParameterClock,
    parameter: Tensor,
    group: Mapping[str, Any],
    steps: int,
) -> None:
    """So many steps like the last one."""
    state = clock.optimizer.state.get(parameter, {})
    hand.steps = steps
    hand.memory = hand.decay_memory = 0.0
    for number in range(max(1, steps - LONG + 1), steps):
        step = Step(clock.optimizer, parameter, group, state, number)
        hand.memory, _ = clock.metric.weight(step, hand.memory, 1.0)
        hand.decay_memory, _ = clock.metric.weight(step, hand.decay_memory, 1.0)
    step = Step(clock.optimizer, parameter, group, state, steps)
    hand.put(hand.advance(step, clock.metric, 1.0, 1.0))
    hand.pending *= steps
    hand.pending_decay *= steps
    hand.shrunk *= steps
    with torch.no_grad():
        root = clock.root(step)
        hand.largest_gradient = _size(root, float(group.get("eps", 0.0)))
        settled = clock.metric.settled(group, steps)
        scaled = isinstance(root, Tensor) or clock.metric.averages
        hand.divide(root * settled if scaled else root)


def _size(root: Tensor | float, eps: float) -> float:
    """Root mean square of the roots, which are about the size of gradients; 1 without any."""
    return float(wide(root - eps).square().mean().sqrt()) if isinstance(root, Tensor) else 1.0


def _check_owner(clock: Clock, parameters: Mapping[str, Tensor]) -> None:
    own = {id(p) for p in clock.parameters}
    if not own & {id(p) for p in parameters.values()}:
        raise ModelMismatchError(
            "an optimizer of this model's parameters",
            f"a {type(clock.optimizer).__name__} that trains none of them",
            "pass the optimizer that was made with model.parameters()",
        )

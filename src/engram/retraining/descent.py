r"""Gradient descent for many copies at once, on mini-batches that all copies share.

With batches of B examples the gradient of the mean objective is
:math:`\frac1B \sum_{i \in batch} w_{ci} \nabla \ell_i + \frac{\delta}{N} \theta_c`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.retraining.quasi_newton import Objective

Update = Callable[[Tensor, int, float], Tensor]


@dataclass(frozen=True)
class Plan:
    """How long and in what order.

    Args:
        epochs: passes over the data.
        batch_size: examples per step; None takes all.
        learning_rate: at the start; it falls to zero along a cosine.
        seed: of the order of the examples, which is the same for every copy.
    """

    epochs: int
    batch_size: int | None
    learning_rate: float
    seed: int

    def steps(self, num_data: int) -> Iterator[tuple[Tensor, float]]:
        """The examples and the learning rate of every step."""
        size = min(self.batch_size or num_data, num_data)
        generator = torch.Generator().manual_seed(self.seed)
        total, number = self.epochs * -(-num_data // size), 0
        for _ in range(self.epochs):
            whole = torch.arange(num_data)
            order = whole if size == num_data else torch.randperm(num_data, generator=generator)
            for chosen in order.split(size):
                yield chosen, 0.5 * self.learning_rate * (1 + math.cos(math.pi * number / total))
                number += 1


def descend(
    objective: Objective, start: Tensor, plan: Plan, update: Update, report: Callable[[float], None]
) -> Tensor:
    """Parameters of all copies after the plan's steps, [C, P].

    Args:
        update: the step [C, P] to subtract, from the gradient, the step's number and its rate.
        report: called with the number of copies' worth of work done since the last call.
    """
    stack, weights, flat = objective.stack, objective.weights, start.clone()
    decay = stack.prior_precision / stack.num_data
    steps = list(plan.steps(stack.num_data))
    for number, (chosen, rate) in enumerate(steps):
        chosen = chosen.to(flat.device)
        slices: list[slice | Tensor] = list(chosen.split(stack.examples_at_once(len(flat))))
        _, total = stack.loss_and_gradient(flat, weights, slices)
        gradient = total / len(chosen) + decay * flat
        flat = flat - update(gradient, number, rate)
        report(len(flat) / len(steps))
    return flat


def momentum_update(momentum: float) -> Update:
    """Heavy ball: v = momentum v + g, the step is rate times v."""
    velocity: Tensor | None = None

    def update(gradient: Tensor, number: int, rate: float) -> Tensor:
        nonlocal velocity
        velocity = gradient if velocity is None else momentum * velocity + gradient
        return rate * velocity

    return update


def adam_update(betas: tuple[float, float], epsilon: float) -> Update:
    """Adam with bias correction; the regulariser is part of the gradient."""
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0

    def update(gradient: Tensor, number: int, rate: float) -> Tensor:
        nonlocal first, second
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        mean = first / (1 - betas[0] ** (number + 1))
        square = second / (1 - betas[1] ** (number + 1))
        return rate * mean / (square.sqrt() + epsilon)

    return update

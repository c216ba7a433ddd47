"""Built-in ways to train again, each for a whole stack of copies at once.

``SGD`` and ``Adam`` go on training for some epochs; ``LBFGS`` and ``Newton`` train until the
gradient of the copy's own objective has vanished, and start from the refit with everything.
A new recipe is a frozen dataclass here that extends :class:`Recipe`, with a name in ``NAMED``.
For nets that were trained to no minimum: ``FromStart``, a function from new first weights, and
``Replay``, a recorded training walked again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, is_auto, is_number, positive, shown, whole
from engram.core.dtypes import wide
from engram.core.selection import spread
from engram.errors import ArgumentError
from engram.linalg.lbfgs import IDENTITY, Base, LBFGSMemory
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace_torch import as_posterior
from engram.problem import Opener
from engram.retraining.newton import (
    Pairs,
    fitted_preconditioner,
    preconditioner,
    simplified_newton,
)
from engram.retraining.own_trainings import FromStart, Replay
from engram.retraining.quasi_newton import begin, minimise
from engram.retraining.stack import Objective

__all__ = ["LBFGS", "NAMED", "SGD", "Adam", "FromStart", "Newton", "Recipe", "Replay"]

Report = Callable[[float], None]
Update = Callable[[Tensor, int, float], Tensor]

# When a copy counts as converged
TYPICAL_EXAMPLES = 64  # whose median gradient norm is the unit for a refit with everything
WORK_OF_A_COPY = 30  # gradients, products with the Hessian counted as two; from 10 to 60 of them
ROUNDINGS = 64  # machine epsilons of the regulariser's gradient, below which sums are rounding


@dataclass(frozen=True)
class Trained:
    """The parameters of a stack of copies after training, and whether they converged.

    Args:
        flat: parameters, [C, P].
        gradient_norm: norm of the gradient of each copy's objective (a sum over examples), [C].
        wanted_norm: the norm at which it counts as converged; infinite for a recipe that trains
            for a fixed time, [C].
        evaluations: gradients over the data that each copy took, [C].
    """

    flat: Tensor
    gradient_norm: Tensor
    wanted_norm: Tensor
    evaluations: Tensor


class Recipe(ABC):
    """A way to train a stack of copies."""

    converges: bool

    @property
    @abstractmethod
    def gradients(self) -> int:
        """Gradients over the data that a copy takes, or about as much work, at a minimum."""

    def bind(self, model: nn.Module, opener: Opener, prior: float, progress: bool) -> Recipe:
        """The recipe with everything it needs to know about the trained model.

        Args:
            model: where the copies start.
            opener: for passes over the data; planned once, for all that is fitted.
            prior: delta.
            progress: show a bar.
        """
        return self

    def rebind(self, model: nn.Module, opener: Opener, prior: float) -> Recipe:
        """The same after the model's weights have moved."""
        return self

    @abstractmethod
    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        """Train all copies from ``start`` [C, P].

        ``report`` is called with the number of copies' worth of work done since the last call.
        """


@dataclass(frozen=True)
class SGD(Recipe):
    """Stochastic gradient descent with momentum; arguments as in :class:`Adam`."""

    learning_rate: float = 0.05
    epochs: int = 50
    batch_size: int | None = 64
    momentum: float = 0.9
    final_learning_rate: float = 0.0
    converges = False

    @property
    def gradients(self) -> int:
        return self.epochs

    def __post_init__(self) -> None:
        _check_positive(self, learning_rate=self.learning_rate)
        _check_counts(self, epochs=self.epochs, batch_size=self.batch_size)
        _check_share("momentum", self.momentum)
        _check_final(self)

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        return _descend(self, objective, start, seed, _momentum_update(self.momentum), report)


@dataclass(frozen=True)
class Adam(Recipe):
    """Adam on the mean objective, the regulariser in the gradient.

    Args:
        learning_rate: at the start; it falls along a cosine.
        epochs: passes over the data.
        batch_size: examples per step; None takes all of them.
        final_learning_rate: that the cosine falls to.
    """

    learning_rate: float = 1e-3
    epochs: int = 50
    batch_size: int | None = 64
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    final_learning_rate: float = 0.0
    converges = False

    @property
    def gradients(self) -> int:
        return self.epochs

    def __post_init__(self) -> None:
        _check_positive(self, learning_rate=self.learning_rate, epsilon=self.epsilon)
        _check_counts(self, epochs=self.epochs, batch_size=self.batch_size)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ArgumentError("two betas", shown(self.betas), "use betas=(0.9, 0.999)")
        for beta in self.betas:
            _check_share("beta", beta)
        _check_final(self)

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        update = _adam_update(self.betas, self.epsilon)
        return _descend(self, objective, start, seed, update, report)


@dataclass(frozen=True)
class LBFGS(Recipe):
    """Full-batch L-BFGS, each copy by itself.

    Args:
        relative_gradient: a copy has converged when its gradient norm is below this share of the
            norm of its left-out examples' gradient, which is what the training has to undo.
        iterations: at most so many steps.
        history: pairs of steps and gradient changes that are kept.
    """

    relative_gradient: float = 1e-2
    iterations: int = 2000
    history: int = 20
    converges = True

    @property
    def gradients(self) -> int:
        return WORK_OF_A_COPY

    def __post_init__(self) -> None:
        _check_positive(self, relative_gradient=self.relative_gradient)
        _check_counts(self, iterations=self.iterations, history=self.history)

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        wanted = _wanted_norms(objective, start, self.relative_gradient)
        own, state = LBFGSMemory(start, self.history), begin(objective, start)
        minimise(objective, state, wanted, self.iterations, own, IDENTITY, report)
        return Trained(state.flat, state.norm, wanted, state.evaluations)


@dataclass(frozen=True)
class Newton(Recipe):
    """Newton steps with one Hessian that all copies share, the posterior as its preconditioner.

    Copies that leave out little share nearly the same Hessian, the one where they all start:
    :func:`engram.retraining.newton.simplified_newton`. Copies for which such steps do not pay, and
    copies that leave out large groups, go on by L-BFGS on top of the posterior's covariance.

    Args:
        posterior: of the trained model, for the refit with everything; ``"auto"`` fits one with
            a full precision up to 2500 parameters and a Kronecker-factored one beyond. For the
            left-out copies it is fitted again at that refit.
        relative_gradient, iterations, history: as in :class:`LBFGS`.
    """

    posterior: Posterior | Any = AUTO
    relative_gradient: float = 1e-2
    iterations: int = 500
    history: int = 20
    converges = True

    @property
    def gradients(self) -> int:
        return WORK_OF_A_COPY

    def __post_init__(self) -> None:
        _check_positive(self, relative_gradient=self.relative_gradient)
        _check_counts(self, iterations=self.iterations, history=self.history)

    def bind(self, model: nn.Module, opener: Opener, prior: float, progress: bool) -> Newton:
        if not is_auto(self.posterior):
            posterior = as_posterior(self.posterior, model)
            posterior.check_likelihood(opener.likelihood)
            return replace(self, posterior=posterior)
        return replace(
            self, posterior=fitted_preconditioner(model, opener, prior, progress=progress)
        )

    def rebind(self, model: nn.Module, opener: Opener, prior: float) -> Newton:
        if isinstance(self.posterior, Posterior) and self.posterior.structure == "low_rank":
            return self  # dear to fit, and as good a preconditioner a small step away
        return replace(self, posterior=fitted_preconditioner(model, opener, prior, progress=False))

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        assert isinstance(self.posterior, Posterior)
        wanted = _wanted_norms(objective, start, self.relative_gradient)
        solve, state = preconditioner(self.posterior, objective.stack), begin(objective, start)
        pairs: Pairs = []
        if objective.shareable:
            try:
                pairs = simplified_newton(objective, state, wanted, solve, report)
            except RuntimeError as error:  # no second derivative: each copy by its own gradients
                if "is not implemented" not in str(error):
                    raise
                state = begin(objective, start)
        behind = state.moving.nonzero()[:, 0]
        if len(behind):
            part, own = state.only(behind), LBFGSMemory(start[: len(behind)], self.history)
            for move, change in pairs:
                every = torch.arange(len(behind))
                own.add(every, move[behind], change[behind], solve(change[behind]))
            rest = objective.only(behind), part, wanted[behind]
            minimise(*rest, self.iterations, own, Base(solve), report)
            state.take(behind, part)
        return Trained(state.flat, state.norm, wanted, state.evaluations)


NAMED: dict[str, type[Recipe]] = {"sgd": SGD, "adam": Adam, "lbfgs": LBFGS, "newton": Newton}


def _check_positive(recipe: Recipe, **values: float) -> None:
    """Numbers above 0; as Python's own in the recipe."""
    for name, value in values.items():
        object.__setattr__(recipe, name, positive(name, value, f"check {recipe!r}"))


def _check_final(recipe: SGD | Adam) -> None:
    """The rate at the end is no higher than that at the start."""
    final = recipe.final_learning_rate
    if not is_number(final) or not 0 <= final <= recipe.learning_rate:
        raise ArgumentError(
            f"a final_learning_rate from 0 to the learning rate, {recipe.learning_rate:g}",
            shown(final),
            "use final_learning_rate=0.0",
        )
    object.__setattr__(recipe, "final_learning_rate", float(final))


def _check_counts(recipe: Recipe, **values: int | None) -> None:
    """Whole numbers from 1 on, as Python's own in the recipe; no batch size says all."""
    for name, value in values.items():
        if value is not None or name != "batch_size":
            object.__setattr__(recipe, name, whole(name, value, 1, None, f"check {recipe!r}"))


def _check_share(name: str, value: float) -> None:
    if not is_number(value) or not 0 <= value < 1:
        raise ArgumentError(f"a {name} from 0 to below 1", shown(value), f"use {name}=0.9")


def _wanted_norms(objective: Objective, start: Tensor, tolerance: float) -> Tensor:
    """Gradient norms at which copies count as converged, [C].

    A share of what leaving out brought in; for a refit with everything, of a typical example's
    gradient. Rounding in the sum of gradients sets the lowest norm that can be asked for.
    """
    stack = objective.stack

    def norms_of(members: tuple[Tensor, ...]) -> Tensor:
        """Norm of the gradient of each copy's left-out examples."""
        return wide(stack.left_out(start[:1].expand(len(members), -1), members)[1]).norm(dim=1)

    norms = norms_of(objective.members).cpu()
    none = torch.tensor([len(chosen) == 0 for chosen in objective.members])
    if none.any():
        some = spread(stack.num_data, TYPICAL_EXAMPLES)
        norms[none] = float(norms_of(tuple(i[None] for i in some)).median())
    regulariser = wide(stack.prior_precision * start).norm(dim=1).cpu()
    rounding = ROUNDINGS * torch.finfo(start.dtype).eps * regulariser
    return torch.maximum(tolerance * norms, rounding)


def _descend(
    recipe: SGD | Adam,
    objective: Objective,
    start: Tensor,
    seed: int,
    update: Update,
    report: Report,
) -> Trained:
    r"""All copies after the recipe's epochs, on mini-batches that they share.

    With batches of B examples the gradient of the mean objective is
    :math:`\frac1B \sum_{i \in batch} w_{ci} \nabla \ell_i + \frac{\delta}{N} \theta_c`; ``update``
    makes of it, the step's number and its rate the step [C, P] to subtract.
    """
    stack, weights, flat = objective.stack, objective.weights, start.clone()
    decay = stack.prior_precision / stack.num_data
    steps = list(_steps(recipe, stack.num_data, seed))
    for number, (chosen, rate) in enumerate(steps):
        chosen = chosen.to(flat.device)
        slices: list[slice | Tensor] = list(chosen.split(stack.examples_at_once(len(flat))))
        _, total = stack.loss_and_gradient(flat, weights, slices)
        flat = flat - update(total / len(chosen) + decay * flat, number, rate)
        report(len(flat) / len(steps))
    norm = wide(stack.value_and_gradient(flat, weights)[1]).norm(dim=1)
    unasked = torch.full((len(flat),), torch.inf, dtype=torch.float64)
    return Trained(flat, norm, unasked, torch.full((len(flat),), recipe.epochs))


def _steps(recipe: SGD | Adam, num_data: int, seed: int) -> Iterator[tuple[Tensor, float]]:
    """The examples and the learning rate of every step; the order is the same for every copy."""
    size = min(recipe.batch_size or num_data, num_data)
    generator = torch.Generator().manual_seed(seed)
    total, number = recipe.epochs * -(-num_data // size), 0
    last, fall = recipe.final_learning_rate, recipe.learning_rate - recipe.final_learning_rate
    for _ in range(recipe.epochs):
        everything = torch.arange(num_data)
        order = everything if size == num_data else torch.randperm(num_data, generator=generator)
        for chosen in order.split(size):
            yield chosen, last + 0.5 * fall * (1 + math.cos(math.pi * number / total))
            number += 1


def _momentum_update(momentum: float) -> Update:
    """Heavy ball: v = momentum v + g, the step is rate times v."""
    velocity: Tensor | None = None

    def update(gradient: Tensor, number: int, rate: float) -> Tensor:
        nonlocal velocity
        velocity = gradient if velocity is None else momentum * velocity + gradient
        return rate * velocity

    return update


def _adam_update(betas: tuple[float, float], epsilon: float) -> Update:
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

"""Built-in ways to train again, each for a whole stack of copies at once.

``SGD`` and ``Adam`` go on training for some epochs; ``LBFGS`` and ``Newton`` train until the
gradient of the copy's own objective has vanished, and start from the refit with everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.batches import Data
from engram.errors import ArgumentError
from engram.likelihoods import Likelihood
from engram.posteriors.blocks import DenseBlock
from engram.posteriors.convert import as_posterior
from engram.posteriors.gaussian import Posterior
from engram.posteriors.laplace import laplace
from engram.precision import wide
from engram.retraining.chord import follow
from engram.retraining.descent import Plan, adam_update, descend, momentum_update
from engram.retraining.hessian_at import HessianAt
from engram.retraining.in_single import in_single
from engram.retraining.layer_hessians import sharpened
from engram.retraining.quasi_newton import Objective, begin, left_out_norms, minimise
from engram.retraining.secants import IDENTITY, Apply, Base, OwnPairs
from engram.retraining.shared_inverse import WIDTH, SharedInverse
from engram.retraining.stack import Stack

Report = Callable[[float], None]
DENSE_PARAMETERS = 2500  # up to here Newton fits a full precision, beyond a Kronecker one
TYPICAL_EXAMPLES = 64
ROUNDINGS = 64  # of the regulariser's gradient: what a sum over many examples cannot resolve
PRODUCTS_PER_COPY = 10  # with the Hessian that all copies share, at most
MANY_COPIES = 24  # from here on, Hessians of the layers are worth their time
FEWEST_PRODUCTS = 120  # that are allowed however few the copies are


@dataclass(frozen=True)
class Trained:
    """A stack after training.

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

    def bind(
        self, model: nn.Module, data: Data, likelihood: Likelihood, prior: float, progress: bool
    ) -> Recipe:
        """The recipe with everything it needs to know about the trained model."""
        return self

    def rebind(self, model: nn.Module, data: Data, likelihood: Likelihood, prior: float) -> Recipe:
        """The same after the model's weights have moved."""
        return self

    @abstractmethod
    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        """Train all copies from ``start`` [C, P]."""


def _fixed_time(objective: Objective, flat: Tensor, epochs: int) -> Trained:
    gradient = objective.stack.value_and_gradient(flat, objective.weights)[1]
    copies = len(flat)
    return Trained(
        flat,
        wide(gradient).norm(dim=1),
        torch.full((copies,), torch.inf, dtype=torch.float64),
        torch.full((copies,), epochs),
    )


def _check_positive(recipe: object, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ArgumentError(f"a positive {name}", repr(value), f"check {recipe!r}")


@dataclass(frozen=True)
class SGD(Recipe):
    """Stochastic gradient descent with momentum; arguments as in :class:`Adam`."""

    learning_rate: float = 0.05
    epochs: int = 50
    batch_size: int | None = 64
    momentum: float = 0.9
    converges = False

    def __post_init__(self) -> None:
        _check_positive(
            self, learning_rate=self.learning_rate, epochs=self.epochs, batch_size=self.batch_size
        )

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        plan = Plan(self.epochs, self.batch_size, self.learning_rate, seed)
        flat = descend(objective, start, plan, momentum_update(self.momentum), report)
        return _fixed_time(objective, flat, self.epochs)


@dataclass(frozen=True)
class Adam(Recipe):
    """Adam on the mean objective, the regulariser in the gradient.

    Args:
        learning_rate: at the start; it falls to zero along a cosine.
        epochs: passes over the data.
        batch_size: examples per step; None takes all of them.
    """

    learning_rate: float = 1e-3
    epochs: int = 50
    batch_size: int | None = 64
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    converges = False

    def __post_init__(self) -> None:
        _check_positive(
            self, learning_rate=self.learning_rate, epochs=self.epochs, batch_size=self.batch_size
        )

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        plan = Plan(self.epochs, self.batch_size, self.learning_rate, seed)
        flat = descend(objective, start, plan, adam_update(self.betas, self.epsilon), report)
        return _fixed_time(objective, flat, self.epochs)


@dataclass(frozen=True)
class LBFGS(Recipe):
    """Full-batch L-BFGS, each copy by itself.

    Args:
        tolerance: a copy has converged when its gradient norm is below this share of the norm of
            its left-out examples' gradient, which is what the training has to undo.
        iterations: at most so many steps.
        history: pairs of steps and gradient changes that are kept.
    """

    tolerance: float = 1e-2
    iterations: int = 2000
    history: int = 20
    converges = True

    def __post_init__(self) -> None:
        _check_positive(self, tolerance=self.tolerance, iterations=self.iterations)

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        wanted = wanted_norms(objective, start, self.tolerance)
        own = OwnPairs(start, self.history)
        state = begin(objective, start)
        minimise(objective, state, wanted, self.iterations, own, IDENTITY, report)
        return Trained(state.flat, state.norm, wanted, state.evaluations)


@dataclass(frozen=True)
class Newton(Recipe):
    """Newton-like steps with the posterior's covariance and one Hessian that the copies share.

    Copies that leave out little share nearly the same Hessian, the one where they all start. It is
    inverted for all of them at once, by block generalised conjugate residuals preconditioned with
    the posterior: a direction whose product with the Hessian is known serves every copy, and every
    later step. What a copy leaves out is taken from that Hessian exactly, as the change of those
    examples' gradient. For many copies the posterior is sharpened with the Hessians of the linear
    layers. A copy for which such steps do not pay, and copies that leave out large groups, go on
    with the posterior (sharpened or not), their own pairs of steps and gradient changes, and step
    control.

    Args:
        posterior: of the trained model, for the refit with everything; fitted when not given, with
            a full precision up to 2500 parameters and a Kronecker-factored one beyond. For the
            left-out copies it is fitted again at that refit.
        tolerance, iterations, history: as in :class:`LBFGS`.
    """

    posterior: Posterior | Any | None = field(default=None)
    tolerance: float = 1e-2
    iterations: int = 500
    history: int = 20
    converges = True

    def __post_init__(self) -> None:
        _check_positive(self, tolerance=self.tolerance, iterations=self.iterations)

    def bind(
        self, model: nn.Module, data: Data, likelihood: Likelihood, prior: float, progress: bool
    ) -> Newton:
        if self.posterior is not None:
            posterior = as_posterior(self.posterior, model)
            posterior.check_model(model)
            posterior.check_likelihood(likelihood)
            return replace(self, posterior=posterior)
        return replace(self, posterior=_fitted(model, data, likelihood, prior, progress))

    def rebind(self, model: nn.Module, data: Data, likelihood: Likelihood, prior: float) -> Newton:
        if isinstance(self.posterior, Posterior) and self.posterior.structure == "low_rank":
            return self  # dear to fit, and as good a preconditioner a small step away
        return replace(self, posterior=_fitted(model, data, likelihood, prior, False))

    def train(self, objective: Objective, start: Tensor, seed: int, report: Report) -> Trained:
        wanted = wanted_norms(objective, start, self.tolerance)
        solve, state = self._solve_with(objective.stack), begin(objective, start)
        pairs: list[tuple[Tensor, Tensor]] = []
        if objective.shareable:
            allowed = max(PRODUCTS_PER_COPY * len(start), FEWEST_PRODUCTS)
            capacity = min(allowed, start.shape[1])
            solve = self._sharpened(objective.stack, start, solve)
            multiply = _products(objective.stack, start)
            shared = SharedInverse(solve, multiply, start, capacity)
            pairs = follow(objective, state, wanted, shared, report)
        behind = state.moving.nonzero()[:, 0]
        part, own = state.only(behind), OwnPairs(start[: len(behind)], self.history)
        for move, change in pairs:
            own.add(torch.arange(len(behind)), move[behind], change[behind])
        rest = objective.only(behind), part, wanted[behind]
        minimise(*rest, self.iterations, own, Base(solve), report)
        state.take(behind, part)
        return Trained(state.flat, state.norm, wanted, state.evaluations)

    def _sharpened(self, stack: Stack, start: Tensor, solve: Apply) -> Apply:
        if len(start) < MANY_COPIES:
            return solve
        assert isinstance(self.posterior, Posterior)
        return sharpened(stack, start[0], self.posterior, solve)

    def _solve_with(self, stack: Stack) -> Apply:
        posterior = self.posterior
        assert isinstance(posterior, Posterior)
        block = posterior.blocks[0] if posterior.blocks else None
        if isinstance(block, DenseBlock) and block.names == stack.layout.names:
            # one product with the inverse takes a tenth of the time of two triangular solves
            inverse = torch.cholesky_inverse(block.cholesky).to(stack.start)
            return lambda rows: rows.to(inverse) @ inverse
        covered = posterior.block_of

        def solve(rows: Tensor) -> Tensor:
            vectors = stack.layout.unflatten(rows)
            solved = posterior.solve(vectors)
            for name in vectors:
                if name not in covered:  # no precision known: the prior's
                    solved[name] = vectors[name] / posterior.prior_precision
            return stack.layout.flatten(solved)

        return solve


def _products(stack: Stack, start: Tensor) -> Apply:
    """H v at the copies' common start, in single precision: what they reach is seen in double."""
    single = in_single(stack)
    at = start[0].to(single.start)
    hessian = HessianAt(single, at, min(WIDTH, len(start)))
    return lambda rows: hessian(rows.to(at)).to(rows)


def _fitted(
    model: nn.Module, data: Data, likelihood: Likelihood, prior: float, progress: bool
) -> Posterior:
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return laplace(
        model,
        data,
        likelihood=likelihood,
        structure="full" if entries <= DENSE_PARAMETERS else "kronecker",
        prior_precision=prior,
        progress=progress,
    )


def wanted_norms(objective: Objective, start: Tensor, tolerance: float) -> Tensor:
    """Gradient norms at which copies count as converged, [C].

    A share of what leaving out brought in; for a refit with everything, of a typical example's
    gradient. Rounding in the sum of gradients sets the lowest norm that can be asked for.
    """
    stack, members = objective.stack, objective.members
    none = torch.tensor([len(chosen) == 0 for chosen in members])
    norms = left_out_norms(stack, start[:1], members).cpu()
    if none.any():
        spread = torch.linspace(0, stack.num_data - 1, min(TYPICAL_EXAMPLES, stack.num_data)).long()
        typical = left_out_norms(stack, start[:1], [i[None] for i in spread.unique()])
        norms[none] = float(typical.median())
    regulariser = stack.prior_precision * wide(start).norm(dim=1).cpu()
    rounding = ROUNDINGS * torch.finfo(start.dtype).eps * regulariser
    return torch.maximum(tolerance * norms, rounding)


NAMED: dict[str, type[Recipe]] = {"sgd": SGD, "adam": Adam, "lbfgs": LBFGS, "newton": Newton}

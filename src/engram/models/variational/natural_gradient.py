"""Natural-gradient steps until the posterior is stationary."""

from __future__ import annotations

import math
import warnings
from typing import Protocol, TypeVar

from engram.core.arguments import is_number, shown, whole
from engram.core.progress import Bar
from engram.errors import ArgumentError, PosteriorError

# the step size rho
SMALLEST_STEP = 2.0**-20  # below, the objective is too rough for steps: the fit ends with a warning
GROWTH = 1.5  # of rho after a step that was taken: a halving is made up for in two steps
# changes of the objective, relative to it
FALLS = 1e-12  # and more is a decrease: less is rounding
STAYS = 1e-4  # and less stays where it is: a sampled objective is no better than that


class Stepping(Protocol):
    """A posterior that can take a step of its natural gradient."""

    @property
    def natural_gradient_length(self) -> float:
        """Of the objective, in the metric of the posterior; 0 at a stationary point."""

    @property
    def objective(self) -> float:
        """Sum of expected losses plus the divergence of the posterior from the prior."""

    def step(self: State, step_size: float) -> State:
        """One step; PosteriorError where it leaves no proper posterior."""


State = TypeVar("State", bound=Stepping)


def fit(
    start: State,
    step_size: float = 1.0,
    max_steps: int = 1000,
    tolerance: float = 1e-10,
    progress: bool = True,
) -> State:
    """Repeat the update of the Bayesian learning rule until its natural gradient vanishes.

    The step size is halved where a step would leave no proper posterior or raise the objective,
    and grows back towards ``step_size`` afterwards.

    Args:
        start: for instance :func:`engram.models.latent.latent_gaussian.at_prior`.
        step_size: the largest rho.
        max_steps: a warning says when these were not enough.
        tolerance: on the length of the natural gradient.
        progress: show a bar when it takes longer than a few seconds.
    """
    max_steps = whole("max_steps", max_steps, remedy="use max_steps=1000, at least 1 step")
    if not (is_number(step_size) and 0 < step_size <= 1):
        raise ArgumentError("a step size above 0, at most 1", shown(step_size), "use step_size=1.0")
    state, rho, length = start, step_size, start.natural_gradient_length
    with Bar(max_steps, "natural gradient", progress) as bar:
        for _ in range(max_steps):
            bar.update()
            if length <= tolerance:
                return state
            candidate, new_length = _attempt(state, rho)
            if _is_better(candidate, state, new_length < length):
                state, length = candidate, new_length
                rho = min(step_size, GROWTH * rho)
            elif rho > SMALLEST_STEP:
                rho /= 2
            else:
                break
    if length > tolerance:
        warnings.warn(
            f"the natural gradient is still {length:.1e} long, not {tolerance:.0e}; "
            "estimates may be off: give more steps or a larger prior precision",
            stacklevel=2,
        )
    return state


def _attempt(state: State, rho: float) -> tuple[State, float]:
    """One step and its natural gradient's length; infinite where no posterior is left."""
    try:
        candidate = state.step(rho)
        length = candidate.natural_gradient_length
    except PosteriorError:
        return state, math.inf
    return candidate, length if math.isfinite(length) else math.inf


def _is_better(candidate: State, state: State, shorter: bool) -> bool:
    """Whether the objective falls, or stays where it is while its natural gradient shortens.

    A sampled objective and a sampled gradient do not vanish at quite the same place, so staying is
    meant to a ten-thousandth.
    """
    before, after = state.objective, candidate.objective
    if after < before - FALLS * abs(before):
        return True
    return shorter and after < before + STAYS * (1 + abs(before))

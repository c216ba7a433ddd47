"""The objective without some examples: what a refit minimises."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from engram.errors import PosteriorError
from engram.models.glm.newton import Minimum, Objective, minimise
from engram.models.glm.separation import check_one_class, check_separation

NOTHING = 1e-12  # share of a row's weight that rounding leaves when all of it is taken out


def objective_without(objective: Objective, indices: Tensor, shares: Tensor) -> Objective:
    """F without shares of some examples; of a row that stands for several, without that of one.

    Args:
        indices: of rows, each once.
        shares: of one example of each row; 1 takes out one of them, the row's frequency all.
    """
    design = objective.design
    weights = design.weights.index_add(0, indices, -shares * design.taken[indices])
    taken_counts = shares * design.counts.clamp(max=1.0)[indices]
    counts = design.counts.index_add(0, indices, -taken_counts)
    if bool((weights < -NOTHING * design.weights).any()):
        where = int((weights / design.weights.clamp(min=NOTHING)).argmin())
        raise PosteriorError(
            "shares that leave no weight below 0",
            f"{float(weights[where]):.4g} for example {where}",
            "take out at most the examples that the row stands for",
        )
    kept = (weights > NOTHING * design.weights).nonzero()[:, 0]
    if len(kept) == 0:
        raise PosteriorError("at least one example that remains", "none", "leave out fewer")
    rest = replace(design, weights=weights, frequencies=counts.clamp(min=0.0)).rows(kept)
    return replace(objective, design=rest, targets=objective.targets[kept])


def minimise_again(objective: Objective, start: Tensor) -> Minimum:
    """From the coefficients of all data to those of the rest.

    SeparationError where the rest has none: Newton's method would stop at some large number, which
    says where its tolerance is, and nothing about the data.
    """
    check_one_class(objective)
    minimum = minimise(objective, start)
    check_separation(objective, minimum.coefficients)
    return minimum

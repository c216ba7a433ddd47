"""delta of the regulariser: one for all parameters, or one for each of them by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engram.core.arguments import is_number, shown
from engram.core.parameters import Layout
from engram.errors import ArgumentError
from engram.posteriors.gaussian import check_prior_precision

Prior = float | Mapping[str, float]


def check_prior(prior: Prior, names: Sequence[str]) -> float | dict[str, float]:
    """A positive number, or one that is not negative for each of the names."""
    if not isinstance(prior, Mapping):
        return check_prior_precision(prior)
    if set(prior) != set(names):
        odd = sorted(set(names) ^ set(prior), key=str)[0]
        raise ArgumentError(
            "a prior precision for each trainable parameter by name",
            f"none for {odd!r}" if odd in names else f"one for {odd!r}, which is none of them",
            "name all of them, or give one number",
        )
    for name, value in prior.items():
        if not is_number(value) or not 0 <= value < math.inf:
            raise ArgumentError(
                "prior precisions that are not negative",
                f"{shown(value)} for {name!r}",
                "use num_data times the weight decay of the mean loss",
            )
    return {name: float(prior[name]) for name in names}


def check_regularised(prior: Prior) -> None:
    """ArgumentError where nothing is regularised, for recipes, which need a minimum to go to.

    A training of one's own has what decay it has in itself, and often none.
    """
    if isinstance(prior, Mapping) and not any(prior.values()):
        raise ArgumentError(
            "a positive prior precision for some parameter", "0 for all", "raise it"
        )


def prior_entries(prior: Prior, layout: Layout, like: Tensor) -> Tensor:
    """delta of every entry of the flat vector, [P]."""
    parts = [
        like.new_full((size,), prior[name] if isinstance(prior, Mapping) else prior)
        for name, size in zip(layout.names, layout.sizes, strict=True)
    ]
    return torch.cat(parts)

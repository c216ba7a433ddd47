"""What every study of left-out examples needs: nets stopped early, and a choice of examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram.core.state.model import state_preserved
from engram.likelihoods import Likelihood
from engram.retraining.recipes import Recipe
from engram.retraining.stack import Objective, open_stack

HARD_SHARE = 0.25  # half of the sample comes from this share of the data, that with most loss


def stop_early(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    likelihood: Likelihood,
    prior_precision: float,
    recipe: Recipe,
    seed: int,
) -> None:
    """Train by the recipe of the truth, with nothing left out."""
    nothing = torch.empty(0, dtype=torch.long)
    with state_preserved(model):
        stack = open_stack(model, data, likelihood, prior_precision)
        objective = Objective(stack, (nothing,))
        trained = recipe.train(objective, stack.start[None], seed, lambda count: None)
    parts = stack.layout.unflatten(trained.flat[0])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parts[name])


def spread_over(losses: Tensor, count: int) -> Tensor:
    """Evenly over the ranks of the loss, in two strata; no estimate has a part in the choice."""
    order = losses.argsort()
    border = round(len(order) * (1 - HARD_SHARE))
    strata = (order[:border], order[border:])
    return torch.cat([s[torch.linspace(0, len(s) - 1, count // 2).round().long()] for s in strata])

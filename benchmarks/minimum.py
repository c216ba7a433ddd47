"""The MLP(32, 16) at a minimum, for the benchmark of retraining."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.nets import small_mlp
from engram.core.state.model import state_preserved
from engram.likelihoods import Categorical
from engram.problem import Opener
from engram.retraining.recipes import Newton
from engram.retraining.stack import Objective, open_stack

PRIOR_PRECISION = 30.0
NOTHING = torch.empty(0, dtype=torch.long)


def trained(data: tuple[Tensor, Tensor], seed: int) -> tuple[nn.Module, float]:
    """A converged net and the norm of its gradient: Adam, then the Newton recipe."""
    torch.manual_seed(seed)
    model, (inputs, targets) = small_mlp(10), data
    decay = PRIOR_PRECISION / len(inputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=decay)
    for _ in range(60):
        for chosen in torch.randperm(len(inputs)).split(250):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
    norm = float("inf")
    for tolerance in (1e-2, 1e-2, 1e-3):  # the posterior is fitted again nearer to the minimum
        with state_preserved(model):
            stack = open_stack(model, data, Categorical(), PRIOR_PRECISION)
            recipe = Newton(relative_gradient=tolerance, iterations=600, history=40)
            recipe = recipe.bind(model, Opener(data, Categorical()), PRIOR_PRECISION, False)
            found = recipe.train(Objective(stack, (NOTHING,)), stack.start[None], 0, silent)
        nn.utils.vector_to_parameters(found.flat[0], model.parameters())
        norm = float(found.gradient_norm)
    return model, norm


def silent(count: float) -> None:
    """No progress bar."""

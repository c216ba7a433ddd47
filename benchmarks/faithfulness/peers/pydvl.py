"""pyDVL: influence of an example on its own loss."""

from __future__ import annotations

import copy

import torch
from pydvl.influence.torch import DirectInfluence, EkfacInfluence
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem

BATCH_SIZE = 100


def ekfac(problem: Problem) -> Estimate:
    """EK-FAC, which knows linear layers and single precision only."""
    model = copy.deepcopy(problem.model).float()
    return _self_influence(
        problem,
        EkfacInfluence(model, update_diagonal=True, hessian_regularization=problem.decay),
    )


def direct(problem: Problem) -> Estimate:
    """The exact Hessian, inverted."""
    model = copy.deepcopy(problem.model)
    return _self_influence(
        problem, DirectInfluence(model, functional.cross_entropy, regularization=problem.decay)
    )


def _self_influence(problem: Problem, unfitted: DirectInfluence | EkfacInfluence) -> Estimate:
    """g' (H + delta / N)^-1 g / N, the diagonal of all pairs."""
    torch.manual_seed(0)
    data = TensorDataset(
        problem.inputs.to(next(unfitted.model.parameters()).dtype), problem.targets
    )
    fitted = unfitted.fit(DataLoader(data, batch_size=BATCH_SIZE))
    inputs, targets = data[problem.left_out]
    pairs = fitted.influences(inputs, targets, inputs, targets)
    return Estimate.of_influence(pairs.detach().diagonal() / len(data))


METHODS: dict[str, Method] = {"pyDVL, EK-FAC": ekfac, "pyDVL, exact Hessian": direct}

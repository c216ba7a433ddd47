"""laplace-torch: the formula of the paper's authors, with the variance that it gives."""

from __future__ import annotations

import copy
from functools import partial

import torch
from laplace import Laplace
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.faithfulness.estimates import Estimate, Method
from benchmarks.faithfulness.truths import Problem

FIT_BATCH, JACOBIAN_BATCH = 100, 8


def authors(problem: Problem, structure: str) -> Estimate:
    """d = diag(V) e, predictions moved by sigma'(f) d, the loss at f + d."""
    outputs, targets = problem.outputs(), problem.targets[problem.left_out]
    probabilities = outputs.softmax(1)
    variance = _variance(problem, structure)
    deviation = variance * (probabilities - functional.one_hot(targets, outputs.shape[1]))
    change = probabilities * (1 - probabilities) * deviation
    moved, still = (
        functional.cross_entropy(logits, targets, reduction="none")
        for logits in (outputs + deviation, outputs)
    )
    return Estimate(change.abs().sum(1), moved - still, deviation)


def _variance(problem: Problem, structure: str) -> Tensor:
    """Diagonal of J S^-1 J', [n, K]."""
    posterior = Laplace(
        copy.deepcopy(problem.model),
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        prior_precision=torch.tensor(problem.prior_precision, dtype=torch.float64),
    )
    posterior.fit(DataLoader(TensorDataset(*problem.data), batch_size=FIT_BATCH))
    parts = [
        posterior._glm_predictive_distribution(inputs)[1].diagonal(dim1=1, dim2=2)
        for inputs in problem.inputs[problem.left_out].split(JACOBIAN_BATCH)
    ]
    return torch.cat(parts).detach()


METHODS: dict[str, Method] = {
    "laplace-torch, K-FAC, authors' formula": partial(authors, structure="kron"),
    "laplace-torch, full, authors' formula": partial(authors, structure="full"),
}

"""laplace-torch: the functional variance that the paper's formula needs, with Kronecker factors."""

from __future__ import annotations

import copy

import torch
from laplace import Laplace
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.libraries.case import Case, Way

JACOBIAN_BATCH = 8  # its Jacobians cost more per example the larger the batch


def own(case: Case) -> Tensor:
    """V e for every example, [N, K]."""
    posterior = Laplace(
        copy.deepcopy(case.model),
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        prior_precision=torch.tensor(float(case.prior_precision or 1.0)),
    )
    posterior.fit(DataLoader(TensorDataset(*case.train), batch_size=case.batch_size))
    found = []
    for inputs, targets in zip(*(t.split(JACOBIAN_BATCH) for t in case.train), strict=True):
        outputs, variance = posterior._glm_predictive_distribution(inputs)
        residual = outputs.softmax(1) - functional.one_hot(targets, outputs.shape[1])
        found.append(torch.einsum("nkl,nl->nk", variance, residual).detach())
    return torch.cat(found)


OWN: dict[str, Way] = {"laplace-torch, K-FAC": own}

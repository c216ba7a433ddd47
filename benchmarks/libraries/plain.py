"""torch alone: the authors' Jacobian way, and sixty lines of torch.func."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import jacobian, torch_func
from benchmarks.libraries.case import Case, Way
from benchmarks.libraries.ours import fitted

JACOBIAN_BATCH, FUNCTIONAL_BATCH = 8, 32


def by_jacobian(case: Case) -> Tensor:
    """J S^-1 J' e with the whole Jacobian of every example and a diagonal S, as the authors did."""
    posterior = fitted(case, "diagonal")
    return torch.cat(
        [
            jacobian.deviation(case.model, inputs, residual, posterior)
            for inputs, residual in _parts(case, JACOBIAN_BATCH)
        ]
    )


def by_functional(case: Case) -> Tensor:
    """The same by vmap(jvp o grad)."""
    posterior = fitted(case, "diagonal")
    return torch.cat(
        [
            torch_func.deviation(case.model, (inputs,), residual, posterior)
            for inputs, residual in _parts(case, FUNCTIONAL_BATCH)
        ]
    )


def _parts(case: Case, size: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of inputs and residuals."""
    if case.train[1].dim() > 1:
        raise ValueError("written for one output vector per example")
    found = []
    for inputs, targets in zip(*(t.split(size) for t in case.train), strict=True):
        with torch.no_grad():
            outputs = case.model(inputs)
        found.append((inputs, outputs.softmax(1) - functional.one_hot(targets, outputs.shape[1])))
    return found


OWN: dict[str, Way] = {"Jacobian, diagonal": by_jacobian, "torch.func, diagonal": by_functional}

"""Both sides of a case, each computed once a worker, and how they are compared."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

import engram
from cases import CASES
from problems import Case
from reference import DensePrecision

PARAMETERS = [(name, structure) for name, case in CASES.items() for structure in case.structures]
"""Every case with every structure that is defined for it."""


@cache
def posterior(
    name: str,
    structure: str,
    curvature: str = "ggn",
    prior_precision: float | None = None,
) -> Any:
    case = CASES[name]
    return engram.laplace(
        case.model,
        case.data,
        likelihood=case.public_likelihood,
        structure=structure,
        prior_precision=prior_precision or case.prior_precision,
        curvature=curvature,
        progress=False,
    )


@cache
def precision(
    name: str,
    structure: str,
    curvature: str = "ggn",
    prior_precision: float | None = None,
) -> DensePrecision:
    case = CASES[name]
    prior_precision = prior_precision or case.prior_precision
    return case.dense.precision(structure, prior_precision, curvature, case.last_layer)


def sensitivities(case: Case, fitted: Any, **settings: Any) -> Any:
    return engram.sensitivities(
        case.model,
        case.data,
        fitted,
        progress=False,
        **settings,
    )


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Largest difference relative to the largest entry."""
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    assert actual.shape == expected.shape, f"expected {expected.shape}, got {actual.shape}"
    assert torch.isfinite(actual).all(), f"expected finite values, got {actual}"
    scale = max(float(expected.abs().max()), 1e-4)
    error = float((actual - expected).abs().max()) / scale
    assert error <= tolerance, f"relative error {error:.1e}, expected {expected}, got {actual}"


def random_vectors(case: Case, count: int, seed: int = 3) -> dict[str, Tensor]:
    """Named tensors [count, *shape] over the trained parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(count, *p.shape, generator=generator, dtype=torch.float64)
        for name, p in case.model.named_parameters()
        if p.requires_grad
    }

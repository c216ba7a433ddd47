"""Diagnostics and checks of results whose posterior is known in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.errors import NonFiniteError
from engram.sensitivity.diagnostics import Diagnostics


@dataclass(frozen=True)
class Convergence:
    """The gradient of the whole objective, and the same over the norms of its two parts."""

    gradient: float
    relative: float


def diagnose(shares: Tensor, flagged: Tensor, convergence: Convergence) -> Diagnostics:
    """Diagnostics of a model whose parameters are all handled exactly.

    Args:
        shares: v beta of every example and output, [N, K]; NaN where there is no such thing.
        flagged: where the guard held, [N].
        convergence: the gradient at the fitted parameters.
    """
    leverage = shares.double().sum(1)
    known = not bool(leverage.isnan().any())
    return Diagnostics(
        leverage_examples=len(leverage) if known else 0,
        share_above_one=float((leverage > 1).double().mean()) if known else math.nan,
        share_inconsistent=float((shares.amax(1) > 1).double().mean()) if known else math.nan,
        effective_parameters=float(leverage.sum()),
        effective_parameters_error=0.0,
        gradient_norm=convergence.gradient,
        relative_gradient=convergence.relative,
        parameters_exact=1.0,
        parameters_fallback=0.0,
        parameters_frozen=0.0,
        parameters_unused=0.0,
        flagged_share=float(flagged.double().mean()),
    )


def finished(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Columns of a result on the CPU, sharing memory with nothing, and without a silent NaN."""
    for name, values in columns.items():
        if name == "leverage" or not values.is_floating_point():
            continue
        finite = torch.isfinite(values.reshape(len(values), -1)).all(1)
        if not finite.all():
            raise NonFiniteError(
                f"a finite {name} for every example",
                f"NaN or infinity at example {int((~finite).nonzero()[0])}",
                "check that the posterior has converged, or use a larger noise or prior precision",
            )
    return {name: values.detach().cpu().clone() for name, values in columns.items()}

"""What a result says about itself: leverages, convergence and coverage."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engram.engine.prepare import Coverage
from engram.engine.session import Session
from engram.parameters import Named, inner, square_norm, trainable
from engram.posteriors.gaussian import Posterior

LEVERAGE_SAMPLE = 512
EXACT_RANK = 16  # up to here the trace is taken over the root of Lambda, beyond by probes
PROBES = 16


@dataclass(frozen=True)
class Diagnostics:
    """Numbers that need no truth to judge a result by.

    Args:
        leverage_examples: how many examples' leverages were computed.
        share_above_one: share of them above the number of outputs' limit of 1 per direction; an
            exact Gauss-Newton posterior has none.
        effective_parameters: sum of the leverages over all examples; its standard error comes
            from having computed only some.
        gradient_norm: norm of the gradient of the full objective, sum of losses plus regulariser.
        relative_gradient: that norm over the norms of its two parts; 0 at a minimum.
        natural_step: length of the next step in posterior standard deviations.
        parameters_exact, parameters_fallback, parameters_frozen, parameters_unused: shares.
        flagged_share: share of examples at which the estimator was held by its guard.
    """

    leverage_examples: int
    share_above_one: float
    effective_parameters: float
    effective_parameters_error: float
    gradient_norm: float
    relative_gradient: float
    natural_step: float
    parameters_exact: float
    parameters_fallback: float
    parameters_frozen: float
    parameters_unused: float
    flagged_share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        error = self.effective_parameters_error
        spread = f" +- {error:.2g}" if error > 0 else ""
        return "\n".join(
            [
                f"effective parameters  {self.effective_parameters:.4g}{spread}",
                f"leverages above 1     {self.share_above_one:.1%}"
                f" of {self.leverage_examples:,} examples",
                f"relative gradient     {self.relative_gradient:.2g}"
                f" (0 at a minimum; next step {self.natural_step:.2g} posterior sd)",
                f"parameters            {self.parameters_exact:.1%} by rule,"
                f" {self.parameters_fallback:.1%} by fallback,"
                f" {self.parameters_frozen:.1%} frozen, {self.parameters_unused:.1%} unused",
                f"held by the guard     {self.flagged_share:.1%} of examples",
            ]
        )


def sampled_leverages(session: Session, posterior: Posterior, seed: int) -> tuple[Tensor, Tensor]:
    """Leverages tr(V Lambda) of a random subset: (indices, leverages)."""
    count = session.batches.num_data
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(count, generator=generator)[:LEVERAGE_SAMPLE].sort().values
    found = []
    for observed in session.passes("leverages", chosen):
        with torch.no_grad():
            found.append(_leverage(observed, session, posterior, seed))
    return chosen, torch.cat(found)


def _leverage(observed: Any, session: Session, posterior: Posterior, seed: int) -> Tensor:
    likelihood = session.likelihood
    outputs, targets = observed.outputs, observed.targets
    if outputs.shape[1] <= EXACT_RANK:
        vectors = likelihood.hessian_factor(outputs, targets)
        products = observed.trace.inner_products(vectors, posterior)
        return torch.diagonal(products, dim1=1, dim2=2).sum(1).cpu()
    generator = torch.Generator(device=outputs.device).manual_seed(seed)
    total = torch.zeros(len(outputs), dtype=outputs.dtype, device=outputs.device)
    for _ in range(PROBES):
        probe = likelihood.sampled_residual(outputs, targets, generator)[:, :, None]
        total += observed.trace.inner_products(probe, posterior)[:, 0, 0]
    return (total / PROBES).cpu()


def diagnose(
    model: nn.Module,
    posterior: Posterior,
    coverage: Coverage,
    total_gradient: Named,
    leverage: Tensor,
    flagged: Tensor,
) -> Diagnostics:
    """Put the diagnostics together.

    Args:
        total_gradient: sum of the losses' gradients over all examples.
        leverage: [N], NaN where it was not computed.
        flagged: [N], where the guard held.
    """
    known = leverage[~leverage.isnan()].double()
    count, num_data = len(known), len(leverage)
    mean = float(known.mean()) if count else math.nan
    error = 0.0
    if 1 < count < num_data:
        error = num_data * float(known.std()) / math.sqrt(count)
    norms = _convergence(model, posterior, total_gradient)
    entries = max(coverage.total, 1)
    return Diagnostics(
        leverage_examples=count,
        share_above_one=float((known > 1).double().mean()) if count else math.nan,
        effective_parameters=num_data * mean,
        effective_parameters_error=error,
        gradient_norm=norms[0],
        relative_gradient=norms[1],
        natural_step=norms[2],
        parameters_exact=coverage.exact / entries,
        parameters_fallback=coverage.fallback / entries,
        parameters_frozen=coverage.frozen / entries,
        parameters_unused=coverage.unused / entries,
        flagged_share=float(flagged.double().mean()),
    )


def _convergence(
    model: nn.Module, posterior: Posterior, total_gradient: Named
) -> tuple[float, float, float]:
    parameters = {n: p.detach() for n, p in trainable(model).items() if n in posterior.block_of}
    regulariser = {n: posterior.prior_precision * p for n, p in parameters.items()}
    losses = {n: total_gradient.get(n, torch.zeros_like(p)) for n, p in parameters.items()}
    objective = {n: losses[n] + regulariser[n] for n in parameters}
    norm = math.sqrt(square_norm(objective))
    parts = math.sqrt(square_norm(losses)) + math.sqrt(square_norm(regulariser))
    step = math.sqrt(max(inner(objective, posterior.solve(objective)), 0.0))
    return norm, norm / parts if parts > 0 else 0.0, step

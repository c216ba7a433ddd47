"""Diagnostics of a result that need no retraining: leverages, convergence and coverage."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.parameters import Named, square_norm, trainable
from engram.core.parameters import count as count_entries
from engram.engine.gradient_accumulator import GradientAccumulator
from engram.engine.prepare import Coverage
from engram.engine.session import Observed, Session
from engram.likelihoods.draws import Draws
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.estimators.base import eigen

#: Examples whose leverage is computed where the estimator does not give all: the error of the
#: effective parameters falls with its root (it is printed), the cost grows with it.
LEVERAGE_SAMPLE = 256
#: Of the examples that a pass could hold at once, one in so many has its leverage computed at a
#: time: each needs a gradient per output vector at every layer.
SHARE_OF_LEVERAGES = 32
#: Outputs up to which the trace is taken over the whole root of Lambda, a backward pass each.
EXACT_RANK = 16
#: Random probes whose mean is the trace beyond, a backward pass each: its error falls with the
#: root of their number.
PROBES = 16


@dataclass(frozen=True)
class Diagnostics:
    """Numbers that need no truth to judge a result by.

    Args:
        leverage_examples: how many examples' leverages were computed.
        share_above_one: share of them above 1. With one output the exact Gauss-Newton posterior
            has none; with more, an example can use up one parameter per independent output.
        share_inconsistent: share of them with an eigenvalue of V Lambda above 1, which the exact
            Gauss-Newton posterior never has: the example would hold more information than all
            data. NaN where there are too many outputs to take eigenvalues.
        effective_parameters: sum of the leverages over all examples; its standard error comes
            from having computed only some.
        gradient_norm: norm of the gradient of the full objective, sum of losses plus regulariser.
        relative_gradient: that norm over the norms of its two parts; 0 at a minimum. For large
            layers both are estimated within some 30 % from a random sketch. For linear predictors
            the Newton decrement in its place, in standard deviations of the posterior.
        parameters_exact, parameters_fallback, parameters_frozen, parameters_unused: shares.
        flagged_share: share of examples at which the estimator was held by its guard.
        parameters_covered: share of the trainable parameters that the posterior lets move.
        fitting_prior: the prior precision for which the gradient would be smallest: that of the
            training, if the model has converged. NaN where it was not computed.
        fitting_gradient: the relative gradient with it.
        leverages_lost: leverages that were computed and came out as no finite number.
        step_error: error of the leave-one-out losses by refits of the examples that one Newton step
            does not settle, relative to their sum. NaN where nothing was refitted.
    """

    leverage_examples: int
    share_above_one: float
    share_inconsistent: float
    effective_parameters: float
    effective_parameters_error: float
    gradient_norm: float
    relative_gradient: float
    parameters_exact: float
    parameters_fallback: float
    parameters_frozen: float
    parameters_unused: float
    flagged_share: float
    parameters_covered: float = 1.0
    fitting_prior: float = math.nan
    fitting_gradient: float = math.nan
    leverages_lost: int = 0
    step_error: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        error = self.effective_parameters_error
        spread = f" +- {error:.2g}" if error > 0 else ""
        inconsistent = self.share_inconsistent
        known = "not known" if math.isnan(inconsistent) else f"{inconsistent:.1%}"
        return "\n".join(
            [
                f"effective parameters  {self.effective_parameters:.4g}{spread}",
                f"leverages above 1     {self.share_above_one:.1%}"
                f" of {self.leverage_examples:,} examples;"
                f" inconsistent {known}",
                f"relative gradient     {self.relative_gradient:.2g}"
                " (0 at a minimum, 1 far from one)",
                f"parameters            {self.parameters_exact:.1%} by rule,"
                f" {self.parameters_fallback:.1%} by fallback,"
                f" {self.parameters_frozen:.1%} frozen, {self.parameters_unused:.1%} unused",
                f"held by the guard     {self.flagged_share:.1%} of examples",
            ]
        )


@dataclass(frozen=True)
class Leverages:
    """tr(V Lambda) and the largest eigenvalue of V Lambda, [N], NaN where not computed."""

    trace: Tensor
    largest: Tensor
    lost: int = 0  # computed, and no finite number

    @classmethod
    def of_all(cls, eigenvalues: Tensor) -> Leverages:
        """From the eigenvalues of every example, [N, R]."""
        trace = eigenvalues.sum(1)
        return cls(trace, eigenvalues.amax(1), int((~torch.isfinite(trace)).sum()))


def sampled_leverages(session: Session, posterior: Posterior, seed: int) -> Leverages:
    """Leverages of a random subset of the examples."""
    count = session.batches.num_data
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(count, generator=generator)[:LEVERAGE_SAMPLE].sort().values
    traces, largest = [], []
    for observed in session.passes("leverages", chosen, _batch_size(session)):
        with torch.no_grad():
            trace, top = _leverage(observed, session, posterior, seed)
        traces.append(trace.cpu())
        largest.append(top.cpu())
    lost = sum(int((~torch.isfinite(trace)).sum()) for trace in traces)
    return Leverages(_spread(traces, chosen, count), _spread(largest, chosen, count), lost)


def _batch_size(session: Session) -> int:
    """Fewer examples at a time: each needs a gradient per output vector at every site."""
    size = session.batches.batch_size
    return max(1, size // 8, min(size, session.fitting // SHARE_OF_LEVERAGES))


def _spread(parts: list[Tensor], chosen: Tensor, count: int) -> Tensor:
    values = torch.cat(parts)
    result = torch.full((count,), math.nan, dtype=values.dtype)
    result[chosen] = values
    return result


def _leverage(
    observed: Observed, session: Session, posterior: Posterior, seed: int
) -> tuple[Tensor, Tensor]:
    likelihood = session.likelihood
    outputs, targets = observed.outputs, observed.targets
    if outputs.shape[1] <= EXACT_RANK:
        vectors = likelihood.hessian_factor(outputs, targets)
        eigenvalues = _consistent_eigenvalues(observed, vectors, posterior)
        return eigenvalues.sum(1), eigenvalues.amax(1)
    draws = [Draws(seed, observed.batch.indices, probe) for probe in range(PROBES)]
    drawn = [likelihood.sampled_residual(outputs, targets, each) for each in draws]
    # at once: what belongs to the layers' inputs is prepared for all probes together
    products = observed.trace.inner_products(torch.stack(drawn, 2), posterior)
    trace = products.diagonal(dim1=1, dim2=2).mean(1)
    return trace, torch.full_like(trace, math.nan)


def _consistent_eigenvalues(observed: Observed, vectors: Tensor, posterior: Posterior) -> Tensor:
    r"""Eigenvalues of F' V F, [B, R], with the example's own curvature in the precision.

    A low-rank precision does not hold it outside the kept directions: there :math:`L` becomes
    :math:`L (I + L)^{-1}`, as if it did.
    """
    products = observed.trace.inner_products(vectors, posterior)
    if not posterior.is_partial:
        return eigen(products)[0]
    within = replace(posterior, blocks=tuple(block.only_kept() for block in posterior.blocks))
    kept = observed.trace.inner_products(vectors, within)
    values, turn = eigen(products - kept)
    values = values.clamp(min=0)
    return eigen(kept + (turn * (values / (1 + values))[:, None]) @ turn.mT)[0]


def diagnose(
    model: nn.Module,
    posterior: Posterior,
    coverage: Coverage,
    total_gradient: GradientAccumulator,
    leverages: Leverages,
    flagged: Tensor,
) -> Diagnostics:
    """Put the diagnostics together.

    Args:
        total_gradient: sum of the losses' gradients over all examples.
        leverages: of all or some examples.
        flagged: [N], where the guard held.
    """
    known = leverages.trace[~leverages.trace.isnan()].double()
    largest = leverages.largest[~leverages.largest.isnan()].double()
    count, num_data = len(known), len(leverages.trace)
    mean = float(known.mean()) if count else math.nan
    error = 0.0
    if 1 < count < num_data:
        error = num_data * float(known.std()) / math.sqrt(count)
    norms = _convergence(model, posterior, total_gradient)
    share, fitting = total_gradient.fitting_share(_covered(model, posterior), posterior.prior_of)
    entries = max(coverage.total, 1)
    return Diagnostics(
        leverage_examples=count,
        share_above_one=float((known > 1).double().mean()) if count else math.nan,
        share_inconsistent=float((largest > 1).double().mean()) if len(largest) else math.nan,
        effective_parameters=num_data * mean,
        effective_parameters_error=error,
        gradient_norm=norms[0],
        relative_gradient=norms[1],
        parameters_exact=coverage.exact / entries,
        parameters_fallback=coverage.fallback / entries,
        parameters_frozen=coverage.frozen / entries,
        parameters_unused=coverage.unused / entries,
        flagged_share=float(flagged.double().mean()),
        parameters_covered=posterior.num_params / max(count_entries(trainable(model).values()), 1),
        fitting_prior=share * posterior.prior_precision,
        fitting_gradient=fitting,
        leverages_lost=leverages.lost,
    )


def _covered(model: nn.Module, posterior: Posterior) -> Named:
    return {n: p.detach() for n, p in trainable(model).items() if n in posterior.block_of}


def _convergence(
    model: nn.Module, posterior: Posterior, total_gradient: GradientAccumulator
) -> tuple[float, float]:
    parameters = _covered(model, posterior)
    losses, objective = total_gradient.square_norms(parameters, posterior.prior_of)
    pulls = {name: posterior.prior_of(name) * p for name, p in parameters.items()}
    regulariser = math.sqrt(square_norm(pulls))
    norm, parts = math.sqrt(objective), math.sqrt(losses) + regulariser
    return norm, 0.0 if parts == 0 else norm / parts  # NaN stays

"""Diagnostics of a result that need no retraining: leverages, convergence and coverage."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from engram.core.parameters import Named, square_norm, trainable
from engram.core.parameters import count as count_entries
from engram.core.storage.values import ADDED_LATER
from engram.engine.gradient_accumulator import GradientAccumulator
from engram.engine.prepare import Coverage
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.course import Course
from engram.sensitivity.leverages import Leverages

#: Examples of a sample for a share of them that says anything; of fewer it is not known.
SHARE_SAMPLE = 16


@dataclass(frozen=True)
class Diagnostics:
    """Numbers that need no truth to judge a result by.

    Args:
        leverage_examples: how many examples' leverages were computed: all where the estimator has
            them, else a random sample that takes at most a quarter of the pass. They are exact
            where that has room for all outputs, and these are at most 16; else the likeliest
            classes are taken exactly and the others by random signs, and where outputs are no
            classes all of them.
        share_above_one: share of them above 1. With one output the exact Gauss-Newton posterior
            has none; with more, an example can use up one parameter per independent output.
        share_inconsistent: share of them with an eigenvalue of V Lambda above 1, which the exact
            Gauss-Newton posterior never has: the example would hold more information than all
            data. Where leverages are not exact the eigenvalues are those of the likeliest classes,
            and the share is no more than that with all. NaN where outputs are no classes then, or a
            sample has fewer than 16.
        effective_parameters: sum of the leverages over all examples; its standard error comes
            from having computed only some, and from the draws. NaN for one example of many.
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
        course: what the recorded training says of the estimate.
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
    course: Course = field(default=Course(), metadata=ADDED_LATER)

    @property
    def computed(self) -> bool:
        """Whether leverages or the gradient were computed; with ``diagnostics=False`` none are."""
        leverages = self.leverage_examples + self.leverages_lost
        return leverages > 0 or not math.isnan(self.relative_gradient)

    @property
    def share_inconsistent_error(self) -> float:
        """Its standard error, from having computed only some of the leverages."""
        if not self.effective_parameters_error > 0:
            return 0.0
        share = self.share_inconsistent
        return math.sqrt(share * (1 - share) / self.leverage_examples)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers by name."""
        found = asdict(self)
        return found | found.pop("course")

    def _of_leverages(self) -> list[str]:
        error, share_error = self.effective_parameters_error, self.share_inconsistent_error
        spread = "" if error == 0 else f" +- {error:.2g}"
        known = "not known"
        if not math.isnan(self.share_inconsistent):
            known = f"{self.share_inconsistent:.1%}"
            known += f" +- {share_error:.1%}" if share_error > 0 else ""
        return [
            f"effective parameters  {self.effective_parameters:.4g}{spread}",
            f"leverages above 1     {self.share_above_one:.1%}"
            f" of {self.leverage_examples:,} examples;"
            f" inconsistent {known}",
            f"relative gradient     {self.relative_gradient:.2g} (0 at a minimum, 1 far from one)",
        ]

    def __str__(self) -> str:
        none = ["diagnostics           none: leverages and gradient were not asked for"]
        return "\n".join(
            [
                *(self._of_leverages() if self.computed else none),
                f"parameters            {self.parameters_exact:.1%} by rule,"
                f" {self.parameters_fallback:.1%} by fallback,"
                f" {self.parameters_frozen:.1%} frozen, {self.parameters_unused:.1%} unused",
                f"held by the guard     {self.flagged_share:.1%} of examples",
            ]
        )


def diagnose(
    model: nn.Module,
    posterior: Posterior,
    coverage: Coverage,
    flagged: Tensor,
    total_gradient: GradientAccumulator,
    leverages: Leverages,
) -> Diagnostics:
    """Put the diagnostics together.

    Args:
        flagged: [N], where the guard held.
        total_gradient: sum of the losses' gradients over all examples.
        leverages: of all or some examples.
    """
    known = leverages.trace[~leverages.trace.isnan()].double()
    largest = leverages.largest[~leverages.largest.isnan()].double()
    count, num_data = len(known), len(leverages.trace)
    mean = float(known.mean()) if count else math.nan
    error, enough = 0.0, True
    if not (leverages.exact and count + leverages.lost == num_data):
        error = num_data * float(known.std()) / math.sqrt(count) if count > 1 else math.nan
        enough = len(largest) >= SHARE_SAMPLE
    norms = _convergence(model, posterior, total_gradient)
    share, fitting = total_gradient.fitting_share(_covered(model, posterior), posterior.prior_of)
    return replace(
        undiagnosed(model, posterior, coverage, flagged),
        leverage_examples=count,
        share_above_one=_share(known > 1),
        share_inconsistent=_share(largest > 1) if enough else math.nan,
        effective_parameters=num_data * mean,
        effective_parameters_error=error,
        gradient_norm=norms[0],
        relative_gradient=norms[1],
        fitting_prior=share * posterior.prior_precision,
        fitting_gradient=fitting,
        leverages_lost=leverages.lost,
    )


def _share(found: Tensor) -> float:
    return float(found.double().mean()) if len(found) else math.nan


def undiagnosed(
    model: nn.Module, posterior: Posterior, coverage: Coverage, flagged: Tensor
) -> Diagnostics:
    """What is known without a computation: neither leverages nor the gradient."""
    entries = max(coverage.total, 1)
    return Diagnostics(
        leverage_examples=0,
        share_above_one=math.nan,
        share_inconsistent=math.nan,
        effective_parameters=math.nan,
        effective_parameters_error=math.nan,
        gradient_norm=math.nan,
        relative_gradient=math.nan,
        parameters_exact=coverage.exact / entries,
        parameters_fallback=coverage.fallback / entries,
        parameters_frozen=coverage.frozen / entries,
        parameters_unused=coverage.unused / entries,
        flagged_share=float(flagged.double().mean()),
        parameters_covered=posterior.num_params / max(count_entries(posterior.mean.values()), 1),
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

r"""What happens when a whole group is left out: one step of the parameters, with all cross terms.

.. math:: \Delta\theta = \Big(S - \sum_j \epsilon_j J_j' \Lambda_j J_j\Big)^{-1}
    \sum_j \epsilon_j \nabla \ell_j

Any data set is then evaluated at :math:`\theta + \Delta\theta`, or linearised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from engram import equation
from engram.arguments import one_of
from engram.batches import Batches, Data
from engram.engine.session import Session, session
from engram.errors import ArgumentError, TargetError
from engram.likelihoods import Likelihood
from engram.memory import backing_off
from engram.parameters import Named
from engram.posteriors.convert import as_posterior
from engram.posteriors.gaussian import Posterior
from engram.selection import check_group
from engram.sensitivity.effects import Effect, effect, paper_effect
from engram.sensitivity.estimators import default_estimator
from engram.sensitivity.remaining import LeftOut, has_low_rank

ESTIMATORS = ("linear", "corrected", "paper")
PLACES = ("displaced", "linearised")


@dataclass(frozen=True, eq=False)
class Removal:
    """The estimated effect of leaving a group out.

    Attributes:
        indices, weights: which examples, and what share of each (1 is removal).
        delta: change of the parameters by name; None for the paper's per-example form.
        group: effect on the group itself.
        evaluation: effect on the data given as ``evaluate_on``.
        flagged: whether the remaining precision was not positive definite, so that the solution
            was stopped early.
        settings: estimator and place of evaluation.
    """

    indices: Tensor
    weights: Tensor
    delta: Named | None = field(repr=False)
    group: Effect
    evaluation: Effect | None
    flagged: bool
    settings: Mapping[str, Any]

    def __repr__(self) -> str:
        text = (
            f"Removal of {len(self.indices):,} examples ({self.settings['estimator']}): "
            f"their own loss {self.group.change:+.4f} nats per example"
        )
        if self.evaluation is not None:
            text += f", evaluation loss {self.evaluation.change:+.4f}"
        return text + (" (flagged: not positive definite)" if self.flagged else "")


@backing_off
def remove(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    indices: Sequence[int] | Tensor | None = None,
    *,
    likelihood: str | Likelihood | None = None,
    weights: Sequence[float] | Tensor | None = None,
    estimator: str | None = None,
    evaluate_on: Data | None = None,
    at: str = "displaced",
    batch_size: int | None = None,
    progress: bool = True,
) -> Removal:
    """Estimate the effect of leaving out, or reweighting, a group of examples.

    Args:
        model: trained; it is not changed.
        data: the training data.
        posterior: of this model at its present weights.
        indices: the group; all examples if not given (then give ``weights``).
        weights: share of each that is taken out; 1 is removal, -1 counts the example twice.
        estimator: ``corrected`` with the precision of the remaining data, ``linear`` with that of
            all data, ``paper`` for each example by itself without cross terms. If not given,
            ``corrected`` where the precision is dense or low-rank, else ``linear``: what is
            subtracted from an approximate precision need not have been in it.
        evaluate_on: another data set, for instance a test set, to see the effect on.
        at: ``displaced`` runs the model at the moved parameters, ``linearised`` a tangent pass.
    """
    posterior = as_posterior(posterior, model)
    posterior.check_model(model)
    estimator = _default_rule(posterior) if estimator is None else estimator
    _check_choices(estimator, at, evaluate_on)
    used = posterior.likelihood_or(likelihood)
    with session(model, data, used, batch_size, progress) as opened:
        chosen, shares = check_group(indices, weights, opened.batches.num_data)
        return _remove(opened, posterior, chosen, shares, estimator, evaluate_on, at)


class ClassRemovals(dict[int, Removal]):
    """The effect of leaving out each class, by class number."""

    def to_frame(self) -> pd.DataFrame:
        """One row per class."""
        rows = {
            label: {
                "examples": len(removal.indices),
                "class_loss": float(removal.group.loss.mean()),
                "class_loss_without": float(removal.group.loss_without.mean()),
                "evaluation_change": removal.evaluation.change if removal.evaluation else math.nan,
                "flagged": removal.flagged,
            }
            for label, removal in self.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("class")


@backing_off
def remove_classes(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    *,
    likelihood: str | Likelihood | None = None,
    estimator: str | None = None,
    evaluate_on: Data | None = None,
    at: str = "displaced",
    batch_size: int | None = None,
    progress: bool = True,
) -> ClassRemovals:
    """Estimate the effect of leaving out each class in turn; arguments as for :func:`remove`."""
    posterior = as_posterior(posterior, model)
    posterior.check_model(model)
    estimator = _default_rule(posterior) if estimator is None else estimator
    _check_choices(estimator, at, evaluate_on)
    used = posterior.likelihood_or(likelihood)
    with session(model, data, used, batch_size, progress) as opened:
        labels = class_numbers(opened.batches)
        removals = ClassRemovals()
        for label in labels.unique().tolist():
            chosen = (labels == label).nonzero()[:, 0]
            shares = torch.ones(len(chosen), dtype=torch.float64)
            removals[label] = _remove(opened, posterior, chosen, shares, estimator, evaluate_on, at)
        return removals


def _default_rule(posterior: Posterior) -> str:
    return "corrected" if has_low_rank(posterior) else default_estimator(posterior)


def class_numbers(batches: Batches) -> Tensor:
    """The class of every example, [N]; TargetError if targets are not class numbers."""
    labels = torch.cat([batch.targets.cpu() for batch in batches])
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    whole = labels.dim() == 1 and bool((labels == labels.round()).all())
    if not whole:
        raise TargetError(
            "one class number per example",
            f"targets of shape {tuple(labels.shape)} and type {labels.dtype}",
            "use engram.remove with the indices of each group",
        )
    return labels.long()


def _check_choices(estimator: str, at: str, evaluate_on: Data | None) -> None:
    one_of("estimator", estimator, ESTIMATORS, 'use "corrected"')
    one_of("at", at, PLACES, 'use "displaced"')
    if estimator == "paper" and evaluate_on is not None:
        raise ArgumentError(
            'no evaluate_on with estimator="paper", which moves each example by itself',
            "a data set",
            'use estimator="corrected"',
        )


def _remove(
    opened: Session,
    posterior: Posterior,
    chosen: Tensor,
    shares: Tensor,
    estimator: str,
    evaluate_on: Data | None,
    at: str,
) -> Removal:
    settings = {"estimator": estimator, "at": at}
    if estimator == "paper":
        return Removal(
            chosen,
            shares,
            None,
            paper_effect(opened, posterior, chosen, shares),
            None,
            False,
            settings,
        )
    group = LeftOut(opened, posterior, chosen, shares)
    gradient = group.gradient()
    flagged = False

    def solve(vector: Named) -> Named:
        nonlocal flagged
        if estimator == "linear":
            return posterior.solve(vector)
        solution, flagged = group.solve_remaining(vector)
        return solution

    delta = equation.mean_deviation(solve, gradient)
    own = effect(opened, opened.batches.subset(chosen), len(chosen), delta, at)
    evaluation = None
    if evaluate_on is not None:
        batches = Batches(evaluate_on, opened.batches.batch_size)
        evaluation = effect(opened, batches, batches.num_data, delta, at)
    return Removal(chosen, shares, delta, own, evaluation, flagged, settings)

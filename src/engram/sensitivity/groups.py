r"""The effect of leaving a whole group out: one step of the parameters, with all cross terms.

.. math:: \Delta\theta = M^{-1} \sum_j \epsilon_j \nabla \ell_j

M is the precision of the remaining data, as :mod:`engram.sensitivity.group_steps` has it. Any data
set is then evaluated along the tangent, or at :math:`\theta + \Delta\theta`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, is_auto, one_of
from engram.core.data.batches import Batches, Data
from engram.core.memory import backing_off
from engram.core.parameters import Named
from engram.core.selection import check_group
from engram.errors import ArgumentError, TargetError
from engram.posteriors.gaussian import Posterior
from engram.problem import Problem, opened_problem
from engram.sensitivity.effects import Effect, effect, paper_effect
from engram.sensitivity.estimators import default_estimator
from engram.sensitivity.group_steps import STEPS, Matrix, group_step

if TYPE_CHECKING:
    import pandas as pd

ESTIMATORS = (*STEPS, "paper")
PLACES = ("displaced", "linearised")


@dataclass(frozen=True, eq=False)
class Removal:
    """The estimated effect of leaving a group out.

    Attributes:
        indices: which examples.
        weights: what share of each was taken out; 1 is removal.
        delta: change of the parameters by name; None for the paper's per-example form.
        group: effect on the group itself.
        evaluation: effect on the data given as ``evaluate_on``.
        flagged: whether a guard held, a weight beyond 1 takes out more than first order can see,
            or a number is not finite: not to be believed.
        estimator: the rule.
        at: where the effect was evaluated.
        matrix: that the step was taken with; None for the paper's form, which has none.
        why: why it is not the one of the rule's own name; empty where it is.
    """

    indices: Tensor
    weights: Tensor
    delta: Named | None = field(repr=False)
    group: Effect
    evaluation: Effect | None
    flagged: bool
    estimator: str
    at: str
    matrix: Matrix | None
    why: str = ""

    def __post_init__(self) -> None:
        effects = [self.group, *([self.evaluation] if self.evaluation is not None else [])]
        if not all(effect.is_finite for effect in effects):
            object.__setattr__(self, "flagged", True)

    def __repr__(self) -> str:
        text = (
            f"Removal of {len(self.indices):,} examples ({self.estimator}): "
            f"their own loss {self.group.change:+.4f} nats per example"
        )
        if self.evaluation is not None:
            text += f", evaluation loss {self.evaluation.change:+.4f}"
        if self.why:
            text += f"; with the {self.matrix}, since {self.why}"
        return text + (" (flagged: not to be believed)" if self.flagged else "")


@backing_off
def remove(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    indices: Sequence[int] | Tensor | None = None,
    *,
    weights: Sequence[float] | Tensor | None = None,
    estimator: str = AUTO,
    evaluate_on: Data | None = None,
    at: str = "linearised",
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Removal:
    """Estimate the effect of leaving out, or reweighting, a group of examples.

    Args:
        model: trained; it is not changed.
        data: the training data.
        posterior: of this model at its present weights.
        indices: the group; all examples if not given (then give ``weights``).
        weights: share of each that is taken out; 1 is removal, -1 counts the example twice.
        estimator: ``linear`` with the precision of all data; with that of the remaining data
            ``corrected``, ``newton`` for posteriors with the exact Hessian, or ``downdated`` for
            those with Kronecker factors; ``paper`` for each example by itself without cross terms.
            ``"auto"`` is the same as in :func:`engram.sensitivities`, so that a group of one has
            the same answer.
        evaluate_on: another data set, for instance a test set, to see the effect on.
        at: ``linearised`` goes along the tangent of the model, as sensitivities do; ``displaced``
            runs the model at the moved parameters.

    Returns:
        The effect on the group and on ``evaluate_on``; ``matrix`` and ``why`` say which precision
        the step was taken with.
    """
    _check_choices(estimator, at, evaluate_on)
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        group = check_group(indices, weights, problem.num_data)
        return _remove(problem, group, estimator, evaluate_on, at)


class ClassRemovals(dict[int, Removal]):
    """The effect of leaving out each class, by class number."""

    def to_frame(self) -> pd.DataFrame:
        """One row per class."""
        import pandas as pd

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
    estimator: str = AUTO,
    evaluate_on: Data | None = None,
    at: str = "linearised",
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> ClassRemovals:
    """Estimate the effect of leaving out each class in turn; arguments as for :func:`remove`."""
    _check_choices(estimator, at, evaluate_on)
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        labels = class_numbers(problem.batches)
        removals = ClassRemovals()
        for label in labels.unique().tolist():
            chosen = (labels == label).nonzero()[:, 0]
            group = (chosen, torch.ones(len(chosen), dtype=torch.float64))
            removals[label] = _remove(problem, group, estimator, evaluate_on, at)
        return removals


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
    one_of("estimator", estimator, (AUTO, *ESTIMATORS), 'use "auto"')
    one_of("at", at, PLACES, 'use "linearised"')
    if estimator == "paper" and evaluate_on is not None:
        raise ArgumentError(
            'no evaluate_on with estimator="paper", which moves each example by itself',
            "a data set",
            'use estimator="corrected"',
        )


def _chosen_rule(estimator: str, posterior: Posterior, size: int) -> str:
    """The one asked for; else that of single examples, completed where it fits no group.

    A low-rank Gauss-Newton matrix has too little in it to take a group out of.
    """
    if not is_auto(estimator):
        return estimator
    if size > 1 and posterior.is_partial and not posterior.exact:
        return "corrected"
    return default_estimator(posterior)


def _remove(
    problem: Problem,
    group: tuple[Tensor, Tensor],
    estimator: str,
    evaluate_on: Data | None,
    at: str,
) -> Removal:
    """The effect of a group, given as indices and weights [M]."""
    opened, posterior = problem.session, problem.posterior
    chosen, weights = group
    rule = _chosen_rule(estimator, posterior, len(chosen))
    if rule == "paper":
        own, outweighs = paper_effect(opened, posterior, chosen, weights)
        return Removal(chosen, weights, None, own, None, outweighs, rule, at, None)
    step = group_step(opened, posterior, chosen, weights, rule)
    own = effect(opened, opened.batches.subset(chosen), len(chosen), step.delta, at)
    evaluation = None
    if evaluate_on is not None:
        batches = Batches(evaluate_on, opened.batches.batch_size)
        evaluation = effect(opened, batches, batches.num_data, step.delta, at)
    flagged, matrix, why = step.flagged, step.matrix, step.why
    return Removal(chosen, weights, step.delta, own, evaluation, flagged, rule, at, matrix, why)

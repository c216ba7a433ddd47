r"""The effect of leaving a whole group out: one step of the parameters, with all cross terms.

.. math:: \Delta\theta = M^{-1} \sum_j \epsilon_j \nabla \ell_j

M is the precision of the remaining data, as :mod:`engram.sensitivity.group_steps` has it. Any data
set is then evaluated along the tangent, or at :math:`\theta + \Delta\theta`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, is_auto, one_of, positive
from engram.core.data.batches import Batches, Data
from engram.core.identity.digests import joined
from engram.core.memory import backing_off
from engram.core.parameters import Named
from engram.core.processes.meeting import check_same, together
from engram.core.selection import check_group
from engram.errors import ArgumentError, TargetError
from engram.likelihoods import Likelihood
from engram.posteriors.gaussian import Posterior
from engram.problem import Problem, opened_problem
from engram.sensitivity.class_removals import ClassRemovals
from engram.sensitivity.effects import Effect, paper_effect
from engram.sensitivity.estimators import default_estimator
from engram.sensitivity.estimators.paper import ESTIMATOR
from engram.sensitivity.group import Part
from engram.sensitivity.group_effects import Audience, Way, group_effects
from engram.sensitivity.group_steps import STEPS, Matrix
from engram.sensitivity.removal_verdict import Grounds, removal_verdict
from engram.sensitivity.replays import replayed_group
from engram.sensitivity.sampling import GRADIENT, Sampling
from engram.sensitivity.step_signals import StepSignals, step_signals
from engram.training.replay import Loss, Path, loss_of
from engram.training.training import Training
from engram.trust.verdict import LEVELS, UNRELIABLE, Verdict

REPLAY = "replay"
ESTIMATORS = (*STEPS, "paper", REPLAY)
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
            or a number is not finite, as for single examples; where the training was recorded, also
            whether the verdict is ``unreliable``.
        estimator: the rule.
        at: where the effect was evaluated.
        matrix: that the step was taken with; None for the paper's form, which has none.
        why: why it is not the one of the rule's own name; empty where it is.
        signals: what tells whether to believe it; None for the paper's form and closed models.
        passes: forward and backward, over as many examples as the data has, that it took; None
            without the record of a training.
        stopped: whether the training was recorded, and is what the removal is about.
        exact: whether it is no estimate: fitted again, or with a quadratic objective.
        training_seconds: that the recorded training took; None where that is not known.
        verdict: how far to believe it, with reasons and what to do about them.
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
    signals: StepSignals | None = None
    passes: float | None = None
    stopped: bool = False
    exact: bool = False
    training_seconds: float | None = None
    verdict: Verdict = field(init=False)

    def __post_init__(self) -> None:
        effects = [self.group, *([self.evaluation] if self.evaluation is not None else [])]
        finite = all(effect.is_finite for effect in effects)
        grounds = Grounds(
            self.matrix,
            self.signals,
            self.stopped,
            self.exact,
            self.flagged,
            finite,
            self.training_seconds,
        )
        object.__setattr__(self, "verdict", removal_verdict(grounds))
        # without a record flagged says what it says of single examples, and no more
        judged = self.stopped and self.verdict.level == LEVELS[UNRELIABLE]
        object.__setattr__(self, "flagged", self.flagged or not finite or judged)

    def __repr__(self) -> str:
        text = (
            f"Removal of {len(self.indices):,} examples ({self.estimator}): "
            f"their own loss {self.group.change:+.4f} nats per example"
        )
        if self.evaluation is not None:
            text += f", evaluation loss {self.evaluation.change:+.4f}"
        if self.passes is not None:
            text += f"; {self.passes:.1f} passes"
        if self.why:
            text += f"; with the {self.matrix}, since {self.why}"
        if self.flagged:
            text += " (flagged: not to be believed)"
        return f"{text}\n{self.verdict}"


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
    training: Training | None = None,
    loss: str | Likelihood | Loss | None = None,
    samples: int = 0,
    expectation: str = GRADIENT,
    step_size: float = 1.0,
    seed: int = 0,
    across_ranks: bool = False,
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
            For nets as people train them: ``gauss_newton`` with the exact Gauss-Newton matrix of
            the remaining data and the training time, five products over some two thousand examples;
            ``replay``, the last two thirds of the recorded training without the group. ``"auto"``
            is ``replay`` where ``training`` is given, ``gauss_newton`` where the posterior was
            fitted with one, else the same as in :func:`engram.sensitivities`, so that a group of
            one has the same answer.
        evaluate_on: another data set, for instance a test set, to see the effect on.
        at: ``linearised`` goes along the tangent of the model, as sensitivities do; ``displaced``
            runs the model at the moved parameters.
        training: of ``engram.record(optimizer, model, replay=True)``, to be walked again.
        loss: of that training, as for :func:`engram.replay`; that of the posterior if not given.
        samples: weights drawn from the posterior for the expectations of the equation, a pass each;
            0 takes them at the mean.
        expectation: what is averaged over them: the group's ``gradient``, and with ``corrected``
            its curvature, as the equation has them; or the whole ``deviation`` of the outputs at
            the sampled weights.
        step_size: rho of the equation, which multiplies all weights.
        seed: of the draws.
        across_ranks: divide the examples among the processes of ``torch.distributed``, which must
            all make the call; each gets the whole answer. A replay is walked by each of them.

    Returns:
        The effect on the group and on ``evaluate_on``; ``matrix`` and ``why`` say which precision
        the step was taken with, ``verdict`` how far to believe it, why and what to do, from
        ``signals``, and ``passes`` what it took.
    """
    check_choices(estimator, at, evaluate_on)
    sampling = Sampling.checked(samples, expectation, seed)
    estimator, rho = sampling.group_rule(estimator), positive("step_size", step_size)
    said = {"settings": [estimator, at, sampling, rho], "posterior": posterior}
    with (
        together(across_ranks, model, data, "remove", said) as peers,
        opened_problem(model, data, posterior, batch_size, progress, peers) as problem,
    ):
        chosen, share = check_group(indices, weights, problem.num_data)
        given = joined("group", *map(str, chosen.tolist()), *map(str, share.tolist())).hex()
        check_same(peers, "call", {"group": given})
        path = _path(problem, data, training, loss, estimator, sampling)
        return _remove(problem, (chosen, rho * share), estimator, evaluate_on, at, path, sampling)


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
    training: Training | None = None,
    loss: str | Likelihood | Loss | None = None,
    samples: int = 0,
    expectation: str = GRADIENT,
    step_size: float = 1.0,
    seed: int = 0,
    across_ranks: bool = False,
) -> ClassRemovals:
    """Estimate the effect of leaving out each class in turn; arguments as for :func:`remove`."""
    check_choices(estimator, at, evaluate_on)
    sampling = Sampling.checked(samples, expectation, seed)
    estimator, rho = sampling.group_rule(estimator), positive("step_size", step_size)
    said = {"settings": [estimator, at, sampling, rho], "posterior": posterior}
    with (
        together(across_ranks, model, data, "remove_classes", said) as peers,
        opened_problem(model, data, posterior, batch_size, progress, peers) as problem,
    ):
        path = _path(problem, data, training, loss, estimator, sampling)
        labels = class_numbers(problem.batches)
        removals = ClassRemovals()
        for label in labels.unique().tolist():
            chosen = (labels == label).nonzero()[:, 0]
            group = (chosen, torch.full((len(chosen),), rho, dtype=torch.float64))
            removals[label] = _remove(problem, group, estimator, evaluate_on, at, path, sampling)
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


def check_choices(estimator: str, at: str, evaluate_on: Data | None) -> None:
    """ArgumentError for a rule or a place that there is none of."""
    one_of("estimator", estimator, (AUTO, *ESTIMATORS), 'use "auto"')
    one_of("at", at, PLACES, 'use "linearised"')
    if estimator == "paper" and evaluate_on is not None:
        raise ArgumentError(
            'no evaluate_on with estimator="paper", which moves each example by itself',
            "a data set",
            'use estimator="corrected"',
        )


def chosen_rule(estimator: str, posterior: Posterior, size: int) -> str:
    """The one asked for; else that of single examples, completed where it fits no group.

    A low-rank Gauss-Newton matrix has too little in it to take a group out of.
    """
    if not is_auto(estimator):
        return estimator
    if size > 1 and posterior.training is not None:
        return "gauss_newton"
    if size > 1 and posterior.is_partial and not posterior.exact:
        return "corrected"
    return default_estimator(posterior)


def _remove(
    problem: Problem,
    group: tuple[Tensor, Tensor],
    estimator: str,
    evaluate_on: Data | None,
    at: str,
    path: Path | None,
    sampling: Sampling,
) -> Removal:
    """The effect of a group, given as indices and weights [M]; ``path`` is for a replay."""
    opened, posterior = problem.session, problem.posterior
    chosen, weights = group
    if path is not None and estimator in (AUTO, REPLAY):
        return _replayed(problem, path, chosen, weights, evaluate_on)
    rule = chosen_rule(estimator, posterior, len(chosen))
    if rule == "paper":
        each = sampling.over(ESTIMATOR, posterior, opened.model)
        own, outweighs = paper_effect(opened, posterior, chosen, weights, each)
        return Removal(chosen, weights, None, own, None, outweighs, rule, at, None)
    audiences = [Audience(opened, chosen)]
    if evaluate_on is not None:
        audiences.append(Audience.of_data(opened, evaluate_on))
    parts, way = [Part.of(opened, chosen, weights)], Way(rule, at, sampling)
    step, (own, *others) = group_effects(opened, posterior, parts, way, audiences)
    evaluation = others[0] if others else None
    signals = step_signals(opened, posterior, parts, step.delta)
    facts = (step.flagged, rule, at, step.matrix, step.why, signals, step.passes)
    recorded = posterior.training
    return Removal(
        chosen,
        weights,
        step.delta,
        own,
        evaluation,
        *facts,
        stopped=recorded is not None,
        training_seconds=None if recorded is None else recorded.seconds,
    )


def _replayed(
    problem: Problem, path: Path, chosen: Tensor, weights: Tensor, evaluate_on: Data | None
) -> Removal:
    """By the last part of the recorded training without the group."""
    if not bool((weights == 1).all()):
        raise ArgumentError(
            "weights of 1 for a replay, which leaves examples out whole",
            f"{float(weights[weights != 1][0]):g}",
            'use estimator="gauss_newton"',
        )
    found = replayed_group(problem.session, path, chosen, evaluate_on)
    facts = (False, REPLAY, "displaced", None, "", found.signals, found.passes)
    return Removal(
        chosen, weights, found.delta, found.group, found.evaluation, *facts, stopped=True
    )


def _path(
    problem: Problem,
    data: Data,
    training: Training | None,
    loss: str | Likelihood | Loss | None,
    estimator: str,
    sampling: Sampling,
) -> Path | None:
    """The recorded training, where one was given that can be walked again."""
    if sampling.samples and training is not None:
        raise ArgumentError(
            "no training= with samples, which are of the last weights",
            f"a record with samples={sampling.samples}",
            "leave out one of the two",
        )
    if training is None or training.order is None:
        if estimator == REPLAY:
            raise ArgumentError(
                "training=, a record that can be replayed",
                "none" if training is None else "one without the order of the examples",
                "record with engram.record(optimizer, model, loader=loader, replay=True)",
            )
        return None
    chosen = problem.likelihood if loss is None else loss
    return Path(problem.model, data, training, loss_of(chosen))

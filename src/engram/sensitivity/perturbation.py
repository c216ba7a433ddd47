r"""Any perturbation of the data: examples changed, and examples added.

.. math:: \hat\lambda - \lambda = \rho \Bigl( \sum_{j \in M} \tilde g_j(\lambda)
    - \sum_{j \in M'} \tilde g_j(\lambda) \Bigr)

The examples M as they were are divided out of the posterior, and M', as they are to be, multiplied
in: the difference of their natural gradients. For a Gaussian posterior its mean moves by

.. math:: \hat m - m = \rho\, \hat S^{-1} \Bigl( \sum_{M} \nabla\ell_j - \sum_{M'} \nabla\ell_j
    \Bigr), \qquad \hat S = S - \rho \sum_{M} H_j + \rho \sum_{M'} H_j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engram.core.arguments import AUTO, one_of, positive, shown
from engram.core.data.batches import Batch, Batches, Data
from engram.core.data.inputs import tensors_of
from engram.core.memory import backing_off
from engram.core.parameters import Named
from engram.core.selection import check_indices
from engram.engine.session import Session
from engram.errors import ArgumentError, DataError
from engram.posteriors.gaussian import Posterior
from engram.problem import opened_problem
from engram.sensitivity.effects import Effect
from engram.sensitivity.group import Part
from engram.sensitivity.group_effects import Audience, Way, group_effects
from engram.sensitivity.group_steps import STEPS, Matrix
from engram.sensitivity.groups import PLACES, chosen_rule
from engram.sensitivity.removal_verdict import Grounds, removal_verdict
from engram.sensitivity.sampling import GRADIENT, Sampling
from engram.sensitivity.step_signals import StepSignals, step_signals
from engram.trust.verdict import Verdict


@dataclass(frozen=True, eq=False)
class Perturbation:
    """The estimated effect of changing examples, or of adding some.

    ``with`` and ``without`` in an effect are before and after: of the data as it is, and perturbed.

    Attributes:
        indices: the examples that are changed.
        delta: change of the parameters by name.
        before: effect on the changed examples as they were; None where only some are added.
        changed: on the same as they are to be; None likewise.
        added: on those that are added; None where there are none.
        evaluation: on the data given as ``evaluate_on``.
        flagged: whether a guard held, or a number is not finite.
        estimator: the rule.
        at: where the effect was evaluated.
        matrix: that the step was taken with.
        why: why it is not the one of the rule's own name; empty where it is.
        signals: what tells whether to believe it.
        stopped: whether the training was recorded, and is what the perturbation is about.
        verdict: how far to believe it, with reasons and what to do about them.
    """

    indices: Tensor
    delta: Named = field(repr=False)
    before: Effect | None
    changed: Effect | None
    added: Effect | None
    evaluation: Effect | None
    flagged: bool
    estimator: str
    at: str
    matrix: Matrix
    why: str
    signals: StepSignals
    stopped: bool
    verdict: Verdict = field(init=False)

    def __post_init__(self) -> None:
        effects = (self.before, self.changed, self.added, self.evaluation)
        finite = all(effect.is_finite for effect in effects if effect is not None)
        grounds = Grounds(
            self.matrix, self.signals, self.stopped, False, self.flagged, finite, changed=True
        )
        object.__setattr__(self, "verdict", removal_verdict(grounds))
        object.__setattr__(self, "flagged", self.flagged or not finite)

    def __repr__(self) -> str:
        counts = []
        if len(self.indices):
            counts.append(f"{len(self.indices):,} examples changed")
        if self.added is not None:
            counts.append(f"{len(self.added.indices):,} added")
        text = f"Perturbation, {', '.join(counts)} ({self.estimator})"
        named = {"changed": self.changed, "added": self.added, "evaluation": self.evaluation}
        for name, effect in named.items():
            if effect is not None:
                text += f"; {name} loss {effect.change:+.4f} nats per example"
        if self.flagged:
            text += " (flagged: not to be believed)"
        return f"{text}\n{self.verdict}"


@backing_off
def perturb(
    model: nn.Module,
    data: Data,
    posterior: Posterior | Any,
    indices: Sequence[int] | Tensor | None = None,
    *,
    inputs: Any = None,
    targets: Any = None,
    add: Data | None = None,
    estimator: str = AUTO,
    evaluate_on: Data | None = None,
    at: str = "linearised",
    samples: int = 0,
    expectation: str = GRADIENT,
    step_size: float = 1.0,
    seed: int = 0,
    batch_size: int | str = AUTO,
    progress: bool = True,
) -> Perturbation:
    """Estimate the effect of other inputs or targets for some examples, or of new examples.

    Args:
        model: trained; it is not changed.
        data: the training data.
        posterior: of this model at its present weights.
        indices: the examples that are changed.
        inputs: their new inputs, a row each, as the model takes them; unchanged if not given.
        targets: their new targets, a row each; unchanged if not given.
        add: examples that are added, as data with targets.
        estimator: ``linear``, ``corrected``, ``newton``, ``downdated`` or ``gauss_newton``, as for
            :func:`engram.remove`.
        evaluate_on, at, samples, expectation, step_size, seed, batch_size, progress: as there.

    Returns:
        The effect on the changed examples, as they were and as they are to be, on the added ones
        and on ``evaluate_on``, with a verdict.

    Example:
        A corrected label moves a ridge regression to where fitting it again does:

        >>> import engram
        >>> x, y = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[3.0], [1.0]]).double()
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> _ = model.weight.data.fill_(5 / 6)  # x'y / (x'x + 1)
        >>> posterior = engram.laplace(
        ...     model, (x, y), likelihood="gaussian", structure="full", prior_precision=1.0
        ... )
        >>> found = perturb(model, (x, y), posterior, [0], targets=[[9.0]])
        >>> found.delta["weight"]  # (9 + 2) / 6 - 5 / 6
        tensor([[1.]], dtype=torch.float64)
    """
    one_of("estimator", estimator, (AUTO, *STEPS), 'use "auto"')
    one_of("at", at, PLACES, 'use "linearised"')
    _check_asked(indices, inputs, targets, add)
    sampling = Sampling.checked(samples, expectation, seed)
    estimator, rho = sampling.group_rule(estimator), positive("step_size", step_size)
    with opened_problem(model, data, posterior, batch_size, progress) as problem:
        opened, posterior = problem.session, problem.posterior
        chosen = torch.zeros(0, dtype=torch.long)
        if indices is not None:
            chosen = check_indices(indices, problem.num_data, "name each example once")
        changes = _Changes.of(opened, chosen, inputs, targets, add)
        parts = changes.parts(rho)
        rule = chosen_rule(estimator, posterior, sum(len(part.chosen) for part in parts))
        audiences = changes.audiences()
        if evaluate_on is not None:
            audiences["evaluation"] = Audience.of_data(opened, evaluate_on)
        way = Way(rule, at, sampling)
        step, found = group_effects(opened, posterior, parts, way, list(audiences.values()))
        effects: dict[str, Effect | None] = dict.fromkeys(EFFECTS)
        return Perturbation(
            chosen,
            step.delta,
            **effects | dict(zip(audiences, found, strict=True)),
            flagged=step.flagged,
            estimator=rule,
            at=at,
            matrix=step.matrix,
            why=step.why,
            signals=step_signals(opened, posterior, parts, step.delta),
            stopped=posterior.training is not None,
        )


EFFECTS = ("before", "changed", "added", "evaluation")


@dataclass(frozen=True)
class _Changes:
    """Examples of the training data that go, and those that come."""

    opened: Session
    chosen: Tensor
    changed: Session | None
    added: Session | None

    @classmethod
    def of(
        cls, opened: Session, chosen: Tensor, inputs: Any, targets: Any, add: Data | None
    ) -> _Changes:
        changed = None
        if len(chosen):
            changed = _session(opened, _replaced(opened.batches.take(chosen), inputs, targets))
        return cls(opened, chosen, changed, None if add is None else _session(opened, add))

    def parts(self, step_size: float) -> list[Part]:
        """What is taken out with weight rho, and put in with weight -rho."""
        parts = []
        if len(self.chosen):
            share = torch.full((len(self.chosen),), step_size, dtype=torch.float64)
            parts.append(Part.of(self.opened, self.chosen, share))
        for session in (self.changed, self.added):
            if session is not None:
                count = session.batches.num_data
                share = torch.full((count,), -step_size, dtype=torch.float64)
                parts.append(Part.of(session, torch.arange(count), share))
        return parts

    def audiences(self) -> dict[str, Audience]:
        """The examples themselves, by the name of their effect."""
        found = {}
        if self.changed is not None:
            found["before"] = Audience(self.opened, self.chosen)
            found["changed"] = Audience(self.changed)
        if self.added is not None:
            found["added"] = Audience(self.added)
        return found


def _session(opened: Session, data: Data) -> Session:
    """The same model with other data, checked as the training data is."""
    other = replace(opened, batches=Batches(data, opened.batches.batch_size))
    other.observe(other.batches.take(torch.arange(min(2, other.batches.num_data))))
    return other


def _replaced(batch: Batch, inputs: Any, targets: Any) -> Data:
    """The examples of a batch with other inputs, other targets, or both."""
    given: Any = batch.inputs
    if isinstance(given, tuple) and len(given) == 1:
        given = given[0]
    if inputs is not None:
        structured = isinstance(inputs, tuple | dict) or not isinstance(given, Tensor)
        given = inputs if structured else _as_rows("inputs", inputs, given)
    wanted = batch.targets if targets is None else _as_rows("targets", targets, batch.targets)
    for what, value in (("inputs", given), ("targets", wanted)):
        rows = {len(t) if t.dim() else 0 for t in tensors_of(value)}
        if rows != {len(batch)}:
            raise DataError(
                f"{len(batch)} rows of {what}, one per index",
                f"{', '.join(str(count) for count in sorted(rows)) or 'none'}",
                f"give the new {what} in the order of the indices",
            )
    return (given, wanted)


def _as_rows(what: str, rows: Any, like: Tensor) -> Tensor:
    """New rows as a tensor of the type and shape of the old ones."""
    try:
        found = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{what} as a tensor or numbers", shown(rows), "give one row per index"
        ) from error
    if found.shape[1:] != like.shape[1:]:
        raise DataError(
            f"{what} of shape {list(like.shape)}, as in the data",
            f"shape {list(found.shape)}",
            "give one row per index",
        )
    return found.to(like)


def _check_asked(indices: Any, inputs: Any, targets: Any, add: Any) -> None:
    changes = inputs is not None or targets is not None
    if indices is not None and not changes:
        raise ArgumentError(
            "inputs= or targets= for the examples that are changed",
            "indices alone",
            "give what they change to, or take them out with engram.remove",
        )
    if changes and indices is None:
        raise ArgumentError(
            "indices of the examples that are changed",
            "none",
            "name them, or add new ones with add=(x, y)",
        )
    if indices is None and add is None:
        raise ArgumentError(
            "something that is changed or added",
            "neither",
            "give indices with inputs= or targets=, or add=(x, y)",
        )

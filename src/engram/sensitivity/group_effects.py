"""The step for a group and what it does to some data, at the mean or as an expectation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.core.data.batches import Batches, Data
from engram.core.parameters import Named
from engram.engine.session import Observed, Session
from engram.errors import LikelihoodError
from engram.posteriors.gaussian import Posterior
from engram.sensitivity.effects import Effect, effect, effect_of
from engram.sensitivity.group import Group, Part
from engram.sensitivity.group_steps import Step, group_step
from engram.sensitivity.sampling import Sampling, weights


@dataclass(frozen=True)
class Audience:
    """Examples that an effect is looked at on.

    Args:
        opened: the model with the data that they are of.
        indices: positions in it; all if None.
    """

    opened: Session
    indices: Tensor | None = None

    @classmethod
    def of_data(cls, opened: Session, data: Data) -> Audience:
        """All of another data set."""
        return cls(replace(opened, batches=Batches(data, opened.batches.batch_size)))

    def effect(self, delta: Named, at: str) -> Effect:
        """Of a change of the parameters."""
        return effect(self.opened, self.indices, delta, at)

    def shifted(self, deviation: Tensor) -> Effect:
        """Of a deviation of the outputs, [n, K] in the order of the examples."""
        own = self.opened.peers.rows(len(deviation))
        rows = iter(deviation[own].split(1))

        def move(observed: Observed) -> Tensor:
            own = torch.cat([next(rows) for _ in range(len(observed.outputs))])
            return observed.outputs + own.to(observed.outputs)

        return effect_of(self.opened, self.indices, move)


@dataclass(frozen=True)
class Way:
    """How a group's effect is computed.

    Args:
        rule: one of ``STEPS``.
        at: ``linearised`` or ``displaced``.
        sampling: of expectations.
    """

    rule: str
    at: str
    sampling: Sampling


def group_effects(
    opened: Session,
    posterior: Posterior,
    parts: Sequence[Part],
    way: Way,
    audiences: Sequence[Audience],
) -> tuple[Step, list[Effect]]:
    """The step of the parameters, and the effect on each audience.

    Args:
        opened, posterior: model, training data and their posterior.
        parts: the group.
        way: rule, place and samples.
        audiences: where to look.
    """
    sampling = way.sampling
    if sampling.averages_deviations:
        _check_outputs(opened)
        return _averaged(opened, posterior, parts, way, audiences)
    draws = sampling.draws(posterior, opened.model) if sampling.samples else None
    step = group_step(Group(opened, posterior, parts, draws), way.rule)
    return step, [audience.effect(step.delta, way.at) for audience in audiences]


def _check_outputs(opened: Session) -> None:
    if not opened.likelihood.keeps_outputs:
        raise LikelihoodError(
            "outputs of every example, whose deviations are averaged",
            f"{opened.likelihood!r}, which keeps the losses alone",
            'use expectation="gradient"',
        )


def _averaged(
    opened: Session,
    posterior: Posterior,
    parts: Sequence[Part],
    way: Way,
    audiences: Sequence[Audience],
) -> tuple[Step, list[Effect]]:
    """The mean over draws of the step and the deviations of outputs at each of them."""
    draws = way.sampling.draws(posterior, opened.model)
    steps: list[Step] = []
    moved: list[list[Tensor]] = [[] for _ in audiences]
    for draw in draws:
        with weights(opened.model, draw):
            there = Group(opened, replace(posterior, mean=draw), parts)
            steps.append(group_step(there, way.rule))
            for audience, deviations in zip(audiences, moved, strict=True):
                own = audience.effect(steps[-1].delta, way.at)
                deviations.append(own.outputs_without - own.outputs)
    delta = {n: torch.stack([step.delta[n] for step in steps]).mean(0) for n in steps[0].delta}
    flagged = any(step.flagged for step in steps)
    why = next((step.why for step in steps if step.why), "")
    found = [
        audience.shifted(torch.stack(deviations).mean(0))
        for audience, deviations in zip(audiences, moved, strict=True)
    ]
    return Step(delta, steps[0].matrix, flagged, why, steps[0].passes), found
